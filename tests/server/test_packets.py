"""Servers that begin empty in a running job; processes that are killed: tests/faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persia._files import catalog
from persia._files.storage import LocalStorage
from persia._server.service import ParameterServer
from persia.errors import CheckpointError, ConfigError
from tests.support.fixtures import Monkey
from tests.support.saving import files_in, rows_of, train
from tests.support.services import ADAGRAD, make_servers, make_worker


@pytest.fixture(autouse=True)
def run(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("PERSIA_RUN_ID", "tuesday")


def make(folder: Path, count: int = 1, **options: Any) -> list[ParameterServer]:
    return make_servers(
        count,
        optimizer=options.pop("optimizer", ADAGRAD),
        enable_incremental_update=True,
        incremental_buffer_size=1 << 40,
        incremental_dir=str(folder),
        recovery=True,
        **options,
    )


def empty(folder: Path) -> ParameterServer:
    """A server as it begins: a trainer has configured nothing."""
    return make(folder, hyper=None, optimizer=None)[0]


def kill(server: ParameterServer) -> None:
    """What others see of a server that was killed: it writes no more, and its lock is free."""
    assert server._incremental is not None
    server._incremental._state = None
    server._incremental._release()


def test_an_empty_server_begins_with_its_newest_packets(tmp_path: Path) -> None:
    servers = make(tmp_path)
    worker = make_worker(servers)
    for part in range(3):  # the first has all rows, the others what has changed
        train(worker, part, 1)
        servers[0].flush_changes()
    expected = rows_of(servers)
    train(worker, 3, 1)  # is in no packet
    assert rows_of(servers) != expected
    kill(servers[0])
    server = empty(tmp_path)
    server.recover()
    assert rows_of([server]) == expected
    assert server.stats()["recovered_rows"] == len(expected)
    assert server.ready_for_serving()
    # It goes on: what it writes next can be recovered as well, and has the packets before.
    old = servers[0]._incremental
    assert old is not None
    train(make_worker([server]), 4, 1)
    server.flush_changes()
    expected = rows_of([server])
    about = catalog.load(LocalStorage(tmp_path / "s0")).extras["log"]
    assert about["reached"][old._history] == 3
    kill(server)
    server = empty(tmp_path)
    server.recover()
    assert rows_of([server]) == expected


def test_a_server_of_another_run_or_with_rows_takes_none(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    server = empty(tmp_path)
    server.recover()  # there is nothing yet
    assert server.get_embedding_size() == 0
    servers = make(tmp_path)
    train(make_worker(servers), 0, 1)
    servers[0].flush_changes()
    kill(servers[0])
    monkeypatch.setenv("PERSIA_RUN_ID", "wednesday")
    server = empty(tmp_path)
    server.recover()
    assert server.get_embedding_size() == 0
    monkeypatch.setenv("PERSIA_RUN_ID", "")
    with pytest.raises(ConfigError, match=r"recovery: expected PERSIA_RUN_ID to name the run"):
        empty(tmp_path).recover()
    monkeypatch.setenv("PERSIA_RUN_ID", "tuesday")
    has_rows = empty(tmp_path)
    has_rows._recovery.num_rows = 1  # of a state file
    has_rows.recover()
    assert has_rows.get_embedding_size() == 0
    cut_short = empty(tmp_path)
    cut_short._loads.recover({"url": "s3://checkpoints", "features": None})
    cut_short.recover()  # other servers miss theirs as well
    assert cut_short.get_embedding_size() == 0


def test_packets_that_cannot_be_read_leave_no_server_without_rows(tmp_path: Path) -> None:
    servers = make(tmp_path)
    train(make_worker(servers), 0, 1)
    servers[0].flush_changes()
    kill(servers[0])
    expected = rows_of(servers)
    part = next(path for path in files_in(tmp_path / "s0") if "rows" in path.parts)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    server = empty(tmp_path)
    with pytest.raises(CheckpointError):
        server.recover()
    part.write_bytes(whole)
    # As the next process does, if its state file says that this one was cut short.
    server._loads.recover({"url": f"{tmp_path}/s0", "features": None})
    server._recovery.num_rows = 1
    server.recover()
    assert rows_of([server]) == expected
    assert server._loads.problem is None
