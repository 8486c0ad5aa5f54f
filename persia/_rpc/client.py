"""Calling a server: deadlines, repetitions, and typed errors with the callee's name.

A call has a deadline, ``PERSIA_RPC_TIMEOUT`` seconds if none is given, and never later than
that of the call on whose behalf it is made. Within it:

    nobody is connected        it waits; what was not sent may be sent later, whatever it is
    connection breaks          sent again at once if the method may be repeated, else
                               ServiceUnavailable: nobody knows whether it was executed
    no answer for 10 s         sent again if the method may be repeated; with the same id, so
                               that a server that still works on it does not begin anew
    ServiceBusy                tried again, a little later each time
    another replica answers    tried again in the same way, until ``move`` leads elsewhere
    the deadline passes        ServiceUnavailable if it never left, else ServiceTimeout

One channel carries any number of calls at a time; each waits in its own thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from persia import env
from persia._metrics.timings import CallTimings
from persia._rpc import failures
from persia._rpc.deadlines import caller_deadline
from persia._rpc.failures import Place
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
from persia._rpc.methods import HELLO, Hello, Method, Role
from persia._rpc.transport import Channel, Outgoing, Parts, Transport
from persia.errors import (
    ConfigError,
    InternalError,
    NotConfigured,
    ProtocolError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    WrongReplica,
)

logger = logging.getLogger(__name__)

# Seconds after which a call that may be repeated is, and a line says whom it waits for.
ATTEMPT_S = 10.0

# Seconds between tries at a busy server: doubled each time, then drawn from its upper half,
# so that those who were refused together do not come back together.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.5

# Of its own: a script's draws must not depend on how busy a server is.
_jitter = random.Random()

_MAX_TIMEOUT_MS = (1 << 32) - 1

# Seconds that a message may take to a busy process, of calls that have time.
_WAY_S = 0.02


class _Pending:
    """One call id: what was sent for it, and what came back."""

    __slots__ = ("_is_lost", "_still", "answer", "channel", "outgoing")

    def __init__(self) -> None:
        # A bare lock, free once something has changed: an Event wakes its waiter only to
        # have it wait for the lock that its setter holds.
        self._still = threading.Lock()
        self._still.acquire()
        self._is_lost = False
        self.answer: Reply | Failure | ServiceError | None = None  # set once
        self.outgoing: Outgoing | None = None
        self.channel: Channel | None = None  # that the attempt goes to

    def resolve(self, answer: Reply | Failure | ServiceError) -> None:
        if self.answer is None:
            self.answer = answer
        self._wake()

    def lose(self) -> None:
        """The connection broke; what was sent before will not be answered."""
        if self.outgoing is not None and self.outgoing.was_sent:
            self._is_lost = True
            self._wake()

    def move(self) -> None:
        """Another connection takes the place of the one that the attempt went to."""
        self._is_lost = True
        self._wake()

    def begin(self, outgoing: Outgoing) -> None:
        """Another attempt; a loss of the one before no longer counts."""
        self.outgoing = outgoing
        self._is_lost = False
        self._still.acquire(blocking=False)
        # An answer may have come before that.
        if self.answer is not None:
            self._wake()

    def wait(self, seconds: float) -> bool:
        """Wait for an answer or a loss; returns whether it is a loss."""
        if self.answer is None:
            self._still.acquire(timeout=max(0.0, seconds))
        return self.answer is None and self._is_lost

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # another change has freed it
            self._still.release()


class Client:
    """Calls one server; any thread may call it.

    Args:
        transport: How to get there.
        address: Where it listens.
        role: What it can be asked.
        replica: Its number, if known; else that of whoever answers ``hello``.
        timeout_s: Seconds of a call; ``PERSIA_RPC_TIMEOUT`` if not given.
        attempt_s: Seconds of one attempt.
        on_restart: Called when another process than before answers at the address, by one
            thread that called it, before any call that found out goes on. It may call this
            client. A call that was refused with NotConfigured is then made once more.
        limits: What a message may be.

    Raises:
        ConfigError: If the address cannot be read.
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        role: Role,
        *,
        replica: int | None = None,
        timeout_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
        on_restart: Callable[[], None] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._transport = transport
        self._role = role
        self._replica = replica
        self._timeout_s = env.rpc_timeout_s() if timeout_s is None else timeout_s
        self._attempt_s = attempt_s
        self._on_restart = on_restart
        self._limits = limits
        self.timings = CallTimings()
        self._lock = threading.Lock()  # guards the next six
        self._num_sent = 0  # bytes, as is the next
        self._num_received = 0
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._counts: Counter[str] = Counter()
        self._told_at = 0.0  # monotonic; when a line last said that calls wait
        self._closed = threading.Event()
        self._restart_lock = threading.RLock()  # guards the next two
        self._settled: int | None = None  # incarnation that on_restart has dealt with
        self._settling: int | None = None
        self._channel = transport.connect(address)
        self._channel.start(self._on_message, self._on_lost)

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self._channel.address

    @property
    def incarnation(self) -> int | None:
        """The server process that answered last; None before the first answer."""
        return self._settled

    def place(self, method: str) -> Place:
        """Who is asked by a call of ``method``."""
        return Place(self._role.name, self._replica, self.address, method)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start; those that are zero are absent.

        ``calls``; ``sent_again`` after silence or a loss; ``busy`` answers; ``lost``
        connections; ``late`` answers to calls that had ended; ``bad.<reason>`` answers.
        """
        with self._lock:
            return dict(self._counts)

    @property
    def role(self) -> str:
        """What it calls."""
        return self._role.name

    @property
    def replica(self) -> int | None:
        """Which of them; None before one has answered."""
        return self._replica

    def traffic(self) -> tuple[int, int]:
        """Return how many bytes of calls were sent, and of answers received."""
        with self._lock:
            return self._num_sent, self._num_received

    def close(self) -> None:
        """End the connection; calls in flight raise ServiceUnavailable."""
        self._closed.set()
        self._channel.close()
        with self._lock:
            waiting = list(self._pending.values())
        for pending in waiting:
            pending.resolve(ServiceUnavailable("the client was closed"))

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until it is closed; False if not in time."""
        return self._closed.wait(timeout_s)

    def move(self, address: str) -> None:
        """Go on with the same server at another address, calls that wait included.

        Raises:
            ConfigError: If the address cannot be read.
        """
        channel = self._transport.connect(address)
        channel.start(self._on_message, self._on_lost)
        with self._lock:
            before, self._channel = self._channel, channel
            # Not those that go by the new one already: they would be executed twice.
            waiting = [one for one in self._pending.values() if one.channel is before]
        before.close()
        if self._closed.is_set():
            channel.close()
        for pending in waiting:
            pending.move()

    # --- calls ------------------------------------------------------------------------------

    def hello(self, timeout_s: float | None = None) -> Hello:
        """Ask the server who it is; answered however busy it is.

        Raises:
            ConfigError: If another role, or another replica, answers at the address.
            ServiceUnavailable: If nobody is there in time.
            ServiceTimeout: If who is there does not answer in time.
        """
        hello: Hello = self.call("hello", timeout_s=timeout_s)
        self._replica = hello.replica_index
        return hello

    def _check(self, hello: Hello) -> None:
        """Refuse who is not the server that this client is for."""
        if hello.role != self._role.name:
            raise ConfigError(f"{self.address}: expected {self._role.name}, found {hello.role}")
        if self._replica is not None and hello.replica_index != self._replica:
            raise ConfigError(
                f"{self.address}: expected {hello.role} {self._replica}, found "
                f"{hello.replica_index} of {hello.replica_size}"
            )

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method and return its result.

        Arrays among the arguments are sent from where they are. After an error they may still
        be on their way: leave them alone, or copy them before.

        Args:
            method: One of the role's.
            arguments: As the role's Protocol declares.
            timeout_s: Seconds, if other than the client's.

        Raises:
            DataTypeError: If an argument is not what the Protocol declares.
            ServiceUnavailable: If there is no connection, or it broke in a call that may not
                be repeated.
            ServiceTimeout: If no answer came in time.
            ServiceBusy: If the server refused until the deadline.
            ProtocolError: If one side cannot read the other.
            RemoteError: If the method failed with an exception that is not PERSIA's.
            PersiaError: What the method raised, otherwise.
        """
        known_method = self._role.methods.get(method)
        if known_method is None:
            raise InternalError(f"{self._role.name} has no method {method!r}")
        now = time.monotonic()
        failed = True
        try:
            result = self._call(known_method, arguments, timeout_s, now)
            failed = False
        finally:
            self.timings.add(method, time.monotonic() - now, 0, 0, failed=failed)
        return result

    def _call(
        self,
        known_method: Method,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        now: float,
    ) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        timeout_s = max(0.0, min(timeout_s, caller_deadline.get() - now))
        deadline = now + timeout_s
        body, arrays = known_method.write_arguments(arguments)
        is_repeatable = known_method.is_repeatable(arguments)
        pause_s = _FIRST_PAUSE_S
        self._count("calls")
        while True:
            before = self._settled
            replica = None if known_method is HELLO else self._replica
            call = Call(0, known_method.name, 0, body, arrays, replica)
            answer = self._exchange(call, deadline, timeout_s, is_repeatable)
            # Who is not the server that is meant is none that was started anew.
            if isinstance(answer, Reply):
                result = self._result(known_method, answer)
                if isinstance(result, Hello):
                    self._check(result)
                self._settle(answer.incarnation)
                return result
            error = failures.from_body(answer.body, self.place(known_method.name))
            if not isinstance(error, WrongReplica):
                self._settle(answer.incarnation)
            left = deadline - time.monotonic()
            if isinstance(error, ServiceBusy) and pause_s < left:
                self._count("busy")
                self._closed.wait(pause_s * _jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            elif not (
                isinstance(error, NotConfigured)
                and self._on_restart is not None
                and before not in (None, answer.incarnation)
            ):
                raise error

    def _result(self, method: Method, reply: Reply) -> Any:
        try:
            return method.read_result(reply.body, reply.arrays)
        except ProtocolError as exc:
            place = self.place(method.name)
            raise ProtocolError(f"{place}: {exc}", **place.fields()) from exc

    def _exchange(
        self, call: Call, deadline: float, timeout_s: float, is_repeatable: bool
    ) -> Reply | Failure:
        pending = _Pending()
        with self._lock:
            call_id = next(self._ids)
            self._pending[call_id] = pending
        try:
            if self._closed.is_set():
                pending.resolve(ServiceUnavailable("the client was closed"))
            call.call_id = call_id
            answer = self._attempts(call, pending, deadline, is_repeatable)
        finally:
            with self._lock:
                del self._pending[call_id]
            if pending.outgoing is not None:
                pending.outgoing.cancel()
        if isinstance(answer, (Reply, Failure)):
            return answer
        place = self.place(call.method)
        if answer is None:
            if pending.outgoing is None or not pending.outgoing.was_sent:
                raise ServiceUnavailable(
                    f"{place}: no connection within {timeout_s:g} s, for {call.method}",
                    **place.fields(),
                )
            raise ServiceTimeout(
                f"{place}: no answer to {call.method} within {timeout_s:g} s", **place.fields()
            )
        raise type(answer)(f"{place}: {call.method}: {answer}", **place.fields())

    def _attempts(
        self,
        call: Call,
        pending: _Pending,
        deadline: float,
        is_repeatable: bool,
    ) -> Reply | Failure | ServiceError | None:
        """Send, and again where that is safe, until there is an answer or the time is up."""
        num_sent = 0
        while pending.answer is None:
            left = deadline - time.monotonic()
            if left <= 0.0:
                return None
            # Less than is left, by the time of the way: what waits there longer than the
            # caller does here is not begun, and an error about a deadline still arrives.
            way_s = min(_WAY_S, left / 20.0)
            call.timeout_ms = min(max(1, int((left - way_s) * 1000.0)), _MAX_TIMEOUT_MS)
            outgoing = Outgoing(encode(call, self._limits))
            pending.begin(outgoing)
            if num_sent:
                self._count("sent_again")
            num_bytes = sum(map(len, outgoing.parts))
            with self._lock:
                pending.channel = channel = self._channel
                self._num_sent += num_bytes
            channel.send(outgoing)
            while True:
                left = deadline - time.monotonic()
                is_lost = pending.wait(min(left, self._attempt_s))
                if pending.answer is not None:
                    break
                if is_lost:
                    if not outgoing.cancel():
                        if not is_repeatable:
                            return ServiceUnavailable(
                                "the connection broke; whether it was executed is not known"
                            )
                        num_sent += 1
                    break
                if deadline - time.monotonic() <= 0.0:
                    return None
                self._say_that_it_waits(call.method, outgoing.was_sent)
                if outgoing.cancel():
                    break  # to write anew how much time is left
                if is_repeatable:
                    num_sent += 1
                    break
        return pending.answer

    def _say_that_it_waits(self, method: str, was_sent: bool) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < self._attempt_s:
                return
            self._told_at = now
            num_pending = len(self._pending)
        logger.warning(
            "%s: %s for %g s, in %s; %d calls wait",
            self.place(method),
            "no answer" if was_sent else "no connection",
            self._attempt_s,
            method,
            num_pending,
        )

    def _settle(self, incarnation: int) -> None:
        """Deal with another process at the address, once, before any call goes on."""
        if incarnation == self._settled:
            return
        with self._restart_lock:
            if incarnation in (self._settled, self._settling):
                return
            is_restart = self._settled is not None
            self._settling = incarnation
            try:
                if is_restart:
                    logger.warning("%s was restarted", self.place(""))
                    if self._on_restart is not None:
                        self._on_restart()
                self._settled = incarnation
            finally:
                self._settling = None

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # --- in the channel's thread ------------------------------------------------------------

    def _on_message(self, parts: Parts) -> None:
        try:
            answer = decode(parts, self._limits)
            if isinstance(answer, Call):
                raise UnreadableFrame(
                    "call",
                    f"expected an answer, got a call {answer.method!r}",
                    answer.call_id,
                )
        except UnreadableFrame as error:
            self._count(f"bad.{error.reason}")
            logger.warning("%s: unreadable answer: %s", self.place(""), error)
            if error.call_id:
                self._resolve(error.call_id, ProtocolError(f"unreadable answer: {error}"))
            return
        if answer.call_id == 0 and isinstance(answer, Failure):
            # It cannot say which call it means, and all are written alike.
            told = failures.from_body(answer.body, self.place(""))
            refused = ProtocolError(f"refused there: {told}")
            with self._lock:
                waiting = list(self._pending.values())
            for pending in waiting:
                if pending.outgoing is not None and pending.outgoing.was_sent:
                    pending.resolve(refused)
            return
        self._resolve(answer.call_id, answer, sum(map(len, parts)))

    def _resolve(
        self, call_id: int, answer: Reply | Failure | ServiceError, num_bytes: int = 0
    ) -> None:
        with self._lock:
            self._num_received += num_bytes
            pending = self._pending.get(call_id)
            if pending is None:
                self._counts["late"] += 1
                return
        pending.resolve(answer)

    def _on_lost(self) -> None:
        with self._lock:
            self._counts["lost"] += 1
            waiting: Sequence[_Pending] = list(self._pending.values())
        for pending in waiting:
            pending.lose()
