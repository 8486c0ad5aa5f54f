"""Arguments of ``publish``; versions that are published are in tests/serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.errors import ConfigError
from tests.serving.models import make_ctx


def test_arguments_are_checked(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        with pytest.raises(ConfigError, match="rows: expected 'checkpoint' or 'log'"):
            ctx.publish(tmp_path / "m", rows="some")
        with pytest.raises(ConfigError, match="did you mean 'keep_last'"):
            ctx.publish(tmp_path / "m", keeplast=3)
        ctx.publish(tmp_path / "m", every_s=3600.0)
        with pytest.raises(ConfigError, match="publishes already"):
            ctx.publish(tmp_path / "m")


def test_it_is_called_inside_the_block(tmp_path: Path) -> None:
    with make_ctx() as ctx:
        pass
    with pytest.raises(ConfigError, match="inside `with TrainCtx"):
        ctx.publish(tmp_path / "m")
