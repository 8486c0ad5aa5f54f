"""Servers that hold rows, and a directory for state files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.saving import Trained, train
from tests.support.services import ADAGRAD, make_servers, make_worker
from tests.support.tmpfs import tmpfs_directory


@pytest.fixture
def trained() -> Trained:
    servers = make_servers(2, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    return worker, servers


@pytest.fixture
def directory() -> Iterator[Path]:
    with tmpfs_directory() as made:
        yield made
