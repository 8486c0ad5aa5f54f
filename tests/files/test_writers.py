"""One writer a folder, and what a writer that could not finish leaves: nothing."""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from persia._files.catalog import discard, ids
from persia._files.rows import rewrite
from persia._files.storage import LocalStorage, open_storage
from persia._files.writer_lock import MOST_FOLDERS, NAME, JobFolders, WriterLock, sole_writer
from persia.errors import CheckpointError
from tests.files.disk import Disk, PowerFailure
from tests.files.test_catalog import dump, row

ROWS = {sign: row(sign, 1) for sign in range(5)}


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


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from persia._files.storage import LocalStorage\n"
        "from persia._files.writer_lock import WriterLock\n"
        "WriterLock(LocalStorage(sys.argv[1])).take()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert ran.returncode == -9
    assert (tmp_path / NAME).is_file()  # stale
    lock = WriterLock(LocalStorage(tmp_path))
    lock.take()
    lock.take()  # it is held already
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} "):
        WriterLock(LocalStorage(tmp_path)).take()
    lock.release()
    lock.release()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/job: cannot make the folder: Not a dir"):
        WriterLock(LocalStorage(tmp_path / "file" / "job")).take()


def test_a_job_keeps_its_folders_until_it_ends(tmp_path: Path) -> None:
    """W-19: jobs that dump into one folder in turn never met, and removed each other's."""
    places = [LocalStorage(tmp_path / f"step{number}") for number in range(MOST_FOLDERS + 1)]
    one, two = JobFolders(), JobFolders()
    for place in places:
        with sole_writer(place, one):
            pass
    with sole_writer(places[-1], one):  # its own
        pass
    for place in places[1:]:
        with pytest.raises(CheckpointError, match="is writing here"):
            two.take(place)
    two.take(places[0])  # it held as many as it may, and this was the first
    one.release()
    two.take(places[-1])
    two.release()
    two.release()
    assert not list(tmp_path.rglob(NAME))


def test_object_stores_take_no_folders_place(tmp_path: Path) -> None:
    one = JobFolders()
    one.take(LocalStorage(tmp_path))
    for number in range(MOST_FOLDERS + 1):
        one.take(open_storage(f"memory://job/step{number}"))
    with pytest.raises(CheckpointError, match="is writing here"):
        JobFolders().take(LocalStorage(tmp_path))
    one.release()


def test_a_job_that_nobody_knows_any_more_keeps_no_folder(tmp_path: Path) -> None:
    one, two = JobFolders(), JobFolders()
    one.take(LocalStorage(tmp_path))
    with pytest.raises(CheckpointError, match=r"it is this process: if .* not left"):
        two.take(LocalStorage(tmp_path))
    del one
    gc.collect()
    two.take(LocalStorage(tmp_path))
    two.release()
    assert not list(tmp_path.iterdir())


def test_a_forked_child_holds_no_folder_of_its_parent(tmp_path: Path) -> None:
    """Such as a worker of torch's DataLoader, which may outlive a killed trainer."""
    script = (
        "import os, sys\n"
        "from persia._files.storage import LocalStorage\n"
        "from persia._files.writer_lock import JobFolders\n"
        "job = JobFolders()\n"
        "job.take(LocalStorage(sys.argv[1]))\n"
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
        lock.take()
        lock.release()


def test_a_folder_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    """Nobody else's lock is let go of for it."""
    place = LocalStorage(tmp_path / "job")
    one, two = WriterLock(place), WriterLock(place)
    one.take()
    shutil.rmtree(tmp_path / "job")
    two.take()
    with pytest.raises(CheckpointError, match="is writing here"):
        one.take()
    one.release()
    assert (tmp_path / "job" / NAME).is_file()
    two.release()
    one.take()
    shutil.rmtree(tmp_path / "job")
    one.take()
    assert (tmp_path / "job" / NAME).is_file()
    one.release()


def test_nobody_is_kept_out_of_an_object_store() -> None:
    with (
        sole_writer(open_storage("memory://locks")),
        sole_writer(open_storage("memory://locks")),
    ):
        pass


@pytest.mark.parametrize("failure", ["error", "power"])
def test_what_a_failed_dump_wrote_is_removed(failure: str) -> None:
    """Whatever fails: afterwards the checkpoint is there whole, or nothing of it is."""
    fail_at = 0
    while True:
        disk = Disk()
        storage = LocalStorage("/data", disk)
        first = dump(storage, ROWS, num_servers=1).id
        before = storage.list()
        disk.arm(fail_at, "error")
        try:
            dump(storage, ROWS, num_servers=1)
        except CheckpointError:
            pass
        else:
            break
        disk.arm(-1, None)
        (left,) = {name.partition(".")[0] for name in storage.list()} - {first} or {""}
        if left:
            if failure == "power":
                disk.arm(fail_at % 4, "power")  # while it is removed
            try:
                assert discard(storage, left)
            except PowerFailure:
                disk.restart(random.Random(fail_at))
                for identity in ids(storage):
                    assert set(storage.list(identity)) >= {"dense.pt", "server0"}
                assert discard(storage, left)
            disk.arm(-1, None)
        assert storage.list() == before
        fail_at += 1
    assert fail_at > 10


def test_a_rewrite_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalStorage(tmp_path / "from")
    dump(source, ROWS)
    real = LocalStorage.write

    def write(storage: LocalStorage, path: str, buffers: object) -> None:
        if path.endswith("dense.pt"):
            raise CheckpointError("No space left on device")
        real(storage, path, buffers)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "write", write)
    with pytest.raises(CheckpointError, match="No space"):
        rewrite(source, LocalStorage(tmp_path / "to"))
    assert list((tmp_path / "to").iterdir()) == []
