"""TensorBoard's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia._report import tensorboard
from persia.errors import ConfigError
from tests.report.runs import build, train


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
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard"):
        build(tensorboard=tmp_path)
