"""The transport over ZeroMQ: DEALER to ROUTER, by ``ipc://`` or ``tcp://``.

libzmq drops what a broken connection still held, so nothing is sent twice without the client
knowing.

libzmq bounds the bytes of each part and delivers a message only once it is whole. Its
high-water mark counts whole messages, and an unfinished one has no bound: a hostile peer can
make it hold parts without end. ``Limits`` bounds only what Python sees. Keys or a closed
network keep strangers out; the process's memory limit is the last defence.
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
from persia._rpc import zmq_calls
from persia._rpc.curve import CurveAuthenticator, Keys
from persia._rpc.frame import LIMITS, Limits
from persia._rpc.zmq_socket import ZmqChannel, ZmqListener
from persia.errors import ConfigError

logger = logging.getLogger(__name__)

# Messages per connection and direction. Calls in flight bound the bytes; this bounds how much
# a peer that does not read can make this process hold.
_HIGH_WATER_MARK = 64

# Freeing a mapped block raises glibc's dynamic mmap threshold to its size, up to 32 MiB: blocks
# of messages are then reused instead of being mapped, and cleared by the kernel, each time.
_MMAP_THRESHOLD_BYTES = (32 << 20) - (64 << 10)

_SILENCE_S = 8.0  # a connection silent for that long is closed
_HEARTBEATS = 4  # sent in that time
_HANDSHAKE_MS = 5_000  # a peer that connects and stays silent is cut off
_CONNECT_MS = 5_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000

_IN_USE = (
    ": another job or process listens there; end it, or give this job other ports: "
    f"{env.parameter_server_addresses.name}, {env.embedding_worker_addresses.name} and "
    f"{env.nn_worker_addresses.name}, the same for every process"
)

_IPC = "ipc://"
_MAX_IPC_PATH = 107  # sockaddr_un holds 108 bytes with the final zero


def normalized(address: str) -> str:
    """Return an address with its scheme; ``host:port`` alone is TCP."""
    if address.startswith(_IPC):
        path = address[len(_IPC) :]
        if not 0 < len(path.encode()) <= _MAX_IPC_PATH:
            raise ConfigError(
                f"address {address!r}: expected a path of 1..{_MAX_IPC_PATH} bytes"
            )
        return address
    scheme, separator, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if (separator and scheme != "tcp") or not host or not is_port:
        forms = "tcp://<host>:<port>, <host>:<port> or ipc://<path>"
        raise ConfigError(f"expected an address as {forms}, got {address!r}")
    return f"tcp://{rest}"


class ZmqTransport:
    """Channels and listeners that share libzmq's threads.

    ``keys`` is the directory of this process's keys; that of ``PERSIA_KEYS`` if not given. With
    neither, nothing is encrypted and peers need no key.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        silence_s: float = _SILENCE_S,
        keys: Path | None = None,
    ) -> None:
        np.empty(_MMAP_THRESHOLD_BYTES, np.uint8)
        self.limits = limits
        self._silence_ms = int(silence_s * 1000)
        # One thread of libzmq's, the default, moves about a gigabyte per second.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        directory = env.keys_directory() if keys is None else keys
        self._keys = None if directory is None else Keys(directory)
        self._lock = threading.Lock()  # guards the next
        self._authenticator: CurveAuthenticator | None = None  # from the first listener on
        # Context.term() blocks for ever while a socket is open: close() closes these first.
        # Weak: an end that a client closed and dropped is not kept here.
        self._ends: weakref.WeakSet[ZmqListener | ZmqChannel] = weakref.WeakSet()

    def listen(self, address: str) -> ZmqListener:
        """Bind to an address; port 0 or ``*`` is one that the kernel chooses.

        ConfigError if it cannot be read or is in use, if a key is missing, or if other machines
        could reach it without keys and nothing allows that.
        """
        wanted = normalized(address)
        if wanted.startswith(_IPC):
            _check_is_free(wanted)
        if self._keys is None and not is_local(wanted):
            _check_is_open_on_purpose(wanted)
        with self._lock:
            if self._authenticator is None and self._keys is not None:
                self._authenticator = CurveAuthenticator(self._context, self._keys)
        socket = self._socket(zmq.ROUTER, wanted)
        if self._authenticator is not None:
            self._authenticator.protect(socket)
        # Without this a reply to a peer that is gone is dropped silently, uncounted.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(wanted)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            advice = _IN_USE if exc.errno == zmq.EADDRINUSE else ""
            raise ConfigError(f"cannot listen at {wanted}: {exc.strerror}{advice}") from exc
        # With the port that the kernel chose.
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        listener = ZmqListener(socket, bound, self.limits)
        self._ends.add(listener)
        return listener

    def connect(self, address: str) -> ZmqChannel:
        """Prepare a channel to an address, where a listener may appear later."""
        wanted = normalized(address)
        curve = {}
        if self._keys is not None:
            secret = self._keys.client_secret()
            curve = {
                zmq.CURVE_SERVERKEY: self._keys.server_public(),
                zmq.CURVE_PUBLICKEY: z85.decode(zmq.curve_public(z85.encode(secret))),
                zmq.CURVE_SECRETKEY: secret,
            }
        socket = self._socket(zmq.DEALER, wanted)
        for option, key in curve.items():
            socket.setsockopt(option, key)
        # Queue only to a completed connection: otherwise a message to an absent server would
        # count as sent, and Outgoing.was_sent would mean nothing.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        # Exponential from the first to the second, per libzmq.
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        channel = ZmqChannel(socket, wanted, self.limits)
        self._ends.add(channel)
        return channel

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        # The default waits for ever at close; a listener sets its own time when it closes.
        socket.setsockopt(zmq.LINGER, 0)
        # Bounds one part, not the message; the connection of a larger one is cut.
        socket.setsockopt(zmq.MAXMSGSIZE, max(self.limits.array_bytes, 1 << 16))
        # Before bind and connect: libzmq applies most options to later connections only.
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        # ZMTP heartbeats are answered by libzmq's thread, so a busy process stays connected.
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._silence_ms // _HEARTBEATS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, self._silence_ms)
        # A peer that never completes the handshake holds a file descriptor until then.
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # Only for an IPv6 literal: with it libzmq resolves a name to its IPv6 address alone.
        socket.setsockopt(zmq.IPV6, int("://[" in address))
        return socket

    def close(self) -> None:
        """Close the open ends, and end libzmq's threads once nothing lingers."""
        for end in list(self._ends):
            end.close(0.0)
        # Returns when all sockets are closed and nothing lingers; wakes the authenticator.
        self._context.term()
        if self._authenticator is not None:
            self._authenticator.close()
        zmq_calls.release()  # arrays that the sockets returned as they closed


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    if address.startswith(_IPC):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name is not resolved: it could mean another address when libzmq resolves it.
        return host == "localhost"


def _check_is_open_on_purpose(address: str) -> None:
    """Refuse an address that every machine can reach, unless the user allows it."""
    if not env.may_listen_without_keys():
        raise ConfigError(
            f"cannot listen at {address}: other machines can reach it, and peers would need no "
            f"key. Set PERSIA_KEYS to a directory that `persia-launcher keys` made; or, on a "
            f"network that no stranger can enter, PERSIA_LISTEN_WITHOUT_KEYS=1"
        )
    logger.warning(
        "listens at %s without keys: every process that can reach it has full control, and "
        "nothing is encrypted; PERSIA_LISTEN_WITHOUT_KEYS allows this",
        address,
    )


def _check_is_free(address: str) -> None:
    """Refuse a path that is in use: libzmq would take it over silently."""
    path = address[len(_IPC) :]
    # The abstract namespace of Linux, which libzmq writes with an @.
    name = "\0" + path[1:] if path.startswith("@") else path
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(name)
        except OSError:
            return  # free, or the bind that follows reports what is wrong
    raise ConfigError(f"cannot listen at {address}: another process listens there")
