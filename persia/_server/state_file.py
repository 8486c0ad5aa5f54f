"""The file in which an embedding-parameter-server outlives its process.

    0        MAGIC, layout, how many shards
    4 KiB    the control page: a word that the core sets when the file is void
    8 KiB    notes, twice: | number u64 | length u64 | checksum 16 | JSON |
    4 MiB    lookups that came lately (``row_policies``)
    8 MiB    updates under way and applied (``update_record``)
    4 GiB    the shards; see ``persia._core.shard.persistent_shard``

The file lies in a tmpfs. It is as long as all that could ever be in it, 128 GiB a shard, and
takes the memory of what is in it. Nobody else may read it, one process at a time has it locked,
and its name says whose it is: the same server, at the same address, of the same supervisor. So
a process that is started again finds its rows, and the next job does not.

Notes are what is read as a whole: the facts without which the rows would mean something else,
settings and optimizer. The newer of the two with a right checksum counts, so that a note that
was cut short is not one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)

MAGIC = b"PERSIA-ROWS\0\0\0\0\0"
LAYOUT = 1

_CONTROL = 4096
_NOTES = (8192, 8192 + (1 << 20))
_NOTE = struct.Struct("<QQ16s")
RECENT = 4 << 20
UPDATES = 8 << 20
_SHARDS = 1 << 32
_SHARD_BYTES = 1 << 37
_MAPPED = 256 << 20
_PREFIX, _SUFFIX = "persia-", ".rows"

# Seconds that the process before may still be giving its memory back.
_PATIENCE_S = 20.0

Parent = tuple[str, int, int]


class StateFile:
    """A server's own file, open and locked. Any thread may write notes.

    Args:
        path: The file; made if there is none.
        num_shards: Of the store.
        parent: The process that would start this server again, if it is known.

    Raises:
        ConfigError: If another process has it.
        OSError: If it cannot be made, or there is no memory for it.
    """

    def __init__(self, path: Path, num_shards: int, parent: Parent | None = None) -> None:
        self.path = path
        self.num_shards = num_shards
        self._parent = parent
        self.descriptor = _locked(path)
        try:
            self.why_not = self._why_not_ours()
            if self.why_not == "":
                os.ftruncate(self.descriptor, _SHARDS + num_shards * _SHARD_BYTES)
                for place in _NOTES:
                    os.posix_fallocate(self.descriptor, place, _NOTE.size)
                os.pwrite(self.descriptor, MAGIC + struct.pack("<QQ", LAYOUT, num_shards), 0)
            size = min(os.fstat(self.descriptor).st_size, _MAPPED)
            if size < _NOTES[1] + (1 << 20):
                self.why_not = self.why_not or "it is cut short"
                os.ftruncate(self.descriptor, _NOTES[1] + (1 << 20))
                size = _NOTES[1] + (1 << 20)
            self._memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._control = self.array(_CONTROL, 1)
        self._number, self._notes = _newest_note(self.descriptor)
        if self.why_not is None and self._control[0]:
            self.why_not = "it had run out of memory before the process ended"
        if self.why_not is None and not self._notes:
            self.why_not = "neither of its notes is whole"

    def _why_not_ours(self) -> str | None:
        """Say why there is nothing to be read here; "" if that is because it is new."""
        head = os.pread(self.descriptor, len(MAGIC) + 16, 0)
        if not head:
            return ""
        if len(head) < len(MAGIC) + 16 or not head.startswith(MAGIC):
            return "it is not a state file"
        layout, num_shards = struct.unpack("<QQ", head[len(MAGIC) :])
        if layout != LAYOUT:
            return f"layout: expected {LAYOUT}, got {layout}"
        if num_shards != self.num_shards:
            return f"num_hashmap_internal_shards: expected {self.num_shards}, got {num_shards}"
        size = os.fstat(self.descriptor).st_size
        if size != _SHARDS + num_shards * _SHARD_BYTES:
            return f"its length: expected {_SHARDS + num_shards * _SHARD_BYTES}, got {size}"
        return None

    @property
    def is_void(self) -> bool:
        """Whether what it holds is not whole any more."""
        return bool(self._control[0])

    def make_void(self) -> None:
        """Have no process read it again; its name goes, its memory with this process."""
        self._control[0] = 1
        self.remove()

    def back(self, offset: int, num_bytes: int) -> bool:
        """Have memory for bytes before they are touched; if there is none, it is void."""
        if not self.is_void:
            try:
                os.posix_fallocate(self.descriptor, offset, num_bytes)
                return True
            except OSError:
                self._control[0] = 1
        return False

    def array(self, offset: int, *shape: int) -> NDArray[np.uint64]:
        """Return numbers of the file; who writes them calls ``back`` before."""
        count = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint64, count, offset).reshape(shape)

    # --- notes ------------------------------------------------------------------------------

    @property
    def notes(self) -> dict[str, Any]:
        """What was noted last; empty in a new file."""
        return dict(self._notes)

    def note(self, **changes: object) -> None:
        """Write notes; those with other names stay."""
        notes = self._notes | changes | {"process": os.getpid(), "parent": self._parent}
        text = json.dumps(notes, sort_keys=True).encode()
        number = self._number + 1
        place = _NOTES[number % 2]
        if len(text) + _NOTE.size > _NOTES[1] - _NOTES[0]:
            raise StoreError(f"{len(text)} bytes of notes do not fit into {self.path}")
        if not self.back(place, len(text) + _NOTE.size):
            return
        end = place + _NOTE.size + len(text)
        self._memory[place + _NOTE.size : end] = text
        self._memory[place : place + _NOTE.size] = _NOTE.pack(
            number, len(text), _checksum(number, text)
        )
        self._number, self._notes = number, notes

    # --- its end ----------------------------------------------------------------------------

    def renewed(self) -> StateFile:
        """Return a new file in the place of this one, which goes."""
        self.remove()
        self.close()
        return StateFile(self.path, self.num_shards, self._parent)

    def remove(self) -> None:
        """Take the name away: nobody finds it any more."""
        with suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self.descriptor).st_ino:
                self.path.unlink()

    def close(self) -> None:
        """Let another process have it."""
        # Closing alone does not: what is mapped holds the file open.
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)


def _checksum(number: int, text: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<Q", number) + text, digest_size=16).digest()


def _newest_note(descriptor: int) -> tuple[int, dict[str, Any]]:
    # Not as mapped: a hole would take memory then, and without any that is a SIGBUS.
    data = os.pread(descriptor, _NOTES[1] + (1 << 20), 0)
    if len(data) < _NOTES[1] + (1 << 20):
        return 0, {}
    return max((_read_note(data, at) for at in _NOTES), key=lambda note: note[0])


def _read_note(memory: bytes, place: int) -> tuple[int, dict[str, Any]]:
    number, length, checksum = _NOTE.unpack_from(memory, place)
    begin = place + _NOTE.size
    if not 0 < length <= _NOTES[1] - _NOTES[0] - _NOTE.size:
        return 0, {}
    text = memory[begin : begin + length]
    if _checksum(number, text) != checksum:
        return 0, {}
    try:
        notes = json.loads(text)
    except ValueError:
        return 0, {}
    return (number, notes) if isinstance(notes, dict) else (0, {})


def _locked(path: Path) -> int:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        # Not through a link that somebody put there.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(
                    f"{path}: expected a file of user {os.getuid()} that nobody else may read, "
                    f"got one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
                )
            if found.st_nlink:
                return descriptor
            os.close(descriptor)  # removed while we waited
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, ConfigError) or error.errno not in (
                errno.EAGAIN,
                errno.EACCES,
            ):
                raise
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{path}: another process has it; is the same server running twice?"
                ) from None
            time.sleep(0.05)
        except BaseException:
            os.close(descriptor)
            raise


# --- which file, and which are nobody's -----------------------------------------------------


def path_of(directory: Path, *whose: object) -> Path:
    """Return the path of a server's file; ``whose`` is all that tells it from others."""
    text = json.dumps([os.getuid(), *map(str, whose)]).encode()
    return directory / f"{_PREFIX}{hashlib.blake2b(text, digest_size=10).hexdigest()}{_SUFFIX}"


def remove_stale(directory: Path, is_running: Callable[[Parent], bool | None]) -> list[Path]:
    """Remove the files of servers that nobody will start again; returns their paths.

    Args:
        directory: Where they are.
        is_running: Whether a process still runs; None if nobody can know.
    """
    removed = []
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                parent = _newest_note(descriptor)[1].get("parent")
                if parent and is_running(tuple(parent)) is False:
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed
