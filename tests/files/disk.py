"""A disk that fails: module ``os`` over memory, as far as LocalStorage uses it.

What was written is not on the disk before it was fsynced, and what was named not before its
folder was. At a power failure every name that is not durable yet is there or not, each for
itself, and a file has any prefix of what was written to it: harsher than any file system.
What goes past its cache has to begin and end with blocks, or is refused; of each file as many
bytes are in it as the test says, and none by default.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

# Of what goes past the cache; a disk's is 512 or 4096.
BLOCK_BYTES = 512
# Bytes of each move past the cache, of any disk.
PAST_CACHE: list[int] = []


class PowerFailure(BaseException):
    """The machine is off. Nothing of ours may catch this."""


@dataclass
class FakeFile:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class FakeFolder:
    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node = FakeFile | FakeFolder


def error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class Disk:
    def __init__(self) -> None:
        self._root = FakeFolder()
        self._open: dict[int, Node] = {}
        self._direct: set[int] = set()
        self._lock = threading.Lock()
        self.operations = 0
        self.fail_at = -1
        self.failure: str | None = None  # "power" or "error"
        self.is_off = False
        self.num_cached = 0  # of each file, from its beginning
        self.from_cache: list[int] = []  # bytes of each read that was in the cache

    # --- what tests do ---

    def arm(self, fail_at: int, failure: str | None) -> None:
        """Fail at an operation that changes something, counted from now."""
        self.operations, self.fail_at, self.failure = 0, fail_at, failure

    def restart(self, rng: random.Random) -> None:
        """Come back with what is durable, and some of what is not."""
        self.is_off = False
        self.arm(-1, None)
        self._open.clear()
        self._direct.clear()
        self._settle(self._root, rng)

    def _settle(self, folder: FakeFolder, rng: random.Random) -> None:
        for name in sorted(folder.names.keys() | folder.durable.keys()):
            node = rng.choice([folder.names.get(name), folder.durable.get(name)])
            folder.names.pop(name, None)
            if node is not None:
                folder.names[name] = node
        folder.durable = dict(folder.names)
        for node in folder.names.values():
            if isinstance(node, FakeFolder):
                self._settle(node, rng)
            elif bytes(node.data) != node.durable:
                end = rng.choice([len(node.data), rng.randint(0, len(node.data))])
                node.data = bytearray(rng.choice([node.durable, bytes(node.data[:end])]))
                node.durable = bytes(node.data)

    # --- what LocalStorage calls ---

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            folder, name = self._parent(path)
            node: Node | None = self._root if name == "" else folder.names.get(name)
            if flags & os.O_CREAT:
                if node is not None:
                    raise error(errno.EEXIST, path)
                self._change()
                node = folder.names[name] = FakeFile()
            if node is None:
                raise error(errno.ENOENT, path)
            descriptor = max(self._open, default=2) + 1
            self._open[descriptor] = node
            if flags & getattr(os, "O_DIRECT", 0):
                self._direct.add(descriptor)
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            self._open.pop(descriptor, None)
            self._direct.discard(descriptor)

    def fstat(self, descriptor: int) -> SimpleNamespace:
        size = len(self._file(descriptor).data)
        return SimpleNamespace(st_size=size, st_dev=os.makedev(8, 1), st_mode=stat.S_IFREG)

    def preadv(
        self, descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0
    ) -> int:
        (buffer,) = buffers
        most = self._at_once(descriptor, buffers, offset) or 100
        if flags:
            most = self.num_cached - offset
            if most <= 0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            self.from_cache.append(min(len(buffer), most))
        data = self._file(descriptor).data[offset : offset + min(len(buffer), most)]
        buffer[: len(data)] = data
        return len(data)

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            file = self._file(descriptor)
            data = b"".join(buffers)
            data = data[: self._at_once(descriptor, buffers, offset) or 150]
            try:
                self._change()
            except BaseException:
                self._put(file, data[: len(data) // 2], offset)
                raise
            self._put(file, data, offset)
            return len(data)

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            self._change()
            node = self._open[descriptor]
            if isinstance(node, FakeFile):
                node.durable = bytes(node.data)
            else:
                node.durable = dict(node.names)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            folder, name = self._parent(source)
            into, new = self._parent(target)
            self._change()
            into.names[new] = folder.names.pop(name)

    def mkdir(self, path: Path) -> None:
        with self._lock:
            folder, name = self._parent(path)
            if name in folder.names:
                raise error(errno.EEXIST, path)
            self._change()
            folder.names[name] = FakeFolder()

    def unlink(self, path: Path) -> None:
        self._remove(path, errno.EISDIR, lambda node: isinstance(node, FakeFolder))

    def rmdir(self, path: Path) -> None:
        self._remove(path, errno.ENOTEMPTY, lambda node: bool(node.names))

    def _remove(self, path: Path, number: int, is_refused: Callable[[Any], bool]) -> None:
        with self._lock:
            folder, name = self._parent(path)
            if name not in folder.names:
                raise error(errno.ENOENT, path)
            if is_refused(folder.names[name]):
                raise error(number, path)
            self._change()
            del folder.names[name]

    def listdir(self, path: Path) -> list[str]:
        with self._lock:
            return list(self._folder(path).names)

    # --- inside ---

    def _change(self) -> None:
        if self.is_off:
            raise PowerFailure
        self.operations += 1
        if self.operations - 1 == self.fail_at and self.failure == "error":
            raise OSError(errno.EIO, "Input/output error")
        if self.operations - 1 == self.fail_at and self.failure == "power":
            self.is_off = True
            raise PowerFailure

    def _put(self, file: FakeFile, data: bytes, offset: int) -> None:
        assert offset <= len(file.data), "a hole"
        file.data[offset : offset + len(data)] = data

    def _at_once(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        """What is moved by one call past the cache; 0 through it."""
        if descriptor not in self._direct:
            return 0
        for view in buffers:
            address = np.frombuffer(view, np.uint8).ctypes.data
            if (address | len(view) | offset) % BLOCK_BYTES:
                raise OSError(errno.EINVAL, "Invalid argument")
            PAST_CACHE.append(len(view))
        return 2 * BLOCK_BYTES

    def _file(self, descriptor: int) -> FakeFile:
        node = self._open[descriptor]
        assert isinstance(node, FakeFile)
        return node

    def _parent(self, path: Path) -> tuple[FakeFolder, str]:
        return self._folder(path.parent), path.name

    def _folder(self, path: Path) -> FakeFolder:
        node: Node = self._root
        for name in path.parts[1:]:
            if not isinstance(node, FakeFolder):
                raise error(errno.ENOTDIR, path)
            if name not in node.names:
                raise error(errno.ENOENT, path)
            node = node.names[name]
        if isinstance(node, FakeFile):
            raise error(errno.ENOTDIR, path)
        return node
