"""The file in which an embedding-parameter-server outlives its process, and recovery from it.

    0        MAGIC, layout, how many shards
    4 KiB    the control page: a word that the core sets when the file is void
    8 KiB    notes, twice: | number u64 | length u64 | checksum 16 | JSON |
    4 MiB    recent lookups (``applied_updates.TrainingClock``)
    8 MiB    updates in flight and applied (``applied_updates.UpdateRecord``)
    4 GiB    the shards; see ``persia._core.shard.persistent_shard``

The file lies in a tmpfs. It is as long as all that could ever be in it, 128 GiB a shard, and
takes the memory of what is in it. Only its user may read it, and one process at a time has it
locked.

Notes are what is read as a whole: the identity of the server, without which the rows would mean
something else, its settings and its optimizer. The newer of the two with a right checksum
counts, so that a note that was cut short is not one.

A server that its supervisor starts again must find its file; a server of the next job, at the
same address, must not. So the file's name is made of server, address and run:

    PERSIA_RUN_ID            the user's name of this run of the job
    else the parent process  honcho, a shell's loop, the test: it outlives its servers
    else the host            where the server is started by init: a container is a host
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._core.store.store import EmbeddingStore
from persia._rpc.deadlines import Retry
from persia.config import ParameterServerConfig
from persia.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)

MAGIC = b"PERSIA-ROWS\0\0\0\0\0"
LAYOUT = 1

# Offsets and sizes in bytes.
_CONTROL = 4096
_NOTES = (8192, 8192 + (1 << 20))
_NOTE = struct.Struct("<QQ16s")
_NOTES_END = _NOTES[1] + (1 << 20)
RECENT = 4 << 20
UPDATES = 8 << 20
_SHARDS = 1 << 32
_SHARD_BYTES = 1 << 37
_MAPPED = 256 << 20
_PREFIX, _SUFFIX = "persia-", ".rows"

# Seconds that the process before may still be giving its memory back.
_LOCK_TIMEOUT_S = 20.0
# A tmpfs with less room than this, and than the memory limit, is not made for rows: Docker's
# default has 64 MB.
_MIN_FREE_BYTES = 1 << 30
_START_TIME = 19  # field of /proc/PID/stat, counted behind the name of the program

# PID namespace, number, and when it was started.
Parent = tuple[str, int, int]


class StateFile:
    """A server's own file, open and locked. Any thread may write notes."""

    def __init__(self, path: Path, num_shards: int, parent: Parent | None = None) -> None:
        self.path = path
        self.num_shards = num_shards
        self._parent = parent
        self.descriptor = _open_locked(path)
        try:
            self.is_new = os.fstat(self.descriptor).st_size == 0
            self.problem = None if self.is_new else self._find_problem()
            if self.is_new:
                os.ftruncate(self.descriptor, _SHARDS + num_shards * _SHARD_BYTES)
                for place in _NOTES:
                    os.posix_fallocate(self.descriptor, place, _NOTE.size)
                os.pwrite(self.descriptor, MAGIC + struct.pack("<QQ", LAYOUT, num_shards), 0)
            size = min(os.fstat(self.descriptor).st_size, _MAPPED)
            if size < _NOTES_END:
                self.problem = self.problem or "it is cut short"
                os.ftruncate(self.descriptor, _NOTES_END)
                size = _NOTES_END
            self._memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._control = self.array(_CONTROL, 1)
        self._noting = threading.Lock()  # guards the notes
        self._number, self._notes = _newest_note(self.descriptor)
        if self.has_state and self._control[0]:
            self.problem = "it had run out of memory before the process ended"
        if self.has_state and not self._notes:
            self.problem = "neither of its notes is whole"

    def _find_problem(self) -> str | None:
        head = os.pread(self.descriptor, len(MAGIC) + 16, 0)
        if len(head) < len(MAGIC) + 16 or not head.startswith(MAGIC):
            return "it is not a state file"
        layout, num_shards = struct.unpack("<QQ", head[len(MAGIC) :])
        if layout != LAYOUT:
            return f"layout: expected {LAYOUT}, got {layout}"
        if num_shards != self.num_shards:
            return f"num_hashmap_internal_shards: expected {self.num_shards}, got {num_shards}"
        size, expected = os.fstat(self.descriptor).st_size, _SHARDS + num_shards * _SHARD_BYTES
        if size != expected:
            return f"its length: expected {expected}, got {size}"
        return None

    @property
    def has_state(self) -> bool:
        """Whether a process left its state here, and as far as is known, whole."""
        return not self.is_new and self.problem is None

    @property
    def is_void(self) -> bool:
        """Whether what it holds is not whole any more."""
        return bool(self._control[0])

    def make_void(self) -> None:
        """Let no process read it again; its memory is freed with this process."""
        self._control[0] = 1
        self.remove()

    def allocate(self, offset: int, num_bytes: int) -> bool:
        """Take memory for bytes before they are touched; if there is none, the file is void."""
        if not self.is_void:
            try:
                os.posix_fallocate(self.descriptor, offset, num_bytes)
                return True
            except OSError:
                self._control[0] = 1
        return False

    def array(self, offset: int, *shape: int) -> NDArray[np.uint64]:
        """Return numbers of the file, to be written after ``allocate``: else a SIGBUS comes."""
        count = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint64, count, offset).reshape(shape)

    # --- notes ------------------------------------------------------------------------------

    @property
    def notes(self) -> dict[str, Any]:
        """What was noted last; empty in a new file."""
        return dict(self._notes)

    def note(self, **changes: object) -> None:
        """Write notes; those with other names stay."""
        with self._noting:
            notes = self._notes | changes | {"process": os.getpid(), "parent": self._parent}
            text = json.dumps(notes, sort_keys=True).encode()
            number = self._number + 1
            place = _NOTES[number % 2]
            if len(text) + _NOTE.size > _NOTES[1] - _NOTES[0]:
                raise StoreError(f"{len(text)} bytes of notes do not fit into {self.path}")
            if not self.allocate(place, len(text) + _NOTE.size):
                return
            end = place + _NOTE.size + len(text)
            self._memory[place + _NOTE.size : end] = text
            self._memory[place : place + _NOTE.size] = _NOTE.pack(
                number, len(text), _checksum(number, text)
            )
            self._number, self._notes = number, notes

    # --- its end ----------------------------------------------------------------------------

    def renewed(self) -> StateFile:
        """Return a new file in the place of this one, which is removed."""
        self.remove()
        self.close()
        return StateFile(self.path, self.num_shards, self._parent)

    def remove(self) -> None:
        """Unlink it, so that no process finds it."""
        with suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self.descriptor).st_ino:
                self.path.unlink()

    def close(self) -> None:
        """Unlock it for another process."""
        # Closing alone does not unlock it: the mapping holds the file open.
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)


def _checksum(number: int, text: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<Q", number) + text, digest_size=16).digest()


def _newest_note(descriptor: int) -> tuple[int, dict[str, Any]]:
    # Not as mapped: a hole would take memory then, and without any that is a SIGBUS.
    data = os.pread(descriptor, _NOTES_END, 0)
    if len(data) < _NOTES_END:
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
    with suppress(ValueError):
        if isinstance(notes := json.loads(text), dict):
            return number, notes
    return 0, {}


def _open_locked(path: Path) -> int:
    for _ in Retry(_LOCK_TIMEOUT_S, first_s=0.05, longest_s=0.05):
        # O_NOFOLLOW: another user may have put a link there.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(
                    f"{path}: expected a file that only user {os.getuid()} may read, got one "
                    f"of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
                )
            if found.st_nlink:
                return descriptor
            # Else it was removed between open and lock: the path names another file now.
        except BaseException as error:
            if getattr(error, "errno", None) not in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise
        os.close(descriptor)
    raise ConfigError(f"{path}: another process has it; is the same server running twice?")


# --- finding a server's file ----------------------------------------------------------------


def open_state(
    config: ParameterServerConfig, address: str, replica_index: int, replica_size: int
) -> StateFile | None:
    """Open the state file of a server; None, said in the log, if it has to do without."""
    directory = env.state_directory() or Path(config.state_dir)
    if not config.keep_state or str(directory) == "off":
        return None
    parent, run_id = _parent(), env.run_id()
    run = run_id or (parent if parent is not None else socket.gethostname())
    path = path_of(directory, run, address, replica_index, replica_size)
    remove_stale(directory)
    try:
        # A file that is there has its memory, and may be what took the room.
        if not path.exists():
            _check_room(directory, config)
        shards = min(config.num_hashmap_internal_shards, max(1, config.capacity // 64))
        # A named run may outlive what started this process.
        state = StateFile(path, shards, None if run_id else parent)
        if state.problem is not None:
            _log_unusable(state.path, state.problem)
            state = state.renewed()
        return state
    except (OSError, StoreError) as error:
        logger.warning(
            "rows will be lost if this server is killed: %s; keep_state: false silences this "
            "line",
            error,
        )
        return None


def path_of(directory: Path, *key: object) -> Path:
    """Return the path of a server's file; no two servers have the same ``key``."""
    text = json.dumps([os.getuid(), *map(str, key)]).encode()
    return directory / f"{_PREFIX}{hashlib.blake2b(text, digest_size=10).hexdigest()}{_SUFFIX}"


def remove_stale(directory: Path) -> None:
    """Remove the files of servers that will not be started again."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                parent = _newest_note(descriptor)[1].get("parent")
                if parent and not _is_running(tuple(parent)):
                    path.unlink()
                    logger.info("removed %s, whose job has ended", path)
            finally:
                os.close(descriptor)


def _log_unusable(path: Path, problem: object) -> None:
    logger.error(
        "%s was left by a process that ended, and CANNOT BE USED: %s; this server begins empty",
        path,
        problem,
    )


def _check_room(directory: Path, config: ParameterServerConfig) -> None:
    """Refuse a directory without room for a new file."""
    found = os.statvfs(directory)
    limit = config.memory_limit_bytes()
    free = found.f_bavail * found.f_frsize
    least = min(limit, _MIN_FREE_BYTES) if limit else _MIN_FREE_BYTES
    if free < least:
        raise StoreError(
            f"state_dir: {directory} has {free / 1e6:.0f} MB free, expected at least "
            f"{least / 1e6:.0f} MB and better the memory limit (docker: --shm-size)"
        )
    if limit > free:
        text = "state_dir: %s: %.2f GB free, memory limit %.2f GB: rows beyond end with a kill"
        logger.info(text, directory, free / 1e9, limit / 1e9)


def _parent() -> Parent | None:
    """Return the process that started this one; None if it is init or cannot be known."""
    number = os.getppid()
    started = _start_of(number)
    if number <= 1 or started is None:
        return None
    return _pid_namespace(), number, started


def _is_running(parent: Parent) -> bool:
    """Whether that process may still run: where its number means nothing here, it may."""
    namespace, number, started = parent
    return namespace != _pid_namespace() or _start_of(number) == started


def _pid_namespace() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _start_of(number: int) -> int | None:
    with suppress(OSError):
        text = Path(f"/proc/{number}/stat").read_text()
        return int(text.rpartition(")")[2].split()[_START_TIME])
    return None


# --- recovery -------------------------------------------------------------------------------


class StateRecovery:
    """What a server notes in its state file, and recovers from one that a process left."""

    def __init__(self, file: StateFile | None, facts: Mapping[str, Any]) -> None:
        self.file = file
        self.num_rows = 0  # recovered
        self.is_void = file is None  # rows are in the memory of this process alone
        self.facts = facts
        self._name = f"parameter server {facts['replica_index']} of {facts['replica_size']}"

    def run(self, attach: Callable[[Mapping[str, Any]], tuple[int, int]]) -> None:
        """Begin with all of the state in the file, or with none and say why."""
        begin = time.perf_counter()
        file = self.file
        if file is not None and file.has_state:
            try:
                self._check_facts(file.notes.get("facts"))
                self.num_rows, num_updates = attach(file.notes)
            except MemoryError as error:
                # The rows are whole. Where there is memory, the next process has them.
                file.close()
                raise StoreError(
                    f"{self._name}: {file.path} has the rows of a process that ended, and "
                    f"there is not enough memory to take them up: {error}. The file is kept: "
                    "start this server again once there is more, or remove the file to begin "
                    "empty"
                ) from error
            except (StoreError, ConfigError) as error:
                _log_unusable(file.path, error)
                self.file = file.renewed()
            else:
                logger.warning(
                    "%s: has the %d rows of a process that ended, after %.2f s; %d updates "
                    "were cut short and wait to be sent again",
                    self._name,
                    self.num_rows,
                    time.perf_counter() - begin,
                    num_updates,
                )
                return
        self.note(facts=self.facts)
        attach({})

    def _check_facts(self, found: object) -> None:
        known = found if isinstance(found, dict) else {}
        others = [
            f"{name}: expected {value!r}, got {known.get(name)!r}"
            for name, value in self.facts.items()
            if known.get(name) != value
        ]
        if others:
            raise ConfigError(", ".join(others))

    def note(self, **changes: object) -> None:
        """Write notes; those with other names stay."""
        if self.file is not None and changes:
            self.file.note(**changes)

    def check_room(self, store: EmbeddingStore) -> None:
        """Say once in the log that the file ran out of memory, and remove it."""
        if self.file is None or not (store.state_is_void() or self.file.is_void):
            return
        self.is_void = True
        self.file.make_void()
        logger.error(
            "%s: %s has no room any more, and rows are in the memory of this process alone "
            "from now on: IF IT IS KILLED, ALL ROWS ARE LOST. Give the tmpfs more room "
            "(docker: --shm-size), or lower memory_limit",
            self._name,
            self.file.path.parent,
        )
