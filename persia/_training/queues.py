"""Bounded queues between the threads of one pipeline, woken by close and by errors.

``queue.Queue`` cannot be closed before Python 3.13. A thread that waits for work has no
deadline: the owner of the queue closes it. A thread of the user that waits has one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Thread

T = TypeVar("T")


def join(threads: Sequence[Thread], timeout_s: float) -> list[Thread]:
    """Wait this long for all threads together; return those that are still alive.

    Left out are those that never started and the caller's own: the collector may close a
    forgotten iterator on one of its own threads.
    """
    deadline = time.monotonic() + timeout_s
    started = [each for each in threads if each.ident not in (None, threading.get_ident())]
    for thread in started:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [thread for thread in started if thread.is_alive()]


class Closed(Exception):
    """The queue was closed: a thread that meets this ends its work without an error."""


class Finished(Exception):
    """Everything that was put has been taken and nothing more will come."""


class BoundedQueue(Generic[T]):
    """A first-in first-out queue of one pass; ``put`` waits while it holds ``capacity`` items.

    Two conditions over one lock, so that an item wakes one worker and not all of them: woken
    in vain, each would take the GIL from the user's thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.RLock()  # guards everything below; see OrderedQueue
        self._has_room = threading.Condition(self._lock)
        self._has_item = threading.Condition(self._lock)
        self._items: deque[T] = deque()
        self._finished = False
        self._closed = False
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[T]:
        """Return the items that are not taken yet."""
        with self._lock:
            return list(self._items)

    def put(self, item: T, timeout_s: float | None = None) -> bool:
        """Append an item once there is room, unless ``Closed``; False if none was in time."""
        with self._lock:
            if len(self._items) >= self._capacity and not self._closed:
                self._has_room.wait_for(self._admits, timeout_s)
            if self._closed:
                raise Closed
            if len(self._items) >= self._capacity:
                return False
            self._items.append(item)
            self._has_item.notify()
            return True

    def _admits(self) -> bool:
        return self._closed or len(self._items) < self._capacity

    def get(self) -> T:
        """Take the oldest item, waiting for one, unless ``Closed`` or ``Finished``."""
        with self._lock:
            while not (self._closed or self._items or self._finished):
                self._has_item.wait()
            if self._closed:
                raise Closed
            if not self._items:
                raise Finished
            item = self._items.popleft()
            self._has_room.notify()
            return item

    def finish(self, failure: BaseException | None = None) -> None:
        """Note that nothing more will be put, and the exception if one ended it."""
        with self._lock:
            self._finished = True
            self.failure = failure
            self._has_item.notify_all()

    def close(self) -> list[T]:
        """Wake all threads with ``Closed`` and return the items that are not taken."""
        with self._lock:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._has_item.notify_all()
            self._has_room.notify_all()
            return left


class OrderedQueue(Generic[T]):
    """The last stage: many workers put numbered items, one reader takes them as 0, 1, 2, ...

    The next number in line is always admitted, whatever the capacity, or the reader would wait
    for an item that waits for the reader. Of those that wait for room the lowest is woken, and
    no other: nine woken in vain for each item would take the GIL from the user's thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Guards everything below. Of an RLock a condition calls methods in C, of a Lock its own
        # in Python: five calls for each wait and one for each notify.
        self._lock = threading.RLock()
        self._has_next = threading.Condition(self._lock)
        self._waiting: dict[int, threading.Condition] = {}  # by number that is to be put
        self._items: dict[int, T] = {}
        self._next = 0
        self._finished = False
        self._closed = False
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, number: int, item: T) -> None:
        """Store an item once there is room, unless ``Closed``."""
        with self._lock:
            if not self._admits(number):
                self._waiting[number] = has_room = threading.Condition(self._lock)
                has_room.wait_for(lambda: self._admits(number))
                del self._waiting[number]
            if self._closed:
                raise Closed
            self._items[number] = item
            if number == self._next:
                self._has_next.notify()
            self._wake_lowest()  # the reader may have made room twice

    def _admits(self, number: int) -> bool:
        return self._closed or len(self._items) < self._capacity or number == self._next

    def _wake_lowest(self) -> None:
        lowest = min(self._waiting, default=None)
        if lowest is not None and self._admits(lowest):
            self._waiting[lowest].notify()

    def get(self, timeout_s: float | None) -> T:
        """Take the next item; without a time-out, wait until there is one or ``Finished``.

        What ``fail`` or ``finish`` was given is raised itself, so that the user sees the
        traceback of the thread it comes from.

        Raises:
            TimeoutError: If nothing came in time.
        """
        with self._lock:
            if not self._is_ready() and not self._has_next.wait_for(self._is_ready, timeout_s):
                raise TimeoutError
            if self._closed or not self._items:
                if self._failure is not None:
                    raise self._failure
                raise Closed if self._closed else Finished
            item = self._items.pop(self._next)
            self._next += 1
            self._wake_lowest()
            return item

    def _is_ready(self) -> bool:
        return self._closed or self._finished or self._next in self._items

    def finish(self, failure: BaseException | None) -> None:
        """Note that nothing more will be put; a failure is raised after what is here."""
        with self._lock:
            self._finished = True
            self._failure = self._failure or failure
            self._has_next.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Raise this at the reader now; what is here stays for ``close`` to return."""
        with self._lock:
            self._failure = self._failure or failure
            self._close()

    def close(self) -> list[T]:
        """Wake all threads with ``Closed`` and return the items that are not taken."""
        with self._lock:
            self._close()
            left = list(self._items.values())
            self._items.clear()
            return left

    def _close(self) -> None:
        self._closed = True
        self._has_next.notify_all()
        for has_room in self._waiting.values():
            has_room.notify()
