"""Curves of a recorded run, and TensorBoard's files of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from persia._report import run, summary
from persia._report.recorder import EVERY, MOST, MOST_MARKS, Curve, Recorder
from persia.errors import ConfigError
from tests.report.runs import build, train


@pytest.mark.parametrize("number", [0, 1, MOST - 1, MOST, MOST + 1, 3 * MOST + 5])
def test_a_curve_stays_small_and_keeps_the_mean(number: int) -> None:
    curve = Curve()
    for x in range(number):
        curve.add(x, 2.0 * x)
        curve.add(x, math.nan)
    points = curve.points()
    assert len(points) < MOST + 1
    assert curve.num_not_finite == number
    assert all(y == 2 * x for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    whole, rest = divmod(number, curve.every)
    weights = [curve.every] * whole + [rest] * bool(rest)
    assert len(points) == len(weights)
    if number:
        mean = sum(x * w for (x, _), w in zip(points, weights, strict=True)) / number
        assert mean == pytest.approx((number - 1) / 2)


def test_a_long_run_keeps_few_marks_that_span_it_and_its_largest_batch() -> None:
    unused: Any = None
    tracker: Any = SimpleNamespace(totals=lambda: (0, 0))
    recorder = Recorder(unused, tracker, unused, 1, {}, None)
    recorder.close()
    for step in range(1, 1001):
        recorder.note_step(step, torch.zeros(()), 8 if step == 1000 else 32)
        recorder.note_mark("checkpoint")
        if step % 500 == 0:
            recorder.note_mark("end of a pass")
        recorder._losses.clear()
    steps = [mark.step for mark in recorder.marks if mark.kind == "checkpoint"]
    assert MOST_MARKS // 2 <= len(steps) <= MOST_MARKS
    (gap,) = {after - before for before, after in itertools.pairwise(steps)}
    assert (steps[0], 1000 - steps[-1] < gap) == (1, True)
    assert [mark.step for mark in recorder.marks if mark.kind == "end of a pass"] == [500, 1000]
    assert recorder.batch_size == 32


def test_norms_of_gradients_are_those_of_the_recorded_step(tmp_path: Path) -> None:
    ctx = build(report=tmp_path / "run.json")
    seen: dict[str, list[torch.Tensor]] = {name: [] for name, _ in ctx.model.named_parameters()}
    for name, parameter in ctx.model.named_parameters():
        parameter.register_hook(seen[name].append)
    with ctx:
        train(ctx)
    recorded = run.load(tmp_path / "run.json").charts
    (chart,) = (chart for chart in recorded if chart.title == "Gradients")
    dense = {series.name: series.points for series in chart.series}["dense net"]
    assert [x for x, _ in dense] == [EVERY, 2 * EVERY]
    for step, norm in dense:
        parts = [float(of_one[int(step) - 1].norm()) for of_one in seen.values()]
        assert norm == pytest.approx(math.hypot(*parts), rel=1e-4)
        assert norm > 0


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with build(tensorboard=tmp_path / "run") as ctx:
        train(ctx)
    reader = events.EventAccumulator(str(tmp_path / "run"))
    reader.Reload()
    assert {
        *("loss", "auc", "rows", "embedding_bytes", "staleness", "update_queue"),
        *("gradient_norm_dense", "gradient_norm_embeddings", "embedding_norm"),
    } <= set(reader.Tags()["scalars"])
    auc = reader.Scalars("auc")
    assert [one.step for one in auc] == [1, 10, 20, 30]
    assert [one.value for one in auc] == pytest.approx([0.5, 0.6, 0.7, 0.8])
    losses = reader.Scalars("loss")
    assert len(losses) == 3  # 16, 16 and 7 steps
    assert losses[-1].value < losses[0].value
    assert reader.Scalars("rows")[-1].value > 100


def test_without_tensorboard_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(summary, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard"):
        build(tensorboard=tmp_path)
