"""How processes ended, in the words of the exception that ended them.

Whoever starts processes names a directory in the environment; each process that ends notes its
exit status and its traceback there. Torchrun, which may stand between, passes on neither.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from persia import env

# Seconds between two looks at whether the launcher is there, and to end when it is not.
_LOOK_S = 0.5
_END_S = 5.0


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


def first_failure(directory: Path) -> End | None:
    """Return the failure that was noted first: those of others often follow from it."""
    notes = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in notes:
        status, text = json.loads(path.read_text(encoding="utf-8"))
        if status:
            return End(status, text)
    return None


def end_with_launcher() -> None:
    """End this process when the one that launched it is gone, however that ended."""
    launcher = env.launcher_pid()
    if launcher is None:
        return

    def watch() -> None:
        pause = threading.Event()
        while not pause.wait(_LOOK_S):
            try:
                os.kill(launcher, 0)
            except ProcessLookupError:
                os.kill(os.getpid(), signal.SIGTERM)
                pause.wait(_END_S)
                os._exit(128 + signal.SIGTERM)
            except PermissionError:
                return  # it runs as another user, and cannot be asked

    threading.Thread(target=watch, name="persia-launcher-watch", daemon=True).start()
