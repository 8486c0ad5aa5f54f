"""One call id: what is sent for it, and what comes back."""

from __future__ import annotations

import contextlib
import threading
import time

from persia._rpc.frame import Failure, Reply
from persia._rpc.transport import Channel, Outgoing
from persia.errors import ServiceError


class PendingCall:
    """Implements ``transport.Waiter``: whoever called waits for what others tell."""

    __slots__ = ("answer", "channel", "is_lost", "outgoing", "still")

    def __init__(self) -> None:
        # A bare lock, free once something has changed: an Event wakes its waiter only to
        # have it wait for the lock that its setter holds.
        self.still = threading.Lock()
        self.still.acquire()
        self.is_lost = False
        self.answer: Reply | Failure | ServiceError | None = None  # set once
        self.outgoing: Outgoing | None = None
        self.channel: Channel | None = None  # that the attempt goes to

    def resolve(self, answer: Reply | Failure | ServiceError) -> None:
        """Take what came back; the first counts."""
        if self.answer is None:
            self.answer = answer
        self._wake()

    def lose(self) -> None:
        """The connection broke; what was sent before will not be answered."""
        if self.outgoing is not None and self.outgoing.was_sent:
            self.move()

    def move(self) -> None:
        """Another connection takes the place of the one that the attempt went to."""
        self.is_lost = True
        self._wake()

    def begin(self, outgoing: Outgoing) -> None:
        """Another attempt; a loss of the one before no longer counts."""
        self.outgoing = outgoing
        self.is_lost = False

    def is_over(self) -> bool:
        """Whether there is an answer, or will be none to this attempt."""
        return self.answer is not None or self.is_lost

    def wait(self, until: float) -> None:
        """Wait until it is over, or until that monotonic time."""
        carrier = None if self.outgoing is None else self.outgoing.carrier
        while not self.is_over():
            left = until - time.monotonic()
            if left <= 0.0:
                return
            if carrier is None:
                self.sleep(left)
            else:
                carrier.wait(self, left)

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until ``still`` is free, and take it."""
        if not self.is_over():
            self.still.acquire(timeout=max(0.0, seconds))

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # another change has freed it
            self.still.release()
