"""One job at a time writes into a folder."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from persia._files.open import open_storage
from persia._files.storage import LocalStorage
from persia._files.writer_lock import MAX_FOLDERS, NAME, JobFolders, WriterLock, sole_writer
from persia.errors import CheckpointError


def test_w19_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "job")
    with sole_writer(storage):
        with (
            pytest.raises(CheckpointError, match=rf"process {os.getpid()} of host .* .since"),
            sole_writer(LocalStorage(tmp_path / "job")),
        ):
            pass
        with sole_writer(LocalStorage(tmp_path / "other")):
            pass
    with sole_writer(LocalStorage(tmp_path / "job")):
        assert (tmp_path / "job" / NAME).is_file()
    assert storage.list() == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/job: cannot make the folder: Not a dir"):
        WriterLock(LocalStorage(tmp_path / "file" / "job")).acquire()


def test_a_job_keeps_its_folders_until_it_ends(tmp_path: Path) -> None:
    """W-19: jobs that dump into one folder in turn never met, and removed each other's."""
    places = [LocalStorage(tmp_path / f"step{number}") for number in range(MAX_FOLDERS + 1)]
    one, two = JobFolders(), JobFolders()
    for place in places:
        with sole_writer(place, one):
            pass
    with sole_writer(places[-1], one):  # its own
        pass
    for place in places[1:]:
        with pytest.raises(CheckpointError, match="is writing here"):
            two.acquire(place)
    two.acquire(places[0])  # it held as many as it may, and this was the first
    one.release()
    two.acquire(places[-1])
    two.release()
    two.release()
    assert not list(tmp_path.rglob(NAME))


def test_object_stores_take_no_folders_place(tmp_path: Path) -> None:
    one = JobFolders()
    one.acquire(LocalStorage(tmp_path))
    for number in range(MAX_FOLDERS + 1):
        one.acquire(open_storage(f"memory://job/step{number}"))
    JobFolders().acquire(open_storage("memory://job/step0"))
    with pytest.raises(CheckpointError, match="is writing here"):
        JobFolders().acquire(LocalStorage(tmp_path))
    one.release()


def test_a_job_that_none_knows_any_more_keeps_no_folder(tmp_path: Path) -> None:
    one, two = JobFolders(), JobFolders()
    one.acquire(LocalStorage(tmp_path))
    with pytest.raises(CheckpointError, match=r"it is this process: if .* not left"):
        two.acquire(LocalStorage(tmp_path))
    del one
    gc.collect()
    two.acquire(LocalStorage(tmp_path))
    two.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_ends_with_its_process_though_a_forked_child_lives(tmp_path: Path) -> None:
    """Such as a worker of torch's DataLoader, which may outlive a killed trainer."""
    script = (
        "import os, sys\n"
        "from persia._files.storage import LocalStorage\n"
        "from persia._files.writer_lock import JobFolders\n"
        "job = JobFolders()\n"
        "job.acquire(LocalStorage(sys.argv[1]))\n"
        "ready, done = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    job.release()\n"
        "    os.write(done, b'.')\n"
        "    os.read(0, 1)\n"
        "    os._exit(0)\n"
        "os.read(ready, 1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as parent:
        assert parent.wait(60) == -9
        assert (tmp_path / NAME).is_file()  # the child's release was not its parent's
        lock = WriterLock(LocalStorage(tmp_path))
        lock.acquire()
        lock.acquire()  # it is held already
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "):
            WriterLock(LocalStorage(tmp_path)).acquire()
        lock.release()
        lock.release()


def test_a_folder_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    """No other writer's lock is released for it."""
    place = LocalStorage(tmp_path / "job")
    one, two = WriterLock(place), WriterLock(place)
    one.acquire()
    shutil.rmtree(tmp_path / "job")
    two.acquire()
    with pytest.raises(CheckpointError, match="is writing here"):
        one.acquire()
    one.release()
    assert (tmp_path / "job" / NAME).is_file()
    two.release()
    one.acquire()
    shutil.rmtree(tmp_path / "job")
    one.acquire()
    assert (tmp_path / "job" / NAME).is_file()
    one.release()
