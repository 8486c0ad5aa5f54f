"""The two ends of a ZeroMQ connection: a ROUTER that listens, a DEALER that connects.

Answers are received by one of the threads that wait for them, as to wake a thread takes longer
than many a call; it hands the others theirs. The channel's own thread receives while nobody
waits. So one at a time receives, and the turn goes

    own thread --a caller came--> a caller --has its answer--> the next that waits, or nobody

where nobody is whoever waits next, or the own thread once no caller came for a while: what
lies in the socket then is for callers who are busy with something else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable

import zmq

from persia._rpc import multipart
from persia._rpc.frame import Limits, Part
from persia._rpc.receive_turn import Turns
from persia._rpc.transport import Outgoing, Parts, Peer, Waiter, Work
from persia._rpc.zmq_socket import COPIED_BYTES, LOOK_S, OUT, ZmqSocket
from persia.errors import InternalError

logger = logging.getLogger(__name__)

# A peer that is none of ours: no ZeroMQ, or not with a key that is known.
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_closings = itertools.count()

_UNBIND_MS = 2_000
# What is never a signal's. The exception of one comes to the main thread at any time, and is
# its own affair.
_BROKEN = (zmq.ZMQError, InternalError, MemoryError)

_YIELD_S = 0.001
_ANEW_S = 1.0  # after a handshake that failed, unless libzmq tries again by itself
_REST_S = 0.02  # the own thread leaves receiving to callers, if one came within this time


class ZmqListener(ZmqSocket[tuple[bytes, Parts]]):
    """Server end."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, limits: Limits) -> None:
        super().__init__("persia-listen", socket, address, limits)
        self._on_message: Callable[[bytes, Parts], Work | None] | None = None
        self._on_dropped: Callable[[str], None] | None = None

    def start(
        self,
        on_message: Callable[[bytes, Parts], Work | None],
        on_dropped: Callable[[str], None],
    ) -> None:
        """Begin to receive."""
        self._on_message, self._on_dropped = on_message, on_dropped
        self._monitor = self._socket.get_monitor_socket(_REFUSALS)
        self._on_event()
        self._start()

    def send(self, peer: bytes, parts: Parts) -> None:
        """Send to a peer, or drop if it has gone or does not read."""
        self._post((peer, parts))

    def close(self, linger_s: float) -> None:
        """Stop listening, giving what was to be sent that many seconds to leave."""
        self._close(linger_s)

    def _deliver(self, parts: list[Part], reason: str) -> Work | None:
        if self._on_message is None:
            raise InternalError(f"{self._address}: receives before start")
        if reason:
            self._drop(reason)
            return None
        user = multipart.user_of(parts[0])
        peer, rest = bytes(parts[0]), parts[1:]
        if user is not None:
            peer = Peer(peer, user)
        parts.clear()  # whoever keeps the rest decides how long its memory lives
        return self._on_message(peer, rest)

    def _on_event(self) -> None:
        self._listen_to_monitor()

    def _hear(self, event: int) -> None:
        self._drop("stranger")

    def _send(self, item: tuple[bytes, Parts]) -> bool:
        peer, parts = item
        message = [peer, *parts]
        try:
            # libzmq looks only now and then whether the peer has gone, or made room; asked, it
            # does. What it takes for one that has gone it drops without a word.
            multipart.events(self._socket)
            if not multipart.send(self._socket, message, COPIED_BYTES):
                multipart.events(self._socket)
                if not multipart.send(self._socket, message, COPIED_BYTES):
                    self._drop("peer_slow")
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            self._drop("peer_gone")
        return True

    def _drop(self, reason: str) -> None:
        if self._on_dropped is not None:
            self._on_dropped(reason)

    def _close_socket(self) -> None:
        """Return when the address is free, which libzmq sees to in a thread of its own.

        Not by ``unbind``: that ends the connections too, and what they had still to send is
        lost whatever the linger time.
        """
        # Of the name that pyzmq would give it, libzmq may still know the monitor before.
        name = f"inproc://closing-{next(_closings)}"
        events = zmq.EVENT_CLOSED | zmq.EVENT_CLOSE_FAILED
        monitor = self._socket.get_monitor_socket(events, name)
        self._socket.close()
        if not monitor.poll(_UNBIND_MS):
            logger.warning("%s: still bound after %d ms", self._name, _UNBIND_MS)
        monitor.close(linger=0)


class ZmqChannel(ZmqSocket[Outgoing]):
    """Client end."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, limits: Limits) -> None:
        super().__init__("persia-channel", socket, address, limits)
        self._was_refused = False
        self._anew_at = math.inf  # monotonic; when to connect anew
        self._tries_anew = False  # after it was cut
        self._on_message: Callable[[Parts], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._came: list[tuple[list[Part], str]] = []  # of whoever receives
        self._turns = Turns()
        self._rest = threading.Event()  # set when the end closes
        self._is_free = threading.Lock()  # free when the turn may be nobody's
        self._is_free.acquire()
        self._broken: Exception | None = None  # a caller could not receive because of it

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        """Begin to connect."""
        self._on_message, self._on_lost = on_message, on_lost
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | _REFUSALS
        )
        self._socket.connect(self._address)
        self._on_event()  # a descriptor tells nothing before the first look
        self._start()

    def send(self, outgoing: Outgoing) -> None:
        """Send as soon as there is a connection with room."""
        if self._failure is not None:
            raise InternalError(f"{self._name}: failed: {self._failure}") from self._failure
        outgoing.carrier = self
        self._post(outgoing)

    def wait(self, waiter: Waiter, seconds: float) -> None:
        """Wait so long, or until it is over, perhaps less; receive meanwhile."""
        deadline = time.monotonic() + seconds
        try:
            if not self._turns.enter(waiter):
                waiter.sleep(seconds)
            if self._turns.has(waiter):
                self._receive_for(waiter, deadline)
        finally:
            self._turns.leave(waiter)
        if self._is_closing and not waiter.is_over():
            waiter.sleep(deadline - time.monotonic())

    def close(self) -> None:
        """End the connection; what was not sent is dropped."""
        self._close(0.0)

    # --- whose turn it is -------------------------------------------------------------------

    def _receive_for(self, waiter: Waiter, deadline: float) -> None:
        """Receive until a caller's wait is over."""
        try:
            while not waiter.is_over() and not self._is_closing:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return
                if not self._step():
                    self._watch(min(left, LOOK_S))
        except Exception as error:
            if threading.current_thread() is threading.main_thread() and not isinstance(
                error, _BROKEN
            ):
                raise
            with self._lock:
                self._failure = self._broken = error
                self._is_closing = True
                self._wake()  # the own thread tells everybody who waits

    def _loop(self) -> None:
        try:
            while not self._is_closing:
                if self._turns.is_needed(self):
                    while not self._turns.was_asked and not self._is_closing:
                        if not self._step():
                            self._watch(LOOK_S)
                    self._turns.leave(self)
                # A caller may have it for long: nothing is to be done here meanwhile.
                if self._turns.rest(self._is_free):
                    self._is_free.acquire(timeout=LOOK_S)
                self._rest.wait(_REST_S)
        finally:
            self._turns.leave(self)
            with self._lock:
                self._is_closing = True
            while not self._turns.close():
                self._wake_one()  # a caller, who then leaves
                time.sleep(_YIELD_S)
        if self._broken is not None:
            raise self._broken
        self._flush_last()

    def _watch(self, seconds: float) -> None:
        super()._watch(seconds)
        if time.monotonic() >= self._anew_at:
            self._connect_anew()

    def _connect_anew(self) -> None:
        """Try again where libzmq has given up: only one end has keys, or a stranger was."""
        with self._lock:
            self._anew_at = math.inf
            if not self._is_closing:
                with contextlib.suppress(zmq.ZMQError):  # of what it has given up
                    self._socket.disconnect(self._address)
                self._socket.connect(self._address)

    def _wake(self) -> None:
        super()._wake()
        if self._is_closing:
            self._rest.set()
            with contextlib.suppress(RuntimeError):  # it was free
                self._is_free.release()

    def _step(self) -> bool:
        """Take one message; first what a signal's exception kept from its caller."""
        has_more = bool(self._came) or self._exchange(self._came)
        while self._came:
            self._deliver(*self._came[0])
            self._came.clear()
        return has_more

    def _on_failure(self) -> None:
        # As if all had left: whoever may send again learns the cause, and nobody waits.
        for outgoing in self._queue:
            outgoing.claim()
        if self._on_lost is not None:
            self._on_lost()

    def _deliver(self, parts: list[Part], reason: str) -> None:
        if self._on_message is None:
            raise InternalError(f"{self._address}: receives before start")
        if reason:
            logger.warning(
                "%s: dropped an answer that exceeds the limit of %s", self._address, reason
            )
        else:
            self._on_message(parts)

    def _on_event(self) -> None:
        if self._on_lost is None:
            raise InternalError(f"{self._address}: watched before start")
        self._listen_to_monitor()
        if not self._was_cut:
            return
        # What is sent now may go into the broken connection, and nobody would say so, until
        # libzmq takes that from the socket: then it tries anew, or there is no room.
        with self._lock:
            is_free = self._tries_anew or not multipart.events(self._socket) & OUT
        if is_free:
            self._was_cut = False
            # Answers that came before the connection broke count.
            while not self._is_closing and self._step():
                pass
            self._on_lost()

    def _hear(self, event: int) -> None:
        if event & _REFUSALS:
            self._say_refused(event)
            self._anew_at = time.monotonic() + _ANEW_S
            return
        if event != zmq.EVENT_DISCONNECTED:
            self._anew_at = math.inf
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._tries_anew = event != zmq.EVENT_DISCONNECTED
            self._was_cut = self._was_cut or not self._tries_anew

    def _say_refused(self, event: int) -> None:
        """Say once why there is no connection."""
        if self._was_refused:
            return
        self._was_refused = True
        logger.warning(
            "%s: %s",
            self._address,
            "does not know this process's key"
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            else "the handshake failed: it has another server key, or only one side has keys",
        )

    def _send(self, outgoing: Outgoing) -> bool:
        if not outgoing.claim():
            return True
        if multipart.send(self._socket, outgoing.parts, COPIED_BYTES):
            return True
        outgoing.unclaim()
        return False
