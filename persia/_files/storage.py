"""Files of a folder of this machine, and what every storage promises.

A storage is one folder and paths below it, with ``/`` between their parts. It promises:

    write      a new file; durable once ``sync`` of its folder has returned
    publish    a small file, whole or not at all after any crash; durable on return

Locally a file is durable when it and the folder that names it are fsynced, and published when
it is renamed into place. What fails is a ``CheckpointError`` that names the path.

Buffers that are aligned to a block are read and written past the page cache (O_DIRECT) where
the file system allows it: the copy into the cache would cost more than the rest of the work on
a row, and would evict pages that other processes need.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import CheckpointError, PersiaError

# Addresses, offsets and lengths of O_DIRECT are multiples of it.
BLOCK_BYTES = 4096
# Pages of this size spare most misses of the TLB.
_HUGE_BYTES = 2 << 20


class BufferPool:
    """Gives out buffers and keeps those that return; thread-safe."""

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialised bytes that begin with a block."""
        held = self._find(num_bytes)
        whole = np.frombuffer(held, np.uint8)
        # Views keep ``whole`` alive as their base. The finalizer may run in any thread at any
        # time, even inside ``_find``: deque.append takes no lock.
        end = weakref.finalize(whole, self._free.append, held)
        end.atexit = False
        return whole[:num_bytes]

    def _find(self, num_bytes: int) -> mmap.mmap:
        for _ in range(len(self._free)):
            try:
                held = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if num_bytes <= len(held) <= 2 * max(num_bytes, _HUGE_BYTES):
                return held
            # Of another size than is needed now: it is unmapped, and a new one replaces it.
        size = max(-(-num_bytes // _HUGE_BYTES), 1) * _HUGE_BYTES
        try:
            held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise CheckpointError(
                f"memory for files: expected {size} bytes of the system, got: {exc}"
            ) from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without them says that it is invalid
                held.madvise(mmap.MADV_HUGEPAGE)
        return held


Buffer = bytes | memoryview

# Bytes of one system call: during a longer copy a processor runs nothing else.
AT_ONCE = 2 << 20
# Below this size the page cache is as fast.
_DIRECT_BYTES = 256 << 10


class FileReader(ABC):
    """An open file."""

    size: int  # bytes

    @abstractmethod
    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        """Fill ``target`` from the file's bytes at ``offset``."""


class Storage(ABC):
    """One folder of files; any thread may call it."""

    url: str  # of the folder, for messages too
    # Called between pieces of a file, by the thread that writes or reads it.
    on_progress: Callable[[], object] = staticmethod(bool)
    # Bytes to read at a time, which have a file's header: a piece is hashed while it is in the
    # cache, and beside requests the pages that it fills are not too many at once.
    read_bytes: int = 512 << 10

    _errors: type[Exception] = OSError  # of what is below

    @abstractmethod
    def write(self, path: str, buffers: Iterable[Buffer]) -> None:
        """Write a file that is not there yet, and the folders above it.

        A buffer is not used after the next one is requested.
        """

    @abstractmethod
    def sync(self, folder: str) -> None:
        """Make durable which files are in a folder."""

    @abstractmethod
    def publish(self, path: str, data: bytes) -> None:
        """Write a whole file or none, in place of one that may be there."""

    @abstractmethod
    def open(self, path: str) -> Any:
        """Return a context that gives a ``FileReader``."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file for good, if it is there."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Remove a folder and what is in it, if it is there."""

    def read(self, path: str, max_bytes: int) -> NDArray[np.uint8]:
        """Return a whole file of at most ``max_bytes``."""
        with self.open(path) as reader:
            if reader.size > max_bytes:
                raise CheckpointError(
                    f"{self.at(path)}: expected at most {max_bytes} bytes, got {reader.size}"
                )
            data = np.empty(reader.size, np.uint8)
            reader.read_into(data, 0)
        return data

    def size(self, path: str) -> int:
        """Return the bytes of a file."""
        with self.open(path) as reader:
            return int(reader.size)

    def is_same(self, other: Storage) -> bool:
        """Whether it is the same folder, as far as its URL says."""
        return self.url.rstrip("/") == other.url.rstrip("/")

    def at(self, path: str) -> str:
        """Return the path with the folder's URL, for messages."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    @contextmanager
    def failing(self, verb: str, path: str) -> Iterator[None]:
        """Say inside what cannot be done, and to which path."""
        try:
            yield
        except CheckpointError:
            raise
        except self._errors as exc:
            reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            error = CheckpointError(f"{self.at(path)}: cannot {verb}: {reason}")
            error.errno = getattr(exc, "errno", None)  # callers look for ENOSPC
            raise error from exc


class _Descriptors:
    """A file that is open through the page cache, and past it where that can be."""

    def __init__(self, system: Any, path: Path, flags: int) -> None:
        self._system = system
        self._path = path
        self._flags = flags & ~(os.O_CREAT | os.O_EXCL)  # a file is made once
        self.cached: int = system.open(path, flags, 0o666)
        self._direct: int | None = None
        self._is_tried = False

    def close(self) -> None:
        self._system.close(self.cached)
        if self._direct is not None:
            self._system.close(self._direct)

    def transfer(
        self, view: memoryview, offset: int, move: Callable[[int, memoryview, int], int]
    ) -> int:
        """Read or write one piece, past the page cache if it can; returns how many bytes."""
        blocks = len(view) - len(view) % BLOCK_BYTES
        if blocks >= _DIRECT_BYTES and not (offset | _address(view)) % BLOCK_BYTES:
            descriptor = self._direct_descriptor()
            if descriptor is not None:
                try:
                    return move(descriptor, view[:blocks], offset)
                except OSError as exc:
                    if exc.errno != errno.EINVAL:
                        raise
                    # Some file systems open files with O_DIRECT but do no such transfer.
                    self._system.close(descriptor)
                    self._direct = None
        return move(self.cached, view[:AT_ONCE], offset)

    def _direct_descriptor(self) -> int | None:
        if not self._is_tried:
            self._is_tried = True
            # Device major 0 is tmpfs, NFS or an overlay, which gain nothing from O_DIRECT.
            if hasattr(os, "O_DIRECT") and os.major(self._system.fstat(self.cached).st_dev):
                with suppress(OSError):
                    self._direct = self._system.open(self._path, self._flags | os.O_DIRECT)
        return self._direct


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class _LocalReader(FileReader):
    def __init__(self, system: Any, file: _Descriptors, name: str) -> None:
        self._system = system
        self._file = file
        self._name = name
        status = system.fstat(file.cached)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name}: expected a file, got a folder, pipe or device")
        self.size = status.st_size

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        view = target.data
        while view:
            count = self._file.transfer(view, offset, self._read)
            if count == 0:
                raise CheckpointError(f"{self._name}: ends after {offset} bytes")
            view, offset = view[count:], offset + count

    def _read(self, descriptor: int, piece: memoryview, offset: int) -> int:
        read: Callable[..., int] = self._system.preadv
        if descriptor != self._file.cached and hasattr(os, "RWF_NOWAIT"):
            with suppress(OSError):  # not in memory; where it is, that is faster than a disk
                return read(self._file.cached, [piece], offset, os.RWF_NOWAIT)
        return read(descriptor, [piece], offset)


class LocalStorage(Storage):
    """A folder of this machine; ``system`` is module ``os``, or in tests a disk that fails."""

    def __init__(self, folder: str | os.PathLike[str], system: Any = os) -> None:
        self.url = os.fspath(folder)
        self._root = Path(self.url)
        self._system = system

    def write(self, path: str, buffers: Iterable[Buffer]) -> None:
        """Write a file that is not there yet, and fsync it."""
        with self.failing("write", path):
            self._make_folder((self._root / path).parent)
            self._write_new(self._root / path, buffers)

    def sync(self, folder: str) -> None:
        """Make durable which files are in a folder, and the folder itself."""
        with self.failing("sync", folder):
            self._sync_folder(self._root / folder)

    def publish(self, path: str, data: bytes) -> None:
        """Write aside, fsync, rename, fsync the folder."""
        target = self._root / path
        aside = target.with_name(f"{target.name}.tmp")
        with self.failing("publish", path):
            self._make_folder(target.parent)
            with suppress(FileNotFoundError):  # left by a process that died here
                self._system.unlink(aside)
            try:
                self._write_new(aside, [data])
                self._system.rename(aside, target)
            except OSError:
                with suppress(OSError):
                    self._system.unlink(aside)
                raise
            self._sync_folder(target.parent)

    @contextmanager
    def open(self, path: str) -> Iterator[FileReader]:
        with self.failing("read", path):
            # O_NONBLOCK: opening a pipe without a writer would block.
            file = _Descriptors(self._system, self._root / path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with self.failing("read", path):
                yield _LocalReader(self._system, file, self.at(path))
        finally:
            file.close()

    def list(self, folder: str = "") -> list[str]:
        with self.failing("list", folder):
            try:
                return sorted(self._system.listdir(self._root / folder))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def is_same(self, other: Storage) -> bool:
        return isinstance(other, LocalStorage) and self._root.resolve() == other._root.resolve()

    def remove(self, path: str) -> None:
        """Unlink a file and fsync its folder: it does not come back."""
        with self.failing("remove", path):
            try:
                self._system.unlink(self._root / path)
            except FileNotFoundError:
                return
            self._sync_folder((self._root / path).parent)

    def remove_folder(self, path: str) -> None:
        """Unlink what is in a folder, then the folder; can be repeated after a crash."""
        with self.failing("remove", path):
            self._remove_tree(self._root / path)

    def _remove_tree(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # another process removes it too
            try:
                self._system.unlink(path)  # of a link not what it leads to
                return
            except (IsADirectoryError, PermissionError):  # a folder, on Linux and macOS
                names = self._system.listdir(path)
            for name in names:
                self._remove_tree(path / name)
            self._system.rmdir(path)

    def _write_new(self, path: Path, buffers: Iterable[Buffer]) -> None:
        file = _Descriptors(self._system, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            offset = 0
            for buffer in buffers:
                view = memoryview(buffer)
                while view:  # a disk that is nearly full takes a part
                    count = file.transfer(view, offset, self._put)
                    self.on_progress()
                    view, offset = view[count:], offset + count
            self._system.fsync(file.cached)
        finally:
            file.close()

    def _put(self, descriptor: int, piece: memoryview, offset: int) -> int:
        return int(self._system.pwritev(descriptor, [piece], offset))

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and those above it; each is named durably by the one above."""
        try:
            self._system.mkdir(folder)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make_folder(folder.parent)
            with suppress(FileExistsError):  # by another server
                self._system.mkdir(folder)
        self._sync_folder(folder.parent)

    def _sync_folder(self, folder: Path) -> None:
        descriptor = self._system.open(folder, os.O_RDONLY)
        try:
            self._system.fsync(descriptor)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # a file system without fsync of folders
                raise
        finally:
            self._system.close(descriptor)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Make a local file, written by ``write``, appear whole or not at all."""
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        aside = Path(name)
        write(aside)
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    except PersiaError:  # of what is written, not of the file
        raise
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"{path} cannot be written: {exc}") from exc
    finally:
        if aside is not None:
            aside.unlink(missing_ok=True)
