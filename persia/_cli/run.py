"""The process of a user's script or function, as ``scripts`` starts it.

    python -m persia._cli.run script train.py --epochs 3
    python -m persia._cli.run call function.pkl

The script sees the same ``sys.argv`` and ``sys.path`` as under ``python train.py --epochs 3``.
SIGTERM raises SystemExit in its main thread, so that ``with TrainCtx`` is left properly. Its
end is noted for the launcher, which prints the traceback again after all other output. A
process whose launcher is gone ends.
"""

from __future__ import annotations

import pickle
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from persia._cluster import process_metrics
from persia._process_exit import end_with_launcher, note_end
from persia.errors import JobFinished


def main() -> None:
    """Run what the command line names, and exit with its status."""
    kind, path, *arguments = sys.argv[1:]
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
