"""The seam between calls and sockets.

A transport moves lists of parts. It knows neither methods nor deadlines: the server and the
client above it are the same over ZeroMQ and in one process, and one suite tests both.

    Channel   client end of one address. Connects and reconnects by itself.
    Listener  server end of one address. A peer is one connection of one channel; after a
              reconnect it is another.

What is promised, and tested for each transport:

    T1  A message arrives whole or not at all, at most once.
    T2  Arrays that arrive belong to the receiver; the sender must leave those that it sent
        alone until the message was answered or the channel is closed.
    T3  A channel without a connection keeps messages until it has one; one with a
        connection that breaks calls ``on_lost``, after which nothing that was sent before
        is answered. Both are without limit in time: deadlines are the client's.
    T4  A listener whose peer does not read drops what it is told to send, says so, and goes
        on with other peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Optional, Protocol

from persia._rpc.frame import Part

Parts = Sequence[Part]

# What a message asks for, and may take its time: returns what is to be done next, or None.
Work = Callable[[], Optional["Work"]]


class Peer(bytes):
    """A peer that has shown a key. ``user`` is whose, by the name of its file."""

    user: str

    def __new__(cls, name: bytes | memoryview, user: str) -> Peer:
        """A routing id, with a name beside it."""
        peer = super().__new__(cls, name)
        peer.user = user
        return peer


class Waiter(Protocol):
    """Somebody who waits for an answer."""

    @property
    def still(self) -> threading.Lock:
        """Freed by who has something to tell."""

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until ``still`` is free, and take it."""


class SocketOwner(Protocol):
    """What answers come by, and how one waits for them."""

    def wait(self, waiter: Waiter, seconds: float) -> None:
        """Wait so long, or until it is over, perhaps less; receive meanwhile."""


class Outgoing:
    """A message on its way. Whoever asks first decides: it is sent, or it is cancelled."""

    __slots__ = ("_lock", "_state", "carrier", "parts")

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.carrier: SocketOwner | None = None  # where threads of its own receive: none
        self._lock = threading.Lock()
        self._state = "waiting"

    @property
    def was_sent(self) -> bool:
        """Whether the peer may have it."""
        return self._state == "sent"

    def claim(self) -> bool:
        """For the channel, before it sends: False if it is cancelled, or was claimed before."""
        with self._lock:
            if self._state != "waiting":
                return False
            self._state = "sent"
            return True

    def unclaim(self) -> None:
        """For the channel: sending was not possible after all, and nothing of it left."""
        with self._lock:
            self._state = "waiting"

    def cancel(self) -> bool:
        """For the client: True if the message was not sent and now never will be."""
        with self._lock:
            if self._state == "waiting":
                self._state = "cancelled"
                self.parts = ()  # a queue may hold it until there is a connection
            return self._state == "cancelled"


class Channel(Protocol):
    """Client end of one address. ``send`` and ``close`` may be called by any thread."""

    @property
    def address(self) -> str:
        """The address it connects to."""

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        """Begin to connect; both functions must return soon and must not raise."""

    def send(self, outgoing: Outgoing) -> None:
        """Send as soon as there is a connection with room."""

    def close(self) -> None:
        """End the connection; what was not sent is dropped."""


class Listener(Protocol):
    """Server end of one address. ``send`` and ``close`` may be called by any thread."""

    @property
    def address(self) -> str:
        """The address it is bound to, with the true port."""

    @property
    def is_open(self) -> bool:
        """Whether it receives."""

    def start(
        self,
        on_message: Callable[[bytes, Parts], Work | None],
        on_dropped: Callable[[str], None],
    ) -> None:
        """Begin to receive.

        Args:
            on_message: Takes the peer and the parts; must return soon and must not raise.
                The peer is a ``Peer`` where it has shown a key.
                What takes longer it returns; that runs in a thread of the listener's, while
                another receives.
            on_dropped: Takes the reason why a message, in or out, was dropped; called by any
                thread, must not send.
        """

    def send(self, peer: bytes, parts: Parts) -> None:
        """Send to a peer, or drop if it has gone or does not read."""

    def close(self, linger_s: float) -> None:
        """Stop listening, giving what was to be sent that many seconds to leave."""


class Transport(Protocol):
    """Makes both ends."""

    def listen(self, address: str) -> Listener:
        """Bind to an address.

        Raises:
            ConfigError: If the address cannot be read or is in use.
        """

    def connect(self, address: str) -> Channel:
        """Prepare a channel to an address; nobody needs to listen there yet.

        Raises:
            ConfigError: If the address cannot be read.
        """

    def close(self) -> None:
        """Release what the ends share; they are closed already."""
