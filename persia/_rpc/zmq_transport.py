"""The transport over ZeroMQ: DEALER to ROUTER, by ``ipc://`` or ``tcp://``.

``ZMQ_IMMEDIATE`` keeps messages out of a connection that is not there, so that "was it sent"
has an answer. libzmq drops what a broken connection still held: nothing is sent twice behind
our back. Its own threads answer heartbeats, so a server that computes is not taken for dead,
and one that is stopped or cut off is noticed.

libzmq bounds a message part by part and holds all parts before it delivers the first: its
high-water mark counts whole messages, and it has no bound for an unfinished one. So a peer
can make it hold parts without end; ``Limits`` bounds what Python sees. Who cannot trust the
network must keep strangers out of it, and a limit of memory is the process's last defence.
"""

from __future__ import annotations

import socket as sockets
import weakref

import numpy as np
import zmq

from persia._rpc import multipart
from persia._rpc.frame import LIMITS, Limits
from persia._rpc.zmq_ends import ZmqChannel, ZmqListener
from persia.errors import ConfigError

# Messages per connection and direction. Bytes are bounded by the calls in flight; this
# bounds what a peer that does not read can make us hold.
_HIGH_WATER_MARK = 64

# The largest block by whose release glibc learns: it then keeps so much memory, and twice as
# much at a heap's end, for the next message instead of asking the kernel for cleared pages.
_LESSON_BYTES = (32 << 20) - (64 << 10)

_SILENCE_S = 8.0  # a connection silent for so long is closed
_HEARTBEATS = 4  # are sent in that time
_HANDSHAKE_MS = 5_000  # who connects and says nothing is cut off
_CONNECT_MS = 5_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000

_IPC = "ipc://"
_MAX_IPC_PATH = 107  # sockaddr_un holds 108 bytes with the final zero


def normalized(address: str) -> str:
    """Return an address with its scheme; ``host:port`` alone is TCP.

    Raises:
        ConfigError: If it is neither ``ipc://<path>`` nor ``[tcp://]<host>:<port>``.
    """
    if address.startswith(_IPC):
        path = address[len(_IPC) :]
        if not 0 < len(path.encode()) <= _MAX_IPC_PATH:
            raise ConfigError(
                f"address {address!r}: expected a path of 1..{_MAX_IPC_PATH} bytes, "
                f"got {len(path.encode())}"
            )
        return address
    scheme, separator, rest = address.rpartition("://")
    host, colon, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if (separator and scheme != "tcp") or not host or not colon or not is_port:
        raise ConfigError(
            f"expected an address as tcp://<host>:<port>, <host>:<port> or ipc://<path>, "
            f"got {address!r}"
        )
    return f"tcp://{rest}"


class ZmqTransport:
    """Ends that share libzmq's threads.

    Args:
        limits: What a message may be.
        num_io_threads: libzmq's own; one moves about a gigabyte a second.
        silence_s: A peer that is not heard for so long is taken for gone.
    """

    def __init__(
        self, limits: Limits = LIMITS, num_io_threads: int = 1, silence_s: float = _SILENCE_S
    ) -> None:
        np.empty(_LESSON_BYTES, np.uint8)
        self._limits = limits
        self._silence_ms = int(silence_s * 1000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(num_io_threads)
        # Those still in use; libzmq would wait for ever for one that nobody closes.
        self._ends: weakref.WeakSet[ZmqListener | ZmqChannel] = weakref.WeakSet()

    def listen(self, address: str) -> ZmqListener:
        """Bind to an address; port 0 or ``*`` is one that the kernel chooses.

        Raises:
            ConfigError: If the address cannot be read, or is in use.
        """
        wanted = normalized(address)
        if wanted.startswith(_IPC):
            _check_nobody_listens(wanted)
        socket = self._socket(zmq.ROUTER, wanted)
        # A reply that nobody can take is an error to count, not to lose.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(wanted)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            raise ConfigError(f"cannot listen at {wanted}: {exc.strerror}") from exc
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        listener = ZmqListener(socket, bound, self._limits)
        self._ends.add(listener)
        return listener

    def connect(self, address: str) -> ZmqChannel:
        """Prepare a channel to an address; nobody needs to listen there yet.

        Raises:
            ConfigError: If the address cannot be read.
        """
        wanted = normalized(address)
        socket = self._socket(zmq.DEALER, wanted)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        channel = ZmqChannel(socket, wanted, self._limits)
        self._ends.add(channel)
        return channel

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._limits.array_bytes, 1 << 16))
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._silence_ms // _HEARTBEATS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, self._silence_ms)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # Only where it is asked for: with it, libzmq would take a name's IPv6 address alone.
        socket.setsockopt(zmq.IPV6, int("://[" in address))
        return socket

    def close(self) -> None:
        """Close what is still open, and end libzmq's threads once nothing lingers."""
        for end in list(self._ends):
            if isinstance(end, ZmqListener):
                end.close(0.0)
            else:
                end.close()
        self._context.term()
        multipart.release()  # what the sockets gave back as they closed


def _check_nobody_listens(address: str) -> None:
    """Refuse a path that is in use: libzmq would take it over without a word."""
    path = address[len(_IPC) :]
    name = "\0" + path[1:] if path.startswith("@") else path
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(name)
        except OSError:
            return  # nobody is there, or the bind that follows says what is wrong
    raise ConfigError(f"cannot listen at {address}: another process does")
