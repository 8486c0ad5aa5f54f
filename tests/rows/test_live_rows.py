"""Rows that are served while they change."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from persia._core.table.row_table import RowTable
from persia._files import catalog
from persia._files.change_log import read_chain
from persia._files.storage import LocalStorage
from persia._rows import live_rows, row_reader
from persia._rows.live_rows import LiveRows
from persia._rows.row_source import RowSource
from persia._rpc.messages import (
    LookupRequest,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._server.incremental import IncrementalWriter
from persia._server.service import ParameterServer
from persia.config import EmbeddingSchema, ParameterServerConfig
from persia.errors import (
    CheckpointError,
    ConfigError,
    PersiaError,
    ServiceBusy,
    ServiceTimeout,
)
from tests.rows import log_process
from tests.rows.log_machine import LogMachine
from tests.rows.support import SIGNS, served_rows, trained_rows
from tests.support.fixtures import Log, Monkey
from tests.support.processes import ROOT
from tests.support.saving import FEATURES, dump, load, train, writing_changes
from tests.support.services import (
    ADAGRAD,
    SCHEMA,
    features,
    gradient,
    make_servers,
    make_worker,
)
from tests.support.services import settings as settings_of_rows
from tests.support.waiting import PATIENCE_S, until


def rows_of(source: RowSource, **options: Any) -> LiveRows:
    rows = LiveRows(source, SCHEMA, follow_interval_s=0.01, **options)
    rows.load(PATIENCE_S)
    return rows


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_checkpoint_are_those_of_training(tmp_path: Path, count: int) -> None:
    servers = make_servers(2, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    dump(worker, tmp_path)
    found: dict[int, bytes] = {}
    for replica in range(count):
        owned = None if count == 1 else (replica, count)
        rows = rows_of(RowSource(checkpoint=str(tmp_path)), owned=owned)
        mine = served_rows(rows)
        assert not mine.keys() & found.keys()
        assert len(rows) == rows.stats()["rows"] == len(mine)
        found |= mine
        assert rows.version == catalog.latest(LocalStorage(tmp_path))
    assert found == trained_rows(servers)


def test_work_rests_between_pieces_beside_requests(tmp_path: Path, monkeypatch: Monkey) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 3)
    dump(worker, tmp_path)
    monkeypatch.setattr(row_reader, "_PIECE_BYTES", 256)
    rests: list[float] = []
    throttle = SimpleNamespace(rest=lambda urgency: rests.append(urgency()))
    monkeypatch.setattr(live_rows, "_throttle", throttle)
    rows = rows_of(RowSource(checkpoint=str(tmp_path)))
    assert served_rows(rows) == trained_rows(servers)
    longest = 4 * max(table.dim for table in SCHEMA.tables)
    assert len(rests) > len(rows) * longest // 256 // 2
    assert not any(rests)
    rows.close()
    train(worker, 3, 1)
    dump(worker, tmp_path)
    with pytest.raises(PersiaError, match="closed before"):
        rows.load(PATIENCE_S)


def test_requests_go_on_for_a_while_after_the_last(tmp_path: Path, monkeypatch: Monkey) -> None:
    rows = LiveRows(RowSource(checkpoint=str(tmp_path)), SCHEMA)
    now = 1000.0
    monkeypatch.setattr(live_rows, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(live_rows, "_last_view", 0.0)
    silent = live_rows._requests()
    with pytest.raises(ServiceBusy), rows.view():
        pass
    assert live_rows._requests() == silent  # a load that is waited for does not pause
    worker = make_worker(make_servers(1, optimizer=ADAGRAD))
    train(worker, 0, 1)
    dump(worker, tmp_path)
    rows.load(PATIENCE_S)
    with rows.view():
        pass
    seen = live_rows._requests()
    now += 0.05
    assert silent != seen != live_rows._requests()
    now += 10
    assert live_rows._requests() == live_rows._requests()


def test_no_row_is_answered_before_all_are_there(tmp_path: Path) -> None:
    rows = LiveRows(RowSource(checkpoint=str(tmp_path)), SCHEMA)
    assert not rows.is_ready
    assert rows.problem
    with pytest.raises(ServiceBusy, match="not loaded yet"), rows.view():
        pass
    with pytest.raises(CheckpointError, match="no checkpoint is here"):
        rows.load()
    with pytest.raises(ServiceBusy, match="no checkpoint is here"), rows.view():
        pass
    assert rows.stats()["failed_loads"] == 1


def test_a_source_and_kept_groups_are_checked() -> None:
    with pytest.raises(ConfigError, match="got neither"):
        RowSource()
    with pytest.raises(ConfigError, match="feature groups"):
        LiveRows(RowSource(checkpoint="x"), SCHEMA, kept_groups=["nothing"])


def test_a_newer_checkpoint_is_shown_and_a_pinned_view_stays(tmp_path: Path) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 2)
    dump(worker, tmp_path, keep_last=2)
    rows = rows_of(RowSource(checkpoint=str(tmp_path), follows_newer=True))
    before, old = served_rows(rows), rows.version
    assert not rows.poll()
    train(worker, 2, 2)
    dump(worker, tmp_path, keep_last=2)
    table, signs = next(iter(SIGNS.items()))
    out = np.empty((len(signs), SCHEMA.tables[table].dim), np.float32)
    again = np.empty_like(out)
    with rows.view() as view:
        view.lookup(table, signs, out)
        assert rows.poll()
        assert view.version == old != rows.version
        view.lookup(table, signs, again)
        assert (out == again).all()
    assert served_rows(rows) == trained_rows(servers) != before
    with rows.view(old) as view:  # which servers of one set agree on meanwhile
        assert view.version == old
    with rows.view("unknown") as view:
        assert view.version == rows.version


def test_rows_before_stay_as_long_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    now = [0.0]
    worker = make_worker(make_servers(1, optimizer=ADAGRAD))
    train(worker, 0, 2)
    dump(worker, tmp_path, keep_last=2)
    source = RowSource(checkpoint=str(tmp_path), follows_newer=True)
    rows = rows_of(source, keep_previous_s=10.0)
    old = rows.version
    train(worker, 2, 2)
    dump(worker, tmp_path, keep_last=2)
    monkeypatch.setattr(live_rows, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert rows.poll()
    for _ in range(3):
        now[0] += 9.0
        rows.poll()
        with rows.view(old) as view:
            assert view.version == old
    now[0] += 11.0
    rows.poll()
    with rows.view(old) as view:
        assert view.version == rows.version != old


def test_a_checkpoint_that_cannot_be_read_leaves_the_rows(tmp_path: Path) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 2)
    dump(worker, tmp_path, keep_last=2)
    rows = rows_of(RowSource(checkpoint=str(tmp_path), follows_newer=True))
    before = served_rows(rows)
    train(worker, 2, 2)
    dump(worker, tmp_path, keep_last=2)
    storage = LocalStorage(tmp_path)
    part = tmp_path / catalog.load(storage).parts[0].path
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointError):
        rows.poll()
    assert served_rows(rows) == before
    data[-1] ^= 1
    part.write_bytes(data)
    assert rows.poll()
    assert served_rows(rows) == trained_rows(servers)


def test_a_load_that_hangs_is_given_up(tmp_path: Path, monkeypatch: Monkey) -> None:
    servers = make_servers(1, optimizer=ADAGRAD)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path)
    is_there, may_go = threading.Event(), threading.Event()
    read = read_chain

    def hang(*arguments: Any) -> Any:
        is_there.set()
        assert may_go.wait(PATIENCE_S)
        return read(*arguments)

    monkeypatch.setattr(row_reader, "read_chain", hang)
    rows = LiveRows(RowSource(checkpoint=str(tmp_path)), SCHEMA)
    with pytest.raises(ServiceTimeout, match="not done within"):
        rows.load(0.05)
    assert is_there.wait(PATIENCE_S)
    with pytest.raises(ServiceTimeout, match="still hangs"):
        rows.load(0.05)
    may_go.set()
    until(lambda: all(one.is_set() for one in rows._calls._hung.values()))
    rows.load(PATIENCE_S)
    assert served_rows(rows) == trained_rows(servers)


# --- a change log ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_packets_are_applied_as_they_come(tmp_path: Path, count: int) -> None:
    servers = writing_changes(tmp_path, count)
    worker = make_worker(servers)
    train(worker, 0, 2)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    assert served_rows(rows) == trained_rows(servers)
    for first in (2, 4):
        train(worker, first, 2)
        gone = [int(signs[3]) for signs in SIGNS.values()]
        for server in servers:
            state = server._state_to_save()
            state.store.delete(np.array(gone, np.uint64))
        worker.flush_changes()
        assert rows.poll()
        assert served_rows(rows) == trained_rows(servers)
    assert rows.stats()["applied_packets"] == 2 * count
    assert rows.contains(rows.position)
    assert set(rows.position) == set(range(count))
    assert set(rows.ages(0.0)) == set(range(count))
    assert not rows.poll()
    for server in servers:
        server.close()


def test_a_packet_is_seen_whole_while_it_is_merged(tmp_path: Path, monkeypatch: Monkey) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 2)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    before = served_rows(rows)
    train(worker, 2, 2)
    worker.flush_changes()
    after = trained_rows(servers)
    seen: list[dict[int, bytes]] = []
    merge = rows._merge

    def look() -> None:
        seen.append(served_rows(rows))
        merge()
        seen.append(served_rows(rows))

    monkeypatch.setattr(rows, "_merge", look)
    rows.poll()
    assert seen == [before, before, after, after]
    servers[0].close()


def _shows(rows: LiveRows, wanted: frozenset[tuple[int, bytes]]) -> bool:
    return frozenset(served_rows(rows).items()) == wanted


def test_a_thread_follows_and_a_reader_sees_no_mixture(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    whole = {frozenset(served_rows(rows).items())}
    lock, seen, is_done = threading.Lock(), [], threading.Event()

    def read() -> None:
        while not is_done.is_set():
            found = frozenset(served_rows(rows).items())
            with lock:
                seen.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    rows.follow()
    try:
        for number in range(1, 5):
            train(worker, number, 1)
            worker.flush_changes()
            now = frozenset(trained_rows(servers).items())
            whole.add(now)
            until(partial(_shows, rows, now))
    finally:
        is_done.set()
        reader.join(PATIENCE_S)
        rows.close()
        servers[0].close()
    assert set(seen) <= whole


def test_a_gap_is_a_new_start_beside_the_rows(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    servers[0].close()
    again = writing_changes(tmp_path)  # another process, whose first packet has all rows
    worker = make_worker(again)
    train(worker, 5, 2)
    worker.flush_changes()
    until(rows.poll)
    assert served_rows(rows) == trained_rows(again)
    assert rows.stats()["gaps"] == rows.stats()["resyncs"] == 1
    again[0].close()


def test_wait_for_packets(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    rows.wait_for(rows.position, 0.0)
    with pytest.raises(ServiceTimeout, match="expected packets"):
        rows.wait_for({0: 99}, 0.01)
    servers[0].close()


def test_a_checkpoint_is_served_until_the_log_is_whole(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path / "log")
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, tmp_path / "checkpoints")
    source = RowSource(
        checkpoint=str(tmp_path / "checkpoints"), change_log=str(tmp_path / "log")
    )
    rows = rows_of(source)
    before = trained_rows(servers)
    assert served_rows(rows) == before
    train(worker, 1, 2)
    worker.flush_changes()
    until(lambda: rows.poll() or served_rows(rows) != before)
    assert served_rows(rows) == trained_rows(servers) != before
    servers[0].close()


def test_a_request_that_does_not_end_holds_packets_up_and_sees_no_change(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(live_rows, "_READERS_S", 0.01)
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    table, signs = next(iter(SIGNS.items()))
    out = np.empty((len(signs), SCHEMA.tables[table].dim), np.float32)
    again = np.empty_like(out)
    with rows.view() as view:
        view.lookup(table, signs, out)
        train(worker, 1, 1)
        worker.flush_changes()
        for _ in range(2):
            with pytest.raises(ServiceTimeout, match="have not ended within"):
                rows.poll()
            assert served_rows(rows) == trained_rows(servers)
        view.lookup(table, signs, again)
        assert (out == again).all()
    rows.poll()
    assert rows.stats()["applied_packets"] == 1
    assert served_rows(rows) == trained_rows(servers)
    servers[0].close()


def test_rows_of_kept_groups_outlive_training(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    group = SCHEMA.slots["sqrt"].group
    rows = rows_of(RowSource(change_log=str(tmp_path)), kept_groups=[group])
    before = served_rows(rows)
    gone = np.array(sorted(before), np.uint64)
    servers[0]._state_to_save().store.delete(gone)
    train(worker, 90, 1)  # so that there is a packet
    worker.flush_changes()
    rows.poll()
    prefix = SCHEMA.slots["sqrt"].prefix
    shift = 64 - SCHEMA.prefix_bits
    kept = {s for s in before if s >> shift == prefix >> shift}
    assert kept
    assert set(served_rows(rows)) == set(trained_rows(servers)) | kept
    servers[0].close()


def test_the_log_is_enough_where_the_checkpoint_is_gone(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path / "log")
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(
        RowSource(checkpoint=str(tmp_path / "none"), change_log=str(tmp_path / "log"))
    )
    assert served_rows(rows) == trained_rows(servers)
    servers[0].close()


def test_a_request_over_two_packets_sees_neither(tmp_path: Path, monkeypatch: Monkey) -> None:
    """One that reads the first packet's overlay is waited for before the second is merged."""
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    table, signs = next(iter(SIGNS.items()))
    out = np.empty((len(signs), SCHEMA.tables[table].dim), np.float32)
    again, merge = np.empty_like(out), rows._merge
    monkeypatch.setattr(rows, "_merge", lambda: None)
    train(worker, 1, 1)
    worker.flush_changes()
    rows.poll()  # its overlay stays for now
    monkeypatch.setattr(rows, "_merge", merge)
    monkeypatch.setattr(live_rows, "_READERS_S", 0.01)
    with rows.view() as view:
        view.lookup(table, signs, out)
        train(worker, 90, 1)
        worker.flush_changes()
        with pytest.raises(ServiceTimeout, match="have not ended within"):
            rows.poll()
        view.lookup(table, signs, again)
        assert (out == again).all()
    rows.poll()
    assert served_rows(rows) == trained_rows(servers)
    servers[0].close()


# --- servers that lose their rows, and files that are damaged -------------------------------


def lose(server: ParameterServer) -> None:
    """What others see of a server that was killed: it writes no more, and its lock is free."""
    assert server._incremental is not None
    server._incremental._state = None
    server._incremental._release()


def test_a_server_without_its_rows_takes_none_away(tmp_path: Path) -> None:
    """Its number may be what the checkpoint was promised, and its rows are not."""
    log, saved = tmp_path / "log", tmp_path / "checkpoints"
    servers = writing_changes(log, 2)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, saved)
    worker.flush_changes()
    source = RowSource(checkpoint=str(saved), follows_newer=True, change_log=str(log))
    rows = rows_of(source)
    assert rows.position == {0: 1, 1: 1}
    before = served_rows(rows)
    for server in servers:
        lose(server)
    servers = writing_changes(log, 2)  # empty ones take their place, and training goes on
    worker = make_worker(servers)
    train(worker, 90, 1)
    worker.flush_changes()
    for _ in range(3):
        with pytest.raises(CheckpointError, match="a server has lost its rows"):
            rows.poll()
    fresh = rows_of(source)
    fresh.poll()
    assert served_rows(rows) == served_rows(fresh) == before
    assert rows.stats()["gaps"] == 1
    assert rows.stats()["resyncs"] == 0
    load(worker, saved)
    train(worker, 91, 1)
    worker.flush_changes()
    for one in (rows, fresh):
        until(one.poll)
        assert served_rows(one) == trained_rows(servers)
    worker.flush_changes()


def test_rows_of_a_later_checkpoint_do_as_well(tmp_path: Path) -> None:
    log, saved = tmp_path / "log", tmp_path / "checkpoints"
    servers = writing_changes(log)
    worker = make_worker(servers)
    train(worker, 0, 1)
    dump(worker, saved, keep_last=2)
    worker.flush_changes()
    source = RowSource(checkpoint=str(saved), follows_newer=True, change_log=str(log))
    rows = rows_of(source)
    lose(servers[0])
    servers = writing_changes(log)  # another training, which begins from nothing
    worker = make_worker(servers)
    train(worker, 90, 1)
    worker.flush_changes()
    with pytest.raises(CheckpointError, match="a server has lost its rows"):
        rows.poll()
    dump(worker, saved, keep_last=2)  # and becomes the newest there is
    train(worker, 91, 1)
    worker.flush_changes()
    until(rows.poll)
    assert served_rows(rows) == trained_rows(servers)
    assert not rows.poll()
    servers[0].close()


@pytest.fixture
def only_deltas(monkeypatch: Monkey) -> None:
    """After the first packet no full one, at which a follower could begin."""
    monkeypatch.setattr(IncrementalWriter, "_is_full_due", lambda writer: False)


def damage(path: Path) -> bytes:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return data


@pytest.mark.usefixtures("only_deltas")
@pytest.mark.parametrize("what", ["manifest", "part"])
def test_a_damaged_packet_leaves_those_before_it(
    tmp_path: Path, what: str, caplog: Log
) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    states = []
    for number in range(4):
        train(worker, number, 1)
        worker.flush_changes()
        states.append(trained_rows(servers))
    storage = LocalStorage(tmp_path / "s0")
    delta = catalog.load(storage, catalog.ids(storage)[2])
    place = f"{delta.id}.json" if what == "manifest" else delta.parts[0].path
    whole = damage(tmp_path / "s0" / place)
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    assert served_rows(rows) == states[1]
    assert rows.position == {0: 2}
    assert rows.stats()["damaged_loads"] == 1
    assert "is damaged" in caplog.text
    for _ in range(12):  # it is not read again and again, and nothing goes back
        with suppress(CheckpointError):
            rows.poll()
    assert served_rows(rows) == states[1]
    assert rows.stats()["resyncs"] == 0
    (tmp_path / "s0" / place).write_bytes(whole)
    until(lambda: rows.poll() or rows.position == {0: 4})
    assert served_rows(rows) == states[3]
    servers[0].close()


@pytest.mark.usefixtures("only_deltas")
def test_rows_before_the_damage_must_be_those_of_the_checkpoint(tmp_path: Path) -> None:
    log, saved = tmp_path / "log", tmp_path / "checkpoints"
    servers = writing_changes(log)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    train(worker, 1, 1)
    dump(worker, saved)
    before = trained_rows(servers)
    worker.flush_changes()
    storage = LocalStorage(log / "s0")
    newest = catalog.load(storage)
    whole = damage(log / "s0" / newest.parts[0].path)
    rows = rows_of(RowSource(checkpoint=str(saved), change_log=str(log)))
    assert served_rows(rows) == before  # the checkpoint's: the log can be read up to packet 1
    assert rows.version
    (log / "s0" / newest.parts[0].path).write_bytes(whole)
    train(worker, 2, 1)
    worker.flush_changes()
    until(rows.poll)
    assert served_rows(rows) == trained_rows(servers)
    servers[0].close()


@pytest.mark.usefixtures("only_deltas")
def test_nothing_goes_back_to_what_a_damaged_log_still_has(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    train(worker, 1, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)))
    shown = served_rows(rows)
    storage = LocalStorage(tmp_path / "s0")
    for number in (2, 3):
        train(worker, number, 1)
        worker.flush_changes()
    ids = catalog.ids(storage)
    for identity in ids[1:3]:
        damage(tmp_path / "s0" / f"{identity}.json")
    for _ in range(12):
        with suppress(CheckpointError):
            rows.poll()
        assert served_rows(rows) == shown
    assert rows.stats()["gaps"] == 1
    servers[0].close()


# --- descriptors, memory, kills -------------------------------------------------------------


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened: EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_rows_stay_and_nothing_is_lost(tmp_path: Path) -> None:
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    source = RowSource(change_log=str(tmp_path))
    rows, late = rows_of(source), LiveRows(source, SCHEMA)
    before = served_rows(rows)
    train(worker, 1, 1)
    with no_descriptors():
        with pytest.raises((CheckpointError, OSError)):
            worker.flush_changes()
        for _ in range(8):
            with suppress(PersiaError, OSError):
                rows.poll()
            assert served_rows(rows) == before
        with pytest.raises((CheckpointError, OSError)):
            late.load()
    worker.flush_changes()
    with no_descriptors():
        for _ in range(8):
            with suppress(PersiaError, OSError):
                rows.poll()
            assert served_rows(rows) == before
    until(rows.poll)
    late.load()
    assert served_rows(rows) == served_rows(late) == trained_rows(servers) != before
    assert rows.stats()["gaps"] == 0
    servers[0].close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_values_are_held_as_asked_for_after_packets_and_a_resync(
    tmp_path: Path, dtype: str
) -> None:
    def expected() -> dict[int, bytes]:
        table = RowTable([one.dim for one in SCHEMA.tables], dtype)
        trained = trained_rows(servers)
        for number, signs in SIGNS.items():
            mine = [sign for sign in signs.tolist() if sign in trained]
            values = np.array([np.frombuffer(trained[s], np.float32) for s in mine])
            table.write(number, np.array(mine, np.uint64), values)
        return {
            sign: row.tobytes()
            for number in SIGNS
            for signs, found in table.blocks(number)
            for sign, row in zip(signs.tolist(), found, strict=True)
        }

    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    rows = rows_of(RowSource(change_log=str(tmp_path)), dtype=dtype)
    assert served_rows(rows) == expected()
    train(worker, 1, 1)
    worker.flush_changes()
    rows.poll()
    assert served_rows(rows) == expected()
    servers[0].close()
    servers = writing_changes(tmp_path)
    train(make_worker(servers), 3, 1)
    servers[0].flush_changes()
    until(rows.poll)
    assert rows.stats()["resyncs"] == 1
    assert served_rows(rows) == expected()
    assert rows._shown is not None
    assert [one.dtype for one in rows._shown.tables] == [dtype]
    servers[0].close()


def num_tables() -> int:
    gc.collect()
    return sum(isinstance(one, RowTable) for one in gc.get_objects())


def test_memory_is_given_back_after_packets_and_resyncs(tmp_path: Path) -> None:
    others = num_tables()
    servers = writing_changes(tmp_path)
    worker = make_worker(servers)
    train(worker, 0, 1)
    worker.flush_changes()
    source = RowSource(change_log=str(tmp_path))
    rows = rows_of(source)
    sizes = []
    for number in range(24):
        if number % 8 == 7:  # begins again
            servers[0].close()
            servers = writing_changes(tmp_path)
            worker = make_worker(servers)
        batch = {name: [[x + 7 * (number % 8)] for x in range(99)] for name in FEATURES}
        result = worker.lookup_direct(features(batch, number))
        worker.update(gradient(result, (2, number)))
        worker.flush_changes()
        until(rows.poll)
        assert num_tables() == others + 1
        sizes.append(rows.stats()["bytes"])
    assert rows.stats()["resyncs"] >= 2
    assert rows.stats()["applied_packets"] >= 18
    # The same rows again and again: each life of the log takes what the one before did.
    assert max(sizes[16:]) <= max(sizes[8:16]) <= 1.2 * max(sizes[:8])
    assert sizes[-1] <= 1.5 * rows_of(source).stats()["bytes"]
    servers[0].close()


def test_rows_that_expire_are_gone_here_too(tmp_path: Path) -> None:
    schema = EmbeddingSchema.load(
        {
            "slots_config": {"user": {"dim": 4}},
            "group_settings": {"user": {"eviction": {"policy": "lfu", "ttl_steps": 3}}},
        }
    )
    config = ParameterServerConfig(
        enable_incremental_update=True,
        incremental_dir=str(tmp_path),
        incremental_buffer_size=1 << 40,
    )
    server = ParameterServer(schema, config)
    server.configure(settings_of_rows())
    server.register_optimizer(ADAGRAD)
    assert server._incremental is not None
    signs = np.arange(400, dtype=np.uint64) + np.uint64(schema.slots["user"].prefix)
    rows = LiveRows(RowSource(change_log=str(tmp_path)), schema)
    seen = set()
    for step in range(24):
        mine = signs[16 * step : 16 * step + 32]
        server.lookup(LookupRequest(step, True, (TableSigns(0, mine),)))
        gradients = np.ones((len(mine), 4), np.float32)
        server.update(UpdateRequest((1, step), (TableGradients(0, mine, None, gradients),)))
        server._incremental.flush()
        rows.poll()
        (entries,) = server.read_embedding((TableSigns(0, signs),))
        states = np.empty(len(signs), np.uint8)
        out = np.empty((len(signs), 4), np.float32)
        with rows.view() as view:
            view.lookup(0, signs, out, states)
        assert signs[states == 1].tolist() == entries.signs.tolist()
        assert out[states == 1].tobytes() == entries.values.tobytes()
        seen |= set(entries.signs.tolist())
    assert server.stats()["expired"] > 0
    assert rows.stats()["deleted_rows"] > 0
    assert len(rows) < len(seen)
    server.close()


def line_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return [int(word) for word in line.split()]


@pytest.mark.slow
def test_killed_writers_and_followers_lose_nothing(tmp_path: Path) -> None:
    log, state = tmp_path / "log", tmp_path / "test.rows"

    def begin(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.rows.log_process", *map(str, words)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        cleanup.enter_context(process)  # waits, and closes the pipe
        cleanup.callback(process.kill)
        return process

    with ExitStack() as cleanup:
        writer, newest = begin("write", log, state), 0
        line_of(writer)
        rows = LiveRows(
            RowSource(change_log=str(log)), log_process.SCHEMA, follow_interval_s=0.01
        )
        rows.load(PATIENCE_S)
        rows.follow()
        cleanup.callback(rows.close)
        follower = begin("follow", log)
        shown = here = 0
        for turn in range(6):
            for _ in range(3 + 5 * turn):
                (newest,) = line_of(writer)
                first, last = log_process.steps_of(rows)
                assert here <= first == last  # whole packets, and never back
                here = last
            writer.kill()
            writer.wait()
            while shown < newest:  # all that was there when it was killed
                first, last = line_of(follower)
                assert shown <= first == last
                shown = last
            if turn % 2:
                follower.kill()
                follower.wait()
                follower = begin("follow", log)
                first, last = line_of(follower)
                assert shown <= first == last  # another one has what the log says
            writer = begin("write", log, state)
            (begun,) = line_of(writer)
            assert begun > newest
        until(lambda: log_process.steps_of(rows)[0] > newest)
        writer.kill()
        writer.wait()
        fresh = LiveRows(RowSource(change_log=str(log)), log_process.SCHEMA)
        fresh.load(PATIENCE_S)
        until(lambda: log_process.steps_of(rows) == log_process.steps_of(fresh))


def test_rows_follow_whatever_happens_to_their_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(live_rows, "_READERS_S", 0.005)
    monkeypatch.setattr(live_rows, "TAKEOVER_S", 0.0)
    LogMachine.folder = tmp_path_factory.mktemp("logs")
    few = settings(max_examples=20, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(LogMachine, settings=few)
