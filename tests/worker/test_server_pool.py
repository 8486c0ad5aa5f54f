"""Parameter servers in other processes: restarts, and answers that are none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from persia._cluster.connect import connect_parameter_servers
from persia._rpc.memory_transport import MemoryTransport
from persia._rpc.messages import (
    HyperParameters,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    TableRows,
)
from persia._rpc.methods import parameter_server
from persia._rpc.server import Server, serve
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.errors import ConfigError, ProtocolError
from tests.support.services import (
    ADAM,
    SETTINGS,
    SGD,
    features,
    gradient,
    make_servers,
    make_worker,
    settings,
    value,
)

NUM_SERVERS = 2


class Cluster:
    """An embedding-worker, and servers that can be killed and started anew."""

    def __init__(self) -> None:
        self.transport = MemoryTransport()
        self.objects: list[ParameterServer] = make_servers(
            NUM_SERVERS, hyper=None, optimizer=None
        )
        self.servers = [self._serve(number) for number in range(NUM_SERVERS)]
        self.remotes = connect_parameter_servers(
            self.transport,
            addresses=[_address(number) for number in range(NUM_SERVERS)],
            timeout_s=20.0,
            on_restart=lambda number: self.worker.server_restarted(number),
        )
        self.worker: EmbeddingWorker = make_worker(list(self.remotes))

    def _serve(self, number: int) -> Server:
        return serve(self.transport, _address(number), parameter_server(), self.objects[number])

    def restart(self, number: int) -> None:
        self.servers[number].stop()
        self.objects[number] = make_servers(NUM_SERVERS, hyper=None, optimizer=None)[number]
        self.servers[number] = self._serve(number)

    def close(self) -> None:
        self.worker.close()
        for remote in self.remotes:
            remote.close()
        for server in self.servers:
            server.stop()
        self.transport.close()


def _address(number: int) -> str:
    return f"ipc:///server/{number}"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(Cluster()) as made:
        yield made


def step(worker: EmbeddingWorker, number: int) -> None:
    result = worker.lookup_direct(features({"sum": [list(range(40))]}, number))
    worker.update(gradient(result, (1, number)))


def test_w17_w30_a_restarted_server_is_configured_again_and_at_once_usable(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cluster.worker
    worker.configure(SETTINGS)
    worker.register_optimizer(SGD)
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


def test_a_server_restarted_before_training_has_lost_nothing(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert cluster.worker.get_embedding_size()
    cluster.restart(1)
    with caplog.at_level(logging.INFO):
        cluster.worker.get_embedding_size()
    record = caplog.records[-1]
    assert record.levelname == "INFO"
    assert "no row of a training is lost" in record.message


def test_w17_rows_begin_anew_with_the_same_settings(cluster: Cluster) -> None:
    worker = cluster.worker
    worker.configure(SETTINGS)
    worker.register_optimizer(SGD)
    step(worker, 1)
    after_one = [value(cluster.objects, "sum", x).tolist() for x in range(40)]
    for number in range(NUM_SERVERS):
        cluster.restart(number)
    step(worker, 1)
    assert [value(cluster.objects, "sum", x).tolist() for x in range(40)] == after_one


def test_a_batch_between_lookup_and_update_is_missed_and_counted(cluster: Cluster) -> None:
    worker = cluster.worker
    worker.configure(SETTINGS)
    worker.register_optimizer(SGD)
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


def test_a_server_restarted_before_any_settings_waits_for_them(cluster: Cluster) -> None:
    cluster.worker.get_embedding_size()
    cluster.restart(0)
    assert not cluster.worker.ready_for_serving()


def test_a_server_that_restarts_while_all_are_told_is_told_too() -> None:
    class Restarts:
        """Loses what it was told first, as if it had been killed after its answer."""

        def __init__(self, server: ParameterServer) -> None:
            self.server = server
            self.told: list[HyperParameters] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.server, name)

        def configure(self, given: HyperParameters) -> None:
            self.told.append(given)
            if len(self.told) == 1:
                worker.server_restarted(0)

        def register_optimizer(self, given: OptimizerSettings) -> None:
            pass

    server = Restarts(make_servers(hyper=None, optimizer=None)[0])
    worker = make_worker([server])
    worker.configure(SETTINGS)
    assert server.told == [SETTINGS, SETTINGS]


Change = Callable[[TableRows], TableRows | None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: None, r"expected tables \[0\], got \[\]"),
        (lambda part: TableRows(1, part.rows, part.hints), r"expected tables \[0\], got \[1\]"),
        (
            lambda part: TableRows(part.table, part.rows[:, :2], part.hints),
            r"expected rows \[3, 4\] of table 0, got \[3, 2\]",
        ),
        (
            lambda part: TableRows(part.table, part.rows[:2], part.hints),
            r"expected rows \[3, 4\] of table 0, got \[2, 4\]",
        ),
        (
            lambda part: TableRows(part.table, part.rows, part.hints[:2]),
            r"expected hints \[3\] of table 0, got \[2\]",
        ),
        (
            lambda part: TableRows(part.table, part.rows, None),
            r"expected hints \[3\] of table 0, got none",
        ),
    ],
)
def test_what_a_server_answers_is_checked(change: Any, message: str) -> None:
    class Wrong:
        def __init__(self, server: ParameterServer) -> None:
            self.server = server

        def __getattr__(self, name: str) -> Any:
            return getattr(self.server, name)

        def lookup(self, request: LookupRequest) -> LookupReply:
            parts = [change(part) for part in self.server.lookup(request).tables]
            return LookupReply(tuple(part for part in parts if part is not None))

    worker = make_worker([Wrong(make_servers()[0])])
    with pytest.raises(ProtocolError, match=message) as raised:
        worker.lookup_direct(features({"sum": [[1, 2, 3]]}))
    assert (raised.value.replica, raised.value.method) == (0, "lookup")


def test_rows_may_come_without_hints_in_evaluation() -> None:
    worker = make_worker(make_servers(2))
    result = worker.lookup_direct(features({"sum": [[1, 2, 3]]}, requires_grad=False))
    assert np.all(result.outputs[0].values == 0.0)  # type: ignore[union-attr]
