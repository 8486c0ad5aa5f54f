"""What calls and sockets have in common; it needs no ZeroMQ.

A transport moves lists of parts and knows neither methods nor deadlines. A ``ZmqChannel`` is
the client end of one address, and connects and reconnects by itself; a ``ZmqListener`` is the
server end. A peer is one connection of one channel; after a reconnect it is another peer.

    T1  A message arrives whole or not at all, at most once.
    T2  Arrays that arrive belong to the receiver. The sender must not change arrays that it
        sent until the message was answered or the channel is closed.
    T3  A channel keeps messages until it has a connection. When a connection breaks it calls
        ``on_lost``; messages sent before are not answered after that. Neither has a time
        limit: deadlines are the client's.
    T4  A listener drops messages to a peer that does not read, reports the drop, and goes on
        with other peers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Optional

from persia._rpc.frame import Part

Parts = Sequence[Part]

# The serving of one message, which may take long; returns the next work or None.
Work = Callable[[], Optional["Work"]]


class Peer(bytes):
    """A routing id with the name of the user whose key the peer has proven to have."""

    user: str


class Waiter:
    """A thread that waits for an answer, and the lock that wakes it."""

    def __init__(self) -> None:
        # A bare lock that is released once something has changed. An Event would wake its
        # waiter only to have it wait for the lock that the setter still holds.
        self.done = threading.Lock()
        self.done.acquire()

    def is_over(self) -> bool:
        """Return whether there is nothing more to wait for."""
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        """Wait at most that long for a ``wake``, and take it."""
        # A lost wake is impossible: wake() comes after the change that is_over() sees.
        if not self.is_over():
            self.done.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        """Wake the thread, or keep its next ``sleep`` from waiting."""
        with contextlib.suppress(RuntimeError):  # released already by another change
            self.done.release()


class Outgoing:
    """A message that is either sent or cancelled, whichever is asked for first."""

    __slots__ = ("_lock", "_state", "parts")

    def __init__(self, parts: Parts) -> None:
        # Views of the caller's arrays, kept alive by this object until they are sent.
        self.parts = parts
        self._lock = threading.Lock()
        # One of waiting, sent and cancelled; the last is final.
        self._state = "waiting"

    @property
    def was_sent(self) -> bool:
        """Whether the peer may have it."""
        return self._state == "sent"

    def claim(self) -> bool:
        """For the channel, before it sends: False if cancelled or claimed before."""
        with self._lock:
            # Under the lock: the client may cancel in another thread just now.
            if self._state != "waiting":
                return False
            self._state = "sent"
            return True

    def unclaim(self) -> None:
        """For the channel: sending failed, and no part has left."""
        with self._lock:
            self._state = "waiting"

    def cancel(self) -> bool:
        """For the client: True if the message was not sent and now never will be."""
        with self._lock:
            if self._state == "waiting":
                self._state = "cancelled"
                # A queue may hold this object until there is a connection, but not the arrays.
                self.parts = ()
            return self._state == "cancelled"
