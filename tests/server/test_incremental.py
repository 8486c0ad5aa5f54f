"""Changed rows that servers write: packets, their failures, and other writers."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from persia._files import catalog
from persia._files.catalog import below
from persia._files.change_log import ChangeLog, Deletion, Rows, read_chain, read_packet
from persia._files.log_position import LogPosition
from persia._files.manifest import Manifest, time_text
from persia._files.part_writer import PartWriter
from persia._files.parts import read_part, take
from persia._files.storage import LocalStorage
from persia._rpc.messages import OptimizerSettings
from persia._server import incremental, snapshot
from persia._server.incremental import IncrementalWriter
from persia._server.service import ParameterServer
from persia._training.checkpoint import CheckpointReader
from persia.errors import CheckpointError
from tests.files.support import manifest
from tests.support.fixtures import Log, Monkey
from tests.support.saving import (
    add_part,
    dump,
    files_in,
    held_load,
    load,
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
    storage = LocalStorage(tmp_path / "s0")
    seen: dict[str, Manifest] = {}
    for number in range(6):
        train(worker, number, 1)
        for server in servers:
            server.flush_changes()
        seen |= {one: catalog.load(storage, one) for one in catalog.ids(storage)}
    for server in servers:
        server.close()
    chained = [one for one in seen.values() if one.after is None]
    assert [one.kind for one in chained] == ["full"] + ["delta"] * 5
    assert [one.base for one in chained[1:]] == [one.id for one in chained[:-1]]
    beside = [one for one in seen.values() if one.after is not None]
    assert len(beside) > 1  # as soon as the deltas are as large as the first was
    # Younger ones stay; what the last two full ones need is less.
    assert catalog.ids(storage) == sorted(seen)
    assert len(catalog.chain(storage)) < 6
    loader, fresh = load_changes(tmp_path, servers)
    for identity in catalog.ids(LocalStorage(tmp_path / "s1")):
        (tmp_path / "s1" / f"{identity}.json").unlink()
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
        rooms.append(arguments[3].side_bytes)
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
    monkeypatch.setattr(PartWriter, "finish", stands)
    (server,) = writing_changes(tmp_path, buffer_size=1)
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


def follow(folder: Path) -> tuple[ChangeLog, dict[int, bytes]]:
    """Begin to follow what servers write; returns the rows there are, by sign."""
    log = ChangeLog(str(folder))
    rows: dict[int, bytes] = {}
    for chain in log.start():
        for found in read_chain(chain):
            apply(found, rows)
    return log, rows


def apply(found: Deletion | Rows, rows: dict[int, bytes]) -> None:
    if isinstance(found, Deletion):
        for sign in found.signs.tolist():
            rows.pop(sign, None)
        return
    for sign, values in zip(found.signs.tolist(), found.values, strict=True):
        rows[sign] = values.tobytes()


def catch_up(log: ChangeLog, rows: dict[int, bytes]) -> bool:
    """Apply what has come; returns whether the follower has to begin again."""
    update = log.poll()
    for packet in update.packets:
        for found in read_packet(packet):
            apply(found, rows)
        log.applied(packet)
    return update.resync


def values_in(servers: list[ParameterServer]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for server in servers:
        state = server._settings.state
        assert state is not None
        with state.store.begin_snapshot() as cut:
            for block in cut.blocks():
                apply(Rows("", block.signs, np.asarray(block.values, np.float32)), found)
    return found


def test_a_follower_has_the_rows_of_training(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path, 2)
    worker = make_worker(servers)
    train(worker, 0, 1)
    for server in servers:
        server.flush_changes()
    log, rows = follow(tmp_path)
    assert rows == values_in(servers)
    for number in range(1, 6):
        train(worker, number, 1)
        state = servers[0]._settings.state
        assert state is not None
        gone = np.array(sorted(values_in(servers[:1]))[number : number + 3], np.uint64)
        state.store.delete(gone)
        for server in servers:
            server.flush_changes()  # full packets come between
        assert not catch_up(log, rows)
        assert rows == values_in(servers)
    late, its_rows = follow(tmp_path)
    assert its_rows == rows
    assert all(late.position[server] <= log.position[server] for server in range(2))
    # What replaces rows without training is written too.
    worker.clear_embeddings()
    train(worker, 7, 1)
    for server in servers:
        server.flush_changes()
    if catch_up(log, rows):
        log, rows = follow(tmp_path)
    assert rows == values_in(servers)
    for server in servers:
        server.close()
    load_changes(tmp_path, servers)


def test_deltas_go_on_while_a_full_packet_is_written(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    is_there, may_go = threading.Event(), threading.Event()
    written = snapshot.write_rows

    def stands(*arguments: Any) -> Any:
        if threading.current_thread().name == "persia-full-packet":
            is_there.set()
            assert may_go.wait(60)
        return written(*arguments)

    monkeypatch.setattr(incremental, "write_rows", stands)
    monkeypatch.setattr(incremental, "MAX_DELTAS", 1)
    (server,) = writing_changes(tmp_path)
    worker, writer = make_worker([server]), server._incremental
    assert writer is not None
    for number in range(4):
        train(worker, number, 1)
        writer.flush()
        if number == 0:
            log, rows = follow(tmp_path)
        else:
            assert is_there.wait(60)
    storage = LocalStorage(tmp_path / "s0")
    assert [one.kind for one in map(partial(catalog.load, storage), catalog.ids(storage))] == [
        "full",
        *["delta"] * 3,
    ]
    assert [int(one[:8]) for one in catalog.ids(storage)] == [1, 2, 4, 5]  # 3 is the full one
    may_go.set()
    assert writer._full is not None
    assert writer._full.is_over.wait(60)
    assert len(catalog.ids(storage)) == 5
    assert [one.kind for one in catalog.chain(storage)] == ["full", "delta", "delta"]
    assert not catch_up(log, rows)
    assert rows == follow(tmp_path)[1] == values_in([server])
    server.close()
    load_changes(tmp_path, [server])


def test_a_full_packet_that_fails_ends_nothing(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(incremental, "MAX_DELTAS", 1)
    (server,) = writing_changes(tmp_path)
    worker, publish = make_worker([server]), catalog.publish

    def refuse(storage: Any, manifest: Manifest) -> None:
        if manifest.after is not None:
            raise CheckpointError("No space left on device")
        publish(storage, manifest)

    monkeypatch.setattr(catalog, "publish", refuse)
    for number in range(4):
        train(worker, number, 1)
        server.flush_changes()
    storage = LocalStorage(tmp_path / "s0")
    assert len(catalog.chain(storage)) == len(catalog.ids(storage)) == 4
    server.close()
    load_changes(tmp_path, [server])


def test_a_checkpoint_knows_its_place_in_the_log(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path / "log", 2)
    worker = make_worker(servers)
    train(worker, 0, 1)
    packets = place_of_dump(worker, tmp_path)
    assert packets == {0: 1, 1: 1}  # to come
    for server in servers:
        server.flush_changes()
    log, rows = follow(tmp_path / "log")
    assert log.contains(packets)
    # Nothing has changed since, yet a packet comes.
    packets = place_of_dump(worker, tmp_path)
    assert packets == {0: 2, 1: 2}
    assert not log.contains(packets)
    for server in servers:
        server.flush_changes()
        server.flush_changes()
    assert not catch_up(log, rows)
    assert log.contains(packets)
    assert rows == values_in(servers)
    for server in servers:
        server.close()


def kill(server: ParameterServer) -> None:
    """What others see of a server that was killed: it writes no more, and its lock is free."""
    assert server._incremental is not None
    server._incremental._state = None
    server._incremental._release()


def test_a_number_that_a_killed_server_promised_is_not_kept_by_another_one(
    tmp_path: Path,
) -> None:
    """Without a state file it comes back empty, and its next packet has the same number."""
    log_at, saved_at = tmp_path / "log", LocalStorage(tmp_path / "checkpoints")
    (first,) = writing_changes(log_at)
    worker = make_worker([first])
    train(worker, 0, 1)
    first.flush_changes()
    train(worker, 1, 1)
    assert place_of_dump(worker, tmp_path) == {0: 2}
    promised = LogPosition.of(catalog.load(saved_at))
    kill(first)
    (again,) = writing_changes(log_at)
    worker = make_worker([again])
    train(worker, 90, 1)
    again.flush_changes()
    log, rows = follow(log_at)
    assert log.position == {0: 2}
    assert not log.has(promised)
    assert len(rows) < len(values_in([first]))
    # Once it has loaded that checkpoint it has those rows, and so have checkpoints of its own.
    load(worker, tmp_path / "checkpoints")
    train(worker, 2, 1)
    again.flush_changes()
    if catch_up(log, rows):
        log, rows = follow(log_at)
    assert log.has(promised)
    place_of_dump(worker, tmp_path)
    kill(again)
    (third,) = writing_changes(log_at)
    load(make_worker([third]), tmp_path / "checkpoints")
    train(make_worker([third]), 3, 1)
    third.flush_changes()
    log, _ = follow(log_at)
    assert log.has(promised)
    assert log.has(LogPosition.of(catalog.load(saved_at)))


def test_rows_that_were_recovered_go_on_with_their_history(tmp_path: Path) -> None:
    noted: list[Any] = []
    (server,) = writing_changes(tmp_path / "log")
    assert server._incremental is not None
    server._incremental._note_history = noted.append
    train(make_worker([server]), 0, 1)
    place_of_dump(make_worker([server]), tmp_path)
    server._incremental.note_loaded({"another": 7})
    promised = LogPosition.of(catalog.load(LocalStorage(tmp_path / "checkpoints")))
    kill(server)
    (again,) = writing_changes(tmp_path / "log")
    assert again._incremental is not None
    again._incremental.resume(json.loads(json.dumps(noted[-1])))
    train(make_worker([again]), 0, 1)
    again.flush_changes()
    log, _ = follow(tmp_path / "log")
    assert log.has(promised)
    assert log.has(LogPosition({0: 7}, {0: "another"}))


def test_a_packet_has_nothing_of_a_load_that_ended_after_its_moment(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    (server,) = writing_changes(tmp_path)
    writer = server._incremental
    assert writer is not None
    room = snapshot.room_for_copies

    def load_meanwhile(taken: Any) -> Any:
        writer.note_loaded({"another": 7})
        return room(taken)

    monkeypatch.setattr(incremental, "room_for_copies", load_meanwhile)
    for number in range(2):
        train(make_worker([server]), number, 1)
        server.flush_changes()
        log, _ = follow(tmp_path)
        assert log.has(LogPosition({0: 7}, {0: "another"})) == (number == 1)


def place_of_dump(worker: Any, tmp_path: Path) -> dict[int, int]:
    dump(worker, tmp_path / "checkpoints")
    extras = catalog.load(LocalStorage(tmp_path / "checkpoints")).extras["change_log"]
    assert extras["url"] == str(tmp_path / "log")
    return {int(server): number for server, number in extras["packets"].items()}


def test_packets_come_as_often_as_the_config_says(tmp_path: Path) -> None:
    (server,) = make_servers(
        1,
        optimizer=ADAGRAD,
        enable_incremental_update=True,
        incremental_flush_sec=0.5,
        incremental_dir=str(tmp_path),
    )
    train(make_worker([server]), 0, 1)
    until(lambda: bool(catalog.ids(LocalStorage(tmp_path / "s0"))))
    server.close()


def test_a_writer_that_starts_again_begins_with_all_rows(tmp_path: Path) -> None:
    for number in range(2):
        (server,) = writing_changes(tmp_path)
        train(make_worker([server]), number, 1)
        server.flush_changes()
        if number == 0:
            log, rows = follow(tmp_path)
        server.close()
    storage = LocalStorage(tmp_path / "s0")
    assert [catalog.load(storage, one).base for one in catalog.ids(storage)] == [None, None]
    assert catch_up(log, rows)
    log, rows = follow(tmp_path)
    assert log.position == {0: 2}
    assert rows == values_in([server])
    # So does one whose packets were removed, or followed by another one's.
    for number in range(2):
        train(make_worker([server]), 2 + number, 1)
        last = storage.list()
        if number == 0:
            storage.remove(f"{catalog.latest(storage)}.json")
        else:
            (other,) = writing_changes(tmp_path)
            train(make_worker([other]), 5, 1)
            other.flush_changes()
        server.flush_changes()
        assert catalog.load(storage).kind == "full", last
        assert follow(tmp_path)[1] == values_in([server])


def test_young_packets_stay(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    now = 1e9
    kept = incremental._KeptPackets(100.0, lambda: now)
    made: list[str] = []

    def write(kind: str, at: float) -> None:
        base = made[-1] if kind == "delta" else None
        identity = catalog.new_id(storage)
        made.append(identity)
        catalog.publish(storage, manifest(identity, base, parts=(), created=time_text(at)))

    for at, kind in enumerate(["full", "delta", "full", "delta", "full", "delta"]):
        write(kind, now - 200 + at)
    kept.prune(storage, ())
    assert catalog.ids(storage) == made[2:]  # the last two full ones, and what follows
    write("full", now)
    write("full", now + 1e6)  # the clock was wrong
    write("full", now)
    kept.prune(storage, ())
    assert catalog.ids(storage) == made[6:]  # those three are young
    (tmp_path / f"{made[6]}.json").write_text("{")
    incremental._KeptPackets(100.0, lambda: now)
    with pytest.raises(CheckpointError):
        incremental._KeptPackets(0.0, lambda: now).prune(storage, ())
    assert catalog.ids(storage) == made[6:]
    kept._keep_s = 0.0
    kept.prune(storage, ())
    assert catalog.ids(storage) == made[7:]
