"""The process that tries a library out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from persia._build import kernel_child

if TYPE_CHECKING:
    import pytest


def test_what_is_wrong_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent.so")
    assert kernel_child.main(absent, "native:absent:0") == 1
    assert "native:absent:0: it cannot be loaded" in capsys.readouterr().out
