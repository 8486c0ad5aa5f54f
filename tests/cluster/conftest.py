"""A place for servers; no thread that asks is left of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.place import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made
    left = [t.name for t in threading.enumerate() if t.name.startswith("persia-ask")]
    assert not left
