"""The process of a user's script, or of a user's function: started by ``scripts``.

    python -m persia._cli.run script train.py --epochs 3
    python -m persia._cli.run call function.pkl

The script finds what ``python train.py --epochs 3`` would give it. SIGTERM raises SystemExit
in its main thread, so that ``with TrainCtx`` is left properly. How it ended is noted for the
launcher, which prints the traceback again when all others are silent. A process whose
launcher is gone ends.
"""

from __future__ import annotations

import pickle
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from persia._cluster import process_metrics
from persia._process_exit import end_with_launcher, note, text_of
from persia.errors import JobFinished


def main() -> None:
    """Run what the command line names, and exit as it does."""
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
        note(_status_of(leaving), "")
        raise
    except KeyboardInterrupt:
        note(128 + signal.SIGINT, "")
        sys.exit(128 + signal.SIGINT)
    except JobFinished:
        # The launcher knows with which status, and whoever failed has said why.
        note(1, "")
        sys.exit(1)
    except BaseException as error:
        sys.last_value = error  # where Python puts what it prints itself; compat.backend looks
        own = _without_this_module(error.__traceback__)
        error.with_traceback(own)
        text = text_of(error)
        if sys.excepthook is sys.__excepthook__:
            sys.stderr.write(text)
        else:
            sys.excepthook(type(error), error, own)  # the script's
        sys.stderr.flush()
        note(1, text)
        sys.exit(1)


def dump_call(function: Callable[[], object]) -> bytes:
    """Return what ``call`` reads: the function, and where its modules are found."""
    import cloudpickle  # type: ignore[import-untyped]

    return pickle.dumps((sys.path, cloudpickle.dumps(function)))


def _call(path: Path) -> None:
    sys.path[:], function = pickle.loads(path.read_bytes())
    pickle.loads(function)()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # Once: what unwinds now shall not be interrupted by who kills twice.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def _status_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def _without_this_module(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames above the script's own first."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            return trace
        trace = trace.tb_next
    return None


if __name__ == "__main__":
    main()
