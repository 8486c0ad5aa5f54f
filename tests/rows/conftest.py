"""Servers that hold rows, and a checkpoint of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.saving import Trained, dump, train
from tests.support.services import ADAGRAD, make_servers, make_worker


@pytest.fixture
def dumped(tmp_path: Path) -> Trained:
    servers = make_servers(2, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    dump(worker, tmp_path)
    return worker, servers
