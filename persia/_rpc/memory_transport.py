"""The transport's contract inside one process, for tests and fakes.

Messages are copied as a wire would copy them, so that neither end sees the other's memory. A
message is delivered by the thread that sends it; what it asks for has a thread to itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia._rpc.transport import Outgoing, Parts, Work
from persia.errors import ConfigError, InternalError


def _copied(parts: Parts) -> list[bytearray]:
    return [bytearray(part) for part in parts]


def _run(work: Work | None) -> None:
    while work is not None:
        work = work()


class MemoryTransport:
    """Addresses are any text; they are known within one object of this class."""

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
        """Nothing is shared."""

    # --- for the ends; the lock is held -----------------------------------------------------

    def _enter(self, channel: MemoryChannel) -> None:
        self._channels.setdefault(channel.address, []).append(channel)

    def _leave(self, channel: MemoryChannel) -> None:
        if channel in self._channels.get(channel.address, []):
            self._channels[channel.address].remove(channel)

    def _unbind(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def _connect_all(self, address: str) -> list[MemoryChannel]:
        """Give the channels of an address a peer's name, if somebody listens there."""
        listener = self._listeners.get(address)
        if listener is None or listener.on_message is None:
            return []
        channels = self._channels.get(address, [])
        for channel in channels:
            if channel.listener is not listener:
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
            self._transport._enter(self)
            self._transport._connect_all(self._address)

    def send(self, outgoing: Outgoing) -> None:
        """Send, or keep until somebody listens."""
        with self._transport._lock:
            self._waiting.append(outgoing)
        self.flush()

    def flush(self) -> None:
        """Deliver what is waiting, if somebody listens."""
        while True:
            with self._transport._lock:
                listener = self.listener
                if listener is None or listener.on_message is None or not self._waiting:
                    return
                outgoing = self._waiting.pop(0)
                if not outgoing.claim():
                    continue
                deliver, peer = listener.on_message, self.peer
            work = deliver(peer, _copied(outgoing.parts))
            if work is not None:
                name = f"persia-serve {self._address}"
                threading.Thread(target=_run, args=(work,), name=name, daemon=True).start()

    def deliver(self, parts: Parts) -> None:
        """Take a message from the listener."""
        on_message = self._on_message
        if on_message is not None:
            on_message(_copied(parts))

    def lose(self) -> None:
        """Forget the connection."""
        with self._transport._lock:
            self.listener = None
            on_lost = self._on_lost
        if on_lost is not None:
            on_lost()

    def close(self) -> None:
        """End the connection."""
        with self._transport._lock:
            self._transport._leave(self)
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
        """Begin to receive, first what channels kept."""
        with self._transport._lock:
            self.on_message, self._on_dropped = on_message, on_dropped
            channels = list(self._transport._connect_all(self._address))
        for channel in channels:
            channel.flush()

    def send(self, peer: bytes, parts: Parts) -> None:
        """Send to a peer, or drop if it has gone."""
        with self._transport._lock:
            channel, on_dropped = self.peers.get(peer), self._on_dropped
        if channel is not None:
            channel.deliver(parts)
        elif on_dropped is not None:
            on_dropped("peer_gone")
        else:
            raise InternalError(f"{self._address}: sent before start")

    def close(self, linger_s: float) -> None:
        """Stop listening; every message was delivered when it was sent."""
        with self._transport._lock:
            self._transport._unbind(self)
            channels, self.peers = list(self.peers.values()), {}
            self.on_message = None
        for channel in channels:
            channel.lose()
