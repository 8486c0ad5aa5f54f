"""How fast a server reads its rows for a dump, beside the training that it serves.

    no requests come          as fast as it can
    training goes on          all threads of a server's dump together take SHARE of the
                              processors, and one at most: after a piece of work a thread
                              pauses until that is paid for
    room gets short           the fuller it is of copies of rows that change meanwhile, the
                              shorter the pauses, as training would have to wait for room
    memory gets short         room is what there is and a part of what is free, computed again
                              every second: other servers of the machine take theirs of the same

Threads pause in turns: each is due once the work of those before it is paid for. Many small
pieces one at a time go unnoticed: threads that all worked at once would take the interpreter's
lock from requests for 5 ms each, every time these let it go.

Pauses, not a lower priority, keep processors free: a thread that holds a lock which training
waits for, and be it the interpreter's, must not be the one that never runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from persia._core.store.store import MAX_SIDE_BYTES
from persia.utils import free_memory_bytes, processor_quota, sleep

if TYPE_CHECKING:
    from persia._core.store.snapshot import Snapshot

# Of the processors, for one server. A dump costs training more than that, as rows are copied
# before they change and as the system has its own work with files; with one server on a machine
# all of it is to be less than a fifth.
SHARE = 0.07
# Processors, however many there are: a disk or network is not faster for more.
MAX_PROCESSORS = 1.0
# Copies may take this part of what is free; of the rows' memory where that is not known.
COPY_DIVISOR = 4
# Seconds between two looks at the memory that is free.
ROOM_S = 1.0
# How full that room is when a reader begins to hurry, and when it does not pause any more.
HURRY = 0.5, 0.75
# Seconds of one pause, however much is owed: more than five threads owe for pieces of 40 ms
# where a container has half a processor, or they would sleep as long and work at once again.
LONGEST_S = 10.0
# Seconds between two looks, in a pause, at whether training goes on, or waits.
LOOK_S = 0.25
# Seconds that a thread is taken to have worked at its first look: so it takes its turn.
PIECE_S = 0.005


def num_processors() -> float:
    """Return how many this process may use, which may be a part of one."""
    if sys.platform == "linux":
        return min(len(os.sched_getaffinity(0)), processor_quota())
    return os.cpu_count() or 1


class Throttle:
    """Limits threads that work beside requests, all of them together.

    Args:
        requests: Returns how many requests have come; training goes on if there are more than
            at a thread's last look.
        processors: What the threads take together; a part of one, or more.
    """

    def __init__(self, requests: Callable[[], int], processors: float | None = None) -> None:
        self._requests = requests
        if processors is None:
            processors = min(SHARE * num_processors(), MAX_PROCESSORS)
        self._processors = processors
        self._first_seen = requests()
        self._own = threading.local()
        self._lock = threading.Lock()  # guards the next
        self._paid_at = 0.0  # when all work done so far is paid for; monotonic

    def rest(self, urgency: Callable[[], float] = lambda: 0.0) -> None:
        """Pause after a piece of work, or before the first, if requests came meanwhile.

        Args:
            urgency: Returns from 0, there is time, to 1, requests wait for this thread.
        """
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

    def beside(self, snapshot: Snapshot) -> Callable[[], None]:
        """Return what the threads that read and write this snapshot call between two pieces."""
        due = time.monotonic()

        def rest() -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due:  # two threads at once: the same, twice
                due = now + ROOM_S
                snapshot.allow(
                    room_for_copies(snapshot, int(snapshot.fill * snapshot.side_bytes))
                )
            self.rest(lambda: urgency_of(snapshot))

        return rest


def room_for_copies(snapshot: Snapshot, copied: int = 0) -> int:
    """Return the bytes that copies of rows may take, which change before they are read.

    Where ids are uniform, a dump copies most rows: too little room would stop training. There
    is enough for all of them where a machine has that much memory left.

    Args:
        snapshot: The one whose rows are copied.
        copied: Bytes that copies take already; they are not free any more.
    """
    whole, free = snapshot.copied_bytes, free_memory_bytes()
    more = free // COPY_DIVISOR if free else whole // COPY_DIVISOR
    return max(MAX_SIDE_BYTES, min(whole, copied + more))


def give_room(snapshot: Snapshot) -> None:
    """Let copies of a new snapshot take what they may: training changes rows from now on.

    If that fails, it is closed: an open one that is not read would stop training.
    """
    try:
        snapshot.allow(room_for_copies(snapshot))
    except BaseException:
        snapshot.close()
        raise


def urgency_of(snapshot: Snapshot) -> float:
    """Return from 0 to 1 how urgent it is to read on, before training has to wait for room."""
    begin, end = HURRY
    return min(1.0, max(0.0, (snapshot.fill - begin) / (end - begin)))
