"""Who writes into a folder: one job.

Two jobs that dump into one folder would remove each other's checkpoints. So whoever writes has
a file there locked, and what it says tells the second one who that is:

    <folder>/writer.lock     {"host": "a", "pid": 4711, "since": "2026-11-21T09:30:00.000000Z"}

A job that trains has it from its first dump there until it ends, as both would seem to be alone
if they dumped in turn; a command has it while it writes.

The lock is the kernel's (``flock``): it ends with the process, however that ends, so a file
that nobody has locked is stale, and is taken over. A process that a writer forks is no writer,
and closes what it was given: it may live longer. The lock holds between machines where their
file system has such locks (NFS does). Where it has none, and in object stores, nobody is kept
out: there a folder for each job is up to the user.
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

from persia._files.manifest import now
from persia._files.storage import LocalStorage, Storage, failed
from persia.errors import CheckpointError
from persia.logger import get_logger

_logger = get_logger("persia.checkpoints")

NAME = "writer.lock"
# That one job keeps others out of.
MOST_FOLDERS = 8
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Descriptors that are or become locks of this process.
_open: set[int] = set()


class WriterLock:
    """One writer's hold of a folder, from ``take`` to ``release``; either may come again."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._held: tuple[Path, int, int] | None = None  # file, its descriptor, whose

    def is_of(self, storage: Storage) -> bool:
        """Whether it is of this folder."""
        return self._storage.is_same(storage)

    def take(self) -> None:
        """Be the one writer of the folder.

        Raises:
            CheckpointError: If somebody else is; says who. Or if the folder cannot be made.
        """
        if not isinstance(self._storage, LocalStorage) or self._holds():
            return
        self.release()  # what somebody has removed, with the folder perhaps
        folder = Path(self._storage.url)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise failed("make the folder", self._storage.url, exc) from exc
        try:
            descriptor = None
            while descriptor is None:
                descriptor = self._locked(folder / NAME)
        except CheckpointError:
            raise
        except OSError as exc:
            raise failed("lock", self._storage.at(NAME), exc) from exc
        self._held = folder / NAME, descriptor, os.getpid()

    def _locked(self, path: Path) -> int | None:
        """Return the file, locked, or None if its owner has just removed it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _open.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _owner(os.pread(descriptor, 4096, 0))
                advice = "give each job a folder of its own"
                if _is_own(descriptor):
                    advice += (
                        "; it is this process: if that was a TrainCtx that was not left, as in "
                        "a notebook's cell that ran before, leave it (its __exit__)"
                    )
                raise CheckpointError(
                    f"{self._storage.url}: {owner} is writing here: expected one writer; "
                    f"{advice}"
                ) from None
            except OSError as exc:
                if exc.errno not in _NO_LOCKS:
                    raise
                _logger.debug("%s: no locks here: %s", path, exc)
            if not os.fstat(descriptor).st_nlink:
                _close(descriptor)
                return None
            mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": now()}
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # a full disk: the dump will say so
                os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        except BaseException:
            _close(descriptor)
            raise
        return descriptor

    def _holds(self) -> bool:
        """Whether the folder's file is the one that is locked here."""
        return self._held is not None and _is_there(*self._held)

    def release(self) -> None:
        """Let others write. The file goes first: whoever waits for it finds it gone."""
        held, self._held = self._held, None
        if held is None or held[2] != os.getpid():
            return  # a forked child has closed it
        if _is_there(*held):  # or it is another writer's by now
            with suppress(OSError):
                held[0].unlink()
        _close(held[1])


def _is_there(path: Path, descriptor: int, pid: int) -> bool:
    """Whether a file is the one that was locked, by this process."""
    try:
        return pid == os.getpid() and os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _close(descriptor: int) -> None:
    _open.discard(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    """Close what a forked child was given; it stays locked by the parent."""
    while _open:
        with suppress(OSError):
            os.close(_open.pop())


os.register_at_fork(after_in_child=_close_all)


def _is_own(descriptor: int) -> bool:
    """Whether it is this process that has a file open elsewhere, too."""
    sought = os.fstat(descriptor)
    for other in _open - {descriptor}:
        with suppress(OSError):  # closed just now
            if os.path.samestat(os.fstat(other), sought):
                return True
    return False


class JobFolders:
    """The folders that a job has dumped into: nobody else's until it, or this object, ends.

    Of a job that makes a new one for each dump the last few, as each costs a descriptor; those
    in object stores, where nobody is kept out, are none of them. Any thread may call it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards the next
        self._locks: list[WriterLock] = []  # the one used last is the last
        end = weakref.finalize(self, _release_all, self._locks)
        end.atexit = False  # a dump may be under way, and the kernel does it

    def take(self, storage: Storage) -> None:
        """Keep others out of a folder.

        Raises:
            CheckpointError: If somebody else is its writer; says who.
        """
        if not isinstance(storage, LocalStorage):
            return
        with self._guard:
            held = next((one for one in self._locks if one.is_of(storage)), None)
            lock = held or WriterLock(storage)
            lock.take()
            if held is not None:
                self._locks.remove(lock)
            self._locks.append(lock)
            while len(self._locks) > MOST_FOLDERS:
                self._locks.pop(0).release()

    def release(self) -> None:
        """Let others write into all of them."""
        with self._guard:
            _release_all(self._locks)


def _release_all(locks: list[WriterLock]) -> None:
    while locks:
        locks.pop().release()


def _owner(data: bytes) -> str:
    try:
        found = json.loads(data)
        return f"process {found['pid']} of host {found['host']} (since {found['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


@contextmanager
def sole_writer(storage: Storage, job: JobFolders | None = None) -> Iterator[None]:
    """Be the one writer of a folder meanwhile; as part of a job, until that ends.

    Raises:
        CheckpointError: If somebody else is; says who.
    """
    if job is not None:
        job.take(storage)
        yield
        return
    lock = WriterLock(storage)
    lock.take()
    try:
        yield
    finally:
        lock.release()
