"""Exports by a context; whole ones are in tests/serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.ctx.exporting import options_of
from persia.errors import ConfigError


def test_options_are_checked(tmp_path: Path) -> None:
    assert options_of({"keep_last": 5}).keep_last == 5
    for given, says in (
        ({"keeplast": 5}, "did you mean 'keep_last'"),
        ({"keep_last": 0}, "keep_last"),
        ({"format": "onnx"}, "format"),
        ({"missing": {"user": "ones"}}, "missing"),
    ):
        with pytest.raises(ConfigError, match=says):
            options_of(given)
