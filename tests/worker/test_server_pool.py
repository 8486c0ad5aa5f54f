"""Parameter servers in other processes: restarts, and answers that are none."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._cluster.connect import connect_parameter_servers
from persia._rpc.client import Client, PendingCall
from persia._rpc.messages import (
    HyperParameters,
    IDsRequest,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    TableRows,
)
from persia._rpc.methods import Hello, parameter_server
from persia._server.kept_lookups import KeptLookups
from persia._server.service import ParameterServer
from persia._worker import server_pool
from persia._worker.server_pool import ServerSet
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig
from persia.errors import (
    ConfigError,
    NotReady,
    ProtocolError,
    ServiceBusy,
    ServiceTimeout,
    ServiceUnavailable,
)
from tests.rpc.proxies import TcpProxy
from tests.rpc.support import Wire
from tests.support.fixtures import Log, Monkey
from tests.support.services import (
    ADAM,
    CONFIG,
    SETTINGS,
    SGD,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
    value,
)
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S, until
from tests.worker.cluster import Faulty, Slow

NUM_SERVERS = 2
HINTS = np.zeros(2, np.uint32)  # of nothing that was asked for


def unset_servers() -> list[ParameterServer]:
    return make_servers(NUM_SERVERS, hyper=None, optimizer=None)


class Cluster:
    """An embedding-worker, and servers that can be killed and restarted."""

    def __init__(self, objects: list[Any]) -> None:
        self._wire = Wire("ipc", Path(f"@{os.getpid()}-servers"))
        self.objects = objects
        self.servers = [self._wire.serve(one, role=parameter_server()) for one in objects]
        self.remotes = connect_parameter_servers(
            self._wire.transport,
            addresses=[server.address for server in reversed(self.servers)],  # in any order
            timeout_s=PATIENCE_S,
            on_restart=lambda number: self.worker.reconfigure_server(number),
        )
        self.worker: EmbeddingWorker = make_worker(list(self.remotes))

    def restart(self, number: int) -> None:
        address = self.servers[number].address
        self.servers[number].stop()
        new = self.objects[number] = unset_servers()[number]
        self.servers[number] = self._wire.serve(new, address, role=parameter_server())

    def configured(self) -> EmbeddingWorker:
        self.worker.configure(SETTINGS)
        self.worker.register_optimizer(SGD)
        return self.worker

    def close(self) -> None:
        self.worker.close()
        for remote in self.remotes:
            remote.close()
        self._wire.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(Cluster(unset_servers())) as made:
        yield made


def step(worker: EmbeddingWorker, number: int) -> None:
    result = worker.lookup_direct(features({"sum": [list(range(40))]}, number))
    worker.update(gradient(result, (1, number)))


def test_w17_w30_a_restarted_server_is_configured_again(cluster: Cluster, caplog: Log) -> None:
    worker = cluster.configured()
    step(worker, 1)
    before = worker.get_embedding_size()
    cluster.restart(1)
    with caplog.at_level(logging.ERROR):
        step(worker, 2)
    assert worker.ready_for_serving()
    assert worker.get_embedding_size() == before
    assert worker.stats()["server_restarts"] == 1
    (line,) = [record.message for record in caplog.records]
    assert "embedding-parameter-server 1 was restarted and THE ROWS IT HELD ARE LOST" in line


def test_a_restart_before_training_loses_nothing(cluster: Cluster, caplog: Log) -> None:
    assert cluster.worker.get_embedding_size()
    cluster.restart(1)
    with caplog.at_level(logging.INFO):
        cluster.worker.get_embedding_size()
    record = caplog.records[-1]
    assert record.levelname == "INFO"
    assert "no trainer has configured it here" in record.message
    assert not cluster.worker.ready_for_serving()


def test_w17_rows_begin_again_with_the_same_settings(cluster: Cluster) -> None:
    worker = cluster.configured()
    step(worker, 1)
    after_one = [value(cluster.objects, "sum", x).tolist() for x in range(40)]
    for number in range(NUM_SERVERS):
        cluster.restart(number)
    step(worker, 1)
    assert [value(cluster.objects, "sum", x).tolist() for x in range(40)] == after_one


def test_a_batch_between_lookup_and_update_is_missed_and_counted(cluster: Cluster) -> None:
    worker = cluster.configured()
    result = worker.lookup_direct(features({"sum": [list(range(40))]}, 1))
    lost = worker.get_embedding_size()[0]
    cluster.restart(0)
    assert worker.update(gradient(result, (1, 1))).num_missing == lost


def test_the_newest_settings_are_given(cluster: Cluster) -> None:
    worker = cluster.worker
    worker.configure(settings(seed=1))
    worker.configure(SETTINGS)
    worker.register_optimizer(SGD)
    worker.register_optimizer(ADAM)
    cluster.restart(0)
    step(worker, 1)
    with pytest.raises(ConfigError, match="admit_probability"):
        worker.configure(settings(admit_probability=2.0))
    cluster.restart(0)  # which does not have what was refused
    step(worker, 2)
    assert worker.ready_for_serving()


def test_a_server_that_restarts_while_all_are_told_is_told_too() -> None:
    received: list[HyperParameters] = []

    class Restarts(Faulty):
        """Loses its first settings, as if it had been killed after its answer."""

        def configure(self, given: HyperParameters) -> None:
            received.append(given)
            if len(received) == 1:
                worker.reconfigure_server(0)

        def register_optimizer(self, given: OptimizerSettings) -> None:
            pass

    server = Restarts(make_servers(hyper=None, optimizer=None)[0])
    worker = make_worker([server])
    worker.configure(SETTINGS)
    assert received == [SETTINGS, SETTINGS]


# --- updates that name their lookup ----------------------------------------------------------

IDS = list(range(40))


def rows_of(objects: list[Any], name: str = "sum") -> Any:
    return [value(objects, name, x).tolist() for x in IDS]


def updates_at(server: Any) -> list[Any]:
    """The requests of updates that a Faulty server was sent."""
    return [arguments[0] for name, arguments in server.calls if name == "update"]


@pytest.mark.parametrize("has_nan", [False, True])
def test_signs_are_sent_for_the_lookup_only(has_nan: bool) -> None:
    """With NaN in a sample's gradient some rows take no step: the others are named by place."""
    faulty = [Faulty(server) for server in make_servers(NUM_SERVERS)]
    plain = make_servers(NUM_SERVERS)
    with contextlib.closing(Cluster(faulty)) as cluster:
        for worker in (make_worker(plain), cluster.worker):
            result = worker.lookup_direct(features({"sum": [[x] for x in IDS]}, 1))
            ones = np.ones((len(IDS), 4), np.float32)
            if has_nan:
                ones[::3] = np.nan
            report = worker.update(gradient(result, (1, 1), {"sum": ones}))
            assert report.num_missing == 0
        for server in faulty:
            ((part,),) = [request.tables for request in updates_at(server)]
            assert len(part.signs) == 0
            assert part.hints is None
            assert (part.places is not None) is has_nan
        assert rows_of([one.server for one in faulty]) == rows_of(plain)


def test_signs_are_sent_again_where_the_lookup_is_not_kept() -> None:
    faulty = [Faulty(server) for server in make_servers(NUM_SERVERS)]
    plain = make_servers(NUM_SERVERS)
    faulty[0].server._kept = KeptLookups(most_signs=0)
    with contextlib.closing(Cluster(faulty)) as cluster:
        for worker in (make_worker(plain), cluster.worker):
            step(worker, 1)
        assert [len(updates_at(server)) for server in faulty] == [2, 1]
        named, whole = updates_at(faulty[0])
        assert named.ref is not None
        assert whole.ref is None
        assert len(whole.tables[0].signs) == len(whole.tables[0].gradients)
        assert rows_of([one.server for one in faulty]) == rows_of(plain)


@pytest.mark.parametrize("when", ["fail_before", "fail_after"])
def test_an_update_that_failed_at_one_server_is_applied_once(when: str) -> None:
    faulty = [Faulty(server) for server in make_servers(NUM_SERVERS)]
    plain = make_servers(NUM_SERVERS)
    step(make_worker(plain), 1)
    with contextlib.closing(Cluster(faulty)) as cluster:
        result = cluster.worker.lookup_direct(features({"sum": [IDS]}, 1))
        getattr(faulty[1], when).append("update")
        with pytest.raises(ServiceUnavailable):
            cluster.worker.update(gradient(result, (1, 1)))
        report = cluster.worker.update(gradient(result, (1, 1)))
        assert report.repeated is (when == "fail_after")
        assert rows_of([one.server for one in faulty]) == rows_of(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: None, r"\[\(0, \(3, 4\), None\)\], got \[\]"),
        (lambda part: TableRows(1, part.rows, None), r"got \[\(1, \(3, 4\), None\)\]"),
        (lambda part: TableRows(0, part.rows[:, :2], None), r"got \[\(0, \(3, 2\), "),
        (lambda part: TableRows(0, part.rows[:2], None), r"got \[\(0, \(2, 4\), "),
        (lambda part: TableRows(0, part.rows, HINTS), r"\(3, 4\), \(2,\)\)\]"),
    ],
)
def test_rows_that_no_server_was_asked_for_are_refused(change: Any, message: str) -> None:
    class Wrong(Faulty):
        def lookup(self, request: LookupRequest) -> LookupReply:
            parts = [change(part) for part in self.server.lookup(request).tables]
            return LookupReply(tuple(part for part in parts if part is not None))

    with (
        contextlib.closing(Cluster([Wrong(make_servers()[0])])) as cluster,
        pytest.raises(ProtocolError, match=message) as raised,
    ):
        cluster.worker.lookup_direct(features({"sum": [[1, 2, 3]]}))
    assert (raised.value.replica, raised.value.method) == (0, "lookup")


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda two, three: [], "expected at least one"),
        (lambda two, three: two[:1], "0 is one of 2, expected one of 1"),
        (lambda two, three: [two[0], two[0]], r"0 of 2 was given twice; missing: \[1\]"),
        (lambda two, three: [*two, three[2]], "is one of 2, expected one of 3"),
    ],
)
def test_the_set_of_servers_must_be_whole(pick: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_worker(pick(make_servers(2), make_servers(3)))


def test_servers_may_come_in_any_order() -> None:
    servers = make_servers(3)
    with contextlib.closing(make_worker(servers[::-1])) as worker:
        worker.lookup_direct(features({"sum": [list(range(50))]}))
        sizes = [server.get_embedding_size() for server in servers]
        assert worker.get_embedding_size() == sizes
        assert all(sizes)


def test_w07_servers_that_number_groups_otherwise_are_refused() -> None:
    other = copy.deepcopy(CONFIG)
    other["slots_config"] = {"new": {"dim": 4}} | other["slots_config"]
    with pytest.raises(ConfigError, match="server 0 of 1 has another embedding config"):
        make_worker(make_servers(1, EmbeddingSchema.load(other)))


def test_w49_no_lock_is_held_while_a_server_is_asked() -> None:
    server = Slow("lookup", only_batch=0)
    worker = make_worker([server])
    first, second = (features({"sum": [[1]]}, number) for number in range(2))
    slow = Background(lambda: worker.lookup_direct(first))
    assert server.started.wait(PATIENCE_S)
    # In a thread, so that a lock would be a failure and no hang.
    Background(lambda: worker.update(gradient(worker.lookup_direct(second), (0, 1)))).result()
    assert worker.stats()["updates"] == 1
    server.may_end.set()
    slow.result()


def test_w15_settings_reach_every_server_before_the_call_returns() -> None:
    servers = [Faulty(s) for s in make_servers(3, hyper=None, optimizer=None)]
    with contextlib.closing(make_worker(servers)) as worker:
        servers[1].fail_before.append("configure")
        with pytest.raises(ServiceUnavailable):
            worker.configure(SETTINGS)
        worker.configure(SETTINGS)
        worker.register_optimizer(ADAM)
        assert all(server.server.ready_for_serving() for server in servers)


class Switching:
    """A server for inference of given versions: the last one, and those before if asked for."""

    def __init__(self, replica: int, *versions: str) -> None:
        self.replica_index, self.replica_size = replica, NUM_SERVERS
        self.schema_fingerprint = unset_servers()[0].schema_fingerprint
        self.versions, self.asked = list(versions), list[str]()

    def lookup(self, request: LookupRequest) -> LookupReply:
        self.asked.append(request.version)
        version = request.version if request.version in self.versions else self.versions[-1]
        return LookupReply((), version)


def ask_both(servers: list[Any]) -> dict[int, LookupReply]:
    pool = ServerSet(servers, EmbeddingSchema.load(CONFIG))
    request = LookupRequest(0, False, ())
    try:
        return pool.lookup(dict.fromkeys(range(NUM_SERVERS), request))
    finally:
        pool.close()


def test_a_lookup_has_rows_of_one_version() -> None:
    ahead, behind = Switching(0, "1", "2"), Switching(1, "1")
    replies = ask_both([ahead, behind])
    assert {reply.version for reply in replies.values()} == {"1"}
    assert ahead.asked == ["", "1"]
    assert behind.asked == [""]


def test_servers_that_have_no_version_in_common_are_asked_again(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(server_pool, "_SETTLE_S", 0.3)
    with pytest.raises(ServiceBusy, match=r"of several checkpoints \(0: 2, 1: 1\)"):
        ask_both([Switching(0, "2"), Switching(1, "1")])
    late = Switching(1, "1")
    ahead = Switching(0, "2")

    def load(request: LookupRequest) -> LookupReply:
        if len(late.asked) == 3:
            late.versions.append("2")
        return Switching.lookup(late, request)

    monkeypatch.setattr(late, "lookup", load)
    monkeypatch.setattr(server_pool, "_SETTLE_S", PATIENCE_S)
    replies = ask_both([ahead, late])
    assert {reply.version for reply in replies.values()} == {"2"}


def test_the_common_version_is_remembered_for_a_while() -> None:
    ahead, behind = Switching(0, "1", "2"), Switching(1, "1")
    both: list[Any] = [ahead, behind]
    pool = ServerSet(both, EmbeddingSchema.load(CONFIG))
    requests = dict.fromkeys(range(NUM_SERVERS), LookupRequest(0, False, ()))
    pool.lookup(requests)
    pool._settled = "1", math.inf
    pool.lookup(requests)
    assert ahead.asked == ["", "1", "1"]
    pool._settled = "1", 0.0
    behind.versions.append("2")
    replies = pool.lookup(requests)
    assert {reply.version for reply in replies.values()} == {"2"}
    pool.close()


def test_only_the_version_that_is_wanted_is_taken() -> None:
    ahead, behind = Switching(0, "1", "2"), Switching(1, "1")
    both: list[Any] = [ahead, behind]
    requests = dict.fromkeys(range(NUM_SERVERS), LookupRequest(0, False, ()))
    schema = EmbeddingSchema.load(CONFIG)
    for wanted in ("1", "2"):
        pool = ServerSet(both, schema, rows_version=wanted)
        if wanted == "1":
            replies = pool.lookup(requests)
            assert {reply.version for reply in replies.values()} == {"1"}
        else:
            with pytest.raises(
                ServiceBusy, match=r"1: expected rows of checkpoint 2, got .* 1"
            ):
                pool.lookup(requests)
        pool.close()
    assert ahead.asked == behind.asked == ["1", "2"]


def test_rows_of_a_log_have_no_version_to_agree_on() -> None:
    servers: list[Any] = [Switching(0, "1"), Switching(1, "")]
    replies = ask_both(servers)
    assert [reply.version for reply in replies.values()] == ["1", ""]


class Health:
    """Questions for health may take long, but those to servers that are gone."""

    def __init__(self, monkeypatch: Monkey) -> None:
        self.gone: set[str] = set()  # addresses
        self.asked: list[float] = []  # of them, and within how many seconds
        hello = Client.hello

        def ask(client: Client, timeout_s: float | None = None) -> Hello:
            if client.address not in self.gone:
                return hello(client, PATIENCE_S)
            assert timeout_s is not None
            self.asked.append(timeout_s)
            return hello(client, timeout_s)

        monkeypatch.setattr(Client, "hello", ask)


@pytest.fixture
def health(monkeypatch: Monkey) -> Health:
    return Health(monkeypatch)


def test_where_reads_fail_over_a_dead_server_is_not_waited_for(
    cluster: Cluster, health: Health
) -> None:
    worker = EmbeddingWorker(
        EmbeddingSchema.load(CONFIG),
        EmbeddingWorkerConfig(),
        list(cluster.remotes),
        fails_over=True,
    )
    asked = features({"sum": [list(range(40))]}, requires_grad=False)
    expected = worker.lookup_direct(asked)
    assert worker.ready_for_serving() is cluster.worker.ready_for_serving()
    address = cluster.servers[1].address
    health.gone.add(address)
    cluster.servers[1].stop(0.0)
    reads: tuple[Callable[[], object], ...] = (
        lambda: worker.lookup_direct(asked),
        lambda: worker.read_rows(
            IDsRequest("sum", np.arange(40, dtype=np.uint64), False, False)
        ),
        worker.ready_for_serving,
    )
    for read in reads:
        with pytest.raises(NotReady, match=re.escape(address)) as caught:
            read()
        found = caught.value
        assert (found.role, found.replica) == ("embedding-parameter-server", 1)
    health.gone.clear()
    cluster.restart(1)
    until(lambda: is_answered(worker))
    assert worker._servers._attempts_s[1] == server_pool.ATTEMPT_S
    assert repr(worker.lookup_direct(asked)) == repr(expected)
    worker.close()


def test_where_reads_fail_over_a_silent_server_is_waited_for_once(
    tmp_path: Path, health: Health
) -> None:
    wire = Wire("tcp", tmp_path)
    server = wire.serve(make_servers(1)[0], role=parameter_server())
    proxy = TcpProxy(server.address)
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        stack.callback(proxy.close)
        remotes = connect_parameter_servers(
            wire.transport, addresses=[proxy.address], timeout_s=PATIENCE_S
        )
        stack.callback(remotes[0].close)
        schema, config = EmbeddingSchema.load(CONFIG), EmbeddingWorkerConfig()
        worker = EmbeddingWorker(schema, config, list(remotes), fails_over=True)
        stack.callback(worker.close)
        asked = features({"sum": [[1]]}, requires_grad=False)
        expected = worker.lookup_direct(asked)
        health.gone.add(proxy.address)
        proxy.hold()
        for _ in range(20):
            with pytest.raises(NotReady, match=re.escape(proxy.address)):
                worker.lookup_direct(asked)
        assert health.asked == [server_pool.ATTEMPT_S]
        assert worker._servers._attempts_s == [server_pool.ATTEMPT_S]
        health.gone.clear()
        proxy.go()
        until(lambda: is_answered(worker))
        assert repr(worker.lookup_direct(asked)) == repr(expected)
        assert worker._servers._attempts_s == [server_pool.ATTEMPT_S]


def test_where_reads_fail_over_a_machine_that_is_slow_gets_more_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = EmbeddingWorker(
        EmbeddingSchema.load(CONFIG),
        EmbeddingWorkerConfig(),
        list(cluster.remotes),
        fails_over=True,
    )

    def fail(self: PendingCall, attempt_s: float) -> None:
        raise ServiceTimeout("no answer yet", role="embedding-parameter-server", replica=0)

    with contextlib.closing(worker), monkeypatch.context() as patch:
        patch.setattr(PendingCall, "result_while_alive", fail)
        for times in (1, 2, 4, 8):  # it answers for its health, and not the read
            until(lambda: has_failed_anew(worker))
            assert worker._servers._attempts_s[0] == server_pool.ATTEMPT_S * times
        patch.undo()
        until(lambda: is_answered(worker))
        assert worker._servers._attempts_s[0] == server_pool.ATTEMPT_S


def has_failed_anew(worker: EmbeddingWorker) -> bool:
    """Whether a read asked the server, and did not remember that it had seemed dead."""
    before = worker._servers._silent.get(0)
    with pytest.raises(NotReady):
        worker.ready_for_serving()
    return worker._servers._silent.get(0) is not before


def is_answered(worker: EmbeddingWorker) -> bool:
    with contextlib.suppress(NotReady):
        worker.ready_for_serving()
        return True
    return False


@pytest.mark.usefixtures("health")
def test_where_reads_fail_over_a_slow_server_is_waited_for() -> None:
    server = Slow("lookup")
    with contextlib.closing(Cluster([server])) as cluster:
        worker = EmbeddingWorker(
            EmbeddingSchema.load(CONFIG),
            EmbeddingWorkerConfig(),
            list(cluster.remotes),
            fails_over=True,
        )
        asked = features({"sum": [[1]]}, requires_grad=False)
        slow = Background(lambda: worker.lookup_direct(asked))
        assert server.started.wait(PATIENCE_S)
        client = cluster.remotes[0].client
        before = client.stats()["calls"]
        until(lambda: client.stats()["calls"] > before + 2)  # it is asked for its health
        server.may_end.set()
        slow.result()
        worker.close()
