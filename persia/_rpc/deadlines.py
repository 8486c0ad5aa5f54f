"""By when whoever called this process wants the answer; its own calls take no longer.

A worker that asks parameter servers on somebody's behalf would otherwise go on for minutes
after that somebody has given up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Seconds before the third try of something, doubled for each later one.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0

# Monotonic seconds. It belongs to the thread that serves the call; one that hands work to
# other threads runs it there in a copy of its context.
caller_deadline: ContextVar[float] = ContextVar("caller_deadline", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let the calls that this thread makes inside end in so many seconds, all together."""
    token = caller_deadline.set(min(caller_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        caller_deadline.reset(token)


class Tries:
    """Tries of one thing, as long as a call may take; from the third on after a pause.

    A batch that moved to another server may find that one gone, too, and so on: as many deaths
    as there is time for cost nothing. The pause is for a server that forgets at once.

    Args:
        timeout_s: Seconds from now after which there is no other try.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._pause_s, self._next_s = 0.0, _FIRST_PAUSE_S

    def another(self) -> bool:
        """Wait until another try is due; returns False if there is no time for it."""
        pause_s, self._pause_s = self._pause_s, self._next_s
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)
        if time.monotonic() + pause_s >= self._deadline:
            return False
        time.sleep(pause_s)
        return True
