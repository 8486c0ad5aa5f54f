"""Serving an object's methods: calls in, one reply or error out for each.

    receiving thread  decodes a message; answers the common methods and whatever cannot be
                      served; queues the call, or serves it while another thread receives
    serving thread    after a call takes the next queued one, peer by peer in turn

A bounded number of threads runs methods, and a bounded number of calls is queued: beyond that
the answer is ServiceBusy, and nothing has changed. Each peer has a share of the queue, so a
flood from one peer leaves the others their turn.

A call that is repeated while the first is queued or running is answered once; a call whose
caller has stopped waiting is not begun.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from persia._metrics.timings import CallTimings
from persia._rpc.codec import FLOAT32, error_to_body
from persia._rpc.curve import CONTROL, is_for_serving
from persia._rpc.deadlines import caller_deadline
from persia._rpc.frame import Call, Failure, Reply, UnreadableFrame, decode, encode
from persia._rpc.job import JobState
from persia._rpc.messages import WireDtypes
from persia._rpc.methods import COMMON, CONFIGURE, HELLO, Hello, Method, Role
from persia._rpc.transport import Parts, Peer, Work
from persia.errors import NotAllowed, PersiaError, ProtocolError, ServiceBusy, WrongReplica
from persia.version import __version__

if TYPE_CHECKING:
    from persia._rpc.zmq_transport import ZmqTransport

logger = logging.getLogger(__name__)

# Seconds that replies get to leave when the server stops.
_LINGER_S = 2.0
# Seconds that a stopping server stays after its last reply: when a connection ends, libzmq
# drops messages that the client has received but not read yet.
_ARRIVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of what one server takes on at a time."""

    num_threads: int = 4  # that run methods
    calls_per_peer: int = 64  # queued or running, as in all below
    calls: int = 1024  # of all peers
    bytes_per_peer: int = 1 << 30  # a single call may exceed it
    bytes: int = 4 << 30  # of all peers; a single call may exceed it


SETTINGS = ServerLimits()


@dataclass(slots=True)
class _QueuedCall:
    peer: bytes
    call: Call
    num_bytes: int
    expires_at: float  # monotonic seconds


class Server:
    """Serves one object at one address.

    The methods of ``service`` are called by several threads at once. A server may listen before
    there is one: the attribute is set later, and ``ready`` returns what it waits for, the text
    of a ServiceBusy. ``job`` is one of its own if not given.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        address: str,
        role: Role,
        service: object | None,
        *,
        replica_index: int = 0,
        replica_size: int = 1,
        schema_fingerprint: str = "",
        wire: WireDtypes = FLOAT32,
        ready: Callable[[], str] = lambda: "it starts",
        job: JobState | None = None,
        settings: ServerLimits = SETTINGS,
    ) -> None:
        self._role = role
        self.service = service
        self._ready = ready
        self._settings = settings
        self._limits = transport.limits
        # Not from random, which a script may seed; 0 is never drawn.
        self._incarnation = secrets.randbits(63) + 1
        ours = (self._incarnation, __version__, schema_fingerprint, wire)
        self.hello = Hello(role.name, replica_index, replica_size, *ours)
        self.job = JobState() if job is None else job
        self._lock = threading.Lock()  # guards all below
        self._is_idle = threading.Condition(self._lock)
        # Round robin: the next peer comes first, and goes behind the others when served.
        self._queues: OrderedDict[bytes, deque[_QueuedCall]] = OrderedDict()
        # Bytes of each call by peer and call id. An id is the caller's, unique per connection.
        self._accepted: dict[bytes, dict[int, int]] = {}  # queued or running
        self._num_calls = 0  # queued or running, as the next
        self._num_bytes = 0
        self._num_running = 0
        self._replied_at = -_ARRIVAL_S  # monotonic
        self._is_stopping = False
        self._counts: Counter[str] = Counter()
        self.timings = CallTimings()
        # Last: an address in use leaves nothing to clean up.
        self._listener = transport.listen(address)
        self.address = self._listener.address  # with the true port

    def _where(self) -> str:
        return f"{self._role.name} at {self.address}"

    def start(self) -> None:
        """Begin to serve."""
        self._listener.start(self._on_message, self._on_dropped)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start; those that are zero are absent.

        ``calls`` were begun; of these ``replies`` returned and ``errors`` raised. ``busy`` were
        refused, ``repeated`` were queued or running already, ``expired`` were queued longer
        than their callers waited. ``bad.<reason>`` could not be read, ``dropped.<reason>``
        could not be received or answered. ``unfinished`` were queued or running when the server
        stopped.
        """
        with self._lock:
            return dict(self._counts)

    def load(self) -> tuple[int, int]:
        """Return how many calls are queued or running, and their bytes."""
        with self._lock:
            return self._num_calls, self._num_bytes

    @property
    def is_alive(self) -> bool:
        """Whether new calls are served."""
        return self._listener.is_open and not self._is_stopping

    def stop(self, timeout_s: float = 10.0) -> Mapping[str, int]:
        """Finish accepted calls and stop; returns ``stats``."""
        with self._lock:
            is_first = not self._is_stopping
            self._is_stopping = True
            # New calls are refused from here on, so the number only falls.
            self._is_idle.wait_for(lambda: not self._num_calls, timeout_s)
            if is_first and self._num_calls:
                self._counts["unfinished"] += self._num_calls
                text = "%s: %d calls unfinished after %g s"
                logger.warning(text, self._where(), self._num_calls, timeout_s)
            self._queues.clear()
            self._is_idle.wait_for(
                lambda: time.monotonic() - self._replied_at > _ARRIVAL_S, _ARRIVAL_S
            )
        # Outside the lock, which the serving threads need to finish.
        self._listener.close(_LINGER_S)
        return self.stats()

    # --- in the receiving thread ------------------------------------------------------------

    def _on_dropped(self, reason: str) -> None:
        text = f"a message was dropped: {reason}"
        if reason == "stranger":
            text = "a connection was refused: no ZeroMQ, or no key that is known here"
        self._count_bad(f"dropped.{reason}", text)

    def _count_bad(self, name: str, text: str) -> None:
        with self._lock:
            self._counts[name] += 1
            is_first = self._counts[name] == 1
        if is_first:
            # A line for each message would let a stranger fill the disk. A peer that leaves
            # before its answer is no fault.
            level = logging.INFO if name == "dropped.peer_gone" else logging.WARNING
            more = f"more of this kind are only counted, as {name}"
            logger.log(level, "%s: %s; %s", self._where(), text, more)

    def _on_message(self, peer: bytes, parts: Parts) -> Work | None:
        try:
            message = decode(parts, self._limits)
            if not isinstance(message, Call):
                kind = type(message).__name__
                raise UnreadableFrame("not_a_call", "a call", kind, message.call_id)
        except UnreadableFrame as error:
            self._count_bad(f"bad.{error.reason}", f"a bad message: {error}")
            answer = encode(self._failure(error.call_id, error), self._limits)
            if error.reason == "version":
                answer[0] = bytes(parts[0])  # of its own, or the peer could not read it either
            self._listener.send(peer, answer)
            return None
        method = self._role.methods.get(message.method)
        # First: a call must not reach the wrong replica's rows.
        if message.replica not in (None, self.hello.replica_index):
            # Addresses move between hosts: this server took the address of another replica.
            here = f"{self._role.name} {self.hello.replica_index}"
            text = f"the call is for replica {message.replica}, at its address is {here} now"
            self._refuse(
                "bad.replica", peer, message, WrongReplica(text, method=message.method)
            )
            return None
        if method is None:
            text = f"{self._role.name} has no method {message.method!r}"
            self._refuse("bad.method", peer, message, ProtocolError(text))
            return None
        if problem := _key_problem(peer, method):
            self._refuse("bad.key", peer, message, NotAllowed(problem, method=message.method))
            return None
        if message.method in COMMON:
            # Not queued, so that the answer comes however many methods run.
            self._answer_common(peer, message, method)
            return None
        expires_at = time.monotonic() + message.timeout_ms / 1000.0
        queued = _QueuedCall(peer, message, sum(map(len, parts)), expires_at)
        refusal, can_run = self._accept(queued)
        if refusal:
            self._fail(peer, message.call_id, ServiceBusy(refusal, method=message.method))
        return functools.partial(self._work, queued) if can_run else None

    def _answer_common(self, peer: bytes, call: Call, method: Method) -> None:
        try:
            arguments = method.read_arguments(call.body, call.arrays)
        except ProtocolError as error:
            self._refuse("bad.arguments", peer, call, error)
            return
        result: object = self.hello
        if method is not HELLO:
            result = getattr(self.job, method.name)(*arguments)
        body, arrays = method.write_result(result)
        self._send(peer, Reply(call.call_id, self._incarnation, body, arrays))

    def _accept(self, queued: _QueuedCall) -> tuple[str, bool]:
        """Accept a call; returns the reason of a refusal or "", and whether it runs at once."""
        settings = self._settings
        with self._lock:
            calls = self._accepted.get(queued.peer, {})
            refusal = ""
            if queued.call.call_id in calls:
                # The reply of the first answers this one too: both have the same id.
                self._counts["repeated"] += 1
                return "", False
            if self._is_stopping:
                refusal = "it is stopping"
            elif len(calls) >= settings.calls_per_peer:
                refusal = f"{len(calls)} calls of this peer are queued or running"
            elif calls and sum(calls.values()) + queued.num_bytes > settings.bytes_per_peer:
                refusal = f"{sum(calls.values())} bytes of this peer are queued or running"
            elif self._num_calls >= settings.calls:
                refusal = f"{self._num_calls} calls are queued or running"
            elif self._num_calls and self._num_bytes + queued.num_bytes > settings.bytes:
                refusal = f"{self._num_bytes} bytes of calls are queued or running"
            if refusal:
                self._counts["busy"] += 1
                refusal = f"{self._role.name} {self.hello.replica_index} is busy: {refusal}"
                return refusal, False
            # Accepted: from here on a repetition is recognised until _finish.
            calls[queued.call.call_id] = queued.num_bytes
            self._accepted[queued.peer] = calls
            self._num_calls += 1
            self._num_bytes += queued.num_bytes
            can_run = self._num_running < settings.num_threads
            if can_run:
                self._num_running += 1
            else:
                self._queues.setdefault(queued.peer, deque()).append(queued)
            return "", can_run

    # --- in a serving thread ----------------------------------------------------------------

    def _work(self, queued: _QueuedCall) -> Work | None:
        """Serve a call; returns the work of serving the next queued one."""
        try:
            self._serve(queued)
        finally:
            following = self._finish(queued)
        return None if following is None else functools.partial(self._work, following)

    def _finish(self, queued: _QueuedCall) -> _QueuedCall | None:
        """Remove a served call; returns the next one for this thread."""
        with self._lock:
            calls = self._accepted[queued.peer]
            calls.pop(queued.call.call_id, None)
            if not calls:
                del self._accepted[queued.peer]
            self._num_calls -= 1
            self._num_bytes -= queued.num_bytes
            if not self._num_calls:
                self._is_idle.notify_all()
            if not self._queues:
                self._num_running -= 1
                return None
            # The oldest call of the peer whose turn it is, which then goes behind the others.
            peer, waiting = self._queues.popitem(last=False)
            following = waiting.popleft()
            if waiting:
                self._queues[peer] = waiting
            return following

    def _serve(self, queued: _QueuedCall) -> None:
        call = queued.call
        # No reply: the caller has given up, and a late answer would only be counted.
        if time.monotonic() > queued.expires_at:
            with self._lock:
                self._counts["expired"] += 1
            return
        method = self._role.methods[call.method]
        arrived = queued.expires_at - call.timeout_ms / 1000.0  # the queue is part of its time
        with self._lock:
            self._counts["calls"] += 1
        # Never reset: the next call that this thread serves sets its own.
        caller_deadline.set(queued.expires_at)
        try:
            service = self.service
            if service is None:
                raise ServiceBusy(f"the {self._role.name} waits: {self._ready()}")
            arguments = method.read_arguments(call.body, call.arrays)
            if problem := _key_problem(queued.peer, method, arguments):
                self._count_bad("bad.key", problem)
                raise NotAllowed(problem, method=method.name)
            result = getattr(service, method.name)(*arguments)
            if method.name == CONFIGURE:
                self.job.mark_configured()
            body, arrays = method.write_result(result, self.hello.wire)
            parts = encode(Reply(call.call_id, self._incarnation, body, arrays), self._limits)
        except BaseException as error:
            # Whatever it is, the caller gets it, and this thread goes on to serve others.
            with self._lock:
                self._counts["errors"] += 1
            if not isinstance(error, PersiaError):
                logger.exception("%s: %s failed", self._where(), method.name)
            self._fail(queued.peer, call.call_id, error)
            took_s = time.monotonic() - arrived
            self.timings.add(method.name, took_s, queued.num_bytes, 0, failed=True)
            return
        now = time.monotonic()
        with self._lock:
            self._counts["replies"] += 1
            self._replied_at = now
        num_bytes = sum(map(len, parts))
        self.timings.add(method.name, now - arrived, queued.num_bytes, num_bytes, failed=False)
        self._listener.send(queued.peer, parts)

    def _refuse(self, name: str, peer: bytes, call: Call, error: PersiaError) -> None:
        self._count_bad(name, str(error))
        self._fail(peer, call.call_id, error)

    def _fail(self, peer: bytes, call_id: int, error: BaseException) -> None:
        self._send(peer, self._failure(call_id, error))

    def _failure(self, call_id: int, error: BaseException) -> Failure:
        return Failure(call_id, self._incarnation, error_to_body(error))

    def _send(self, peer: bytes, message: Reply | Failure) -> None:
        self._listener.send(peer, encode(message, self._limits))


def _key_problem(peer: bytes, method: Method, arguments: Sequence[Any] | None = None) -> str:
    """Say why a peer's key does not allow a call; "" if it does, as far as is known.

    Without ``arguments`` they are not decoded yet, and the call must be checked again.
    """
    # Only peers with keys are checked: without keys every caller has full control.
    if not isinstance(peer, Peer):
        return ""
    reads = method.reads_only
    if is_for_serving(peer.user):
        if reads is not None and (arguments is None or reads(arguments)):
            return ""
        what = method.name
        if reads is not None:
            is_lookup = what.startswith("lookup")
            what += " for training" if is_lookup else " with the optimizer's state"
        needed = "the control key" if method.needs_control else "the control or a data key"
        return (
            f"{what} needs {needed}, the caller has {peer.user}'s, which may look up and ask "
            "for the state only"
        )
    if method.needs_control and peer.user != CONTROL:
        return f"{method.name} needs the control key, the caller has {peer.user}'s"
    return ""


def serve(
    transport: ZmqTransport, address: str, role: Role, service: Any, **options: Any
) -> Server:
    """Start a ``Server`` for an object, with its identity as far as it has one."""
    names = ("replica_index", "replica_size", "schema_fingerprint")
    known = {name: getattr(service, name) for name in names if hasattr(service, name)}
    server = Server(transport, address, role, service, **(known | options))
    server.start()
    return server
