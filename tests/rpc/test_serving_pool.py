"""Embedding-workers of serving: one of them is enough, and a dead one costs a request once."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from persia._rpc import serving_pool
from persia._rpc.messages import FeatureScan, IDRows, IDsRequest, LookupResult
from persia._rpc.methods import embedding_worker, parameter_server
from persia._rpc.server import Server
from persia._rpc.serving_pool import ServingWorkers
from persia._rpc.zmq_transport import ZmqTransport
from persia.config import EmbeddingSchema, schema_fingerprint
from persia.errors import (
    ConfigError,
    NotReady,
    ServiceBusy,
    ServiceError,
    ServiceUnavailable,
)
from tests.rpc.proxies import TcpProxy
from tests.rpc.support import Wire
from tests.support.fixtures import Log, Monkey
from tests.support.services import SCHEMA, features, gradient, make_servers, make_worker
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S, until

OWN = schema_fingerprint(SCHEMA)
OTHER = schema_fingerprint(EmbeddingSchema.load({"slots_config": {"sum": {"dim": 3}}}))
SERVER = parameter_server().name
ASKED = features({"sum": [[1]]}, requires_grad=False)


class Counted:
    """An embedding-worker that counts its lookups, and may hold them."""

    def __init__(self, servers: list[Any]) -> None:
        self.own = make_worker(servers)
        self.lookups = self.num_asked = 0  # the second: whether it is ready
        self.lacks_server = False
        self.held = threading.Event()  # a lookup waits
        self.permit = threading.Event()
        self.permit.set()

    def lookup_direct(self, asked: Any) -> LookupResult:
        self.lookups += 1
        if not self.permit.is_set():
            self.held.set()
            assert self.permit.wait(PATIENCE_S)
        if self.lacks_server:
            raise NotReady("no connection to that of server 3", role=SERVER, replica=3)
        return self.own.lookup_direct(asked)

    def ready_for_serving(self) -> bool:
        self.num_asked += 1
        if self.lacks_server:
            raise NotReady("no connection to that of server 3", role=SERVER, replica=3)
        return self.own.ready_for_serving()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Job:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        servers = make_servers()
        self.workers = [Counted(servers) for _ in "ab"]
        self.addresses = [wire.address() for _ in "ab"]
        self.servers: dict[int, Server] = {}
        self.gone: set[str] = set()  # addresses that are not waited for until they answer

    def start(self, number: int, **options: Any) -> Server:
        """Start a worker; its address stays."""
        values = {"role": embedding_worker(), "replica_index": number, "replica_size": 2}
        values["schema_fingerprint"] = OWN
        service = options.pop("service", self.workers[number])
        made = self.wire.serve(service, self.addresses[number], **{**values, **options})
        self.servers[number] = made
        self.gone.discard(self.addresses[number])
        return made

    def stop(self, number: int) -> None:
        self.gone.add(self.addresses[number])
        self.servers[number].stop(0.0)

    @contextlib.contextmanager
    def pool(self, addresses: list[str] | None = None, **options: Any) -> Iterator[Any]:
        """A pool that takes no worker for dead but those that are gone."""
        where = self.addresses if addresses is None else addresses
        pool: Any = ServingWorkers(ZmqTransport(), lambda: where, **options)
        check = pool._check

        def check_patiently(server: Any, timeout_s: float) -> None:
            check(server, timeout_s if server.address in self.gone else PATIENCE_S)

        pool._check = check_patiently
        with contextlib.closing(pool):
            yield pool

    def await_up(self, pool: ServingWorkers, count: int) -> None:
        until(lambda: sum(one.is_up for one in pool._servers.values()) == count)


@pytest.fixture
def job(ipc_wire: Wire, monkeypatch: Monkey) -> Job:
    monkeypatch.setattr(serving_pool, "HEALTH_S", 0.05)
    monkeypatch.setattr(serving_pool, "HEALTH_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", str(PATIENCE_S))
    return Job(ipc_wire)


@pytest.fixture
def patient(job: Job, monkeypatch: Monkey) -> Job:
    """A job whose workers are not asked for their health, however busy this machine is."""
    for name in ("ATTEMPT_S", "_LONGEST_ATTEMPT_S"):
        monkeypatch.setattr(serving_pool, name, PATIENCE_S)
    return job


def pause_no_more(pool: Any, monkeypatch: Monkey) -> None:
    """Let rounds follow each other at once, until the next pause would be too long."""
    monkeypatch.setattr(serving_pool, "_LONGEST_PAUSE_S", math.inf)
    monkeypatch.setattr(pool._closed, "wait", lambda seconds: False)


def test_one_worker_that_answers_is_enough_and_others_are_found(patient: Job) -> None:
    job = patient
    job.start(1)
    with job.pool() as pool:
        for _ in range(4):
            assert pool.lookup_direct(ASKED).ref is None
        assert pool.schema_fingerprint == job.servers[1].hello.schema_fingerprint
        job.start(0)
        job.await_up(pool, 2)
        for _ in range(4):
            pool.lookup_direct(ASKED)
    assert [one.lookups for one in job.workers] == [2, 6]


def test_without_any_worker_the_error_names_what_was_asked(
    job: Job, monkeypatch: Monkey
) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    with pytest.raises(ServiceUnavailable, match="no embedding-worker answers") as raised:
        ServingWorkers(job.wire.transport, lambda: job.addresses)
    assert all(address in str(raised.value) for address in job.addresses)


def test_a_worker_that_stops_is_avoided_and_found_again(job: Job, caplog: Log) -> None:
    for number in (0, 1):
        job.start(number)
    with job.pool() as pool, caplog.at_level(logging.WARNING):
        job.await_up(pool, 2)
        job.stop(0)
        for _ in range(6):
            pool.lookup_direct(ASKED)
        before = job.workers[1].lookups
        assert before >= 6
        assert sum("it is avoided until it answers" in one for one in caplog.messages) == 1
        job.start(0)
        job.await_up(pool, 2)
        for _ in range(4):
            pool.lookup_direct(ASKED)
        assert job.workers[0].lookups == 2
    assert any("answers again" in one for one in caplog.messages)


def test_the_connection_breaks_under_a_lookup(patient: Job) -> None:
    """By the event, before any time has passed."""
    job = patient
    for number in (0, 1):
        job.start(number)
    proxy = TcpProxy(
        job.wire.serve(
            job.workers[0], "tcp://127.0.0.1:0", role=embedding_worker(), schema_fingerprint=OWN
        ).address
    )
    with contextlib.closing(proxy), job.pool([proxy.address, job.addresses[1]]) as pool:
        job.await_up(pool, 2)
        job.workers[0].permit.clear()
        done: list[Any] = []
        thread = threading.Thread(
            target=lambda: done.extend(pool.lookup_direct(ASKED) for _ in "ab")
        )
        thread.start()
        assert job.workers[0].held.wait(PATIENCE_S)
        proxy.close()
        thread.join(PATIENCE_S)
        assert len(done) == 2
        assert job.workers[1].lookups == 2
        job.workers[0].permit.set()


def test_a_host_that_drops_packets_costs_a_request_two_attempts_once(
    job: Job, monkeypatch: Monkey
) -> None:
    """It neither answers nor ends its connection; its health is asked after one attempt."""
    assert 2 * serving_pool.ATTEMPT_S <= 0.2
    monkeypatch.setattr(serving_pool, "HEALTH_S", PATIENCE_S)  # only the request finds it
    job.start(1)
    far = job.wire.serve(
        job.workers[0], "tcp://127.0.0.1:0", role=embedding_worker(), schema_fingerprint=OWN
    )
    proxy = TcpProxy(far.address)
    with contextlib.closing(proxy), job.pool([proxy.address, job.addresses[1]]) as pool:
        job.await_up(pool, 2)
        waits: list[float] = []
        proxy.hold()
        job.gone.add(proxy.address)
        health = pool._check

        def check(server: Any, timeout_s: float) -> None:
            if server.address == proxy.address:
                waits.append(timeout_s)
            health(server, timeout_s)

        monkeypatch.setattr(pool, "_check", check)
        for _ in range(6):
            pool.lookup_direct(ASKED)
        assert waits == [serving_pool.ATTEMPT_S]
        assert (job.workers[0].lookups, job.workers[1].lookups) == (0, 6)
        proxy.go()


def test_a_worker_that_is_slow_is_waited_for(job: Job, monkeypatch: Monkey) -> None:
    for number in (0, 1):
        job.start(number)
    with job.pool() as pool:
        job.await_up(pool, 2)
        slow = job.workers[0]
        slow.permit.clear()
        asked: list[float] = []
        health = pool._check

        def check(server: Any, timeout_s: float) -> None:
            health(server, timeout_s)
            if server.address == job.addresses[0]:
                asked.append(timeout_s)
            if len(asked) == 3:
                slow.permit.set()

        monkeypatch.setattr(pool, "_check", check)
        for _ in "ab":
            pool.lookup_direct(ASKED)
        assert asked[:3] == [serving_pool.ATTEMPT_S] * 3
        assert [one.lookups for one in job.workers] == [1, 1]


def test_a_worker_that_starts_leaves_requests_to_others(job: Job, monkeypatch: Monkey) -> None:
    job.start(0, service=None)
    job.start(1)
    with job.pool() as pool:
        job.await_up(pool, 2)
        for _ in range(4):
            pool.lookup_direct(ASKED)
        assert job.workers[1].lookups == 4
        job.stop(1)
        with pytest.raises(ServiceError):
            pool.call("lookup_direct", ASKED, timeout_s=0.5)
    with job.pool(job.addresses[:1], timeout_s=PATIENCE_S) as pool:
        pause_no_more(pool, monkeypatch)
        with pytest.raises(ServiceBusy):
            pool.lookup_direct(ASKED)


def test_one_address_is_waited_for(job: Job) -> None:
    job.start(0)
    with job.pool(job.addresses[:1]) as pool:
        pool.lookup_direct(ASKED)
        job.stop(0)
        thread = threading.Thread(target=pool.lookup_direct, args=(ASKED,))
        thread.start()
        job.start(0)
        thread.join(PATIENCE_S)
        assert job.workers[0].lookups == 2


def test_what_is_no_worker_of_this_job_is_not_asked(
    job: Job, caplog: Log, monkeypatch: Monkey
) -> None:
    job.start(0)
    job.start(1, schema_fingerprint=OTHER)
    with job.pool(schema_fingerprint=OWN) as pool:
        until(lambda: "has another one" in caplog.text)
        for _ in range(4):
            pool.lookup_direct(ASKED)
        assert job.workers[1].lookups == 0
        # Replaced between two questions for its health: the answer of the other is not taken.
        job.stop(0)
        job.start(0, schema_fingerprint=OTHER)
        pause_no_more(pool, monkeypatch)
        with pytest.raises(ServiceUnavailable):
            pool.call("lookup_direct", ASKED, timeout_s=PATIENCE_S)
    server = job.wire.serve(make_servers()[0], role=parameter_server())
    with pytest.raises(ConfigError, match=r"expected embedding-worker, found embedding-param"):
        ServingWorkers(job.wire.transport, lambda: [server.address])


def test_addresses_of_a_name_come_and_go(patient: Job, monkeypatch: Monkey) -> None:
    job = patient
    monkeypatch.setattr(serving_pool, "_RESOLVE_S", 0.05)
    for number in (0, 1):
        job.start(number)
    where = job.addresses[:1]
    with job.pool(where, has_names=True) as pool:
        pool.lookup_direct(ASKED)
        where[:] = job.addresses[1:]
        until(lambda: list(pool._servers) == where)
        job.await_up(pool, 1)
        pool.lookup_direct(ASKED)
        where.clear()  # not known for a moment
        pool.lookup_direct(ASKED)
        assert [one.address for one in pool.clients] == job.addresses[1:]
    assert [one.lookups for one in job.workers] == [1, 2]


def test_other_methods_are_answered_by_any_and_batches_of_a_training_are_refused(
    job: Job,
) -> None:
    for number in (0, 1):
        job.start(number)
    with job.pool() as pool:
        assert pool.ready_for_serving()
        assert pool.get_embedding_size() == [0]
        assert [stats["rows"] for stats in pool.server_stats()] == [0]
        assert pool.feature_order() is None
        pool.clear_embeddings()
        ids = np.array([4, 5], np.uint64)
        pool.write_rows(IDRows("sum", ids, np.ones((2, 4), np.float32), None))
        assert pool.table_info("sum").group == "shared"
        assert pool.count_rows("sum") == [2]
        assert pool.delete_rows("sum", ids[:1]) == 1
        assert pool.read_rows(IDsRequest("sum", ids, False, False)).found.tolist() == [0, 1]
        piece = pool.scan_rows(FeatureScan("sum", 0, 0, 9, False))
        assert (len(piece.signs), piece.cursor) == (1, None)
        result = job.workers[0].own.lookup_direct(features({"sum": [[1]]}))
        calls: tuple[Callable[[], object], ...] = (
            lambda: pool.lookup_direct(features({"sum": [[1]]})),
            lambda: pool.register(ASKED),
            lambda: pool.lookup(0, True),
            lambda: pool.update(gradient(result)),
            lambda: pool.release(0),
        )
        for call in calls:
            with pytest.raises(ConfigError, match="expected a batch without gradients"):
                call()


def test_a_worker_without_servers_is_avoided_until_it_is_ready(
    patient: Job, caplog: Log
) -> None:
    job = patient
    for number in (0, 1):
        job.start(number)
    lacking = job.workers[0]
    with job.pool() as pool, caplog.at_level(logging.WARNING):
        job.await_up(pool, 2)
        lacking.lacks_server = True
        for _ in range(8):
            pool.lookup_direct(ASKED)
        assert (lacking.lookups, job.workers[1].lookups) == (1, 8)
        # It answers for its health, which does not count, and says that it is not ready.
        until(lambda: lacking.num_asked >= 2)
        assert [one.is_up for one in pool._servers.values()] == [False, True]
        pool.lookup_direct(ASKED)
        assert lacking.lookups == 1
        lacking.lacks_server = False
        job.await_up(pool, 2)
        for _ in range(4):
            pool.lookup_direct(ASKED)
        assert lacking.lookups == 3
    assert sum("it is avoided until it is ready" in one for one in caplog.messages) == 1
    assert any("answers again" in one for one in caplog.messages)


def test_where_no_worker_has_servers_the_error_names_one_at_the_deadline(
    job: Job, monkeypatch: Monkey
) -> None:
    for number in (0, 1):
        job.start(number)
        job.workers[number].lacks_server = True
    with job.pool() as pool, monkeypatch.context() as patch:
        job.await_up(pool, 2)
        pause_no_more(pool, patch)
        calls: tuple[Callable[[], object], ...] = (
            lambda: pool.call("lookup_direct", ASKED, timeout_s=PATIENCE_S),
            lambda: pool.call("ready_for_serving", timeout_s=PATIENCE_S),
        )
        for call in calls:
            with pytest.raises(NotReady, match="of server 3") as caught:
                call()
            assert (caught.value.role, caught.value.replica) == (SERVER, 3)
        assert all(one.lookups >= 2 for one in job.workers)  # asked again until then
    with job.pool(
        job.addresses[:1], timeout_s=PATIENCE_S
    ) as pool:  # a single one is waited for
        before = job.workers[0].lookups
        waiting = Background(lambda: pool.lookup_direct(ASKED))
        until(lambda: job.workers[0].lookups > before + 1)
        job.workers[0].lacks_server = False
        assert waiting.result().ref is None
