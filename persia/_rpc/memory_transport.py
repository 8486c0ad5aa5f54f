"""The transport's contract inside one process, for tests and fakes.

Messages are copied as a wire would copy them, so that neither end sees the other's memory. The
sending thread delivers a message; the work it causes gets a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia._rpc.transport import Outgoing, Parts, Waiter, Work
from persia.errors import ConfigError, InternalError


def _copied(parts: Parts) -> list[bytearray]:
    # Writable, as parts from ZeroMQ are: receivers may work in place.
    return [bytearray(part) for part in parts]


def _run(work: Work | None) -> None:
    while work is not None:
        work = work()


class MemoryTransport:
    """Addresses are any text and belong to one object of this class."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all below, and every end's fields
        self._listeners: dict[str, MemoryListener] = {}
        self._channels: dict[str, list[MemoryChannel]] = {}
        self._num_peers = 0

    def listen(self, address: str) -> MemoryListener:
        """Bind to an address.

        Raises:
            ConfigError: If it is in use.
        """
        with self._lock:
            if address in self._listeners:
                raise ConfigError(f"{address}: the address is in use")
            listener = MemoryListener(self, address)
            self._listeners[address] = listener
            return listener

    def connect(self, address: str) -> MemoryChannel:
        """Prepare a channel to an address."""
        return MemoryChannel(self, address)

    def close(self) -> None:
        """Do nothing: there are no shared resources."""

    # --- for the ends; the lock is held -----------------------------------------------------

    def _add(self, channel: MemoryChannel) -> None:
        self._channels.setdefault(channel.address, []).append(channel)

    def _remove(self, channel: MemoryChannel) -> None:
        if channel in self._channels.get(channel.address, []):
            self._channels[channel.address].remove(channel)

    def _unbind(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def _connect_channels(self, address: str) -> list[MemoryChannel]:
        """Connect the channels of an address to its listener, if there is one; return them."""
        listener = self._listeners.get(address)
        if listener is None or listener.on_message is None:
            return []
        channels = self._channels.get(address, [])
        for channel in channels:
            # A listener that was restarted at the address is another object.
            if channel.listener is not listener:
                # Each connection gets a new routing id, as on a ROUTER after a reconnect.
                self._num_peers += 1
                channel.listener, channel.peer = listener, self._num_peers.to_bytes(5, "big")
                listener.peers[channel.peer] = channel
        return channels


class MemoryChannel:
    """Client end."""

    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._transport = transport
        self._address = address
        self._waiting: list[Outgoing] = []
        self._on_message: Callable[[Parts], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self.listener: MemoryListener | None = None
        self.peer = b""

    @property
    def address(self) -> str:
        """The address it connects to."""
        return self._address

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        """Begin to connect."""
        with self._transport._lock:
            self._on_message, self._on_lost = on_message, on_lost
            self._transport._add(self)
            self._transport._connect_channels(self._address)

    def send(self, outgoing: Outgoing) -> None:
        """Send, or keep until there is a listener."""
        # Queued first: a flush of another thread may take it before this one gets to it.
        with self._transport._lock:
            self._waiting.append(outgoing)
        self.flush()

    def wait(self, waiter: Waiter, seconds: float) -> None:
        """Wait; the listener's threads deliver."""
        waiter.sleep(seconds)

    def flush(self) -> None:
        """Deliver the queued messages if there is a listener."""
        while True:
            with self._transport._lock:
                # Read under the lock: lose() clears it in another thread.
                listener = self.listener
                if listener is None or listener.on_message is None or not self._waiting:
                    return
                outgoing = self._waiting.pop(0)
                # Cancelled, or claimed by another thread that flushes.
                if not outgoing.claim():
                    continue
                deliver, peer = listener.on_message, self.peer
            # Outside the lock: the receiver may send from inside this call.
            work = deliver(peer, _copied(outgoing.parts))
            if work is not None:
                name = f"persia-serve {self._address}"
                threading.Thread(target=_run, args=(work,), name=name, daemon=True).start()

    def deliver(self, parts: Parts) -> None:
        """Pass a message of the listener's on."""
        on_message = self._on_message
        if on_message is not None:
            # Copied, because a ZeroMQ receiver gets memory of its own as well.
            on_message(_copied(parts))

    def lose(self) -> None:
        """Forget the connection."""
        with self._transport._lock:
            self.listener = None  # reconnected when a listener starts at the address
            on_lost = self._on_lost
        if on_lost is not None:
            on_lost()

    def close(self) -> None:
        """End the connection."""
        with self._transport._lock:
            self._transport._remove(self)
            # Late deliveries find no callback instead of an object that is closed.
            self._on_message = self._on_lost = None
            self._waiting.clear()
            if self.listener is not None:
                self.listener.peers.pop(self.peer, None)
                self.listener = None


class MemoryListener:
    """Server end."""

    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._transport = transport
        self._address = address
        self._on_dropped: Callable[[str], None] | None = None
        self.on_message: Callable[[bytes, Parts], Work | None] | None = None
        self.peers: dict[bytes, MemoryChannel] = {}

    @property
    def address(self) -> str:
        """The address it is bound to."""
        return self._address

    @property
    def is_open(self) -> bool:
        """Whether it receives."""
        return self.on_message is not None

    def start(
        self,
        on_message: Callable[[bytes, Parts], Work | None],
        on_dropped: Callable[[str], None],
    ) -> None:
        """Begin to receive, first the messages that channels kept."""
        with self._transport._lock:
            self.on_message, self._on_dropped = on_message, on_dropped
            # A copy: flush() below runs without the lock, and a channel may close meanwhile.
            channels = list(self._transport._connect_channels(self._address))
        for channel in channels:
            channel.flush()

    def send(self, peer: bytes, parts: Parts) -> None:
        """Send to a peer; dropped if the peer is gone."""
        with self._transport._lock:
            channel, on_dropped = self.peers.get(peer), self._on_dropped
        if channel is not None:
            channel.deliver(parts)
        elif on_dropped is not None:
            on_dropped("peer_gone")
        else:
            raise InternalError(f"{self._address}: sent before start")

    def close(self, linger_s: float) -> None:
        """Stop listening; ``linger_s`` has no use, as sending delivers at once."""
        with self._transport._lock:
            self._transport._unbind(self)
            # Unbound first: a lost channel that connects again must not find this listener.
            channels, self.peers = list(self.peers.values()), {}
            self.on_message = None
        for channel in channels:
            channel.lose()
