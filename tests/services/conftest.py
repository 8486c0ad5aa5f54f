"""Servers that hold rows."""

from __future__ import annotations

import pytest

from tests.services.saving import Trained, train
from tests.services.support import ADAGRAD, make_servers, make_worker


@pytest.fixture
def trained() -> Trained:
    servers = make_servers(2, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    return worker, servers
