"""Deadlines of calls, and the loop that retries until a deadline.

A server that calls others while it serves a call gives them no more time than its own caller
gave it: after that the answer has no reader.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Monotonic seconds. A context variable is not inherited by other threads: a server that hands
# work to them must run it in a copy of its own context.
caller_deadline: ContextVar[float] = ContextVar("caller_deadline", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Bound all calls that this thread begins inside by this many seconds in total."""
    token = caller_deadline.set(min(caller_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        caller_deadline.reset(token)


class Retry:
    """The attempts of one action: yields the seconds left, with a pause before each next one.

    The first attempt is always made. A pause doubles from ``first_s`` up to ``longest_s``; when
    it would end after the deadline, iteration ends instead. A ``first_s`` of 0 makes the second
    attempt at once, and then pauses 0.1 s. ``stop`` ends a pause, and with it the iteration.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        first_s: float = 0.1,
        longest_s: float = 1.0,
        stop: threading.Event | None = None,
    ) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._first_s, self._longest_s = first_s, longest_s
        self._stop = threading.Event() if stop is None else stop

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(self._deadline - time.monotonic(), 0.0)

    def __iter__(self) -> Iterator[float]:
        pause_s = self._first_s
        while True:
            # Also with no time left: the caller gets one attempt, and the callee raises the
            # timeout.
            yield self.left_s
            # Event.wait rather than sleep: it returns True as soon as the event is set.
            if pause_s >= self.left_s or self._stop.wait(pause_s):
                return
            pause_s = min(2 * pause_s or 0.1, self._longest_s)
