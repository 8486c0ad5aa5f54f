"""A directory in a tmpfs, which state files need: elsewhere they would be too long."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")


@pytest.fixture
def directory() -> Iterator[Path]:
    if not SHARED.is_dir():
        pytest.skip("there is no /dev/shm")
    made = Path(tempfile.mkdtemp(prefix="persia-test-", dir=SHARED))
    yield made
    shutil.rmtree(made)
