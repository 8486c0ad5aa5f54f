"""Servers that hold rows."""

from __future__ import annotations

import pytest

from tests.support.saving import Trained, train
from tests.support.services import ADAGRAD, make_servers, make_worker


@pytest.fixture
def trained() -> Trained:
    servers = make_servers(2, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    return worker, servers
