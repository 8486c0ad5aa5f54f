"""Serving an object's methods: calls in, one reply or error out for each.

    who received it     reads the frame, answers what every server answers and whatever cannot
                        be served; queues the rest, or serves it while another receives
    who has served one  takes the next of those that wait, peer by peer in turn

A bounded number of threads runs methods, and a bounded number of calls waits: beyond it the
answer is ServiceBusy, which changed nothing. One peer has a share of the queue, so that a
flood from one leaves the others their turn.

A call that is repeated while the first is still here is answered once; a call whose caller
has stopped waiting is not begun.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persia._metrics.timings import CallTimings
from persia._rpc import error_codec
from persia._rpc.deadlines import caller_deadline
from persia._rpc.frame import (
    LIMITS,
    Call,
    Failure,
    Limits,
    Reply,
    UnreadableFrame,
    decode,
    encode,
)
from persia._rpc.job import JobState
from persia._rpc.keys import CONTROL
from persia._rpc.methods import COMMON, CONFIGURE, HELLO, Hello, Method, Role
from persia._rpc.transport import Listener, Parts, Peer, Transport, Work
from persia.errors import NotAllowed, PersiaError, ProtocolError, ServiceBusy, WrongReplica
from persia.version import __version__

logger = logging.getLogger(__name__)

# Seconds that replies get to leave when the server stops.
_LINGER_S = 2.0
# How long after the last reply a server that stops stays: libzmq drops what a client has
# received and not read yet when it learns that the connection ended.
_ARRIVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How much one server takes on at a time."""

    num_threads: int = 4  # at most run methods at a time
    calls_per_peer: int = 64  # waiting or running
    calls: int = 1024  # waiting or running, of all peers
    bytes_per_peer: int = 1 << 30  # of its waiting and running calls; one is taken if all may
    bytes: int = 4 << 30  # of waiting and running calls; one call is always taken


SETTINGS = ServerSettings()


@dataclass(slots=True)
class _Job:
    peer: bytes
    call: Call
    num_bytes: int
    expires_at: float  # monotonic seconds


class Server:
    """Serves one object at one address.

    Args:
        transport: Where to listen.
        address: Port 0 is one that the kernel chooses; see ``address``.
        role: The methods and their forms.
        service: The object whose methods are called, by several threads at once.
        replica_index: Its number among the replicas of its role.
        replica_size: How many of them there are.
        schema_fingerprint: Of its embedding config; what ``hello`` answers.
        job: Where the end of the job is noted; one of its own if not given.
        settings: Threads and bounds.
        limits: What a message may be.

    Raises:
        ConfigError: If the address cannot be used.
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        role: Role,
        service: object,
        *,
        replica_index: int = 0,
        replica_size: int = 1,
        schema_fingerprint: str = "",
        job: JobState | None = None,
        settings: ServerSettings = SETTINGS,
        limits: Limits = LIMITS,
    ) -> None:
        self._role = role
        self._service = service
        self._settings = settings
        self._limits = limits
        self._incarnation = secrets.randbits(63) + 1
        self._hello = Hello(
            role.name,
            replica_index,
            replica_size,
            self._incarnation,
            __version__,
            schema_fingerprint,
        )
        self._job = JobState() if job is None else job
        self._lock = threading.Lock()  # guards all below
        self._is_idle = threading.Condition(self._lock)
        self._waiting: OrderedDict[bytes, deque[_Job]] = OrderedDict()  # next peer first
        self._here: dict[bytes, dict[int, int]] = {}  # by peer: bytes by id, waiting or running
        self._num_calls = 0  # waiting or running
        self._num_running = 0
        self._replied_at = -_ARRIVAL_S  # monotonic
        self._num_bytes = 0
        self._is_stopping = False
        self._counts: Counter[str] = Counter()
        self.timings = CallTimings()
        self._listener: Listener = transport.listen(address)

    @property
    def address(self) -> str:
        """Where it listens, with the true port."""
        return self._listener.address

    @property
    def hello(self) -> Hello:
        """Who it says it is."""
        return self._hello

    @property
    def job(self) -> JobState:
        """Where the end of the job is noted."""
        return self._job

    def start(self) -> None:
        """Begin to serve."""
        self._listener.start(self._on_message, self._on_dropped)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start; those that are zero are absent.

        ``calls`` were begun; of these ``replies`` returned and ``errors`` raised. ``busy`` were
        refused, ``repeated`` were here already, ``expired`` waited longer than their callers.
        ``bad.<reason>`` could not be read, ``dropped.<reason>`` could not be taken or answered.
        ``unfinished`` were waiting or running when the server stopped.
        """
        with self._lock:
            return dict(self._counts)

    def load(self) -> tuple[int, int]:
        """Return how many calls wait or run now, and how many bytes they have."""
        with self._lock:
            return self._num_calls, self._num_bytes

    @property
    def is_alive(self) -> bool:
        """Whether calls that come are served."""
        return self._listener.is_open and not self._is_stopping

    def stop(self, timeout_s: float = 10.0) -> Mapping[str, int]:
        """Finish what is here and stop; what is not finished in time is counted.

        Returns:
            As ``stats``.
        """
        with self._lock:
            is_first = not self._is_stopping
            self._is_stopping = True
            self._is_idle.wait_for(lambda: not self._num_calls, timeout_s)
            if is_first and self._num_calls:
                self._counts["unfinished"] += self._num_calls
                logger.warning(
                    "%s at %s: stopped with %d calls unfinished after %g s",
                    self._role.name,
                    self.address,
                    self._num_calls,
                    timeout_s,
                )
            self._waiting.clear()
            self._is_idle.wait_for(self._have_replies_arrived, _ARRIVAL_S)
        self._listener.close(_LINGER_S)
        return self.stats()

    def _have_replies_arrived(self) -> bool:
        return time.monotonic() - self._replied_at > _ARRIVAL_S

    # --- in the thread that received it -----------------------------------------------------

    def _on_dropped(self, reason: str) -> None:
        told = f"a message was dropped: {reason}"
        if reason == "stranger":
            told = "a connection was refused: no ZeroMQ, or no key that is known here"
        self._count_bad(f"dropped.{reason}", told)

    def _count_bad(self, name: str, text: str) -> None:
        with self._lock:
            self._counts[name] += 1
            is_first = self._counts[name] == 1
        if is_first:
            # A line for each message would let a stranger fill the disk. A peer that leaves
            # while it is being answered is nobody's fault.
            logger.log(
                logging.INFO if name == "dropped.peer_gone" else logging.WARNING,
                "%s at %s: %s; more of this kind are only counted, as %s",
                self._role.name,
                self.address,
                text,
                name,
            )

    def _on_message(self, peer: bytes, parts: Parts) -> Work | None:
        try:
            message = decode(parts, self._limits)
            if not isinstance(message, Call):
                raise UnreadableFrame("not_a_call", "expected a call", message.call_id)
        except UnreadableFrame as error:
            self._count_bad(f"bad.{error.reason}", f"a bad message: {error}")
            self._fail(peer, error.call_id, error)
            return None
        if message.replica not in (None, self._hello.replica_index):
            # It has got the address of the one that is meant, and touches nothing.
            self._count_bad("bad.replica", f"a call for replica {message.replica}")
            here = f"{self._role.name} {self._hello.replica_index}"
            told = f"the call is for replica {message.replica}, at its address is {here} now"
            self._fail(peer, message.call_id, WrongReplica(told, method=message.method))
            return None
        method = self._role.methods.get(message.method)
        if (
            method is not None
            and method.needs_control
            and isinstance(peer, Peer)
            and peer.user != CONTROL
        ):
            # Without keys nobody knows who calls: then all may do everything.
            self._count_bad("bad.key", f"a call of {method.name} by {peer.user}")
            told = f"{method.name} needs the control key, the caller has {peer.user}'s"
            self._fail(peer, message.call_id, NotAllowed(told, method=message.method))
            return None
        if message.method in COMMON:
            # Here, so that it is answered however many methods run.
            self._answer_common(peer, message, COMMON[message.method])
            return None
        if method is None:
            self._count_bad("bad.method", f"no method {message.method!r}")
            self._fail(
                peer,
                message.call_id,
                ProtocolError(f"{self._role.name} has no method {message.method!r}"),
            )
            return None
        job = _Job(
            peer,
            message,
            sum(map(len, parts)),
            time.monotonic() + message.timeout_ms / 1000.0,
        )
        refusal, can_run = self._take(job)
        if refusal:
            self._fail(peer, message.call_id, ServiceBusy(refusal, method=message.method))
        return functools.partial(self._work, job) if can_run else None

    def _answer_common(self, peer: bytes, call: Call, method: Method) -> None:
        try:
            arguments = method.read_arguments(call.body, call.arrays)
        except ProtocolError as error:
            self._count_bad("bad.arguments", f"a bad call: {error}")
            self._fail(peer, call.call_id, error)
            return
        result: object = self._hello
        if method is not HELLO:
            result = getattr(self._job, method.name)(*arguments)
        body, arrays = method.write_result(result)
        self._send(peer, Reply(call.call_id, self._incarnation, body, arrays))

    def _take(self, job: _Job) -> tuple[str, bool]:
        """Take a job or queue it; returns why neither can be, or "", and whether it can run."""
        settings = self._settings
        with self._lock:
            here = self._here.get(job.peer, {})
            refusal = ""
            if job.call.call_id in here:
                self._counts["repeated"] += 1
                return "", False
            if self._is_stopping:
                refusal = "it is stopping"
            elif len(here) >= settings.calls_per_peer:
                refusal = f"{len(here)} calls of this peer are waiting or running"
            elif here and sum(here.values()) + job.num_bytes > settings.bytes_per_peer:
                refusal = f"{sum(here.values())} bytes of this peer are waiting or running"
            elif self._num_calls >= settings.calls:
                refusal = f"{self._num_calls} calls are waiting or running"
            elif self._num_calls and self._num_bytes + job.num_bytes > settings.bytes:
                refusal = f"{self._num_bytes} bytes of calls are waiting or running"
            if refusal:
                self._counts["busy"] += 1
                refusal = f"{self._role.name} {self._hello.replica_index} is busy: {refusal}"
                return refusal, False
            here[job.call.call_id] = job.num_bytes
            self._here[job.peer] = here
            self._num_calls += 1
            self._num_bytes += job.num_bytes
            can_run = self._num_running < settings.num_threads
            if can_run:
                self._num_running += 1
            else:
                self._waiting.setdefault(job.peer, deque()).append(job)
            return "", can_run

    # --- in the same thread, while another receives -----------------------------------------

    def _work(self, job: _Job) -> Work | None:
        """Serve a call; returns how to serve the one that has waited longest."""
        try:
            self._serve(job)
        finally:
            following = self._done(job)
        return None if following is None else functools.partial(self._work, following)

    def _next(self) -> _Job | None:
        """With the lock held: the oldest call of the peer whose turn it is."""
        if not self._waiting:
            return None
        peer, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[peer] = jobs  # behind the others
        return job

    def _done(self, job: _Job) -> _Job | None:
        """Forget a call; returns the next one for this thread."""
        with self._lock:
            here = self._here[job.peer]
            here.pop(job.call.call_id, None)
            if not here:
                del self._here[job.peer]
            self._num_calls -= 1
            self._num_bytes -= job.num_bytes
            if not self._num_calls:
                self._is_idle.notify_all()
            following = self._next()
            self._num_running -= following is None
            return following

    def _serve(self, job: _Job) -> None:
        call = job.call
        if time.monotonic() > job.expires_at:
            with self._lock:
                self._counts["expired"] += 1
            return
        method = self._role.methods[call.method]
        with self._lock:
            self._counts["calls"] += 1
        caller_deadline.set(job.expires_at)
        try:
            arguments = method.read_arguments(call.body, call.arrays)
            result = getattr(self._service, method.name)(*arguments)
            if method.name == CONFIGURE:
                self._job.take()
            body, arrays = method.write_result(result)
            parts = encode(Reply(call.call_id, self._incarnation, body, arrays), self._limits)
        except BaseException as error:
            # All of them: the caller is told, and the thread has other callers to serve.
            with self._lock:
                self._counts["errors"] += 1
            if not isinstance(error, PersiaError):
                logger.exception(
                    "%s at %s: %s failed", self._role.name, self.address, method.name
                )
            self._fail(job.peer, call.call_id, error)
            self._time(job, time.monotonic(), 0, failed=True)
            return
        now = time.monotonic()
        with self._lock:
            self._counts["replies"] += 1
            self._replied_at = now
        self._time(job, now, sum(map(len, parts)))
        self._listener.send(job.peer, parts)

    def _time(self, job: _Job, now: float, sent: int, *, failed: bool = False) -> None:
        arrived = job.expires_at - job.call.timeout_ms / 1000.0
        self.timings.add(job.call.method, now - arrived, job.num_bytes, sent, failed=failed)

    def _fail(self, peer: bytes, call_id: int, error: BaseException) -> None:
        self._send(peer, Failure(call_id, self._incarnation, error_codec.to_body(error)))

    def _send(self, peer: bytes, message: Reply | Failure) -> None:
        self._listener.send(peer, encode(message, self._limits))


def serve(
    transport: Transport, address: str, role: Role, service: Any, **options: Any
) -> Server:
    """Start a server for an object that says itself which replica it is.

    Args:
        transport: Where to listen.
        address: As for ``Server``.
        role: As for ``Server``.
        service: Its ``replica_index``, ``replica_size`` and ``schema_fingerprint`` are used
            where it has them.
        options: Further arguments of ``Server``.
    """
    names = ("replica_index", "replica_size", "schema_fingerprint")
    known = {name: getattr(service, name) for name in names if hasattr(service, name)}
    server = Server(transport, address, role, service, **(known | options))
    server.start()
    return server
