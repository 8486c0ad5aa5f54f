"""Rows that are served while they change."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from persia._files import catalog
from persia._files.change_log import read_chain
from persia._files.storage import LocalStorage
from persia._rows import live_rows, row_reader
from persia._rows.live_rows import LiveRows
from persia._rows.row_source import RowSource
from persia.errors import CheckpointError, ConfigError, ServiceBusy, ServiceTimeout
from tests.rows.log_machine import LogMachine
from tests.rows.support import SIGNS, served_rows, trained_rows
from tests.support.fixtures import Monkey
from tests.support.saving import dump, train, writing_changes
from tests.support.services import ADAGRAD, SCHEMA, make_servers, make_worker
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


def test_rows_follow_whatever_happens_to_their_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(live_rows, "_READERS_S", 0.005)
    monkeypatch.setattr(live_rows, "_RESYNC_S", 0.01)
    monkeypatch.setattr(live_rows, "TAKEOVER_S", 0.0)
    LogMachine.folder = tmp_path_factory.mktemp("logs")
    few = settings(max_examples=20, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(LogMachine, settings=few)
