"""Dumps: of one moment, beside training, and those that fail."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from persia._core.store.snapshot import Snapshot
from persia._files import catalog
from persia._files.part_writer import PartWriter
from persia._files.storage import LocalStorage
from persia._files.writer_lock import sole_writer
from persia._rpc.messages import (
    CutRequest,
)
from persia._server import snapshot, throttle
from persia._server.row_settings import RowSettings
from persia._training import checkpoint
from persia._training.checkpoint import CheckpointWriter
from persia.errors import CheckpointError, NotConfigured
from tests.support.saving import (
    Trained,
    dump,
    load,
    rows_of,
    train,
)
from tests.support.services import (
    ADAGRAD,
    make_servers,
    make_worker,
)
from tests.support.waiting import until


def test_w19_a_second_dump_takes_the_place_of_the_first(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    dump(worker, tmp_path)
    train(worker, 3, 1)
    dump(worker, tmp_path)
    assert len(catalog.ids(LocalStorage(tmp_path))) == 1
    dump(worker, tmp_path, keep_last=2)
    assert len(catalog.ids(LocalStorage(tmp_path))) == 2
    fresh = make_servers(optimizer=ADAGRAD)
    load(make_worker(fresh), tmp_path)
    assert rows_of(fresh) == rows_of(servers)


def test_the_cut_is_of_its_moment_though_training_goes_on(
    trained: Trained, tmp_path: Path
) -> None:
    worker, servers = trained
    before = rows_of(servers)
    saver = CheckpointWriter(worker)
    frozen = saver.begin(3, dict)
    train(worker, 3, 3)
    saver.finish(frozen, str(tmp_path), 1, blocking=True)
    load(worker, tmp_path)
    assert rows_of(servers) == before


def test_w63_lookups_and_updates_go_on_while_rows_are_written(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_w32_a_failure_is_told_and_the_next_dump_succeeds(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, servers = trained
    dump(worker, tmp_path / "there")
    real = PartWriter.finish

    def fails(writer: Any) -> Any:
        if writer._server == 1:
            raise OSError(28, "No space left on device")
        return real(writer)

    monkeypatch.setattr(PartWriter, "finish", fails)
    with pytest.raises(CheckpointError, match=r"server 1 .*No space left"):
        dump(worker, tmp_path / "there")
    assert len(catalog.ids(LocalStorage(tmp_path / "there"))) == 1
    saver = CheckpointWriter(worker)
    saver.finish(saver.begin(3, dict), str(tmp_path / "other"), 1, blocking=False)
    with pytest.raises(CheckpointError, match="No space left"):
        saver.wait()
    monkeypatch.undo()
    dump(worker, tmp_path / "other")
    load(worker, tmp_path / "other")
    assert rows_of(servers)


def test_nothing_is_dumped_before_it_is_configured(tmp_path: Path) -> None:
    worker = make_worker(make_servers(1, hyper=None, optimizer=None))
    with pytest.raises(NotConfigured, match="checkpoint"):
        dump(worker, tmp_path)


def test_begin_cut_again_is_the_same_cut(trained: Trained) -> None:
    _, (server, _) = trained
    assert server.begin_cut(CutRequest(9, None)) == server.begin_cut(CutRequest(9, None))
    server.end_cut(9, False)


def test_copies_have_room_before_a_cut_is_written(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "room_for_copies", lambda cut: 1 << 40)
    _, (server, *_) = trained
    server.begin_cut(CutRequest(9, None))
    (dump,) = server._snapshots._dumps.values()
    assert dump.snapshot.side_bytes == 1 << 40
    server.end_cut(9, False)


@pytest.mark.parametrize("fails", ["room", "about"])
def test_a_cut_that_cannot_be_told_of_is_closed(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    begun: list[Snapshot] = []

    def give_room(cut: Snapshot) -> None:
        begun.append(cut)
        if fails == "room":
            raise MemoryError

    def about(settings: RowSettings) -> str:
        raise MemoryError

    _, (server, *_) = trained
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "give_room", give_room)
        patch.setattr(RowSettings, "about", about)
        with pytest.raises(MemoryError):
            server.begin_cut(CutRequest(9, None))
    assert [cut.is_closed for cut in begun] == [True]
    server.begin_cut(CutRequest(9, None))
    server.end_cut(9, False)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def no_more_than(folder: Path, before: list[Path]) -> bool:
    return files_in(folder) == before


@pytest.mark.parametrize("fails_at", ["rows", "dense", "manifest"])
def test_a_failed_dump_leaves_no_files(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    worker, _ = trained
    dump(worker, tmp_path)
    before = files_in(tmp_path)

    def then_fails(function: Any) -> Any:
        def fails(*arguments: Any) -> Any:
            found = function(*arguments)
            if fails_at != "rows" or arguments[0]._server == 1:
                raise CheckpointError("No space left on device")
            return found

        return fails

    if fails_at == "rows":
        monkeypatch.setattr(PartWriter, "finish", then_fails(PartWriter.finish))
    elif fails_at == "dense":
        name = "_write_dense"
        monkeypatch.setattr(checkpoint, name, then_fails(checkpoint._write_dense))
    else:  # it is there already when its writer hears of a failure
        monkeypatch.setattr(catalog, "publish", then_fails(catalog.publish))
    saver = CheckpointWriter(worker)
    frozen = saver.begin(3, lambda: {"dense.pt": b"x"})
    with pytest.raises(CheckpointError, match="No space left"):
        saver.finish(frozen, str(tmp_path), 1, blocking=True)
    until(partial(no_more_than, tmp_path, before))
    monkeypatch.undo()
    dump(worker, tmp_path)
    load(worker, tmp_path)


def test_w19_two_jobs_do_not_write_into_one_folder(trained: Trained, tmp_path: Path) -> None:
    worker, _ = trained
    with (
        sole_writer(LocalStorage(tmp_path)),
        pytest.raises(CheckpointError, match="is writing here"),
    ):
        dump(worker, tmp_path)
    dump(worker, tmp_path)  # the cut that was begun was ended
