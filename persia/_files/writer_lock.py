"""One job writes into a folder of checkpoints at a time.

    <folder>/writer.lock     {"host": "a", "pid": 4711, "since": "2026-11-21T09:30:00.000000Z"}

A job that trains holds the lock of this file, which names it for others, from its first dump
there until it ends; a command holds it while it writes. The lock is the kernel's (``flock``):
it ends with the process, so a file that is not locked is stale, and is taken over. A forked
child is no writer: it closes the descriptor that it inherited, since it may outlive its parent.
Where a file system has no such locks, and in object stores, nothing is locked: each job then
needs a folder of its own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from persia._files.manifest import now
from persia._files.storage import LocalStorage, Storage
from persia.errors import CheckpointError
from persia.logger import get_logger

_logger = get_logger("persia.checkpoints")

NAME = "writer.lock"
# Most folders that one job keeps locked; each costs a descriptor.
MAX_FOLDERS = 8
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Descriptors of this process that are locks or are becoming locks.
_descriptors: set[int] = set()


class WriterLock:
    """The lock of one folder, from ``acquire`` to ``release``; both may be repeated."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._held: tuple[Path, int, int] | None = None  # file, descriptor, process

    def acquire(self) -> None:
        """Become the one writer of the folder."""
        if not isinstance(self.storage, LocalStorage):
            return
        if self._held is not None and _is_there(*self._held):
            return
        self.release()  # the file was removed, perhaps with the folder
        folder = Path(self.storage.url)
        with self.storage.failing("make the folder", ""):
            folder.mkdir(parents=True, exist_ok=True)
        with self.storage.failing("lock", NAME):
            while (descriptor := self._lock(folder / NAME)) is None:
                pass
        self._held = folder / NAME, descriptor, os.getpid()

    def release(self) -> None:
        """Let others write. The file goes first, so that a waiting writer finds it gone."""
        held, self._held = self._held, None
        if held is None or held[2] != os.getpid():
            return  # a forked child has closed it
        if _is_there(*held):  # or it is another writer's by now
            with suppress(OSError):
                held[0].unlink()
        _close(held[1])

    def _lock(self, path: Path) -> int | None:
        """Return the locked file, or None if its owner has just removed it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _descriptors.add(descriptor)
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": now()}
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = _explain(os.pread(descriptor, 4096, 0), mine)
                raise CheckpointError(f"{self.storage.url}: {text}") from None
            except OSError as exc:
                if exc.errno not in _NO_LOCKS:
                    raise
                _logger.debug("%s: no locks here: %s", path, exc)
            if not os.fstat(descriptor).st_nlink:
                _close(descriptor)
                return None
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # a full disk: the dump will report it
                os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        except BaseException:
            _close(descriptor)
            raise
        return descriptor


def _explain(note: bytes, mine: dict[str, Any]) -> str:
    """Return the error of a folder that the writer of a note has locked."""
    owner, advice = "another process", "give each job a folder of its own"
    with suppress(ValueError, KeyError, TypeError):  # a note that is being written
        found = json.loads(note)
        owner = f"process {found['pid']} of host {found['host']} (since {found['since']})"
        if (found["pid"], found["host"]) == (mine["pid"], mine["host"]):
            advice += (
                "; it is this process: if that was a TrainCtx that was not left, as in a "
                "notebook's cell that ran before, leave it (its __exit__)"
            )
    return f"{owner} is writing here: expected one writer; {advice}"


def _is_there(path: Path, descriptor: int, pid: int) -> bool:
    """Whether a file is the one that was locked, by this process."""
    try:
        return pid == os.getpid() and os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    """Close the locks that a forked child inherited; the parent keeps them locked."""
    while _descriptors:
        with suppress(OSError):
            os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_all)


class JobFolders:
    """The folders that a job has dumped into: locked until it, or this object, ends.

    The last few, if a job makes a new one for each dump. Thread-safe.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards the next
        self._locks: dict[str, WriterLock] = {}  # by folder; the last used is the last
        end = weakref.finalize(self, _release_all, self._locks)
        end.atexit = False  # a dump may be under way, and the kernel releases locks

    def acquire(self, storage: Storage) -> None:
        if not isinstance(storage, LocalStorage):
            return
        place = os.path.realpath(storage.url)
        with self._guard:
            lock = self._locks.get(place) or WriterLock(storage)
            lock.acquire()
            self._locks.pop(place, None)
            self._locks[place] = lock
            while len(self._locks) > MAX_FOLDERS:
                self._locks.pop(next(iter(self._locks))).release()

    def release(self) -> None:
        """Let others write into all of them."""
        with self._guard:
            _release_all(self._locks)


def _release_all(locks: dict[str, WriterLock]) -> None:
    while locks:
        _, lock = locks.popitem()
        lock.release()


@contextmanager
def sole_writer(storage: Storage, job: JobFolders | None = None) -> Iterator[None]:
    """Hold the lock of a folder inside; as part of a job, until that ends."""
    if job is not None:
        job.acquire(storage)
        yield
        return
    lock = WriterLock(storage)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()
