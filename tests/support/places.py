"""Directories in places that pytest's are not in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def short_directory(parent: str = "/tmp") -> Iterator[Path]:
    """A directory in whose paths sockets fit: those of pytest may be too long."""
    if not Path(parent).is_dir():
        pytest.skip(f"there is no {parent}")
    with tempfile.TemporaryDirectory(prefix="persia-test-", dir=parent) as directory:
        yield Path(directory)


def tmpfs_directory() -> AbstractContextManager[Path]:
    """One for state files, which need a tmpfs."""
    return short_directory("/dev/shm")
