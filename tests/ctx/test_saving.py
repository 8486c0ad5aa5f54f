"""What contexts save: dumps and loads are in test_checkpoints, exports in tests/serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.ctx import EmbeddingCtx, PreprocessMode
from persia.errors import ConfigError, DataError
from tests.serving.models import make_ctx


def test_an_export_needs_a_batch_and_a_name(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        with pytest.raises(DataError, match="inputs="):
            ctx.export(tmp_path / "m")
        with pytest.raises(ConfigError, match="name of a model"):
            ctx.export(tmp_path / "a b")
    assert list(tmp_path.iterdir()) == []


def test_a_context_without_a_model_has_none_to_save(tmp_path: Path) -> None:
    ctx = EmbeddingCtx(PreprocessMode.EVAL)
    with pytest.raises(ConfigError, match="model= is None"):
        ctx.dump_checkpoint(tmp_path)
