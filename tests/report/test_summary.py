"""The report of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia._report import summary
from persia.ctx import eval_ctx
from persia.errors import ConfigError
from tests.report.runs import SIZE, STEPS, Reader, build, train


def test_a_run_ends_with_its_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    with build(report=path) as ctx:
        train(ctx)
        ctx.write_report(tmp_path / "before.html")
        assert not path.exists()
        with eval_ctx(model=ctx.model) as evaluation:
            evaluation.report(gauc=0.625)
    page = path.read_text("utf-8")
    read = Reader(page)
    assert read.headings == [
        *("Training report: Net", "Warnings", "Loss", "AUC", "Throughput", "Staleness"),
        *("Rows", "Memory", "Gradients", "Embeddings", "Features by size"),
    ]
    assert read.num_charts == 8
    assert not read.fetched
    assert not re.search(r"https?:|@import|url\(", page)
    for said in (
        "0.6250 gauc, last",
        "0.8000 auc, last",
        "39 steps",
        "embedded mode",
        "Adagrad",
    ):
        assert said in read.text
    assert "1 batches without a backward" in read.text
    assert "samples without id" in read.text
    for line in ("user 4 ", "tags 8 "):  # of the table: a name and its dim
        assert line in read.text
    # A third of the samples have no tag.
    missing = re.search(r"tags.*?(\d+\.\d) %", read.text)
    assert missing is not None
    assert 25.0 < float(missing[1]) < 42.0
    assert "gauc, last" not in (tmp_path / "before.html").read_text("utf-8")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["report.html"]


def test_losses_that_are_not_finite_are_counted_and_a_failed_run_is_reported(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.html"

    def fail() -> None:
        with build(report=path) as ctx:
            train(ctx, spoiled=STEPS - 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    text = Reader(path.read_text("utf-8")).text
    assert "1 losses not finite NaN or infinity." in text
    assert f"{SIZE} gradient rows not finite: user" in text
    assert re.search(r"\d+ gradient rows not finite: tags", text)


def test_only_a_recorded_run_can_be_reported(tmp_path: Path) -> None:
    with build() as ctx, pytest.raises(ConfigError, match=r"TrainCtx\(report='report.html'\)"):
        ctx.write_report(tmp_path / "report.html")
    recorded = build(report=tmp_path / "report.html")
    with pytest.raises(ConfigError, match="inside its `with`"):
        recorded.write_report()


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, says in (
        (tmp_path / "file" / "report.html", "cannot make the folder .*file"),
        (tmp_path, "expected a file, got the folder"),
    ):
        with pytest.raises(ConfigError, match=f"report: {says}"):
            build(report=path)


# --- charts, numbers and escaping ----------------------------------------------------------

FLOATS = st.floats(-1e30, 1e30)


@given(FLOATS, FLOATS, st.sampled_from(["", "B"]))
@example(0.0, 5e-324, "")
def test_ticks_are_few_and_span_the_range(one: float, other: float, unit: str) -> None:
    low, high = min(one, other), max(one, other)
    if unit:
        low, high = 0.0, abs(high)
    found = summary.ticks(low, high, unit)
    width = (found[-1] - found[0]) * 1e-9
    assert 2 <= len(found) <= 9
    assert found[0] <= low + width
    assert found[-1] >= high - width
    assert found == sorted(set(found))


def test_numbers_are_short() -> None:
    texts = {0: "0", 12: "12", 1500: "1500", 0.00123: "0.00123", 12_345: "12.3k", None: "-"}
    assert {value: summary.short(value) for value in texts} == texts
    assert summary.short(3 * 2**30, "B") == "3.0 GiB"


def test_a_chart_of_nothing_says_so_and_names_are_escaped() -> None:
    def draw(chart: summary.Chart) -> str:
        return summary.render(summary.Page("", "", (), (), (chart,), ()))

    empty = draw(summary.Chart("<b>", "", "step", (summary.ChartSeries("x", ()),)))
    assert "nothing was recorded" in empty
    assert "<b>" not in empty
    one = draw(summary.Chart("t", "", "step", (summary.ChartSeries("<i>", ((3.0, 2.0),)),)))
    assert "<circle" in one
    assert "<i>:" not in one
