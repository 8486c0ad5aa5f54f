"""Changed rows that servers write: packets, their failures, and other writers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from persia._files import catalog
from persia._files.catalog import below
from persia._files.part_writer import PartWriter
from persia._files.parts import read_part, take
from persia._files.storage import LocalStorage
from persia._rpc.messages import OptimizerSettings
from persia._server import incremental
from persia._server.incremental import IncrementalWriter
from persia._training.checkpoint import CheckpointReader
from persia.errors import CheckpointError
from tests.support.fixtures import Log, Monkey
from tests.support.saving import (
    add_part,
    dump,
    files_in,
    held_load,
    load_changes,
    rows_of,
    train,
    writing_changes,
)
from tests.support.services import ADAGRAD, make_servers, make_worker
from tests.support.waiting import until


def test_changes_are_written_as_training_goes_on(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path, 2, buffer_size=200)
    worker = make_worker(servers)
    kinds = []
    for number in range(6):
        train(worker, number, 1)
        for server in servers:
            server.flush_changes()
        kinds.append(catalog.load(LocalStorage(tmp_path / "s0")).kind)
    for server in servers:
        server.close()
    assert kinds[:2] == ["full", "delta"]
    assert "full" in kinds[2:]  # once the deltas are as large as the first was
    # What is left is the last full one and what leads to the one before it.
    assert len(catalog.ids(LocalStorage(tmp_path / "s0"))) < 6
    loader, fresh = load_changes(tmp_path, servers)
    for manifest in catalog.ids(LocalStorage(tmp_path / "s1")):
        (tmp_path / "s1" / f"{manifest}.json").unlink()
    with pytest.raises(CheckpointError, match="s1 is missing"):
        loader.verify("", str(tmp_path), None)
    assert rows_of(fresh) == rows_of(servers)


def test_packets_can_be_read_whatever_became_of_the_one_before(tmp_path: Path) -> None:
    (server,) = servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    server.flush_changes()
    # Another learning rate is another schema, so no delta.
    server.register_optimizer(OptimizerSettings(ADAGRAD.name, {**ADAGRAD.options, "lr": 1.0}))
    train(worker, 1, 1)
    server.flush_changes()
    assert len(catalog.chain(LocalStorage(tmp_path / "s0"))) == 1
    # What a packet that failed had is written in the end, though nothing comes after it.
    train(worker, 2, 1)
    (tmp_path / "s0").rename(tmp_path / "kept")
    (tmp_path / "s0").write_text("not a folder")
    with pytest.raises(CheckpointError):
        server.flush_changes()
    (tmp_path / "s0").unlink()
    (tmp_path / "kept").rename(tmp_path / "s0")
    server.close()
    load_changes(tmp_path, servers)


def test_copies_have_room_before_a_packet(tmp_path: Path, monkeypatch: Monkey) -> None:
    rooms: list[int] = []
    (server,) = servers = writing_changes(tmp_path)
    write = IncrementalWriter._write

    def note(*arguments: Any) -> None:
        rooms.append(arguments[-1].side_bytes)
        write(*arguments)

    monkeypatch.setattr(IncrementalWriter, "_write", note)
    for number in range(2):  # all rows, and changes
        with monkeypatch.context() as patch:
            patch.setattr(incremental, "room_for_copies", lambda cut: 1 << 40)
            train(make_worker(servers), number, 1)
            server.flush_changes()
    assert rooms == [1 << 40] * 2
    with monkeypatch.context() as patch:  # no open cut is left, which would stop training
        patch.setattr(incremental, "room_for_copies", Mock(side_effect=MemoryError))
        train(make_worker(servers), 2, 1)
        with pytest.raises(MemoryError):
            server.flush_changes()
    server.close()
    load_changes(tmp_path, servers)


def test_packets_come_by_themselves(tmp_path: Path) -> None:
    (server,) = servers = writing_changes(tmp_path, buffer_size=100)
    worker = make_worker(servers)
    for number in range(3):
        train(worker, number, 1)
        until(lambda: len(catalog.ids(LocalStorage(tmp_path / "s0"))) > number)  # noqa: B023
    server.close()
    load_changes(tmp_path, servers)


def test_packets_of_two_jobs_do_not_mix(tmp_path: Path, monkeypatch: Monkey) -> None:
    (first,), (second,) = writing_changes(tmp_path), writing_changes(tmp_path)
    for server in (first, second):
        train(make_worker([server]), 0, 1)
    assert first._incremental is not None
    first._incremental.flush()  # as it does by itself
    with pytest.raises(CheckpointError, match="is writing here"):
        second.flush_changes()
    first.flush_changes()  # the end of its job, though it was not closed
    assert not list(tmp_path.rglob("*.lock"))
    second.flush_changes()
    # One that fails leaves no files; its rows come with the next.
    before = files_in(tmp_path)
    train(make_worker([second]), 1, 1)
    full = Mock(side_effect=CheckpointError("No space left on device"))
    monkeypatch.setattr(catalog, "publish", full)
    with pytest.raises(CheckpointError, match="No space"):
        second.flush_changes()
    assert files_in(tmp_path) == before
    monkeypatch.undo()
    second.close()
    assert not list(tmp_path.rglob("*.lock"))
    load_changes(tmp_path, [second])


def test_the_end_waits_for_a_packet(tmp_path: Path, monkeypatch: Monkey, caplog: Log) -> None:
    is_there, may_go = threading.Event(), threading.Event()

    def stands(*_: Any) -> Any:
        is_there.set()
        assert may_go.wait(60)
        raise CheckpointError("at last")

    monkeypatch.setattr(incremental, "LAST_PACKET_S", 0.01)
    monkeypatch.setattr(incremental, "FLUSH_S", 0.01)
    monkeypatch.setattr(PartWriter, "finish", stands)
    (server,) = writing_changes(tmp_path)
    train(make_worker([server]), 0, 1)
    assert is_there.wait(60)
    server.close()
    assert "this server ends without it" in caplog.text
    may_go.set()
    until(lambda: "at last" in caplog.text)


def test_rows_of_another_server_in_a_packet_are_found(tmp_path: Path) -> None:
    """Else a row would be in the packets of two servers, and which one counts would be luck."""
    servers = writing_changes(tmp_path, 2)
    train(make_worker(servers), 0, 1)
    for server in servers:
        server.flush_changes()
        server.close()
    there = LocalStorage(tmp_path / "s0")
    stranger = take(read_part(there, catalog.load(there).parts[0]), np.arange(1))
    add_part(tmp_path / "s1", "twice", lambda _: stranger)
    fresh = make_servers(1, optimizer=ADAGRAD)
    other = make_worker(fresh)
    train(other, 1, 1)
    before = rows_of(fresh)
    with pytest.raises(CheckpointError, match=r"expected those of server 1 of 2"):
        CheckpointReader(other).verify("", str(tmp_path), None)
    assert rows_of(fresh) == before


def test_no_packet_is_written_in_a_load(tmp_path: Path, monkeypatch: Monkey) -> None:
    (server,) = writing_changes(tmp_path / "changes")
    worker = make_worker([server])
    train(worker, 0, 1)
    dump(worker, tmp_path / "full")
    server.flush_changes()
    train(worker, 1, 1)
    with (
        held_load(worker, tmp_path / "full", monkeypatch),
        pytest.raises(CheckpointError, match="a load is replacing"),
    ):
        server.flush_changes()
    server.close()
    storage = LocalStorage(below(str(tmp_path / "changes"), "s0"))
    assert catalog.load(storage).kind == "full"  # the changes before the load mean nothing now
    monkeypatch.undo()
    load_changes(tmp_path / "changes", [server])
