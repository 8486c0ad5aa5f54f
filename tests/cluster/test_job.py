"""The end of a job: announced to servers that come back, and events of a process."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from queue import SimpleQueue
from unittest.mock import Mock

from persia._cluster import job
from persia._cluster.job import (
    Event,
    Events,
    TrainerWatch,
    announce_job_end,
    watched_process,
)
from persia._rpc.client import Client
from persia._rpc.methods import embedding_worker, nn_worker
from tests.cluster.place import Monkey, Place, hosts_of
from tests.support.waiting import PATIENCE_S, until


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
    missing = ["embedding-parameter-server 1"]
    # Those that are there answer in time, unless they have no processor for so long.
    until(lambda: announce_job_end(place.transport, 3, 0.5) == missing)
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


def test_a_trainer_that_is_another_process_is_noticed(place: Place) -> None:
    rank = place.serve(0, 1, role=nn_worker())
    with closing(Client(place.transport, rank.address, nn_worker())) as client:
        incarnation = client.hello().incarnation
    for before in (incarnation, incarnation + 1, None):
        events: Events = SimpleQueue()
        with closing(TrainerWatch(place.transport, {rank.address: before}, events)) as watch:
            if before == incarnation:
                assert watch._ask(rank.address) == incarnation
                assert watch._ask(place.ipc("none")) is None
                assert events.empty()
            else:
                assert events.get(timeout=PATIENCE_S) == Event("restarted")


def test_a_trainer_by_name_is_looked_up_beside_the_thread_of_other_calls(
    place: Place, monkeypatch: Monkey
) -> None:
    rank = place.serve(0, 1, "tcp://127.0.0.1:0", role=nn_worker())
    name = f"tcp://trainer:{rank.address.rpartition(':')[2]}"
    hosts_of(monkeypatch, {"trainer": ["127.0.0.1"]})  # which libzmq does not know
    events: Events = SimpleQueue()
    with closing(TrainerWatch(place.transport, {name: None}, events)):
        assert events.get(timeout=PATIENCE_S) == Event("restarted")


def test_signals_and_failures_come_one_after_the_other() -> None:
    error = ValueError("lost my mind")
    before = signal.getsignal(signal.SIGTERM), threading.excepthook
    with watched_process() as events:
        os.kill(os.getpid(), signal.SIGTERM)
        thread = threading.Thread(target=Mock(side_effect=error))
        thread.start()
        thread.join()
        assert events.get(timeout=PATIENCE_S) == Event("signal", signal.SIGTERM)
        assert events.get(timeout=PATIENCE_S) == Event("failure", error=error)
    assert (signal.getsignal(signal.SIGTERM), threading.excepthook) == before
