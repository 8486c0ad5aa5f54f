"""Which state file is this server's, and whether it can have one.

A server that its supervisor starts again must find its file; a server of the next job, at the
same address, must not. So the file's name contains the run:

    PERSIA_RUN_ID            whatever the user calls this run of the job
    else the parent process  honcho, a shell's loop, the test: it outlives its servers
    else the host            where the server is started by init: a container is a host
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from persia import env
from persia._server.state_file import Parent, StateFile, path_of, remove_stale
from persia.config import ParameterServerConfig
from persia.errors import StoreError

logger = logging.getLogger(__name__)

# A tmpfs with less room than this, and than the memory limit, is not made for rows: Docker's
# default has 64 MB.
_LEAST_BYTES = 1 << 30
_START_TIME = 19  # field of /proc/PID/stat, counted behind the name of the program


def open_state(
    settings: ParameterServerConfig, address: str, replica_index: int, replica_size: int
) -> StateFile | None:
    """Open the state file of a server; None, said in the log, if it has to do without.

    Raises:
        ConfigError: If another process has the file.
    """
    directory = env.state_directory() or Path(settings.state_dir)
    if not settings.keep_state or str(directory) == "off":
        return None
    parent, named = _parent(), env.run_id()
    run = named or (parent if parent is not None else socket.gethostname())
    path = path_of(directory, run, address, replica_index, replica_size)
    for stale in remove_stale(directory, _is_running):
        logger.info("removed %s, whose job has ended", stale)
    # A file that is there has its memory, and may be what took the room.
    why = "" if path.exists() else _why_unusable(directory, settings)
    if not why:
        shards = min(settings.num_hashmap_internal_shards, max(1, settings.capacity // 64))
        try:
            # A named run may outlive what started this process.
            return _usable(StateFile(path, shards, None if named else parent))
        except (OSError, StoreError) as error:
            why = str(error)
    logger.warning(
        "rows are not kept for the case that this server is killed: %s; keep_state: false says "
        "that this is meant so",
        why,
    )
    return None


def _usable(state: StateFile) -> StateFile:
    """Return the file, or a new one in its place if it cannot be read."""
    if not state.why_not:
        return state
    logger.error(
        "%s was left by a process that ended, and CANNOT BE USED: %s; this server begins empty",
        state.path,
        state.why_not,
    )
    return state.renewed()


def _why_unusable(directory: Path, settings: ParameterServerConfig) -> str:
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return str(error)
    limit = settings.memory_limit_bytes()
    free = found.f_bavail * found.f_frsize
    least = min(limit, _LEAST_BYTES) if limit else _LEAST_BYTES
    if free < least:
        return (
            f"state_dir: {directory} has {free / 1e6:.0f} MB free, expected at least "
            f"{least / 1e6:.0f} MB and better the memory limit (docker: --shm-size)"
        )
    if limit > free:
        logger.info(
            "state_dir: %s has %.2f GB free, and the memory limit is %.2f GB: beyond that rows "
            "will not outlive this process",
            directory,
            free / 1e9,
            limit / 1e9,
        )
    return ""


def _parent() -> Parent | None:
    """Return the process that started this one, unless that is init; None if nobody can say."""
    number = os.getppid()
    started = _start_of(number)
    if number <= 1 or started is None:
        return None
    return _pid_namespace(), number, started


def _is_running(parent: Parent) -> bool | None:
    """Whether that process still runs; None where its number means nothing here."""
    namespace, number, started = parent
    if namespace != _pid_namespace():
        return None
    return _start_of(number) == started


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_of(number: int) -> int | None:
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[_START_TIME])
