"""``persia-launcher top``: a whole job in a terminal, live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from persia._launch.asking import Asker, listed_places
from persia._metrics.frame import WIDTH, Frame, need_rich

NOBODY = (
    "nobody answers: start the job, or name its processes, persia-launcher top HOST:PORT ... "
    "(each logs a line `metrics at`)"
)


def run_top(
    named: Sequence[str], *, interval_s: float, deadline_s: float, is_once: bool
) -> int:
    """Show the job until Ctrl-C, or one frame of it; returns the exit status.

    Raises:
        ConfigError: If nothing says where the job is, or rich is not installed.
    """
    need_rich()
    asker = Asker(listed_places(named), deadline_s)
    if is_once:
        return _show_once(asker, interval_s, deadline_s)
    try:
        _show(asker, interval_s)
    except KeyboardInterrupt:
        return 0
    return 0


def frame_of(asker: Asker) -> Frame:
    """Return a frame of what is known now."""
    processes = asker.processes()
    num_there = sum(one.span is not None for one in processes)
    return Frame(processes, f"{num_there} of {len(processes)} processes answer")


def _show_once(asker: Asker, interval_s: float, deadline_s: float) -> int:
    asker.ask()
    asker.wait(deadline_s)
    threading.Event().wait(interval_s)  # rates are of this time
    asker.ask()
    asker.wait(deadline_s)
    frame = frame_of(asker)
    print(frame)
    if any(one.span is not None for one in frame.processes):
        return 0
    print(NOBODY, file=sys.stderr)
    return 1


def _show(asker: Asker, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    pause = threading.Event()  # never set: a wait that Ctrl-C ends
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            asker.ask()
            asker.wait(interval_s)
            frame = frame_of(asker)
            if console.is_terminal:
                live.update(frame, refresh=True)
            else:
                console.print(frame)
            pause.wait(max(0.0, begin + interval_s - time.monotonic()))
