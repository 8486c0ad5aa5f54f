"""Who writes into a folder: one job.

Two jobs that dump into one folder would remove each other's checkpoints. So whoever writes has
a file there locked, and what it says tells the second one who that is:

    <folder>/writer.lock     {"host": "a", "pid": 4711, "since": "2026-11-21T09:30:00.000000Z"}

A job that trains has it from its first dump there until it ends, as both would seem to be alone
if they dumped in turn; a command has it while it writes.

The lock is the kernel's (``flock``): it ends with the process, however that ends, so a file
that nobody has locked is stale, and is taken over. It holds between machines where their file
system has such locks (NFS does). Where it has none, and in object stores, nobody is kept out:
there a folder for each job is up to the user.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
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


class WriterLock:
    """One writer's hold of a folder, from ``take`` to ``release``; either may come again."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._descriptor: int | None = None

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
            while self._descriptor is None:
                self._descriptor = self._locked(folder / NAME)
        except CheckpointError:
            raise
        except OSError as exc:
            raise failed("lock", self._storage.at(NAME), exc) from exc

    def _locked(self, path: Path) -> int | None:
        """Return the file, locked, or None if its owner has just removed it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _owner(os.pread(descriptor, 4096, 0))
                raise CheckpointError(
                    f"{self._storage.url}: {owner} is writing here: expected one writer; give "
                    "each job a folder of its own"
                ) from None
            except OSError as exc:
                if exc.errno not in _NO_LOCKS:
                    raise
                _logger.debug("%s: no locks here: %s", path, exc)
            if not os.fstat(descriptor).st_nlink:
                os.close(descriptor)
                return None
            mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": now()}
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # a full disk: the dump will say so
                os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _holds(self) -> bool:
        """Whether the folder's file is the one that is locked here."""
        if self._descriptor is None:
            return False
        try:
            there = Path(self._storage.url, NAME).stat()
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._descriptor), there)

    def release(self) -> None:
        """Let others write. The file goes first: whoever waits for it finds it gone."""
        is_there = self._holds()  # or it is another writer's by now
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if is_there:
            with suppress(OSError):
                Path(self._storage.url, NAME).unlink()
        os.close(descriptor)


class JobFolders:
    """The folders that a job has dumped into: nobody else's until it ends.

    Of a job that makes a new one for each dump the last few, as each costs a descriptor. Any
    thread may call it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards the next
        self._locks: list[WriterLock] = []  # the one used last is the last

    def take(self, storage: Storage) -> None:
        """Keep others out of a folder.

        Raises:
            CheckpointError: If somebody else is its writer; says who.
        """
        with self._guard:
            held = next((one for one in self._locks if one.is_of(storage)), None)
            lock = held or WriterLock(storage)
            lock.take()
            self._locks = [*(one for one in self._locks if one is not lock), lock]
            while len(self._locks) > MOST_FOLDERS:
                self._locks.pop(0).release()

    def release(self) -> None:
        """Let others write into all of them."""
        with self._guard:
            while self._locks:
                self._locks.pop().release()


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
