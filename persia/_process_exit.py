"""How launched processes end: notes for the launcher, and the watch over the launcher.

The launcher names a directory in the environment of the processes that it starts. Each of them
notes there its exit status and the text of its error. Torchrun, which may stand between, passes
on neither.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from persia import env

# The module that runs a user's script and notes its end.
RUN = "persia._cli.run"

_PARTICIPATED = "participated"
_ENDS_SLOWLY = "ends-slowly"
_SERVED = "served"  # by a data-loader: JSON, the nn-workers' addresses and incarnations

# Status of a data-loader's script that is to run again from the start.
RUN_AGAIN = 75

# Seconds between two checks of the launcher, and to unwind once it is gone.
_POLL_S = 0.5
_UNWIND_S = 5.0


@dataclass(frozen=True, slots=True)
class End:
    """The end of a process: its exit status, and the text to print if it failed."""

    status: int
    text: str = ""


def note_end(status: int, text: str = "") -> None:
    """Note the end of this process, if it was launched."""
    directory = env.run_directory()
    if directory is None:
        return
    # Named by process: a script may change the rank that the environment says.
    part = directory / f"{os.getpid()}.part"
    part.write_text(json.dumps([status, text]), encoding="utf-8")
    part.rename(part.with_suffix(".json"))


def mark_participated() -> None:
    """Note that this process configures servers, if it was launched.

    Called before it does: servers accept the end of a job only from a job that configured
    them, and the answer to the configuration may be lost.
    """
    directory = env.run_directory()
    if directory is not None:
        (directory / _PARTICIPATED).touch()


def has_participated(directory: Path) -> bool:
    """Return whether a process has noted in a directory that it configures servers."""
    return (directory / _PARTICIPATED).exists()


def mark_slow_end() -> None:
    """Note, if this process was launched, that it writes a checkpoint before it ends.

    The launcher then gives it ``PERSIA_GRACE_PERIOD`` after a signal.
    """
    directory = env.run_directory()
    if directory is not None:
        (directory / _ENDS_SLOWLY).touch()


def ends_slowly(directory: Path) -> bool:
    """Return whether a process has noted in a directory that its end takes time."""
    return (directory / _ENDS_SLOWLY).exists()


def note_served(peers: Mapping[str, int | None]) -> None:
    """Note, if this process was launched, which nn-workers have got all of its data."""
    directory = env.run_directory()
    if directory is not None:
        part = directory / f"{_SERVED}.part"
        part.write_text(json.dumps(dict(peers)), encoding="utf-8")
        part.rename(directory / _SERVED)


def served(directory: Path) -> dict[str, int | None]:
    """Return what ``note_served`` noted last in a directory."""
    try:
        found: dict[str, int | None] = json.loads((directory / _SERVED).read_bytes())
    except FileNotFoundError:
        return {}
    return found


def first_failure(directory: Path) -> End | None:
    """Return the failure that was noted first: later ones often follow from it."""
    notes = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in notes:
        status, text = json.loads(path.read_text(encoding="utf-8"))
        if status:
            return End(status, text)
    return None


def end_with_launcher() -> None:
    """End this process when its launcher, or its parent, is gone.

    The parent may be torchrun, which leaves its ranks behind when it is killed.
    """
    launcher, parent = env.launcher_pid(), os.getppid()
    if launcher is None:
        return

    def lives() -> bool:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user: only the parent can be checked
        return os.getppid() == parent

    def watch() -> None:
        pause = threading.Event()
        while lives():
            pause.wait(_POLL_S)
        # A process that ignores the signal, or already unwinds, has as long to end.
        os.kill(os.getpid(), signal.SIGTERM)
        pause.wait(_UNWIND_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="persia-launcher-watch", daemon=True).start()
