"""Parameter servers in other processes: restarts, and answers that are none."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persia._cluster.connect import connect_parameter_servers
from persia._rpc.messages import (
    HyperParameters,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    TableRows,
)
from persia._rpc.methods import parameter_server
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema
from persia.errors import ConfigError, ProtocolError, ServiceUnavailable
from tests.rpc.support import PATIENCE_S, Wire
from tests.support.fixtures import Log
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
from tests.worker.cluster import Faulty, Slow

NUM_SERVERS = 2


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: None, r"\[\(0, \(3, 4\), \(3,\)\)\], got \[\]"),
        (lambda part: TableRows(1, part.rows, part.hints), r"got \[\(1, \(3, 4\), \(3,\)\)\]"),
        (lambda part: TableRows(0, part.rows[:, :2], part.hints), r"got \[\(0, \(3, 2\), "),
        (lambda part: TableRows(0, part.rows[:2], part.hints), r"got \[\(0, \(2, 4\), "),
        (lambda part: TableRows(0, part.rows, part.hints[:2]), r"\(3, 4\), \(2,\)\)\]"),
        (lambda part: TableRows(0, part.rows, None), r"\(3, 4\), None\)\]"),
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
    assert server.started.wait(10)
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
