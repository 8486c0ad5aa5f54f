"""How fast a server reads its rows for others, beside those who train.

    nobody asks anything      as fast as it can
    training goes on          a piece of work, then a pause of so many times as long, or less
                              as copies of rows that change meanwhile fill their room

Pauses are what keeps a processor free; a lower priority alone would not, since whoever holds a
lock that training waits for must not be the one that never runs. Threads that hold no locks
(those that write files) have a low priority as well: they have work in bursts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from persia._core.store import MAX_SIDE_BYTES

if TYPE_CHECKING:
    from persia._core.cut import Cut
    from persia._core.store import EmbeddingStore

# A pause is so many times as long as the work before it: a third of one processor is left to a
# dump, and as much again to those that write its files.
REST = 2.0
# What part of a store's memory copies may take beside it.
COPIED = 4
# Of one pause.
LONGEST_S = 0.25
_LOWEST_PRIORITY = 19


def step_back() -> None:
    """Let every other thread run before this one, where threads have priorities."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


class Pace:
    """Of threads that work beside others; each rests for itself.

    Args:
        requests: Returns how many requests have come; if there are more than at the last look,
            somebody trains.
    """

    def __init__(self, requests: Callable[[], int]) -> None:
        self._requests = requests
        self._own = threading.local()
        self._pause = threading.Event()  # never set: a wait that a signal ends

    def rest(self, urgency: float = 0.0) -> None:
        """After a piece of work: pause, if requests came meanwhile.

        Args:
            urgency: From 0, there is time, to 1, others wait for this thread.
        """
        seen, now = self._requests(), time.thread_time()
        before, since = getattr(self._own, "last", (seen, now))
        pause_s = min(REST * (now - since), LONGEST_S) * (1.0 - urgency)
        if seen != before and pause_s > 0:
            self._pause.wait(pause_s)
        self._own.last = seen, time.thread_time()


def room_for_copies(store: EmbeddingStore) -> int:
    """Return the bytes that copies of rows that change before they are read may take.

    Where ids are uniform, a dump copies most rows: too little room would stop training.
    """
    return max(MAX_SIDE_BYTES, store.stats()["bytes"] // COPIED)


def urgency_of(cut: Cut) -> float:
    """Return how urgent it is to read on: half full, copies are taken out before anything."""
    return min(1.0, 4.0 * cut.fill)
