"""Deadlines of calls, and the one loop that tries something again until its deadline.

A server that calls others while it serves a call gives them no more time than its own caller
gave it: beyond that the answer has no reader.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Monotonic seconds. It belongs to the thread that serves the call; one that hands work to
# other threads runs it there in a copy of its context.
caller_deadline: ContextVar[float] = ContextVar("caller_deadline", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Bound all calls that this thread begins inside, together, by this many seconds."""
    token = caller_deadline.set(min(caller_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        caller_deadline.reset(token)


class Retry:
    """The attempts of one thing: yields the seconds left for each, with pauses between them.

        for left_s in Retry(env.rpc_timeout_s()):
            try:
                return ask(timeout_s=left_s)
            except ServiceUnavailable as exc:
                last = exc
        raise last

    The first attempt is always made. A pause doubles from ``first_s`` up to ``longest_s``; when
    it would end after the deadline, iteration ends instead.

    Args:
        timeout_s: Seconds from now on for all attempts and pauses.
        first_s: The first pause; 0 makes the second attempt at once and then pauses 0.1 s.
        longest_s: Bound of a pause.
        stop: Ends a pause, and with it the iteration, when it is set.
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

    def __iter__(self) -> Iterator[float]:
        pause_s = self._first_s
        while True:
            left_s = self._deadline - time.monotonic()
            yield max(left_s, 0.0)
            left_s = self._deadline - time.monotonic()
            if pause_s >= left_s or self._stop.wait(pause_s):
                return
            pause_s = min(2 * pause_s or 0.1, self._longest_s)


class Tries:
    """Tries of one thing, as long as a call may take; from the third on after a pause.

    A batch that moved to another server may find that one gone, too, and so on: as many deaths
    as there is time for cost nothing. The pause is for a server that forgets at once.

    Args:
        timeout_s: Seconds from now after which there is no other try.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._pause_s, self._next_s = 0.0, 0.1

    def another(self) -> bool:
        """Wait until another try is due; returns False if there is no time for it."""
        pause_s, self._pause_s = self._pause_s, self._next_s
        self._next_s = min(2 * self._next_s, 1.0)
        if time.monotonic() + pause_s >= self._deadline:
            return False
        time.sleep(pause_s)
        return True
