"""Who may connect: the answer to libzmq's question at each handshake (ZeroMQ's RFC 27, ZAP).

    listener's socket --handshake--> libzmq's thread --inproc--> this thread: known key?

A server that cannot ask refuses: without a domain that it enforces, libzmq would let in whoever
can encrypt. A peer that is let in has a name, which libzmq puts beside each of its messages.

Who is known is read anew at each handshake, which costs more than that: a key that comes or
goes counts from then on. While the keys cannot be read nobody is let in; peers try again by
themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import zmq

from persia._rpc.keys import Keys
from persia.errors import ConfigError

logger = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"persia"
_VERSION = b"1.0"
_CURVE = b"CURVE"
_JOIN_S = 2.0
_OK, _REFUSED = (b"200", b"OK"), (b"400", b"unknown key")


class CurveAuthenticator:
    """Lets known keys into the listeners of one context, until that is ended.

    Args:
        context: One that has no other.
        keys: Of those who may connect.

    Raises:
        ConfigError: If a key cannot be read.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._secret = keys.of_server()
        self._keys = keys
        self._told = sorted(keys.users().values())  # who may connect, or why nobody
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="persia-keys", daemon=True)
        self._thread.start()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not bound yet ask here."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        """Wait for the thread; the context is ended, by which it ends."""
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        # What it raises goes to threading.excepthook, by which a server's process ends. The
        # socket is closed then, and nobody is let in.
        try:
            while True:
                self._answer(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, question: list[bytes]) -> None:
        """Answer one question: it comes from libzmq, its last part from the peer."""
        peer, empty, version, number, domain, _, _, mechanism, *shown = question
        user = None
        if (version, domain, mechanism) == (_VERSION, _DOMAIN, _CURVE) and len(shown) == 1:
            user = self._users().get(shown[0])
        code, text = _REFUSED if user is None else _OK
        name = (user or "").encode()
        self._socket.send_multipart([peer, empty, version, number, code, text, name, b""])

    def _users(self) -> Mapping[bytes, str]:
        """Return who may connect now, and say so if that has changed."""
        users: Mapping[bytes, str] = {}
        try:
            users = self._keys.users()
            told = sorted(users.values())
        except ConfigError as error:
            told = [f"nobody: {error}"]
        if told != self._told:
            self._told = told
            logger.warning("may connect from now on: %s", ", ".join(told))
        return users
