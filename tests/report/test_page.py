"""The page of one run, and of several."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia._report import page
from persia._report.run import Chart, ChartSeries, FeatureRow, Mark, Run
from persia.errors import ConfigError
from tests.report.runs import Reader

FLOATS = st.floats(-1e30, 1e30)
BAD = "</script><b>'\"&"


@given(FLOATS, FLOATS, st.sampled_from(["", "B"]))
@example(0.0, 5e-324, "")
def test_ticks_are_few_and_span_the_range(one: float, other: float, unit: str) -> None:
    low, high = min(one, other), max(one, other)
    if unit:
        low, high = 0.0, abs(high)
    found = page.ticks(low, high, unit)
    width = (found[-1] - found[0]) * 1e-9
    assert 2 <= len(found) <= 9
    assert found[0] <= low + width
    assert found[-1] >= high - width
    assert found == sorted(set(found))


def test_numbers_are_short() -> None:
    texts = {0: "0", 12: "12", 1500: "1500", 0.00123: "0.00123", 12_345: "12.3k", None: "-"}
    assert {value: page.short(value) for value in texts} == texts
    assert page.short(3 * 2**30, "B") == "3.0 GiB"


def test_a_chart_of_nothing_says_so() -> None:
    def draw(series: ChartSeries) -> str:
        return page.render({"run": Run("", "", charts=[Chart("t", "", (series,))])})

    assert "nothing was recorded" in draw(ChartSeries("x", []))
    for x in (3.0, 1e300, -1e300):  # 1 is nothing beside some
        assert "<circle" in draw(ChartSeries("x", [(x, 2.0)]))


@pytest.mark.parametrize("values", [(0.0, 0.0), (4.0, 5.0)])
def test_an_axis_from_zero_begins_there(values: tuple[float, float]) -> None:
    line = ChartSeries("x", list(enumerate(values)))
    for from_zero in (True, False):
        drawn = page.plot(Chart("t", "", (line,), from_zero=from_zero), [("x", "s0", line)])
        assert (drawn["up"][0] == 0) is from_zero


def test_charts_of_one_title_and_other_axes_stay_apart() -> None:
    """As those of the loss and of ``ctx.report(Loss=...)``."""
    axes = [("mean", False), ("other", False), ("mean", True)]
    charts = [
        Chart("Loss", unit, (ChartSeries("x", [(0.0, 1.0)]),), over_time=over_time)
        for unit, over_time in axes
    ]
    drawn = page.plots({"run": Run("", "", charts=charts)})
    assert [(one["chart"].unit, one["chart"].over_time) for one in drawn] == axes


def test_every_text_is_escaped() -> None:
    run = Run(
        BAD,
        BAD,
        {BAD: BAD},
        [(BAD, BAD)],
        [(BAD, 1, BAD)],
        [Chart(BAD, BAD, (ChartSeries(BAD, [(0.0, 1.0)]), ChartSeries(BAD, [(0.0, 2.0)])))],
        [Mark("checkpoint", 0, 0.0)],
        [FeatureRow(BAD, 8, 1.0, 1, 1.0, 0.0, None, None)],
    )
    for runs in ({BAD: run}, {BAD: run, "other": run}):
        text = page.render(runs)
        assert "<b>'" not in text
        shown = Reader(text).text
        assert f"{BAD} {BAD}" in shown


def _run(lr: str, points: list[tuple[float, float]], *others: Chart) -> Run:
    loss = ChartSeries("loss", points), ChartSeries("smoothed", points)
    return Run(
        "Training report: Net",
        "when",
        {"seed": "1", "lr": lr},
        [("steps", "10")],
        charts=[Chart("Loss", "", loss), *others],
        marks=[Mark("end of a pass", 10, 2.0), Mark("checkpoint", 5, 1.0)],
    )


def test_two_runs_lie_over_each_other_and_what_differs_comes_first() -> None:
    auc = Chart("AUC", "", (ChartSeries("auc", [(0.0, 0.5)]),))
    one = _run("0.1", [(0.0, 1.0), (10.0, 0.5)])
    two = _run("0.2", [(0.0, 1.0), (20.0, 0.25)], auc)
    text = page.render({"monday": one, "tuesday": two})
    read = Reader(text)
    assert read.headings[0] == "2 training runs"
    assert read.num_charts == 2  # the losses are one
    assert re.search(r"lr 0.1 0.2 seed 1 1", read.text)
    assert text.count('class="differs"') == 1
    loss = page.plots({"monday": one, "tuesday": two})[0]
    assert [(line["name"], line["style"]) for line in loss["lines"]] == [
        ("monday: loss", "s0 d0"),
        ("monday: smoothed", "s0 d1"),
        ("tuesday: loss", "s1 d0"),
        ("tuesday: smoothed", "s1 d1"),
    ]
    assert loss["xs"] == (0.0, 20.0)
    assert sorted((x, number) for x, number, _ in loss["marks"]) == [
        *((5, 0), (5, 1), (10, 0), (10, 1))
    ]
    # A page of several is no one's data.
    assert "persia-run" not in text


def test_a_line_has_a_colour_of_its_own_or_its_runs_and_a_faint_one_no_dashes() -> None:
    points = [(0.0, 1.0)]
    faint = ChartSeries("as it is", points, is_faint=True)
    series = faint, ChartSeries("smoothed", points), ChartSeries("other", points)
    run = Run("", "", charts=[Chart("Loss", "", series)])

    def styles(runs: dict[str, Run]) -> list[str]:
        (drawn,) = page.plots(runs)
        return [line["style"] for line in drawn["lines"]]

    assert styles({"a": run}) == ["s0 faint", "s1", "s2"]
    several = styles({"a": run, "b": run})
    assert several == [*("s0 d0 faint", "s0 d0", "s0 d1"), *("s1 d0 faint", "s1 d0", "s1 d1")]


def test_what_one_run_does_not_have_is_a_dash_and_a_difference() -> None:
    (row,) = page.rows_of({"a": {"lr": "1"}, "b": {}})
    assert (row.values, row.differs) == (("1", "-"), True)


def test_marks_behind_the_last_point_are_at_its_side_and_those_before_the_first_left_out() -> (
    None
):
    chart = Chart("t", "", (ChartSeries("x", [(2.0, 1.0), (8.5, 1.0)]),), over_time=True)
    marks = [(0, Mark("checkpoint", step, at)) for step, at in ((7, 1.0), (1, 5.0), (3, 9.0))]
    drawn = page.plot(chart, [("x", "s0", chart.series[0])], marks)
    assert [x for x, _, _ in drawn["marks"]] == [5.0, 8.5]
    assert drawn["across"] == [2, 4, 6, 8]  # no 10, beyond the last


def test_more_runs_than_colours_are_refused() -> None:
    runs = {str(number): _run("1", [(0.0, 1.0)]) for number in range(9)}
    with pytest.raises(ConfigError, match="expected at most 8 runs, got 9"):
        page.render(runs)
