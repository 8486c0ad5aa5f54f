"""A directory in a tmpfs, which state files need: elsewhere they would be too long."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")


@contextmanager
def tmpfs_directory() -> Iterator[Path]:
    if not SHARED.is_dir():
        pytest.skip("there is no /dev/shm")
    made = Path(tempfile.mkdtemp(prefix="persia-test-", dir=SHARED))
    try:
        yield made
    finally:
        shutil.rmtree(made)
