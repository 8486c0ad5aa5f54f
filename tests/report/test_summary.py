"""The report of a run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from persia._report import run, summary
from persia._report.recorder import Curve
from persia.ctx import eval_ctx
from persia.data import DataLoader
from persia.errors import ConfigError
from tests.report.runs import SIZE, STEPS, Clicks, Reader, build, train


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
        *("Rows", "Memory of rows", "Memory of this process", "Gradients", "Embeddings"),
        *("Parameters", "Features by size"),
    ]
    assert read.num_charts == 9
    assert not read.fetched
    assert not re.search(r"https?:|@import|url\(", page)
    for said in (
        "0.6250 gauc, last",
        "0.8000 auc, last",
        "39 steps",
        "embedded mode",
        "embedding optimizer Adagrad",
        "embedding optimizer: lr 0.1",
        "dense optimizer: lr 0.1",
        f"batch size {SIZE}",
        "embedding_staleness auto reproducible True lookups at the same time ",
        "slot tags dim 8, sum, float32",
        "0.00 updates missed by a lookup, mean",
        "time that the loop waited for batches",
    ):
        assert said in read.text
    assert "1 batches without a backward" in read.text
    assert "samples without id" in read.text
    for line in ("user 4 ", "tags 8 "):  # of the table: a name and its dim
        assert line in read.text
    # A third of the samples have no tag.
    missing = re.search(r"tags 8 .*?(\d+\.\d) %", read.text)
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
    assert "nan loss at the end" in text
    assert f"{SIZE} gradient rows not finite: user" in text
    assert re.search(r"\d+ gradient rows not finite: tags", text)


def test_a_reported_number_that_is_nan_is_shown_and_counted(tmp_path: Path) -> None:
    with build(report=tmp_path / "run.json") as ctx:
        for auc, recall in ((0.5, 0.25), (math.nan, 0.5)):
            ctx.report(auc=auc, recall=recall)
    found = run.load(tmp_path / "run.json")
    tiles = dict(found.tiles)
    assert (tiles["auc, last"], tiles["recall, last"]) == ("nan", "0.5000")
    assert [one[:2] for one in found.warnings] == [("auc not finite", 1)]


def test_usual_measures_have_their_names_as_titles(tmp_path: Path) -> None:
    usual = {
        "auc": "AUC",
        "gauc": "GAUC",
        "ndcg": "NDCG",
        "log_loss": "Log loss",
        "normalized_entropy": "Normalized entropy",
        "calibration": "Calibration",
        "recall_at_10": "Recall@10",
        "ndcg_at_5": "NDCG@5",
        "click_at_5": "click_at_5",
        "auc_at_": "auc_at_",
        "validation_auc": "validation_auc",
    }
    with build(report=tmp_path / "run.json") as ctx:
        for value in (0.25, 0.5):
            ctx.report(**dict.fromkeys(usual, value))
        shown = dict(ctx.top().headline())
    found = run.load(tmp_path / "run.json")
    titles = [chart.title for chart in found.charts if chart.unit == "as reported"]
    assert titles == list(usual.values())
    tiles = dict(found.tiles)
    for name in usual:
        assert (tiles[f"{name}, last"], shown[name]) == ("0.5000", "0.5")


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
        summary.check_outputs(path, None, rank=1)  # the first alone writes it
    for name in ("report", "tensorboard"):
        for wrong, shown in ((5, "5"), (True, "True"), ("", "''")):
            with pytest.raises(ConfigError, match=f"{name}: expected a path, got {shown}"):
                build(**{name: wrong})
    with pytest.raises(ConfigError, match=r"tensorboard: cannot make the folder .*file"):
        build(tensorboard=tmp_path / "file")
    build(tensorboard=tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("number", [59, 60])
def test_a_loss_of_many_points_is_smoothed_too(number: int) -> None:
    over_steps = Curve()
    for step in range(number):
        over_steps.add(step, float(step % 2))
    recorder: Any = SimpleNamespace(curves={"loss": (over_steps, Curve())})
    loss, *smoothed = summary._charts(recorder)[0].series
    assert (len(loss.points), loss.is_faint) == (number, number >= 60)
    assert [one.name for one in smoothed] == ["smoothed"] * (number >= 60)
    for one in smoothed:
        assert all(abs(y - 0.5) < 0.15 for _, y in one.points[20:])


def test_ends_of_passes_and_checkpoints_are_marked(tmp_path: Path) -> None:
    with build(report=tmp_path / "run.json") as ctx:
        train(ctx)
        ctx.dump_checkpoint(tmp_path / "rows")
        train(ctx)
        ctx.dump_embedding(tmp_path / "rows", blocking=False)
        with eval_ctx(model=ctx.model) as evaluation:
            for batch in DataLoader(Clicks()):
                evaluation.forward(batch)  # its end is none of the training's
        for number, batch in enumerate(DataLoader(Clicks())):
            if number == 2:
                break  # a pass that is left has not ended
            ctx.prepare_features(batch)
    steps = STEPS - 1
    found = run.load(tmp_path / "run.json")
    assert [(mark.kind, mark.step) for mark in found.marks] == [
        ("end of a pass", steps),
        ("checkpoint", steps),
        ("end of a pass", 2 * steps),
        ("checkpoint", 2 * steps),
    ]


def test_a_report_holds_the_same_data_in_both_forms(tmp_path: Path) -> None:
    with build(report=tmp_path / "run.html") as ctx:
        train(ctx)
        ctx.write_report(tmp_path / "alone.json")
    alone, in_page = run.load(tmp_path / "alone.json"), run.load(tmp_path / "run.html")
    assert json.loads((tmp_path / "alone.json").read_text())["parameters"] == alone.parameters
    assert in_page.parameters == alone.parameters
    assert in_page.charts[0] == alone.charts[0]  # the loss
    assert in_page.parameters["model parameters"] == "15"
    memory = {chart.title: chart for chart in in_page.charts if chart.unit == "B"}
    assert set(memory) == {"Memory of rows", "Memory of this process"}
    # Each is drawn over its own axis: the process has at least a hundred times as much.
    rows, process = (one.series[0].points[-1][1] for one in memory.values())
    assert 0 < 100 * rows < process


def test_a_delay_compensation_shows_what_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    settings = {"embedding_worker_config": {"delay_compensation": 1.0}}
    with build(report=path, global_config=settings) as ctx:
        train(ctx)
    text = Reader(path.read_text("utf-8")).text
    assert re.search(r"\d\.\d\d ms delay compensation, of an update", text)
