"""Several embedding-workers as one, while one of them is gone."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from persia._rpc import client as client_module
from persia._rpc import worker_pool as workers_module
from persia._rpc.messages import FeatureOrder, LookupResult, PooledOutput
from persia._rpc.methods import embedding_worker
from persia._rpc.stubs import RemoteEmbeddingWorker
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._training.backward import BackwardPipeline
from persia._training.forward import Lookups
from persia._training.inflight import InFlightBatch, InFlightTracker
from persia.errors import ServiceBusy, ServiceUnavailable, UnknownRef
from tests.rpc.support import Wire
from tests.support.fixtures import Log, Monkey
from tests.support.services import features, gradient, make_servers, make_worker, settings
from tests.support.waiting import PATIENCE_S

# Of one call that is in vain; all others take far less, and PERSIA_RPC_TIMEOUT far more.
TRY_S = 0.5
IN_ORDER: Any = SimpleNamespace(note=lambda *_: None)  # lookups that arrange no outputs


class Job:
    """Two embedding-workers over one set of servers, and what an nn-worker sees of them."""

    def __init__(self, wire: Wire) -> None:
        servers = make_servers()
        self.own = [make_worker(servers) for _ in "ab"]
        self.servers = [
            wire.serve(worker, role=embedding_worker(), replica_index=number, replica_size=2)
            for number, worker in enumerate(self.own)
        ]
        self.workers = EmbeddingWorkers(
            wire.transport,
            lambda on_restart: [
                RemoteEmbeddingWorker.connect(wire.transport, server.address)
                for server in self.servers
            ],
        )
        self.in_vain: list[str] = []  # methods that workers which are gone were asked for

    def stop(self, number: int) -> None:
        """End a worker; calls of it take no more time than they must."""
        self.servers[number].stop(0.0)
        client = self.workers.clients[number]
        call = client.call

        def call_in_vain(method: str, *arguments: Any, timeout_s: float) -> Any:
            self.in_vain.append(method)
            return call(method, *arguments, timeout_s=min(timeout_s, 0.1))

        client.call = call_in_vain  # type: ignore[method-assign,assignment]


@pytest.fixture
def job(ipc_wire: Wire, monkeypatch: Monkey) -> Iterator[Job]:
    monkeypatch.setattr(workers_module, "_TRY_S", PATIENCE_S)
    monkeypatch.setattr(workers_module, "_PROBE_S", PATIENCE_S)
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "120")
    made = Job(ipc_wire)
    yield made
    made.workers.close()
    for worker in made.own:
        worker.close()


def test_w69_a_dead_worker_costs_its_time_once(job: Job, caplog: Log) -> None:
    job.stop(0)
    with caplog.at_level(logging.WARNING, workers_module.__name__):
        for number in range(8):
            job.workers.lookup_direct(features({"sum": [[1]]}, number, requires_grad=False))
            handle = job.workers.register(features({"sum": [[1]]}, number))
            job.workers.release(handle)
    assert len(caplog.messages) == 1
    assert "another embedding-worker is tried" in caplog.messages[0]
    assert len(job.in_vain) == 1
    assert job.workers.get_embedding_size() == [0]
    assert [stats["rows"] for stats in job.workers.server_stats()] == [0]
    stats = job.workers.stats()
    assert (stats["lookups"], stats["unanswered"]) == (8, 1)
    job.stop(1)
    with pytest.raises(ServiceUnavailable):
        job.workers.stats()


@pytest.mark.slow
def test_w69_the_batches_of_a_dead_worker_go_to_another(job: Job) -> None:
    first, second = (job.workers.register(features({"sum": [[1]]}, x)) for x in (0, 2))
    result = job.workers.lookup(second, True)
    job.stop(0)
    with pytest.raises(ServiceUnavailable, match="embedding-worker 0"):
        job.workers.lookup(first, True)
    with pytest.raises(ServiceUnavailable, match="embedding-worker 0"):
        job.workers.update(gradient(result))
    job.workers.release(first)
    assert job.workers.stats()["not_released"] == 1
    # With gradients, and its turn at the one that is gone.
    again = job.workers.lookup_direct(features({"sum": [[1]]}, 2))
    job.workers.update(gradient(again))
    assert job.workers.stats()["updates"] == 1
    assert job.in_vain == ["lookup", "update", "release", "stats", "stats"]


def test_w69_what_a_dead_worker_knew_of_a_dataset_the_trainer_registers_again(job: Job) -> None:
    """Between lookup and update; the other worker has never seen the batch."""

    def vectors() -> list[float]:
        asked = features({"sum": [[1]]}, requires_grad=False)
        (output,) = job.workers.lookup_direct(asked).outputs
        assert isinstance(output, PooledOutput)
        return [float(value) for value in output.values.ravel()]

    lookups = Lookups(job.workers, InFlightTracker(job.workers), True, lambda: None, IN_ORDER)
    ticket = InFlightBatch(batch_id=0, features=features({"sum": [[1]]}, 0).features)
    looked_up = lookups._ask(ticket, True, time.perf_counter())
    before = vectors()
    job.stop(0)
    pipeline: Any = SimpleNamespace(_worker=job.workers)
    report = BackwardPipeline._update(pipeline, ticket, gradient(looked_up))
    assert not report.repeated
    after = vectors()
    assert after != before
    # Sent once more, as if the answer had been lost.
    assert BackwardPipeline._update(pipeline, ticket, gradient(looked_up)).repeated
    assert vectors() == after


@pytest.mark.parametrize("is_slow", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_worker_that_is_slow_or_whose_server_is_away_is_waited_for(
    job: Job, monkeypatch: Monkey, is_slow: bool
) -> None:
    # Another worker would miss the same server: trying all in turn would end before it is back.
    monkeypatch.setattr(workers_module, "_TRY_S", TRY_S)
    handle = job.workers.register(features({"sum": [[1]]}))
    lookup, tries = job.own[0].lookup, []

    def lookup_late(ref: int, is_training: bool) -> LookupResult:
        tries.append(ref)
        if is_slow:
            threading.Event().wait(2 * TRY_S)
        elif len(tries) == 1:
            raise ServiceUnavailable("no connection", role="embedding-parameter-server")
        return lookup(ref, is_training)

    monkeypatch.setattr(job.own[0], "lookup", lookup_late)
    assert job.workers.lookup(handle, True).ref == handle


@pytest.mark.slow
def test_a_worker_that_was_started_again_and_looks_for_its_servers_is_waited_for(
    job: Job, monkeypatch: Monkey, caplog: Log
) -> None:
    handle = job.workers.register(features({"sum": [[1]]}))
    monkeypatch.setattr(workers_module, "_TRY_S", TRY_S)

    def looks(*_: object) -> None:
        if "so it is waited for" not in caplog.text:
            raise ServiceBusy("the embedding-worker waits")
        raise UnknownRef("no batch in flight has this ref")

    for name in ("lookup", "release"):
        monkeypatch.setattr(job.own[0], name, looks)
    job.workers.release(handle)
    assert job.workers.stats()["not_released"] == 1
    # By this error its ids are registered again.
    with pytest.raises(UnknownRef, match="no batch in flight"):
        job.workers.lookup(handle, True)


def test_a_worker_that_waits_for_its_servers_is_asked_why(
    ipc_wire: Wire, monkeypatch: Monkey, caplog: Log
) -> None:
    monkeypatch.setattr(workers_module, "_LINE_S", 2.0)
    monkeypatch.setattr(
        client_module, "_FIRST_PAUSE_S", math.inf
    )  # refusals are raised at once
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "4")
    why = "no embedding-parameter-server answers: no connection to tcp://10.0.0.7:8888"
    server = ipc_wire.serve(None, role=embedding_worker(), ready=lambda: why)
    workers = EmbeddingWorkers(
        ipc_wire.transport,
        lambda _: [RemoteEmbeddingWorker.connect(ipc_wire.transport, server.address)],
    )

    def stop_server(record: logging.LogRecord) -> bool:
        server.stop(0.0)  # as it does when it has waited long enough
        return True

    logging.getLogger(workers_module.__name__).addFilter(stop_server)
    try:
        said = "no connection to tcp://10.0.0.7:8888; and it has gone since; waited 4 s$"
        with pytest.raises(ServiceUnavailable, match=said) as raised:
            workers.configure(settings())
        assert raised.value.role == "embedding-parameter-server"
        assert caplog.messages[0].startswith(
            f"waiting: embedding-worker 0 at {server.address}: "
        )
        assert caplog.messages[0].endswith("no connection to tcp://10.0.0.7:8888")
    finally:
        logging.getLogger(workers_module.__name__).removeFilter(stop_server)
        workers.close()


def test_all_workers_have_one_order_of_features(job: Job) -> None:
    first, second = (FeatureOrder(ids, (), ()) for ids in (("a", "b"), ("b", "a")))
    assert job.workers.feature_order() is None
    assert job.workers.fix_feature_order(first, None) == first
    assert job.workers.fix_feature_order(second, None) == first  # another rank's first batch
    assert [each.feature_order() for each in job.own] == [first, first]
    assert job.workers.fix_feature_order(second, second) == first  # another has come meanwhile
    assert job.workers.fix_feature_order(second, first) == second
    job.stop(0)
    assert job.workers.feature_order() == second
    assert job.workers.fix_feature_order(first, second) == first
    assert [each.feature_order() for each in job.own] == [second, first]
    job.own[1]._order = None  # it has restarted
    job.workers._configure_again(1)
    assert job.own[1].feature_order() == first


def test_a_rank_follows_the_order_that_others_train_by(job: Job) -> None:
    """Also where the worker that decides was away when that order was fixed."""
    first, second, third = (FeatureOrder((name,), (), ()) for name in "abc")
    for knows in job.own:
        for each in job.own:
            each._order = None
        knows.fix_feature_order(first, None)
        assert job.workers.fix_feature_order(second, None) == first
        assert [each.feature_order() for each in job.own] == [first, first]
    job.own[1].fix_feature_order(third, first)
    # A process that only asks gives it to one that restarts, too.
    job.workers._order = None
    assert job.workers.feature_order() == first
    job.own[1]._order = None
    job.workers._configure_again(1)
    assert job.own[1].feature_order() == first
