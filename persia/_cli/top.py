"""``persia-launcher top``: a whole job in a terminal, live."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from persia import env
from persia._cli.scraper import Scraper, list_targets
from persia._metrics.top_view import WIDTH, Frame, Watched, need_rich
from persia.utils import sleep

NO_ANSWER = (
    "no process answers: start the job, or name its processes, persia-launcher top HOST:PORT "
    "... (each logs a line `metrics at`)"
)


def run_top(
    named: Sequence[str], *, interval_s: float, deadline_s: float, is_once: bool
) -> int:
    """Show the job until Ctrl-C, or one frame of it; returns the exit status.

    Raises:
        ConfigError: If no address of the job is known, or rich is not installed.
    """
    need_rich()
    scraper = Scraper(list_targets(named), deadline_s)
    if is_once:
        return _show_once(scraper, interval_s, deadline_s)
    try:
        _show(scraper, interval_s)
    except KeyboardInterrupt:
        return 0
    return 0


def frame_of(scraper: Scraper) -> Frame:
    """Return a frame of the last answers, of the run of ``PERSIA_RUN_ID`` if that is set."""
    wanted = env.run_id()
    processes = [_of_run(wanted, one) for one in scraper.processes()]
    spans = [one.span for one in processes if one.span is not None]
    title = f"{len(spans)} of {len(processes)} processes answer"
    runs = sorted({span.now.run for span in spans} - {""})
    if runs:
        title = f"run {', '.join(runs)}: {title}"
    if len(runs) > 1:
        title += " (of one job? PERSIA_RUN_ID names it)"
    return Frame(processes, title)


def _of_run(wanted: str | None, one: Watched) -> Watched:
    """Return a process without its readings if it is of another run."""
    run = "" if one.span is None else one.span.now.run
    if not wanted or run in ("", wanted):
        return one
    problem = f"is of another run, {run}, and PERSIA_RUN_ID is {wanted}"
    return dataclasses.replace(one, span=None, problem=problem)


def _show_once(scraper: Scraper, interval_s: float, deadline_s: float) -> int:
    scraper.request_all()
    scraper.wait(deadline_s)
    sleep(interval_s)  # rates are of this time
    scraper.request_all()
    scraper.wait(deadline_s)
    frame = frame_of(scraper)
    print(frame)
    if any(one.span is not None for one in frame.processes):
        return 0
    print(NO_ANSWER, file=sys.stderr)
    return 1


def _show(scraper: Scraper, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            scraper.request_all()
            scraper.wait(interval_s)
            frame = frame_of(scraper)
            if console.is_terminal:
                live.update(frame, refresh=True)
            else:
                console.print(frame)
            sleep(max(0.0, begin + interval_s - time.monotonic()))
