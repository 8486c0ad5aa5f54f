"""What both ends of a ZeroMQ connection are: a socket, a lock, and threads that receive.

Any thread sends on the socket itself, under a lock; each end has a thread that receives.

    any thread --lock, zmq--> libzmq's thread ... --> thread of the other end --callback-->

What a message asks for runs in the thread that received it, while another one receives: to
wake a thread takes longer than many a call. The kernel wakes one of those that wait, the one
that waited last, so that a thread that is alone with its calls stays so.

A queue of its own has an end only for what finds no connection or no room.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket as sockets
import threading
import time
from collections import deque
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from persia._rpc import multipart
from persia._rpc.frame import Limits, Part
from persia._rpc.transport import Work
from persia.errors import InternalError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0  # a thread that is not woken looks so often, for arrays that have left too
_EVENT_PARTS, _EVENT_BYTES = 2, 1 << 12
_MAX_EVENTS = 4  # descriptors of one end, and one more
_EDGE = select.EPOLLIN | select.EPOLLET  # a change wakes one thread
_WORK_S = 1.0  # whoever closes an end waits so long for a thread that serves a call
_END_S = 10.0  # and for one that only receives
_JOIN_S = 0.1

# Parts of fewer bytes are copied, which costs no more than keeping account of them.
COPIED_BYTES = 1 << 16

# As plain integers: arithmetic on zmq's enumerations takes longer than a send.
IN, OUT, NOW = (int(n) for n in (zmq.POLLIN, zmq.POLLOUT, zmq.NOBLOCK))

# What multipart.send raises. Not all exceptions: in the main thread a signal's may come before
# or after, never within.
_FAILURES = (zmq.ZMQError, MemoryError, BufferError, TypeError)


class ZmqSocket(Generic[T]):
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
        self._told: list[tuple[list[Part], str]] = []  # by the monitor
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
        now = time.monotonic()
        for thread in threads:
            # Not without end: a signal's handler may close what its own thread is waiting for.
            while (
                thread is not threading.current_thread()
                and thread.is_alive()
                and time.monotonic() - now
                < (_WORK_S if thread.ident in self._at_work else _END_S)
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
        return events & (IN | OUT if self._queue else IN)

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

    def _listen_to_monitor(self) -> None:
        """Have ``_hear`` told all that the monitor tells."""
        if self._monitor is None:
            raise InternalError(f"{self._name}: watched before start")
        with self._lock:
            while multipart.receive(self._monitor, _EVENT_PARTS, _EVENT_BYTES, self._told):
                pass
            # Twice rather than not at all, if a signal's exception comes in between.
            for parts, _ in self._told:
                self._hear(parse_monitor_message([bytes(part) for part in parts])["event"])
            self._told.clear()

    def _hear(self, event: int) -> None:
        """With the lock held: take one event of the monitor's."""

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
        while not self._is_closing:
            if not self._step():
                self._watch(LOOK_S)
        self._flush_last()

    def _flush_last(self) -> None:
        with self._lock:
            if not self._is_released:
                self._flush()

    def _watch(self, seconds: float) -> None:
        """Wait until there may be something to do."""
        if self._poller is None:
            raise InternalError(f"{self._name}: looks before start")
        ready = [number for number, _ in self._poller.poll(seconds, _MAX_EVENTS)]
        multipart.release()
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(64)
        if (self._monitor is not None and self._monitor.FD in ready) or self._was_cut:
            self._on_event()

    def _step(self) -> bool:
        """Send what is queued and take one message; returns False if there is time to wait."""
        came: list[tuple[list[Part], str]] = []
        has_more = self._exchange(came)
        for parts, reason in came:
            self._work(self._deliver(parts, reason))
        return has_more

    def _exchange(self, came: list[tuple[list[Part], str]]) -> bool:
        """Send what is queued, and put one message into ``came``; returns as ``_step``."""
        with self._lock:
            if self._is_closing:
                return True  # whoever closed saw nobody who waits, and woke nobody
            # Routing id, protocol name and header come beside the arrays.
            limits = self._limits
            message = multipart.receive(
                self._socket, limits.num_arrays + 3, limits.message_bytes, came
            )
            has_more = message is not None
            if self._queue:
                # A send alone does not see at once that there is room, and it may take away
                # the tale of a message: hence a look before and one behind.
                if self._ready() & OUT:
                    self._flush()
                has_more = has_more or bool(self._ready())
            # From here on whoever finds something wakes the thread.
            self._is_waiting = not has_more and not self._is_closing
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
