"""How processes end: what they print last, and what whoever started them learns of it.

An error is not explained by the way that it took through PERSIA if its message says what to
change or who did not answer, if a data-loader failed of it, or if the user's own code raised
it. Its traceback keeps every frame that is not PERSIA's, and of its causes those that have such
a frame; all others are printed whole, and so is everything with ``LOG_LEVEL=debug``.

Whoever starts processes names a directory in the environment; each process that ends notes its
exit status and its traceback there. Torchrun, which may stand between, passes on neither.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import site
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import persia
from persia import env
from persia.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RemoteError,
    ServiceBusy,
    ServiceTimeout,
    ServiceUnavailable,
)

_FOR_USERS = (
    *(ConfigError, DataError, CheckpointError),
    *(ServiceUnavailable, ServiceTimeout, ServiceBusy),
)
_OWN = f"{Path(persia.__file__).parent}{os.sep}"
_COMPILED = "persia/", ".pyx"  # such a file's name is the one the build gave it
# Debian's dist-packages, and what pip put into the home of the user, sysconfig does not name.
_LIBRARIES = tuple(
    f"{place}{os.sep}"
    for place in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        *(site.getusersitepackages(), *site.getsitepackages()),
    )
)

# The module that runs a user's script, and notes how it ended.
RUN = "persia._cli.run"

_TOOK_PART = "took_part"

# Seconds between two looks at whether the launcher is there, and to end when it is not.
_LOOK_S = 0.5
_END_S = 5.0


# --- the text --------------------------------------------------------------------------------


def text_of(error: BaseException) -> str:
    """Return what is printed of an exception that ended a script."""
    trace = traceback.TracebackException.from_exception(error)
    if not _is_debugging():
        is_users = trace.stack and _is_users(trace.stack[-1].filename)
        if is_users or isinstance(error, _FOR_USERS) or is_of_loader(error):
            _leave_out_own(trace)
    return "".join(trace.format())


def at_the_users(error: Exception) -> Exception:
    """Return an error without the frames by which it came from where the user's code raised it.

    Of a data-loader's, which was raised in another process, no frame is left.
    """
    if _is_debugging():
        return error
    if is_of_loader(error):
        return error.with_traceback(None)
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None or not _is_users(trace.tb_frame.f_code.co_filename):
        return error
    return error.with_traceback(trace)


def is_of_loader(error: BaseException) -> bool:
    """Whether it says how a data-loader failed; its text has the traceback over there."""
    return isinstance(error, RemoteError) and error.role == "data-loader"


def _is_debugging() -> bool:
    return env.log_level() <= logging.DEBUG


def _is_own(filename: str) -> bool:
    begin, end = _COMPILED
    return filename.startswith(_OWN) or (filename.startswith(begin) and filename.endswith(end))


def _is_users(filename: str) -> bool:
    """Whether it is a file of the user's: not PERSIA's, nor one that was installed."""
    return not (_is_own(filename) or filename.startswith((*_LIBRARIES, "<frozen ")))


def _leave_out_own(trace: traceback.TracebackException) -> None:
    frames = [frame for frame in trace.stack if not _is_own(frame.filename)]
    trace.stack = traceback.StackSummary.from_list(frames)
    for link in ("__cause__", "__context__"):
        before: traceback.TracebackException | None = getattr(trace, link)
        if before is not None:
            _leave_out_own(before)
            if not (before.stack or before.__cause__ or before.__context__):
                setattr(trace, link, None)


# --- the note --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended: its exit status, and what there is to say if it failed."""

    status: int
    text: str = ""


def note(status: int, text: str = "") -> None:
    """Note how this process ends, where somebody asked for it."""
    directory = env.run_directory()
    if directory is None:
        return
    # Not by rank: the script may change what the environment says, and reads it once.
    part = directory / f"{os.getpid()}.part"
    part.write_text(json.dumps([status, text]), encoding="utf-8")
    part.rename(part.with_suffix(".json"))


def note_part() -> None:
    """Note that this process configures servers, where somebody asked for it.

    Before it does: otherwise servers that it has configured, and whose answer was lost, would
    not heed the end of its job.
    """
    directory = env.run_directory()
    if directory is not None:
        (directory / _TOOK_PART).touch()


def took_part(directory: Path) -> bool:
    """Return whether a process has noted that it configures servers."""
    return (directory / _TOOK_PART).exists()


def first_failure(directory: Path) -> End | None:
    """Return the failure that was noted first: those of others often follow from it."""
    notes = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in notes:
        status, text = json.loads(path.read_text(encoding="utf-8"))
        if status:
            return End(status, text)
    return None


def end_with_launcher() -> None:
    """End this process when the one that launched it is gone, however that ended.

    So does the end of its parent, which may be torchrun: killed, it leaves its ranks behind.
    """
    launcher, parent = env.launcher_pid(), os.getppid()
    if launcher is None:
        return

    def is_there() -> bool:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user, and cannot be asked
        return os.getppid() == parent

    def watch() -> None:
        pause = threading.Event()
        while is_there():
            pause.wait(_LOOK_S)
        # Who ignores the signal unwinds already, or takes no notice: it has as long to end.
        os.kill(os.getpid(), signal.SIGTERM)
        pause.wait(_END_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="persia-launcher-watch", daemon=True).start()
