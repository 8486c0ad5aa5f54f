"""A catalog in a folder of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia._files.storage import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)
