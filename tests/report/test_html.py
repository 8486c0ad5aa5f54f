"""Charts, numbers and escaping."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from persia._report import html

FLOATS = st.floats(-1e30, 1e30)


@given(FLOATS, FLOATS, st.sampled_from(["", "B"]))
@example(0.0, 5e-324, "")
def test_ticks_are_few_and_span_the_range(one: float, other: float, unit: str) -> None:
    low, high = min(one, other), max(one, other)
    if unit:
        low, high = 0.0, abs(high)
    found = html.ticks(low, high, unit)
    width = (found[-1] - found[0]) * 1e-9
    assert 2 <= len(found) <= 9
    assert found[0] <= low + width
    assert found[-1] >= high - width
    assert found == sorted(set(found))


def test_numbers_are_short() -> None:
    texts = {0: "0", 12: "12", 1500: "1500", 0.00123: "0.00123", 12_345: "12.3k", None: "-"}
    assert {value: html.short(value) for value in texts} == texts
    assert html.short(3 * 2**30, "B") == "3.0 GiB"


def test_a_chart_of_nothing_says_so_and_names_are_escaped() -> None:
    def draw(chart: html.Chart) -> str:
        return html.render(html.Page("", "", (), (), (chart,), ()))

    empty = draw(html.Chart("<b>", "", "step", (html.ChartSeries("x", ()),)))
    assert "nothing was recorded" in empty
    assert "<b>" not in empty
    one = draw(html.Chart("t", "", "step", (html.ChartSeries("<i>", ((3.0, 2.0),)),)))
    assert "<circle" in one
    assert "<i>:" not in one
