"""Servers that hold rows, and a directory for state files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import tmpfs_directory
from tests.support.saving import Trained, dump, train
from tests.support.services import ADAGRAD, make_servers, make_worker


@pytest.fixture
def trained() -> Trained:
    servers = make_servers(2, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    return worker, servers


@pytest.fixture
def dumped(trained: Trained, tmp_path: Path) -> Trained:
    """The same, with a checkpoint of them in ``tmp_path``."""
    dump(trained[0], tmp_path)
    return trained


@pytest.fixture
def directory() -> Iterator[Path]:
    with tmpfs_directory() as made:
        yield made
