"""Threads that read and write rows beside requests, and leave the processors to them.

While no requests come, they work as fast as they can. Beside requests all together take a
share of the processors: after a piece of work a thread pauses until that is paid for, in turn
with the others, as threads that work at once would keep the interpreter's lock from requests.
Pauses, not a lower priority: a thread that holds a lock must not be the one that never runs.

A request that wakes on a processor where a piece is worked on may wait for its end, up to a
tick of the kernel's clock: pieces of work are to be shorter than a request.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from persia.utils import processor_quota, sleep

# Of the processors, for one server. A dump costs training more than that, as rows are copied
# before they change: with one server on a machine all of it is to be less than a fifth.
SHARE = 0.07
# Processors, however many there are: a disk or network is not faster for more.
MAX_PROCESSORS = 1.0
# Seconds of one pause, however much is owed: threads of a small container owe much more.
LONGEST_S = 10.0
# Seconds between two looks, in a pause, at whether requests go on, or wait.
LOOK_S = 0.25
# Seconds that a thread is taken to have worked at its first look: so it takes its turn.
PIECE_S = 0.005


class Throttle:
    """Limits threads that work beside requests, all of them together.

    Args:
        requests: Returns a number that changes when a request comes.
        processors: That they take; None: ``SHARE`` of those of this process.
    """

    def __init__(self, requests: Callable[[], float], processors: float | None = None) -> None:
        self._requests = requests
        if processors is None:
            usable: float = os.cpu_count() or 1
            if sys.platform == "linux":
                usable = min(len(os.sched_getaffinity(0)), processor_quota())
            processors = min(SHARE * usable, MAX_PROCESSORS)
        self._processors = processors
        self._first_seen = requests()
        self._own = threading.local()
        self._lock = threading.Lock()  # guards the next
        self._paid_at = 0.0  # when all work done so far is paid for; monotonic

    def rest(self, urgency: Callable[[], float] = lambda: 0.0) -> None:
        """Pause after a piece of work, or before the first, if requests came meanwhile."""
        seen, now = self._requests(), time.thread_time()
        before, since = getattr(self._own, "last", (self._first_seen, now - PIECE_S))
        if seen != before and urgency() < 1.0:
            left_s = min(self._owed(now - since, urgency()), LONGEST_S)
            while left_s > 0 and urgency() < 1.0:
                sleep(min(left_s, LOOK_S))
                left_s -= LOOK_S
                seen, before = self._requests(), seen
                if seen == before:
                    break
        self._own.last = seen, time.thread_time()

    def _owed(self, work_s: float, urgency: float = 0.0) -> float:
        """Return the seconds until this work is paid for, which began when it could.

        The part that is urgent is forgiven, not put off until there is time.
        """
        with self._lock:
            now = time.monotonic()
            paid_at = max(self._paid_at, now - work_s) + work_s / self._processors
            owed_s = (paid_at - now) * (1.0 - urgency)
            self._paid_at = now + owed_s
            return owed_s
