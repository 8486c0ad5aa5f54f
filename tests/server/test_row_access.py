"""Rows of one table by sign, at a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._core.base.hashing import owners, route
from persia._rpc.messages import (
    LoadRequest,
    LoadStatus,
    LookupRequest,
    RowsRequest,
    ScanRequest,
    TableSigns,
)
from persia._server.service import ParameterServer
from persia.errors import CheckpointError, NotConfigured, ServiceBusy, StoreError
from tests.support.fixtures import Monkey
from tests.support.saving import (
    dump,
    held_load,
    load,
    load_changes,
    rows_of,
    train,
    writing_changes,
)
from tests.support.services import ADAGRAD, SCHEMA, make_servers, make_worker, sign

SLOT = SCHEMA.slots["mean"]


def signs(*ids: int) -> Any:
    return np.array([sign("mean", x) for x in ids], np.uint64)


def read(
    server: ParameterServer, *ids: int, states: bool = False, initial: bool = False
) -> Any:
    return server.read_rows(RowsRequest(SLOT.table, signs(*ids), states, initial))


def train_ids(server: ParameterServer, *ids: int) -> Any:
    request = LookupRequest(0, True, (TableSigns(SLOT.table, signs(*ids)),))
    return server.lookup(request).tables[0].rows


@pytest.fixture
def server() -> ParameterServer:
    return make_servers(1, optimizer=ADAGRAD)[0]


def test_initial_values_are_those_that_training_inserts(server: ParameterServer) -> None:
    train_ids(server, 1)
    found = read(server, 1, 2, 2, 3, initial=True)
    assert found.found.tolist() == [1, 0, 0, 0]
    assert server.get_embedding_size() == 1  # nothing was inserted
    assert train_ids(server, 1, 2, 3)[[0, 1, 1, 2]].tobytes() == found.values.tobytes()
    assert not read(server, 9).values.any()


def test_a_read_has_the_state_if_it_is_asked_for(server: ParameterServer) -> None:
    train_ids(server, 1)
    assert read(server, 1).states is None
    whole = read(server, 1, 2, states=True)
    assert whole.states[0].view(np.float32).tolist() == [np.float32(1e-8)] * SLOT.dim
    assert not whole.states[1].any()


def test_without_settings_there_are_no_rows() -> None:
    (server,) = make_servers(1, hyper=None, optimizer=None)
    assert read(server, 1).found.tolist() == [0]
    assert server.count_rows(SLOT.table, SLOT.prefix) == 0
    piece = server.scan_rows(ScanRequest(SLOT.table, SLOT.prefix, 0, 5, False))
    assert (len(piece.signs), piece.values.shape, piece.cursor) == (0, (0, SLOT.dim), None)
    calls: list[Callable[[], Any]] = [
        lambda: read(server, 1, states=True),
        lambda: read(server, 1, initial=True),
        lambda: server.delete_rows(TableSigns(SLOT.table, signs(1))),
    ]
    for call in calls:
        with pytest.raises(NotConfigured):
            call()


def test_requests_of_other_tables_and_servers_are_refused() -> None:
    server, _ = make_servers(2)
    mine = [x for x in range(100) if not refused(server, x)]
    assert 20 < len(mine) < 80
    for table in (-1, 99):
        with pytest.raises(StoreError, match=f"expected a table in .* got {table}"):
            server.count_rows(table, SLOT.prefix)
        with pytest.raises(StoreError, match=f"expected a table in .* got {table}"):
            server.scan_rows(ScanRequest(table, SLOT.prefix, 0, 5, False))
    for cursor, count in ((-1, 5), (0, 0), (0, 1 << 17), (1 << 64, 5)):
        with pytest.raises(StoreError, match=r"scan_rows: expected 1\.\.65536 rows"):
            server.scan_rows(ScanRequest(SLOT.table, SLOT.prefix, cursor, count, False))


def refused(server: ParameterServer, x: int) -> bool:
    """Whether the sign is of another server, so that reading and dropping it is refused."""
    if server.replica_index == route(signs(x), owners(2), 2)[1].tolist().index(1) - 1:
        read(server, x)
        return False
    for call in (
        lambda: read(server, x),
        lambda: server.delete_rows(TableSigns(SLOT.table, signs(x))),
    ):
        with pytest.raises(StoreError, match=r"_rows: sign .* is not of server 0 of 2"):
            call()
    return True


def test_what_replaces_all_rows_makes_another_generation(tmp_path: Path) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    (server,), worker = servers, make_worker(servers)
    train(worker, 0, 1)
    scan = ScanRequest(SLOT.table, SLOT.prefix, 0, 5, False)
    generations = [server.scan_rows(scan).generation for _ in range(2)]
    assert generations[0] == generations[1]
    dump(worker, tmp_path)
    load(worker, tmp_path)
    generations.append(server.scan_rows(scan).generation)
    server.clear_embeddings()
    generations.append(server.scan_rows(scan).generation)
    assert len(set(generations)) == 3


def test_rows_of_a_load_are_of_its_generation_from_the_first(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    (server,), worker = servers, make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path)
    scan = ScanRequest(SLOT.table, SLOT.prefix, 0, 5, False)
    before, seen = server.scan_rows(scan).generation, []
    run = server._loads.load

    def load_and_scan(request: LoadRequest) -> LoadStatus:
        status = run(request)
        if request.step == "finish":
            seen.append(server.scan_rows(scan).generation)
        return status

    monkeypatch.setattr(server._loads, "load", load_and_scan)
    load(worker, tmp_path)
    assert seen == [server.scan_rows(scan).generation]
    assert seen != [before]


def test_while_a_load_replaces_rows_they_are_neither_read_nor_dropped(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path)
    with held_load(worker, tmp_path, monkeypatch):
        (server,) = servers
        calls: list[Callable[[], Any]] = [
            lambda: read(server, 1),
            lambda: server.count_rows(SLOT.table, SLOT.prefix),
            lambda: server.scan_rows(ScanRequest(SLOT.table, SLOT.prefix, 0, 5, False)),
        ]
        for call in calls:
            with pytest.raises(ServiceBusy):
                call()
        with pytest.raises(CheckpointError):
            server.delete_rows(TableSigns(SLOT.table, signs(1)))


def test_rows_that_are_dropped_are_gone_from_the_change_log(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path, 2)
    worker = make_worker(servers)
    train(worker, 0, 1)
    for server in servers:
        server.flush_changes()
    assert worker.delete_rows("sum", np.arange(1, 6, dtype=np.uint64)) == 5
    for server in servers:
        server.flush_changes()
    _, fresh = load_changes(tmp_path, servers)
    gone = {sign("sum", x) for x in range(1, 6)}
    assert not gone & rows_of(fresh).keys()
    assert len(rows_of(fresh)) > 100
    for server in servers:
        server.close()
