"""Servers that come back at another host: as another replica's, or while the job ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia._cli import health
from persia._cluster import job, monitor
from persia._cluster.connect import connect_parameter_servers
from persia._cluster.job import announce_job_end, status_after_job
from persia._rpc.methods import embedding_worker, nn_worker, parameter_server
from persia.errors import ConfigError, RemoteError, ServiceBusy, ServiceError
from tests.cluster.test_discovery import PATIENCE_S, Place, hosts_of
from tests.support.waiting import until

Monkey = pytest.MonkeyPatch


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def test_two_servers_that_come_back_with_each_others_addresses(
    place: Place, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(monitor, "_LOOK_S", 0.2)
    first = place.serve(0, 2, "tcp://127.0.0.1:0")
    port = first.address.rpartition(":")[2]
    second = place.serve(1, 2, f"tcp://127.0.0.2:{port}")
    hosts_of(monkeypatch, {"servers": ["127.0.0.1", "127.0.0.2"]})
    restarted: list[int] = []
    found = connect_parameter_servers(
        place.transport,
        addresses=[f"servers:{port}"],
        timeout_s=PATIENCE_S,
        on_restart=restarted.append,
    )
    for server in (first, second):
        server.stop()
    swapped = [
        place.serve(0, 2, f"tcp://127.0.0.2:{port}"),
        place.serve(1, 2, f"tcp://127.0.0.1:{port}"),
    ]
    for remote, server in zip(found, swapped, strict=True):
        # These have no method but hello: who is asked says what it lacks.
        with pytest.raises(RemoteError, match="no attribute 'stats'"):
            remote.client.call("stats")
        assert remote.client.address == server.address
        assert remote.client.incarnation == server.hello.incarnation
    assert sorted(restarted) == [0, 1]
    for remote in found:
        remote.close()
    until(lambda: not any("persia-follow" in t.name for t in threading.enumerate()))


def test_a_server_that_comes_back_while_the_job_ends_is_told(
    place: Place, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(job, "_ATTEMPT_S", 0.2)
    workers = [place.serve(0, 1, role=embedding_worker())]
    first = place.serve(0, 2, "tcp://127.0.0.1:0")
    port = first.address.rpartition(":")[2]
    led = {"localhost": ["127.0.0.1"]}  # one host is left to ZeroMQ, which knows this name
    hosts_of(monkeypatch, led)
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"localhost:{port}")
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", workers[0].address)
    assert announce_job_end(place.transport, 3, 0.5) == ["embedding-parameter-server 1"]
    silent: list[list[str]] = []
    telling = threading.Thread(
        target=lambda: silent.append(announce_job_end(place.transport, 3, PATIENCE_S))
    )
    telling.start()
    second = place.serve(1, 2, f"tcp://127.0.0.2:{port}")
    led["localhost"] = ["127.0.0.1", "127.0.0.2"]
    telling.join(PATIENCE_S)
    assert silent == [[]]
    assert [one.job.status for one in (*workers, first, second)] == [3, 3, 3]


@pytest.mark.parametrize(("supervised", "want"), [("1", 0), ("0", 7), ("", 7)])
def test_the_status_of_who_would_be_started_again(
    monkeypatch: Monkey, supervised: str, want: int
) -> None:
    monkeypatch.setenv("PERSIA_SUPERVISED", supervised)
    assert status_after_job(7) == want


# --- health -----------------------------------------------------------------------------------


class Healthy:
    def stats(self) -> dict[str, int]:
        return {}


class Waiting:
    def stats(self) -> dict[str, int]:
        raise ServiceBusy("the embedding-worker waits: nobody is there")


def test_the_server_of_this_container_is_asked(place: Place, monkeypatch: Monkey) -> None:
    server = place.serve(0, 1, "tcp://127.0.0.1:0")
    port = server.address.rpartition(":")[2]
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "0.0.0.0")
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"servers:{port}")
    name = parameter_server().name
    server._service = Healthy()
    health.check(name, PATIENCE_S)
    health.check(name, PATIENCE_S, int(port))
    with pytest.raises(ConfigError, match="expected embedding-worker, found embedding-param"):
        health.check(embedding_worker().name, PATIENCE_S, int(port))
    server._service = Waiting()
    with pytest.raises(ServiceBusy, match="nobody is there"):
        health.check(name, 0.3)
    server.stop()
    with pytest.raises(ServiceError, match="no connection"):
        health.check(name, 0.2)


def test_an_nn_worker_is_there_or_not(place: Place, monkeypatch: Monkey) -> None:
    server = place.serve(0, 1, "tcp://127.0.0.1:0", role=nn_worker())
    monkeypatch.setenv("PERSIA_NN_WORKERS", server.address)
    health.check(nn_worker().name, PATIENCE_S)
