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
from persia._rpc import error_codec
from persia._rpc.deadlines import caller_deadline
from persia._rpc.error_codec import ErrorOrigin
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
from persia._rpc.pending_call import PendingCall
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
        self._attempts: dict[int, PendingCall] = {}
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

    def place(self, method: str) -> ErrorOrigin:
        """Who is asked by a call of ``method``."""
        return ErrorOrigin(self._role.name, self._replica, self.address, method)

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
            waiting = list(self._attempts.values())
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
            waiting = [one for one in self._attempts.values() if one.channel is before]
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

    def who(self, timeout_s: float) -> Hello:
        """Ask as ``hello``; another process than before is left to the next call.

        To deal with one may take as long as a call, and it may be gone again meanwhile: whoever
        looks for it elsewhere asks this.
        """
        flight = self.begin("hello", timeout_s=timeout_s)
        flight.settles = False
        hello: Hello = flight.result()
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
        return self.begin(method, *arguments, timeout_s=timeout_s).result()

    def begin(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> CallInFlight:
        """Begin a call as ``call`` makes it; any number may be in flight at a time.

        Returns:
            Where to ask for its result or to cancel it, one of which has to be done.

        Raises:
            DataTypeError: If an argument is not what the Protocol declares.
            ProtocolError: If it exceeds what a message can carry.
        """
        known_method = self._role.methods.get(method)
        if known_method is None:
            raise InternalError(f"{self._role.name} has no method {method!r}")
        self._count("calls")
        return CallInFlight(self, known_method, arguments, timeout_s)

    # --- for calls in flight ----------------------------------------------------------------

    def _enter(self, attempt: PendingCall) -> int:
        """Return the id by which its answer comes."""
        with self._lock:
            call_id = next(self._ids)
            self._attempts[call_id] = attempt
        return call_id

    def _leave(self, call_id: int) -> None:
        with self._lock:
            self._attempts.pop(call_id, None)

    def _channel_for(self, attempt: PendingCall, num_bytes: int) -> Channel:
        """Return the channel of now, by which it goes with so many bytes."""
        with self._lock:
            self._num_sent += num_bytes
            attempt.channel = self._channel
            return self._channel

    def _result(self, method: Method, reply: Reply) -> Any:
        try:
            return method.read_result(reply.body, reply.arrays)
        except ProtocolError as exc:
            place = self.place(method.name)
            raise ProtocolError(f"{place}: {exc}", **place.fields()) from exc

    def _say_that_it_waits(self, method: str, was_sent: bool) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < self._attempt_s:
                return
            self._told_at = now
            num_pending = len(self._attempts)
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
                # A call of on_restart's may have met one more, and dealt with that.
                if self._settling == incarnation:
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
            told = error_codec.from_body(answer.body, self.place(""))
            refused = ProtocolError(f"refused there: {told}")
            with self._lock:
                waiting = list(self._attempts.values())
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
            pending = self._attempts.get(call_id)
            if pending is None:
                self._counts["late"] += 1
                return
        pending.resolve(answer)

    def _on_lost(self) -> None:
        with self._lock:
            self._counts["lost"] += 1
            waiting: Sequence[PendingCall] = list(self._attempts.values())
        for pending in waiting:
            pending.lose()


class CallInFlight:
    """A call that was begun; for one thread at a time.

    Args:
        client: Who makes it.
        method: What is called.
        arguments: As the role's Protocol declares.
        timeout_s: Seconds, if other than the client's.
    """

    def __init__(
        self,
        client: Client,
        method: Method,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
    ) -> None:
        self._client = client
        self._method = method
        timeout_s = client._timeout_s if timeout_s is None else timeout_s
        self._begun_at = time.monotonic()
        self._timeout_s = max(0.0, min(timeout_s, caller_deadline.get() - self._begun_at))
        self._deadline = self._begun_at + self._timeout_s
        self._body, self._arrays = method.write_arguments(arguments)
        self._is_repeatable = method.is_repeatable(arguments)
        self.settles = True  # the client deals with whoever answers
        self._begin()

    def _begin(self) -> None:
        """Send it, with an id of its own."""
        client = self._client
        self._before = client._settled
        replica = None if self._method is HELLO else client._replica
        self._attempt = PendingCall()
        self._num_sent = 0
        call_id = client._enter(self._attempt)
        self._call = Call(call_id, self._method.name, 0, self._body, self._arrays, replica)
        try:
            if client._closed.is_set():
                self._attempt.resolve(ServiceUnavailable("the client was closed"))
            elif self._left() > 0.0:
                self._send()
        except BaseException:
            self.cancel()
            raise

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _send(self) -> None:
        left = self._left()
        # Less than is left, by the time of the way: what waits there longer than the
        # caller does here is not begun, and an error about a deadline still arrives.
        way_s = min(_WAY_S, left / 20.0)
        self._call.timeout_ms = min(max(1, int((left - way_s) * 1000.0)), _MAX_TIMEOUT_MS)
        outgoing = Outgoing(encode(self._call, self._client._limits))
        self._attempt.begin(outgoing)
        if self._num_sent:
            self._client._count("sent_again")
        num_bytes = sum(map(len, outgoing.parts))
        self._client._channel_for(self._attempt, num_bytes).send(outgoing)

    def cancel(self) -> None:
        """Wait no longer; what was not sent never will be."""
        self._client._leave(self._call.call_id)
        if self._attempt.outgoing is not None:
            self._attempt.outgoing.cancel()

    def result(self) -> Any:
        """Wait for the result and return it; to be asked once.

        Raises:
            PersiaError: As ``Client.call``.
        """
        failed = True
        try:
            result = self._result()
            failed = False
        finally:
            took_s = time.monotonic() - self._begun_at
            self._client.timings.add(self._method.name, took_s, 0, 0, failed=failed)
        return result

    def _result(self) -> Any:
        client, method = self._client, self._method
        pause_s = _FIRST_PAUSE_S
        while True:
            answer = self._answer()
            # Who is not the server that is meant is none that was started anew.
            if isinstance(answer, Reply):
                result = client._result(method, answer)
                if isinstance(result, Hello):
                    client._check(result)
                if self.settles:
                    client._settle(answer.incarnation)
                return result
            error = error_codec.from_body(answer.body, client.place(method.name))
            if not isinstance(error, WrongReplica):
                client._settle(answer.incarnation)
            if isinstance(error, ServiceBusy) and pause_s < self._left():
                client._count("busy")
                client._closed.wait(pause_s * _jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            elif not (
                isinstance(error, NotConfigured)
                and client._on_restart is not None
                and self._before not in (None, answer.incarnation)
            ):
                raise error
            self._begin()

    def _answer(self) -> Reply | Failure:
        """Wait for what comes back, and raise what says that nothing will."""
        attempt, name = self._attempt, self._method.name
        try:
            answer = self._wait()
        finally:
            self.cancel()
        if isinstance(answer, (Reply, Failure)):
            return answer
        place = self._client.place(name)
        if answer is None:
            if attempt.outgoing is None or not attempt.outgoing.was_sent:
                raise ServiceUnavailable(
                    f"{place}: no connection within {self._timeout_s:g} s, for {name}",
                    **place.fields(),
                )
            raise ServiceTimeout(
                f"{place}: no answer to {name} within {self._timeout_s:g} s", **place.fields()
            )
        raise type(answer)(f"{place}: {name}: {answer}", **place.fields())

    def _wait(self) -> Reply | Failure | ServiceError | None:
        """Wait, and send again where that is safe, until there is an answer or no time."""
        attempt, client = self._attempt, self._client
        while True:
            attempt.wait(min(self._deadline, time.monotonic() + client._attempt_s))
            is_lost, outgoing = attempt.is_lost, attempt.outgoing
            if attempt.answer is not None:
                return attempt.answer
            if outgoing is None or (not is_lost and self._left() <= 0.0):
                return None
            if not is_lost:
                client._say_that_it_waits(self._method.name, outgoing.was_sent)
            # What was not sent is written anew, with how much time is left.
            if not outgoing.cancel():
                if not self._is_repeatable:
                    if is_lost:
                        return ServiceUnavailable(
                            "the connection broke; whether it was executed is not known"
                        )
                    continue
                self._num_sent += 1
            if self._left() <= 0.0:
                return None
            self._send()
