"""The two ends of a ZeroMQ connection: a ROUTER that listens, a DEALER that connects.

Any thread sends on the socket itself, under a lock; each end has a thread that receives.

    any thread --lock, zmq--> libzmq's thread ... --> thread of the other end --callback-->

What a message asks for runs in the thread that received it, while another one receives: to
wake a thread takes longer than many a call. The kernel wakes one of those that wait, the one
that waited last, so that a thread that is alone with its calls stays so.

A queue of its own has an end only for what finds no connection or no room.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from persia._rpc import multipart
from persia._rpc.frame import Limits, Part
from persia._rpc.transport import Outgoing, Parts, Peer, Work
from persia.errors import InternalError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_closings = itertools.count()

_UNBIND_MS = 2_000
_LOOK_S = 1.0  # a thread that is not woken looks so often, for arrays that have left too
_MAX_EVENTS = 4  # descriptors of one end, and one more
_EDGE = select.EPOLLIN | select.EPOLLET  # a change wakes one thread
_WORK_S = 1.0  # whoever closes an end waits so long for a thread that serves a call
_JOIN_S = 0.1

# Parts of fewer bytes are copied, which costs no more than keeping account of them.
_COPIED_BYTES = 1 << 16

# As plain integers: arithmetic on zmq's enumerations takes longer than a send.
_IN, _OUT, _NOW = (int(n) for n in (zmq.POLLIN, zmq.POLLOUT, zmq.NOBLOCK))

# A peer that is none of ours: no ZeroMQ, or not with a key that is known.
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

# What multipart.send raises. Not all exceptions: in the main thread a signal's may come before
# or after, never within.
_FAILURES = (zmq.ZMQError, MemoryError, BufferError, TypeError)


class _End(Generic[T]):
    """A socket on which any thread sends ``T``s, and threads of its own receive.

    Every use of the socket holds the lock. The threads wait without it, on the socket's
    descriptor, which tells of changes and not of a state: whoever uses the socket may take the
    tale away. So each use by another ends with ``_look``.

    A thread is free, that is it looks or waits, or at work. One at least is free: who begins
    to work as the last one starts another. Who is at work looks when it has done with it.
    """

    def __init__(
        self, name: str, socket: zmq.Socket[bytes], address: str, limits: Limits
    ) -> None:
        self._name = f"{name} {address}"
        self._address = address
        self._limits = limits
        self._lock = threading.Lock()  # guards the socket and all below
        self._socket = socket
        self._queue: deque[T] = deque()  # what could not be sent at once
        self._is_waiting = False  # a thread is, or is about to, and none is looking
        self._is_closing = False
        self._failure: BaseException | None = None  # closed because of it
        self._linger_ms = 0
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._monitor: zmq.Socket[Any] | None = None
        self._was_cut = False  # the monitor said so, and the thread has not dealt with it
        self._poller: select.epoll | None = None
        self._thread: threading.Thread | None = None  # the first one
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        self._at_work: set[int] = set()  # who they are
        self._is_released = False

    @property
    def address(self) -> str:
        """The address it is bound to, with the true port, or connects to."""
        return self._address

    @property
    def is_open(self) -> bool:
        """Whether it receives: it was started, not closed, and has not failed."""
        return self._thread is not None and not self._is_closing

    def _start(self) -> None:
        if self._thread is not None:
            raise InternalError(f"{self._name}: started twice")
        with self._lock:
            self._poller = select.epoll()
            self._poller.register(self._wake_in, _EDGE)
            self._poller.register(self._socket.FD, _EDGE)
            if self._monitor is not None:
                self._poller.register(self._monitor.FD, _EDGE)
            self._thread = self._start_thread(self._name)

    def _post(self, item: T) -> None:
        """Send now, or leave it to the thread; dropped if the end is closed."""
        with self._lock:
            if self._is_closing:
                return
            # In the main thread a signal's exception may come before the look, though not while
            # parts are sent: the thread then looks by itself, a little later.
            if self._queue or not self._try_send(item):
                self._queue.append(item)
            if threading.get_ident() not in self._at_work:
                self._look()

    def _close(self, linger_s: float) -> None:
        """Stop the thread and close the socket; repeating it does nothing."""
        with self._lock:
            is_first = not self._is_closing
            self._is_closing = True
            if is_first:
                self._linger_ms = max(0, int(linger_s * 1000))
            self._wake()
            threads = self._threads.copy()
        if not threads and is_first:
            self._release()
        deadline = time.monotonic() + _WORK_S
        for thread in threads:
            while (
                thread is not threading.current_thread()
                and thread.is_alive()
                and (thread.ident not in self._at_work or time.monotonic() < deadline)
            ):
                thread.join(_JOIN_S)

    def _release(self) -> None:
        with self._lock:
            if self._is_released:
                return  # by others, while this thread was at work
            self._is_released = self._is_closing = True
            self._is_waiting = False  # nobody writes to a closed pair
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
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        self._num_free += 1
        thread.start()
        return thread

    def _hand_over(self) -> None:
        """Leave the socket to another thread; this one goes to work."""
        if self._is_closing:
            return
        if self._num_free:
            self._is_waiting = True  # or it looks just now, and once more does no harm
            self._look()
        else:
            self._start_thread(f"persia-serve {self._address}")

    def _send(self, item: T) -> bool:
        """Put an item on the socket; returns False if there is no room now."""
        raise NotImplementedError

    def _try_send(self, item: T) -> bool:
        try:
            return self._send(item)
        except _FAILURES as error:
            # Some parts may have left, and the next message would be taken for the rest.
            self._failure = error
            self._is_closing = True
            self._wake()
            raise InternalError(f"{self._name}: cannot send: {error}") from error

    def _ready(self) -> int:
        """Return what can be done, of receiving and sending what is queued."""
        events = multipart.events(self._socket)
        return events & (_IN | _OUT if self._queue else _IN)

    def _look(self) -> None:
        """Wake the thread if there is something for it."""
        if self._is_waiting and self._ready():
            self._wake()

    def _wake(self) -> None:
        if self._is_waiting:
            # One byte in a buffer that is emptied after each wait always fits. First the byte:
            # whom a signal's exception stops in between has woken the thread.
            self._wake_one()
            self._is_waiting = False

    def _wake_one(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    # --- in the threads ---------------------------------------------------------------------

    def _deliver(self, parts: list[Part], reason: str) -> Work | None:
        """Hand a message on, or the reason why it is dropped; returns what it asks for."""
        raise NotImplementedError

    def _on_event(self) -> None:
        """Look what the monitor tells."""

    def _events(self) -> Iterator[int]:
        """Take what the monitor tells."""
        if self._monitor is None:
            raise InternalError(f"{self._name}: watched before start")
        with contextlib.suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._monitor.recv_multipart(_NOW))
                yield message["event"]

    def _on_failure(self) -> None:
        """Tell whoever waits for this end; it is closed."""

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._failure = error
            raise  # to threading.excepthook, by which a server's process ends
        finally:
            with self._lock:
                self._is_closing = True
                self._num_free -= 1
                is_last = not self._num_free
                if not is_last:
                    self._wake_one()  # who wakes the next
            if is_last:
                self._release()
            if self._failure is not None:
                self._on_failure()

    def _loop(self) -> None:
        if self._poller is None:
            raise InternalError(f"{self._name}: looks before start")
        wake = self._wake_in.fileno()
        watched = -1
        if self._monitor is not None:
            watched = self._monitor.FD
            self._on_event()  # a descriptor tells nothing before the first look
        while not self._is_closing:
            if self._step():
                continue
            ready = [number for number, _ in self._poller.poll(_LOOK_S, _MAX_EVENTS)]
            multipart.release()
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(64)
            if watched in ready or self._was_cut:
                self._on_event()
        with self._lock:
            if not self._is_released:
                self._flush()

    def _step(self) -> bool:
        """Send what is queued and take one message; returns False if there is time to wait."""
        with self._lock:
            if self._is_closing:
                return True  # whoever closed saw nobody who waits, and woke nobody
            # Routing id, protocol name and header come beside the arrays.
            message = multipart.receive(
                self._socket, self._limits.num_arrays + 3, self._limits.message_bytes
            )
            has_more = message is not None
            if self._queue:
                # A send alone does not see at once that there is room, and it may take away
                # the tale of a message: hence a look before and one behind.
                if self._ready() & _OUT:
                    self._flush()
                has_more = has_more or bool(self._ready())
            # From here on whoever finds something wakes the thread.
            self._is_waiting = not has_more and not self._is_closing
        if message is not None:
            self._work(self._deliver(*message))
        return has_more

    def _work(self, work: Work | None) -> None:
        if work is None:
            return
        number = threading.get_ident()
        with self._lock:
            self._num_free -= 1
            self._at_work.add(number)
            self._hand_over()
        try:
            while True:
                work = work()
                if work is None:
                    return
                with self._lock:
                    self._hand_over()
        finally:
            with self._lock:
                self._at_work.discard(number)
                self._num_free += 1

    def _flush(self) -> None:
        while self._queue and self._try_send(self._queue[0]):
            self._queue.popleft()


class ZmqListener(_End[tuple[bytes, Parts]]):
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
        for _ in self._events():
            self._drop("stranger")

    def _send(self, item: tuple[bytes, Parts]) -> bool:
        peer, parts = item
        message = [peer, *parts]
        try:
            # libzmq looks only now and then whether the peer has gone, or made room; asked, it
            # does. What it takes for one that has gone it drops without a word.
            multipart.events(self._socket)
            if not multipart.send(self._socket, message, _COPIED_BYTES):
                multipart.events(self._socket)
                if not multipart.send(self._socket, message, _COPIED_BYTES):
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


class ZmqChannel(_End[Outgoing]):
    """Client end."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, limits: Limits) -> None:
        super().__init__("persia-channel", socket, address, limits)
        self._was_refused = False
        self._on_message: Callable[[Parts], None] | None = None
        self._on_lost: Callable[[], None] | None = None

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        """Begin to connect."""
        self._on_message, self._on_lost = on_message, on_lost
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _REFUSALS
        )
        self._socket.connect(self._address)
        self._start()

    def send(self, outgoing: Outgoing) -> None:
        """Send as soon as there is a connection with room."""
        if self._failure is not None:
            raise InternalError(f"{self._name}: failed: {self._failure}") from self._failure
        self._post(outgoing)

    def close(self) -> None:
        """End the connection; what was not sent is dropped."""
        self._close(0.0)

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
        is_free = False
        for event in self._events():
            if event & _REFUSALS:
                self._say_refused(event)
                continue
            is_cut = event == zmq.EVENT_DISCONNECTED
            self._was_cut, is_free = self._was_cut or is_cut, not is_cut
        if not self._was_cut:
            return
        # What is sent now may go into the broken connection, and nobody would say so, until
        # libzmq takes that from the socket: then it tries anew, or there is no room.
        with self._lock:
            is_free = is_free or not multipart.events(self._socket) & _OUT
        if is_free:
            self._was_cut = False
            # Answers that came before the connection broke count.
            while not self._is_closing and self._step():
                pass
            self._on_lost()

    def _say_refused(self, event: int) -> None:
        """Say once why there is no connection: it tries on."""
        if self._was_refused:
            return
        self._was_refused = True
        logger.warning(
            "%s: %s; tries again",
            self._address,
            "does not know this process's key"
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            else "the handshake failed: it has another server key, or only one side has keys",
        )

    def _send(self, outgoing: Outgoing) -> bool:
        if not outgoing.claim():
            return True
        if multipart.send(self._socket, outgoing.parts, _COPIED_BYTES):
            return True
        outgoing.unclaim()
        return False
