"""The health command asks the server of its own container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from persia._cli import health
from persia._rpc.methods import embedding_worker, nn_worker, parameter_server
from persia.errors import ConfigError, ServiceBusy, ServiceError
from tests.cluster.place import PATIENCE_S, Monkey, Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


class Healthy:
    def stats(self) -> dict[str, int]:
        return {}


class Waiting:
    def stats(self) -> dict[str, int]:
        raise ServiceBusy("the embedding-worker waits: no server answers")


def test_the_server_of_this_container_is_asked(place: Place, monkeypatch: Monkey) -> None:
    server = place.serve(0, 1, "tcp://127.0.0.1:0")
    port = server.address.rpartition(":")[2]
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "0.0.0.0")
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"servers:{port}")
    name = parameter_server().name
    server.service = Healthy()
    health.check(name, PATIENCE_S)
    health.check(name, PATIENCE_S, int(port))
    with pytest.raises(ConfigError, match="expected embedding-worker, found embedding-param"):
        health.check(embedding_worker().name, PATIENCE_S, int(port))
    server.service = Waiting()
    with pytest.raises(ServiceBusy, match="no server answers"):
        health.check(name, 0.3)
    server.stop()
    with pytest.raises(ServiceError, match="no connection"):
        health.check(name, 0.2)


def test_an_nn_worker_is_there_or_not(place: Place, monkeypatch: Monkey) -> None:
    server = place.serve(0, 1, "tcp://127.0.0.1:0", role=nn_worker())
    monkeypatch.setenv("PERSIA_NN_WORKERS", server.address)
    health.check(nn_worker().name, PATIENCE_S)
