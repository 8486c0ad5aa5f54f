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

import ipaddress
import logging
import socket as sockets
import threading
import weakref
from pathlib import Path

import numpy as np
import zmq
from zmq.utils import z85

from persia import env
from persia._rpc import multipart
from persia._rpc.curve_auth import CurveAuthenticator
from persia._rpc.frame import LIMITS, Limits
from persia._rpc.keys import Keys
from persia._rpc.zmq_endpoints import ZmqChannel, ZmqListener
from persia.errors import ConfigError

logger = logging.getLogger(__name__)

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

# What to do about an address that is taken.
_IN_USE = (
    ": another job or process listens there; end it, or give this job other ports: "
    f"{env.PARAMETER_SERVERS_VARIABLE}, {env.EMBEDDING_WORKERS_VARIABLE} and "
    f"{env.NN_WORKERS_VARIABLE}, the same for every process"
)

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
        keys: The directory of this process's keys; that of ``PERSIA_KEYS`` if not given. If
            there is none either, nothing is encrypted and nobody is asked for a key.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        num_io_threads: int = 1,
        silence_s: float = _SILENCE_S,
        keys: Path | None = None,
    ) -> None:
        np.empty(_LESSON_BYTES, np.uint8)
        self._limits = limits
        self._silence_ms = int(silence_s * 1000)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(num_io_threads)
        directory = env.keys_directory() if keys is None else keys
        self._keys = None if directory is None else Keys(directory)
        self._lock = threading.Lock()  # guards the next
        self._doorkeeper: CurveAuthenticator | None = None  # from the first listener on
        # Those still in use; libzmq would wait for ever for one that nobody closes.
        self._ends: weakref.WeakSet[ZmqListener | ZmqChannel] = weakref.WeakSet()

    def listen(self, address: str) -> ZmqListener:
        """Bind to an address; port 0 or ``*`` is one that the kernel chooses.

        Raises:
            ConfigError: If the address cannot be read, or is in use, or a key is missing; if
                other machines could reach it, there are no keys, and nobody has said that
                this is meant.
        """
        wanted = normalized(address)
        if wanted.startswith(_IPC):
            _check_nobody_listens(wanted)
        if self._keys is None and not is_local(wanted):
            _check_strangers_are_meant(wanted)
        doorkeeper = self._open_door()
        socket = self._socket(zmq.ROUTER, wanted)
        if doorkeeper is not None:
            doorkeeper.guard(socket)
        # A reply that nobody can take is an error to count, not to lose.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(wanted)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            todo = _IN_USE if exc.errno == zmq.EADDRINUSE else ""
            raise ConfigError(f"cannot listen at {wanted}: {exc.strerror}{todo}") from exc
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        listener = ZmqListener(socket, bound, self._limits)
        self._ends.add(listener)
        return listener

    def connect(self, address: str) -> ZmqChannel:
        """Prepare a channel to an address; nobody needs to listen there yet.

        Raises:
            ConfigError: If the address cannot be read, or a key is missing.
        """
        wanted = normalized(address)
        curve = {}
        if self._keys is not None:
            own = self._keys.own()
            curve = {
                zmq.CURVE_SERVERKEY: self._keys.to_server(),
                zmq.CURVE_PUBLICKEY: z85.decode(zmq.curve_public(z85.encode(own))),
                zmq.CURVE_SECRETKEY: own,
            }
        socket = self._socket(zmq.DEALER, wanted)
        for option, key in curve.items():
            socket.setsockopt(option, key)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        channel = ZmqChannel(socket, wanted, self._limits)
        self._ends.add(channel)
        return channel

    def _open_door(self) -> CurveAuthenticator | None:
        with self._lock:
            if self._doorkeeper is None and self._keys is not None:
                self._doorkeeper = CurveAuthenticator(self._context, self._keys)
            return self._doorkeeper

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
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        multipart.release()  # what the sockets gave back as they closed


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    if address.startswith(_IPC):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_strangers_are_meant(address: str) -> None:
    """Refuse to let every machine in unless somebody has asked for that."""
    if not env.may_listen_without_keys():
        raise ConfigError(
            f"cannot listen at {address}: other machines can reach it, and nobody would be "
            f"asked for a key. Set PERSIA_KEYS to a directory that `persia-launcher keys` "
            f"made; or, on a network that no stranger can enter, PERSIA_LISTEN_WITHOUT_KEYS=1"
        )
    logger.warning(
        "listens at %s without keys: whoever can reach it can do everything, and nothing is "
        "encrypted; PERSIA_LISTEN_WITHOUT_KEYS says that this is meant",
        address,
    )


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
