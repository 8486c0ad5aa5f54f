"""A user's script or function in a process of its own: how it is started, and what runs there.

    python -m persia._cli.run script train.py --epochs 3
    python -m persia._cli.run call function.pkl
    python -m persia._cli.run torchrun --standalone --nproc-per-node=2 -m module ...

The script sees the same ``sys.argv`` and ``sys.path`` as under ``python train.py --epochs 3``.
SIGTERM raises SystemExit in its main thread, so that ``with TrainCtx`` is left properly. Its
end is noted for the launcher, which prints the traceback again after all other output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from persia import env
from persia._process_exit import (
    RUN_AGAIN,
    End,
    end_with_launcher,
    ends_slowly,
    first_failure,
    has_participated,
    note_end,
    served,
)
from persia.errors import JobFinished, StreamRewound

logger = logging.getLogger(__name__)

# Seconds that a signalled child gets to end; honcho kills this process after 5.
UNWIND_S = 2.5


class Child:
    """A running Python process with a session of its own.

    A signal to the group of this process (Ctrl-C, honcho) reaches it once, from here.

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
            env.is_launched.name: 1,
            env.run_directory.name: self._notes.name,
            env.launcher_pid.name: os.getpid(),
        }
        environment = env.of_child(**launched, **changes)
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self.process.pid, number)

    def stop(self, number: int, timeout_s: float = UNWIND_S) -> None:
        """Signal the child, and kill it if it does not end in time."""
        self.send_signal(number)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            text = "process %d did not end within %g s of %s and is killed"
            name = signal.Signals(number).name
            logger.warning(text, self.process.pid, timeout_s, name)
            self.send_signal(signal.SIGKILL)
            self.process.wait()

    def end(self) -> End:
        status = self.process.wait()
        if status == 0:
            return End(0)
        status = 128 - status if status < 0 else status
        return first_failure(Path(self._notes.name)) or End(status)

    @property
    def served(self) -> dict[str, int | None]:
        """Which nn-workers have got all data of this data-loader, by address."""
        return served(Path(self._notes.name))

    @property
    def has_participated(self) -> bool:
        return has_participated(Path(self._notes.name))

    @property
    def ends_slowly(self) -> bool:
        return ends_slowly(Path(self._notes.name))

    def close(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        self._notes.cleanup()


def main() -> None:
    kind, path, *arguments = sys.argv[1:]
    if kind == "torchrun":
        _torchrun([path, *arguments])
        return
    from persia._cluster import process_metrics

    end_with_launcher()
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.argv = [path, *arguments]
    try:
        process_metrics.hold()  # as long as this process lives
        if kind == "script":
            sys.path[0] = str(Path(path).resolve().parent)
            runpy.run_path(path, run_name="__main__")
        else:
            _call(Path(path))
    except SystemExit as leaving:
        sys.last_value = leaving
        note_end(_status_of(leaving), "")
        raise
    except KeyboardInterrupt:
        note_end(128 + signal.SIGINT, "")
        sys.exit(128 + signal.SIGINT)
    except JobFinished:
        # The launcher knows the status of the job, and the process that failed has logged why.
        note_end(1, "")
        sys.exit(1)
    except StreamRewound as error:
        logger.warning("%s", error)
        note_end(RUN_AGAIN, f"{error}\n")
        sys.exit(RUN_AGAIN)
    except BaseException as error:
        sys.last_value = error  # where Python puts what it prints itself; compat.backend looks
        own = _without_this_module(error.__traceback__)
        error.with_traceback(own)
        text = "".join(traceback.format_exception(error))
        if sys.excepthook is sys.__excepthook__:
            sys.stderr.write(text)
        else:
            sys.excepthook(type(error), error, own)  # the script's
        sys.stderr.flush()
        note_end(1, text)
        sys.exit(1)


def _torchrun(arguments: list[str]) -> None:
    """Run ``torch.distributed.run`` without a traceback of its own after the script's."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(arguments)
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            how = f"exit code {failure.exitcode}"
            print(f"rank {rank} (process {failure.pid}) ended with {how}", file=sys.stderr)
        sys.exit(1)


def dump_call(function: Callable[[], object]) -> bytes:
    """Pickle a function and the search path of its modules, for ``call``."""
    import cloudpickle  # type: ignore[import-untyped]

    return pickle.dumps((sys.path, cloudpickle.dumps(function)))


def _call(path: Path) -> None:
    sys.path[:], function = pickle.loads(path.read_bytes())
    pickle.loads(function)()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # Once: a second signal must not interrupt the unwinding.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def _status_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def _without_this_module(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this module and of ``runpy``, above the script's first."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            return trace
        trace = trace.tb_next
    return None


if __name__ == "__main__":
    main()
