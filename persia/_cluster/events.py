"""What ends a process, one after the other in a queue: signals, failures, the job's end.

A signal handler may run between any two instructions, so it only puts an event there; the main
thread takes it out where it waits anyway.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from persia.errors import InternalError


@dataclass(frozen=True, slots=True)
class Event:
    """A reason to end, or to look whether there is one.

    ``signal`` with its number; ``job`` with its exit status, or with the error that keeps it
    from being known; ``ended``, of a process that was started; ``failure`` of a thread.
    """

    kind: str
    number: int = 0
    error: BaseException | None = None


Events = queue.SimpleQueue[Event]  # put() is allowed in a signal handler


@contextmanager
def watched_process() -> Iterator[Events]:
    """Turn SIGTERM, SIGINT, and exceptions that end a thread, into events."""
    events: Events = queue.SimpleQueue()

    def on_signal(number: int, frame: FrameType | None) -> None:
        events.put(Event("signal", number))

    def on_failure(failure: threading.ExceptHookArgs) -> None:
        error = failure.exc_value or InternalError(f"a thread ended by {failure.exc_type}")
        events.put(Event("failure", error=error))

    hook = threading.excepthook
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, on_signal) for number in signals}
    threading.excepthook = on_failure
    try:
        yield events
    finally:
        threading.excepthook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
