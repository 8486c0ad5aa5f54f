"""Dumps: of one moment, beside training, and those that fail."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from persia._core.store.snapshot import Snapshot
from persia._files import catalog
from persia._files.part_writer import PartWriter
from persia._files.storage import LocalStorage
from persia._files.writer_lock import sole_writer
from persia._rpc.messages import CutRequest
from persia._server import snapshot
from persia._server.row_settings import RowSettings
from persia._server.snapshot import (
    COPY_DIVISOR,
    ROOM_S,
    beside_training,
    room_for_copies,
    urgency_of,
)
from persia._training import checkpoint
from persia._training.checkpoint import CheckpointWriter
from persia.errors import CheckpointError, NotConfigured
from tests.support.fixtures import Monkey
from tests.support.saving import Trained, dump, files_in, load, rows_of, train
from tests.support.services import make_servers, make_worker
from tests.support.waiting import until


def test_w63_training_in_a_dump(trained: Trained, tmp_path: Path, monkeypatch: Monkey) -> None:
    worker, servers = trained
    before = rows_of(servers)
    may_write = threading.Event()
    real = PartWriter.add

    def add(*arguments: Any) -> None:
        assert may_write.wait(60)
        real(*arguments)

    monkeypatch.setattr(PartWriter, "add", add)
    saver = CheckpointWriter(worker)
    saver.finish(saver.begin(3, dict), str(tmp_path), 1, blocking=False)
    train(worker, 3, 3)  # nothing can be written before this has ended
    may_write.set()
    saver.wait()
    load(worker, tmp_path)
    assert rows_of(servers) == before


def test_nothing_is_dumped_before_it_is_configured(tmp_path: Path) -> None:
    worker = make_worker(make_servers(1, hyper=None, optimizer=None))
    with pytest.raises(NotConfigured, match="checkpoint"):
        dump(worker, tmp_path)


def test_a_cut_has_room_or_is_closed(trained: Trained, monkeypatch: Monkey) -> None:
    begun: list[Any] = []

    def room_for_copies(cut: Snapshot) -> int:
        begun.append(cut)
        return 1 << 40

    monkeypatch.setattr(snapshot, "room_for_copies", room_for_copies)
    _, (server, *_) = trained
    with monkeypatch.context() as patch:
        patch.setattr(RowSettings, "about", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            server.begin_cut(CutRequest(9, None))
    assert begun.pop().is_closed
    info = server.begin_cut(CutRequest(9, None))
    assert server.begin_cut(CutRequest(9, None)) == info  # once more
    assert [cut.side_bytes for cut in begun] == [1 << 40]
    server.end_cut(9, False)


@pytest.mark.parametrize(
    ("place", "name"),
    [(PartWriter, "finish"), (checkpoint, "_write_dense"), (catalog, "publish")],
)
@pytest.mark.parametrize("blocking", [True, False])
def test_w32_a_failed_dump_is_told_leaves_no_files_and_the_next_succeeds(
    dumped: Trained, tmp_path: Path, monkeypatch: Monkey, place: Any, name: str, blocking: bool
) -> None:
    """A manifest is there already when its writer hears of a failure."""
    worker, servers = dumped
    before = files_in(tmp_path)
    real = getattr(place, name)

    def fails(*arguments: Any) -> Any:
        found = real(*arguments)
        if place is not PartWriter:
            raise CheckpointError("No space left on device")
        if arguments[0]._server == 1:
            raise OSError(28, "No space left on device")
        return found

    monkeypatch.setattr(place, name, fails)
    saver = CheckpointWriter(worker)
    frozen = saver.begin(3, lambda: {"dense.pt": b"x"})
    finish: Any = partial(saver.finish, frozen, str(tmp_path), 1, blocking=blocking)
    if not blocking:
        finish()
        finish = saver.wait
    said = "server 1 .*No space left" if place is PartWriter else "No space left"
    with pytest.raises(CheckpointError, match=said):
        finish()
    until(lambda: files_in(tmp_path) == before)
    monkeypatch.undo()
    dump(worker, tmp_path)
    assert len(catalog.ids(LocalStorage(tmp_path))) == 1
    dump(worker, tmp_path, keep_last=2)
    assert len(catalog.ids(LocalStorage(tmp_path))) == 2
    rows = rows_of(servers)
    load(worker, tmp_path)
    assert rows_of(servers) == rows != {}


def test_w19_two_jobs_do_not_write_into_one_folder(trained: Trained, tmp_path: Path) -> None:
    worker, _ = trained
    with (
        sole_writer(LocalStorage(tmp_path)),
        pytest.raises(CheckpointError, match="is writing here"),
    ):
        dump(worker, tmp_path)
    dump(worker, tmp_path)  # the cut that was begun was ended


@pytest.mark.parametrize(
    ("held", "free", "want"),
    [
        (8 << 30, 0, (8 << 30) // COPY_DIVISOR),  # how much is free is not known
        (8 << 30, 16 << 30, 4 << 30),
        (8 << 30, 64 << 30, 8 << 30),  # all rows may change: they need no more
        (1, 64 << 30, 64 << 20),
    ],
)
def test_room_for_copies_is_taken(monkeypatch: Monkey, held: int, free: int, want: int) -> None:
    monkeypatch.setattr(snapshot, "free_memory_bytes", lambda: free)
    cut: Any = SimpleNamespace(copied_bytes=held, fill=0.0, side_bytes=0)
    assert room_for_copies(cut) == want


def test_a_reader_hurries_before_its_room_is_full() -> None:
    found = [urgency_of(SimpleNamespace(fill=fill)) for fill in (0.2, 0.5, 0.625, 0.75, 2)]  # type: ignore[arg-type]
    assert found == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_room_follows_the_memory_that_others_leave(monkeypatch: Monkey) -> None:
    free = 16 << 30
    monkeypatch.setattr(snapshot, "free_memory_bytes", lambda: free)
    now = 100.0
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=lambda: now))
    allowed: list[int] = []
    cut: Any = SimpleNamespace(copied_bytes=8 << 30, fill=0.0, side_bytes=0)

    def allow(side_bytes: int) -> None:
        copied = cut.fill * cut.side_bytes
        cut.side_bytes = side_bytes
        cut.fill = copied / side_bytes
        allowed.append(side_bytes)

    cut.allow = allow
    rest = beside_training(cut, lambda: 7)
    rest()
    cut.fill, free = 0.25, 2 << 30  # another server took its own
    rest()
    assert allowed == [4 << 30]
    now += ROOM_S
    rest()
    assert allowed == [4 << 30, (1 << 30) + (512 << 20)]
