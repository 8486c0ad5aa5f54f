"""A child process with a session of its own.

A signal to the group of this process (Ctrl-C, honcho) reaches the child once, from here. The
child ends when this process is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from persia import env
from persia._process_exit import End, first_failure, has_participated

logger = logging.getLogger(__name__)

# Seconds that a signalled child gets to end; honcho kills this process after 5.
UNWIND_S = 2.5


def signal_name(number: int) -> str:
    """``15`` -> ``SIGTERM``."""
    return signal.Signals(number).name


class Child:
    """A running Python process.

    Args:
        words: Python's arguments.
        changes: To the environment; None removes a variable.
    """

    def __init__(self, words: Sequence[str], **changes: object) -> None:
        command = [sys.executable, *words]
        if env.launcher_verbose():
            print(f"execute command: {shlex.join(command)}", file=sys.stderr, flush=True)
        self._notes = tempfile.TemporaryDirectory(prefix="persia-")
        launched = {
            env.LAUNCHED_VARIABLE: 1,
            env.RUN_DIRECTORY_VARIABLE: self._notes.name,
            env.LAUNCHER_PID_VARIABLE: os.getpid(),
        }
        environment = env.of_child(**launched, **changes)
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def send_signal(self, number: int) -> None:
        """Signal every process of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self.process.pid, number)

    def stop(self, number: int, timeout_s: float = UNWIND_S) -> None:
        """Signal the child, and kill it if it does not end in time."""
        self.send_signal(number)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning(
                "process %d did not end within %g s of %s and is killed",
                self.process.pid,
                timeout_s,
                signal_name(number),
            )
            self.send_signal(signal.SIGKILL)
            self.process.wait()

    def end(self) -> End:
        """Wait for the end of the child and return it."""
        status = self.process.wait()
        if status == 0:
            return End(0)
        status = 128 - status if status < 0 else status
        return first_failure(Path(self._notes.name)) or End(status)

    @property
    def has_participated(self) -> bool:
        """Whether its script has configured servers."""
        return has_participated(Path(self._notes.name))

    def close(self) -> None:
        """Kill every process of its session."""
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        self._notes.cleanup()
