"""The ends of a ZeroMQ connection: a ROUTER that listens, a DEALER that connects.

Any thread sends on the socket itself, under a lock. Each end has threads that receive:

    any thread --lock, zmq--> libzmq's thread ... --> thread of the other end --callback-->

A listener serves a message in the thread that received it, while another goes on to receive:
waking a thread takes longer than many a call.

A channel's answers are received by one of the callers that wait for them, for the same reason;
it passes the others theirs. The channel's own thread receives while no caller waits:

    own thread --a caller waits--> caller --has its answer--> next waiting caller, or free

A free turn is taken by the next caller, or by the own thread once no caller has come for a
while: messages in the socket then belong to callers that are busy elsewhere.

Messages are queued here only while there is no connection or no room. What a message means is
in ``transport``, T1 to T4.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import select
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from persia._rpc import zmq_calls
from persia._rpc.frame import Limits, Part
from persia._rpc.transport import Outgoing, Parts, Peer, Waiter, Work
from persia._rpc.zmq_calls import ReceiveTurn
from persia.errors import InternalError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after which a thread looks without being woken, also to release arrays that have left.
_POLL_S = 1.0
_EVENT_PARTS, _EVENT_BYTES = 2, 1 << 12
_MAX_EVENTS = 4  # three descriptors per end, and one to spare
# ZMQ_FD is edge-triggered by itself; EPOLLET makes each change wake one thread, not all.
_EDGE = select.EPOLLIN | select.EPOLLET
_SERVE_S = 1.0  # close() waits that long for a thread that serves a call
_END_S = 10.0  # and that long for one that only receives
_JOIN_S = 0.1
_UNBIND_MS = 2_000
_YIELD_S = 0.001
_RECONNECT_S = 1.0  # after a failed handshake, where libzmq does not retry by itself
_IDLE_S = 0.02  # without callers for that long, the own thread receives

# Parts of fewer bytes are copied, which costs no more than tracking their release.
_COPIED_BYTES = 1 << 16

# As plain integers: arithmetic on zmq's enumerations takes longer than a send.
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)

# What zmq_calls.send raises. Not every exception: one raised by a signal handler reaches the
# main thread before or after the call, never within, and then leaves the socket intact.
_SEND_ERRORS = (zmq.ZMQError, MemoryError, BufferError, TypeError)
# Errors of this module, as opposed to an exception of a signal handler, which in the main
# thread can appear anywhere and belongs to the caller.
_RECEIVE_ERRORS = (zmq.ZMQError, InternalError, MemoryError)

# The peer speaks no ZeroMQ, or has no known key.
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_NO_KEY = "does not know this process's key"
_NO_HANDSHAKE = (
    "the handshake failed: it was too slow, has another server key, or only one side has keys"
)

_closings = itertools.count()


class ZmqSocket(Generic[T]):
    """A socket on which any thread sends ``T``s, and threads of its own receive.

    Every use of the socket holds the lock. The threads wait without it, on the socket's
    descriptor. ZMQ_FD is edge-triggered, and any use of the socket may consume the event, so
    each use by another thread ends with ``_wake_if_ready``.

    A thread is free (it receives or waits) or serving. At least one is free: the last free one
    starts another before it serves. A serving thread receives again when it is done.
    """

    def __init__(
        self, name: str, socket: zmq.Socket[bytes], address: str, limits: Limits
    ) -> None:
        self._name = f"{name} {address}"
        self.address = address  # that it is bound to, with the true port, or connects to
        self._limits = limits
        self._lock = threading.Lock()  # guards the socket and all below
        self._socket = socket
        self._queue: deque[T] = deque()  # could not be sent at once
        # A thread waits or is about to, and none is using the socket: it needs a wake byte.
        self._is_waiting = False
        self._is_closing = False
        self._failure: BaseException | None = None  # closed because of it
        self._linger_ms = 0
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._monitor: Any = None  # a socket from ``start`` on
        self._poller: Any = None  # an epoll object from then on
        self._is_cut = False  # the monitor reported a lost connection, not yet handled
        self._monitor_messages: list[tuple[list[Part], str]] = []  # received, not yet handled
        self._thread: threading.Thread | None = None  # the first one
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        self._serving: set[int] = set()  # identifiers of threads
        self._is_released = False

    @property
    def is_open(self) -> bool:
        """Whether it receives: it was started, not closed, and has not failed."""
        return self._thread is not None and not self._is_closing

    def _start(self) -> None:
        with self._lock:
            self._poller = select.epoll()
            self._poller.register(self._wake_in, _EDGE)
            self._poller.register(self._socket.FD, _EDGE)
            self._poller.register(self._monitor.FD, _EDGE)
            self._thread = self._start_thread(self._name)

    def _post(self, item: T) -> None:
        """Send now or queue; dropped if the end is closed."""
        with self._lock:
            if self._is_closing:
                return
            # In the main thread a signal handler's exception may skip the wake below; a thread
            # then finds the item at its next poll. It cannot come between parts of a message.
            if self._queue or not self._try_send(item):
                self._queue.append(item)
            if threading.get_ident() not in self._serving:
                self._wake_if_ready()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop, idempotently; queued messages get ``linger_s`` seconds to leave."""
        with self._lock:
            is_first = not self._is_closing
            self._is_closing = True
            if is_first:
                self._linger_ms = max(0, int(linger_s * 1000))
            self._wake()
            # A thread that serves may still start another.
            threads = self._threads.copy()
        if not threads and is_first:
            self._release()
        now = time.monotonic()
        for thread in threads:
            # Bounded: a signal handler may close the end that its own thread is waiting for.
            while (
                thread is not threading.current_thread()
                and thread.is_alive()
                and time.monotonic() - now
                < (_SERVE_S if thread.ident in self._serving else _END_S)
            ):
                thread.join(_JOIN_S)

    def _release(self) -> None:
        with self._lock:
            if self._is_released:
                return  # by another thread, while this one served
            self._is_released = self._is_closing = True
            self._is_waiting = False  # so that no wake byte goes to a closed pair
            if self._poller is not None:
                self._poller.close()
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
            self._socket.setsockopt(zmq.LINGER, self._linger_ms)
            self._close_socket()
            self._wake_in.close()
            self._wake_out.close()

    # --- with the lock held -----------------------------------------------------------------

    def _close_socket(self) -> None:
        self._socket.close()

    def _start_thread(self, name: str) -> threading.Thread:
        # Daemons: a call that hangs in a service must not keep the process from exiting.
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        self._num_free += 1
        thread.start()
        return thread

    def _hand_over(self) -> None:
        """Leave the socket to another thread; this one serves."""
        if self._is_closing:
            return
        if self._num_free:
            # The other may be receiving just now: an unneeded wake byte does no harm.
            self._is_waiting = True
            self._wake_if_ready()
        else:
            self._start_thread(f"persia-serve {self.address}")

    def _send(self, item: T) -> bool:
        """Put an item on the socket; returns False if there is no room now."""
        raise NotImplementedError

    def _try_send(self, item: T) -> bool:
        try:
            return self._send(item)
        except _SEND_ERRORS as error:
            # Some parts may have left: the peer would take the next message for the rest.
            self._failure = error
            self._is_closing = True
            self._wake()
            raise InternalError(f"{self._name}: cannot send: {error}") from error

    def _ready_events(self) -> int:
        """Return whether it can receive, or send while something is queued, as zmq's flags."""
        # Reading ZMQ_EVENTS also resets the edge of ZMQ_FD.
        events = zmq_calls.events(self._socket)
        return events & (_IN | _OUT if self._queue else _IN)

    def _wake_if_ready(self) -> None:
        if self._is_waiting and self._ready_events():
            self._wake()

    def _wake(self) -> None:
        if self._is_waiting:
            # One byte always fits in a buffer that is emptied after each wait. The byte goes
            # first: an exception of a signal handler in between then costs one wake too many.
            self._write_wake_byte()
            self._is_waiting = False

    def _write_wake_byte(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    # --- in the threads ---------------------------------------------------------------------

    def _deliver(self, parts: list[Part], reason: str) -> Work | None:
        """Pass a message on, or the reason why it is dropped; returns the work it causes."""
        raise NotImplementedError

    def _check_monitor(self) -> None:
        """Handle what the monitor reports."""
        monitor = self._monitor
        with self._lock:
            while zmq_calls.receive(
                monitor, _EVENT_PARTS, _EVENT_BYTES, self._monitor_messages
            ):
                pass
            # Cleared only after all are handled: if a signal handler's exception intervenes,
            # an event is handled twice, which is harmless, rather than never.
            for parts, _ in self._monitor_messages:
                self._on_event(parse_monitor_message([bytes(part) for part in parts])["event"])
            self._monitor_messages.clear()

    def _on_event(self, event: int) -> None:
        """With the lock held: handle one event of the monitor."""

    def _on_failure(self) -> None:
        """Fail those that wait for this end; it is closed."""

    def _run(self) -> None:
        try:
            self._loop()
            with self._lock:
                if not self._is_released:
                    self._flush()
        except BaseException as error:
            self._failure = error
            raise  # to threading.excepthook, which ends a server's process
        finally:
            with self._lock:
                self._is_closing = True
                self._num_free -= 1
                is_last = not self._num_free
                if not is_last:
                    self._write_wake_byte()  # each thread that ends wakes the next
            if is_last:
                self._release()
            if self._failure is not None:
                self._on_failure()

    def _loop(self) -> None:
        while not self._is_closing:
            if not self._step():
                self._wait_ready(_POLL_S)

    def _wait_ready(self, seconds: float) -> None:
        """Wait until there may be something to do."""
        ready = [number for number, _ in self._poller.poll(seconds, _MAX_EVENTS)]
        # Buffers returned while all threads waited; without this they are kept until the next
        # message.
        zmq_calls.release()
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(64)
        if self._monitor.FD in ready or self._is_cut:
            self._check_monitor()

    def _step(self) -> bool:
        """Send what is queued and take one message; returns False if there is time to wait."""
        received: list[tuple[list[Part], str]] = []
        has_more = self._exchange(received)
        for parts, reason in received:
            # Outside the lock: callbacks send.
            self._serve(self._deliver(parts, reason))
        return has_more

    def _exchange(self, received: list[tuple[list[Part], str]]) -> bool:
        """Send what is queued and append one message; returns as ``_step``."""
        with self._lock:
            if self._is_closing:
                return True  # close() found no waiting thread, so it wrote no wake byte
            # Routing id, protocol name and header come beside the arrays.
            limits = self._limits
            has_more = zmq_calls.receive(
                self._socket, limits.num_arrays + 3, limits.message_bytes, received
            )
            if self._queue:
                # A send alone does not notice new room at once, and it may consume the event
                # of an incoming message: hence a look before it and one after.
                if self._ready_events() & _OUT:
                    self._flush()
                has_more = has_more or bool(self._ready_events())
            # Set under the lock: any later use of the socket by another thread wakes this one.
            self._is_waiting = not has_more and not self._is_closing
        return has_more

    def _serve(self, work: Work | None) -> None:
        if work is None:
            return
        number = threading.get_ident()
        with self._lock:
            self._num_free -= 1
            self._serving.add(number)
            self._hand_over()
        try:
            while True:
                # The work returns the next queued call: one hand-over serves several.
                work = work()
                if work is None:
                    return
                with self._lock:
                    self._hand_over()
        finally:
            with self._lock:
                self._serving.discard(number)
                self._num_free += 1

    def _flush(self) -> None:
        while self._queue and self._try_send(self._queue[0]):
            self._queue.popleft()


class ZmqListener(ZmqSocket[tuple[bytes, Parts]]):
    """Server end."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, limits: Limits) -> None:
        super().__init__("persia-listen", socket, address, limits)
        # Both are set by ``start``.
        self._on_message: Callable[[bytes, Parts], Work | None]
        self._on_dropped: Callable[[str], None]

    def start(
        self,
        on_message: Callable[[bytes, Parts], Work | None],
        on_dropped: Callable[[str], None],
    ) -> None:
        """Begin to receive.

        ``on_message`` takes the peer (a ``Peer`` if it has a key) and the parts; it must return
        soon and must not raise. Long work that it returns runs in a thread of this end's while
        another receives. ``on_dropped`` takes the reason why a message, in or out, was dropped;
        any thread calls it, and it must not send.
        """
        self._on_message, self._on_dropped = on_message, on_dropped
        self._monitor = self._socket.get_monitor_socket(_REFUSALS)
        self._check_monitor()
        self._start()

    def send(self, peer: bytes, parts: Parts) -> None:
        """Send to a peer; dropped if the peer is gone or does not read."""
        self._post((peer, parts))

    def _deliver(self, parts: list[Part], reason: str) -> Work | None:
        if reason:
            self._on_dropped(reason)
            return None
        user = zmq_calls.user_of(parts[0])
        peer, rest = bytes(parts[0]), parts[1:]
        if user is not None:
            peer = Peer(peer)
            peer.user = user
        parts.clear()  # the callee alone decides how long the parts' memory lives
        return self._on_message(peer, rest)

    def _on_event(self, event: int) -> None:
        self._on_dropped("stranger")

    def _send(self, item: tuple[bytes, Parts]) -> bool:
        peer, parts = item
        # A ROUTER takes the routing id as the first part, and removes it.
        message = [peer, *parts]
        try:
            # libzmq notices only now and then that a peer is gone or has made room; reading
            # ZMQ_EVENTS makes it look. A message to a peer it takes for gone is lost silently.
            zmq_calls.events(self._socket)
            if not zmq_calls.send(self._socket, message, _COPIED_BYTES):
                zmq_calls.events(self._socket)
                if not zmq_calls.send(self._socket, message, _COPIED_BYTES):
                    self._on_dropped("peer_slow")
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            self._on_dropped("peer_gone")
        return True

    def _close_socket(self) -> None:
        """Return when the address is free, which happens in a thread of libzmq's.

        Not by ``unbind``: that closes the connections too, and drops what they had still to
        send whatever the linger time.
        """
        # A name of its own: libzmq may still hold the one that pyzmq gave the first monitor.
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
        self._has_logged_refusal = False
        self._reconnect_at = math.inf  # monotonic seconds
        self._is_retrying = False  # libzmq connects again, after the connection was cut
        self._on_message: Callable[[Parts], None]  # set by ``start``, as the next
        self._on_lost: Callable[[], None]
        self._received: list[tuple[list[Part], str]] = []  # only the turn's holder uses it
        self._turn = ReceiveTurn()
        self._closing = threading.Event()  # set when the end closes
        self._turn_free = threading.Lock()  # released when the turn may be free
        self._turn_free.acquire()
        self._receive_error: Exception | None = None  # met by a caller

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        """Begin to connect; both functions must return soon and must not raise."""
        self._on_message, self._on_lost = on_message, on_lost
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | _REFUSALS
        )
        self._socket.connect(self.address)
        self._check_monitor()  # edge-triggered: no event comes before the first read
        self._start()

    def send(self, outgoing: Outgoing) -> None:
        """Send as soon as there is a connection with room."""
        if self._failure is not None:
            raise InternalError(f"{self._name}: failed: {self._failure}") from self._failure
        self._post(outgoing)

    def wait(self, waiter: Waiter, seconds: float) -> None:
        """Wait until it is over or at most that long, and receive meanwhile; may end early."""
        deadline = time.monotonic() + seconds
        try:
            # Either this thread receives, for others too, or the receiving one wakes it.
            if not self._turn.enter(waiter):
                waiter.sleep(seconds)
            if self._turn.has(waiter):
                self._receive_for(waiter, deadline)
        finally:
            # Also when an exception of a signal handler leaves the wait: no turn is ever lost.
            self._turn.leave(waiter)
        if self._is_closing and not waiter.is_over():
            waiter.sleep(deadline - time.monotonic())

    # --- with the turn ----------------------------------------------------------------------

    def _receive_for(self, waiter: Waiter, deadline: float) -> None:
        """Receive until a caller's wait is over."""
        try:
            while not waiter.is_over() and not self._is_closing:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return
                if not self._step():
                    self._wait_ready(min(left, _POLL_S))
        except Exception as error:
            if threading.current_thread() is threading.main_thread() and not isinstance(
                error, _RECEIVE_ERRORS
            ):
                raise
            with self._lock:
                self._failure = self._receive_error = error
                self._is_closing = True
                self._wake()  # the own thread fails all waiting callers

    def _loop(self) -> None:
        try:
            while not self._is_closing:
                if self._turn.take_if_unused(self):
                    while not self._turn.was_asked and not self._is_closing:
                        if not self._step():
                            self._wait_ready(_POLL_S)
                    self._turn.leave(self)
                # A caller may hold the turn for long: sleep until it is free.
                if self._turn.release_when_free(self._turn_free):
                    self._turn_free.acquire(timeout=_POLL_S)
                self._closing.wait(_IDLE_S)
        finally:
            self._turn.leave(self)
            with self._lock:
                self._is_closing = True
            while not self._turn.close():
                self._write_wake_byte()  # for the caller with the turn, which then leaves
                time.sleep(_YIELD_S)
        if self._receive_error is not None:
            raise self._receive_error

    def _wait_ready(self, seconds: float) -> None:
        super()._wait_ready(seconds)
        if time.monotonic() < self._reconnect_at:
            return
        # libzmq has given up, as after a refused handshake.
        with self._lock:
            self._reconnect_at = math.inf
            if not self._is_closing:
                with contextlib.suppress(zmq.ZMQError):  # libzmq may have forgotten the address
                    self._socket.disconnect(self.address)
                self._socket.connect(self.address)

    def _wake(self) -> None:
        super()._wake()
        if self._is_closing:
            self._closing.set()
            with contextlib.suppress(RuntimeError):  # released already
                self._turn_free.release()

    def _step(self) -> bool:
        # A message that a signal handler's exception kept from delivery comes first.
        has_more = bool(self._received) or self._exchange(self._received)
        while self._received:
            # Removed after delivery: delivered twice is harmless, not at all loses an answer.
            self._deliver(*self._received[0])
            self._received.clear()
        return has_more

    def _on_failure(self) -> None:
        # Claimed as if all had left: a caller that may send again then meets the cause.
        for outgoing in self._queue:
            outgoing.claim()
        self._on_lost()

    def _deliver(self, parts: list[Part], reason: str) -> None:
        if reason:
            logger.warning(
                "%s: dropped an answer that exceeds the limit of %s", self.address, reason
            )
        else:
            self._on_message(parts)

    def _check_monitor(self) -> None:
        super()._check_monitor()
        if not self._is_cut:
            return
        # Until libzmq removes the broken connection from the socket, a message would go into
        # it and be lost silently. It is removed once libzmq retries, or no room is reported.
        with self._lock:
            is_removed = self._is_retrying or not zmq_calls.events(self._socket) & _OUT
        if is_removed:
            self._is_cut = False
            # Answers that came before the break are valid.
            while not self._is_closing and self._step():
                pass
            self._on_lost()

    def _on_event(self, event: int) -> None:
        if event & _REFUSALS:
            self._reconnect_at = time.monotonic() + _RECONNECT_S
            # Once per channel: libzmq retries the handshake for ever.
            if not self._has_logged_refusal:
                self._has_logged_refusal = True
                has_no_key = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                logger.warning("%s: %s", self.address, _NO_KEY if has_no_key else _NO_HANDSHAKE)
            return
        if event != zmq.EVENT_DISCONNECTED:
            self._reconnect_at = math.inf
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_retrying = event != zmq.EVENT_DISCONNECTED
            self._is_cut = self._is_cut or not self._is_retrying

    def _send(self, outgoing: Outgoing) -> bool:
        # Cancelled while it was queued; taken off the queue as if sent.
        if not outgoing.claim():
            return True
        if zmq_calls.send(self._socket, outgoing.parts, _COPIED_BYTES):
            return True
        # No part has left: the message stays in the queue.
        outgoing.unclaim()
        return False
