"""Calls of a server's methods: deadlines, repetition, and typed errors that name the server.

A call has a deadline, ``PERSIA_RPC_TIMEOUT`` seconds if none is given, and never later than
that of the call on whose behalf it is made. Until then:

    no connection              it waits; a message that was not sent may be sent later
    connection breaks          sent again at once if the method is repeatable, else
                               ServiceUnavailable: it may or may not have been executed
    no answer for 10 s         sent again if the method is repeatable, with the same id: a
                               server that still works on it does not begin a second time
    ServiceBusy                tried again, after a growing pause
    another replica answers    tried again in the same way, until ``move`` leads elsewhere
    the deadline passes        ServiceUnavailable if it was never sent, else ServiceTimeout

"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from persia import env
from persia._core.base.halves import DTYPES
from persia._metrics.timings import CallTimings
from persia._rpc.codec import FLOAT32, ErrorOrigin, error_from_body
from persia._rpc.deadlines import caller_deadline
from persia._rpc.frame import Call, Failure, Reply, UnreadableFrame, decode, encode
from persia._rpc.methods import HELLO, Hello, Method, Role
from persia._rpc.transport import Outgoing, Parts, Waiter
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

if TYPE_CHECKING:
    from persia._rpc.zmq_socket import ZmqChannel
    from persia._rpc.zmq_transport import ZmqTransport

logger = logging.getLogger(__name__)

# Seconds after which a repeatable call is sent again, and a line names the server waited for.
ATTEMPT_S = 10.0

# Seconds between tries at a busy server: doubled each time, then drawn from the upper half,
# so that callers that were refused together do not come back together.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.5

# A generator of its own: a script's draws must not depend on how busy a server is.
_jitter = random.Random()

# Seconds that a message may take to a busy process.
_TRANSIT_S = 0.02


class Client:
    """Calls one server; any number of threads may call it at a time.

    Without ``replica``, the server's index, that is taken from the first ``hello``; without
    ``timeout_s`` a call has ``PERSIA_RPC_TIMEOUT``. When a new process answers at the address,
    one of the threads that called it calls ``on_restart``, which may call this client, before
    any call that noticed goes on. A call that the new process refused with NotConfigured is
    then made once more.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        address: str,
        role: Role,
        *,
        replica: int | None = None,
        timeout_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
        on_restart: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self.role = role.name
        self._methods = role.methods
        self.replica = replica  # the server's index; None before it has answered
        self.wire = FLOAT32  # how the server wants gradients, from its last hello
        self._timeout_s = env.rpc_timeout_s() if timeout_s is None else timeout_s
        self._attempt_s = attempt_s
        self._on_restart = on_restart
        self.timings = CallTimings()
        self._lock = threading.Lock()  # guards the next six, and a pending call's state
        self._sent_bytes = 0
        self._received_bytes = 0
        # Never reused on a channel: a late answer must not resolve another call.
        self._ids = itertools.count(1)
        # The calling thread adds and removes its call; other threads only set its answer.
        self._pending: dict[int, PendingCall] = {}  # by call id
        self._counts: Counter[str] = Counter()
        self._logged_at = 0.0  # monotonic; when a line last named the server waited for
        self._closed = threading.Event()
        # Reentrant: on_restart calls this client, whose answers come from the new process too.
        self._restart_lock = threading.RLock()  # guards the next two
        self.incarnation: int | None = None  # of the process that on_restart was called for
        self._new_incarnation: int | None = None  # that it is being called for
        self._channel = transport.connect(address)
        self._channel.start(self._on_message, self._on_lost)

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self._channel.address

    def origin(self, method: str) -> ErrorOrigin:
        """Return the server as errors of a call of ``method`` name it."""
        return ErrorOrigin(self.role, self.replica, self.address, method)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start; those that are zero are absent.

        ``calls``; ``sent_again`` after silence or a loss; ``busy`` answers; ``lost``
        connections; ``late`` answers to calls that had ended; ``bad.<reason>`` answers.
        """
        with self._lock:
            return dict(self._counts)

    def traffic(self) -> tuple[int, int]:
        """Return how many bytes of calls were sent, and of answers received."""
        with self._lock:
            return self._sent_bytes, self._received_bytes

    def close(self) -> None:
        """End the connection; calls in flight raise ServiceUnavailable."""
        # Set first: a call that begins after the snapshot below sees it.
        self._closed.set()
        self._channel.close()
        self._resolve_all(ServiceUnavailable("the client was closed"))

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until it is closed; False if not in time."""
        return self._closed.wait(timeout_s)

    def move(self, address: str) -> None:
        """Go on with the same server at another address, calls in flight included."""
        channel = self._transport.connect(address)
        channel.start(self._on_message, self._on_lost)
        with self._lock:
            before, self._channel = self._channel, channel
        # Outside the lock: closing waits for threads that may be in _resolve.
        before.close()
        if self._closed.is_set():
            channel.close()
        # Not those that use the new channel already: they would be executed twice.
        self._mark_lost(lambda pending: pending.channel is before)

    # --- calls ------------------------------------------------------------------------------

    def hello(self, timeout_s: float | None = None) -> Hello:
        """Ask the server for its identity, which it answers however busy it is.

        ConfigError if another role or replica answers at the address.
        """
        hello: Hello = self.call("hello", timeout_s=timeout_s)
        # From here on calls carry the index, and another replica at the address refuses them.
        self.replica = hello.replica_index
        return hello

    def probe(self, timeout_s: float) -> Hello:
        """Ask as ``hello``, but leave ``on_restart`` to the next call.

        It may take as long as a call, and the server may be gone again meanwhile: a thread that
        searches for the server elsewhere must not wait for that.
        """
        pending = self.begin("hello", timeout_s=timeout_s)
        pending.handles_restart = False
        hello: Hello = pending.result()
        return hello

    def _check_identity(self, hello: Hello) -> None:
        if hello.role != self.role:
            raise ConfigError(f"{self.address}: expected {self.role}, found {hello.role}")
        if self.replica is not None and hello.replica_index != self.replica:
            raise ConfigError(
                f"{self.address}: expected {hello.role} {self.replica}, found "
                f"{hello.replica_index} of {hello.replica_size}"
            )
        for name in (hello.wire.rows, hello.wire.gradients):
            if name not in DTYPES:
                origin = self.origin("hello")
                expected = f"rows and gradients as {', '.join(DTYPES)}"
                raise origin.error(ProtocolError, f"{origin}: expected {expected}, got {name}")
        self.wire = hello.wire

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method; returns its result, or raises what it raised or the module describes.

        Arrays among the arguments are sent from where they are. After an error they may still
        be on their way: do not change them, or pass copies. DataTypeError if an argument is
        not what the role's Protocol declares.
        """
        return self.begin(method, *arguments, timeout_s=timeout_s).result()

    def begin(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> PendingCall:
        """Begin a call as ``call`` makes it; it must be asked for its result or cancelled."""
        # Of this version's table; the server may have another, and then answers ProtocolError.
        known_method = self._methods.get(method)
        if known_method is None:
            raise InternalError(f"{self.role} has no method {method!r}")
        self._count("calls")
        return PendingCall(self, known_method, arguments, timeout_s)

    # --- for pending calls ------------------------------------------------------------------

    def _log_waiting(self, method: str, was_sent: bool) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._logged_at < self._attempt_s:
                return
            self._logged_at = now
        what = "no answer" if was_sent else "no connection"
        logger.warning(
            "%s: %s for %g s, in %s", self.origin(method), what, self._attempt_s, method
        )

    def _handle_restart(self, incarnation: int) -> None:
        """Call ``on_restart`` once for each new process, before any call goes on."""
        # Without the lock: the usual case, and reading one reference is atomic under the GIL.
        if incarnation == self.incarnation:
            return
        with self._restart_lock:
            # Handled by another thread meanwhile, or by this one: on_restart is what made this
            # call.
            if incarnation in (self.incarnation, self._new_incarnation):
                return
            is_restart = self.incarnation is not None
            self._new_incarnation = incarnation
            try:
                if is_restart:
                    logger.warning("%s was restarted", self.origin(""))
                    if self._on_restart is not None:
                        self._on_restart()
                # A call that on_restart made may have met, and handled, a still newer process.
                if self._new_incarnation == incarnation:
                    self.incarnation = incarnation
            finally:
                self._new_incarnation = None

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # --- in the channel's thread ------------------------------------------------------------

    def _on_message(self, parts: Parts) -> None:
        try:
            # In the thread that has the turn, often another caller's: must neither wait nor
            # raise.
            answer = decode(parts, self._transport.limits)
            if isinstance(answer, Call):
                raise UnreadableFrame("call", "an answer", answer.method, answer.call_id)
        except UnreadableFrame as error:
            # The connection stays usable: messages are framed by ZeroMQ.
            self._count(f"bad.{error.reason}")
            logger.warning("%s: unreadable answer: %s", self.origin(""), error)
            problem = ProtocolError(f"unreadable answer: {error}")
            if error.call_id:
                self._resolve(error.call_id, problem)
            elif error.reason == "version":  # so are all its answers
                self._resolve_all(problem, only_sent=True)
            return
        if answer.call_id == 0 and isinstance(answer, Failure):
            # The server could not read an id. All calls are encoded alike, so all will fail.
            cause = error_from_body(answer.body, self.origin(""))
            self._resolve_all(ProtocolError(f"refused there: {cause}"), only_sent=True)
            return
        self._resolve(answer.call_id, answer, sum(map(len, parts)))

    def _resolve(
        self, call_id: int, answer: Reply | Failure | ServiceError, num_bytes: int = 0
    ) -> None:
        with self._lock:
            self._received_bytes += num_bytes
            pending = self._pending.get(call_id)
            if pending is None:
                # Its caller gave up, or has an answer to a repetition already.
                self._counts["late"] += 1
                return
            # Under the lock: the call may be about to begin again with another id.
            if pending.answer is None:
                pending.answer = answer
        pending.wake()

    def _resolve_all(self, error: ServiceError, *, only_sent: bool = False) -> None:
        with self._lock:
            resolved = [one for one in self._pending.values() if one.was_sent or not only_sent]
            for pending in resolved:
                if pending.answer is None:
                    pending.answer = error
        for pending in resolved:
            pending.wake()

    def _on_lost(self) -> None:
        self._count("lost")
        # What was not sent yet goes by the next connection.
        self._mark_lost(lambda pending: pending.was_sent)

    def _mark_lost(self, is_lost: Callable[[PendingCall], bool]) -> None:
        with self._lock:
            lost = [one for one in self._pending.values() if is_lost(one)]
            for pending in lost:
                pending.is_lost = True
        for pending in lost:
            pending.wake()


class PendingCall(Waiter):
    """A call that was begun, until it has its result; one thread at a time awaits it."""

    def __init__(
        self,
        client: Client,
        method: Method,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
    ) -> None:
        super().__init__()
        self._client = client
        self._method = method
        timeout_s = client._timeout_s if timeout_s is None else timeout_s
        self._begun_at = time.monotonic()
        self._timeout_s = max(0.0, min(timeout_s, caller_deadline.get() - self._begun_at))
        self._deadline = self._begun_at + self._timeout_s
        # Once for all attempts. The arrays are the caller's own until the call ends.
        self._body, self._arrays = method.write_arguments(arguments, client.wire)
        self._is_repeatable = method.is_repeatable(arguments)
        self.handles_restart = True  # on_restart runs if another process answers
        # A lost connection and ServiceBusy are raised at once: another server will be asked.
        self.fails_over = False
        # Of the current id; the client's lock guards these four.
        self.answer: Reply | Failure | ServiceError | None = None  # set once
        self.is_lost = False  # the connection broke or moved after the message was sent
        self.outgoing: Outgoing | None = None
        self.channel: ZmqChannel | None = None
        self._begin()

    @property
    def was_sent(self) -> bool:
        """Whether the server may have it."""
        return self.outgoing is not None and self.outgoing.was_sent

    def is_over(self) -> bool:
        """Return whether there is an answer, or will be none to this attempt."""
        return self.answer is not None or self.is_lost

    def _begin(self) -> None:
        """Send it with a new id."""
        client = self._client
        self._incarnation_before = client.incarnation
        # Without the index, hello is answered by any server, whose identity is then checked.
        replica = None if self._method is HELLO else client.replica
        self._num_repeats = 0
        with client._lock:
            call_id = next(client._ids)
            client._pending[call_id] = self
            self.answer = self.outgoing = self.channel = None
            self.is_lost = False
        self._call = Call(call_id, self._method.name, 0, self._body, self._arrays, replica)
        try:
            if client._closed.is_set():
                self.answer = ServiceUnavailable("the client was closed")
            elif self._left() > 0.0:
                self._send()
        except BaseException:
            self.cancel()
            raise

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _send(self) -> None:
        client, left = self._client, self._left()
        # The server is given less time than is left, by the time in transit: it must not begin
        # a call that its caller no longer awaits, and an error about a deadline must arrive.
        transit_s = min(_TRANSIT_S, left / 20.0)
        self._call.timeout_ms = max(1, int((left - transit_s) * 1000.0))
        outgoing = Outgoing(encode(self._call, client._transport.limits))
        num_bytes = sum(map(len, outgoing.parts))
        with client._lock:
            if self._num_repeats:
                client._counts["sent_again"] += 1
            client._sent_bytes += num_bytes
            self.is_lost = False  # a loss of the attempt before no longer counts
            self.outgoing = outgoing
            self.channel = channel = client._channel
        channel.send(outgoing)

    def cancel(self) -> None:
        """Stop waiting; a message that was not sent never will be."""
        # First, so that an answer from now on counts as late.
        with self._client._lock:
            self._client._pending.pop(self._call.call_id, None)
        if self.outgoing is not None:
            self.outgoing.cancel()

    def wait(self, seconds: float) -> bool:
        """Wait at most that long; return whether ``result`` would not wait, or raise at once.

        A connection that broke counts as the end, so ``fails_over`` has to be set.
        """
        self._wait_until(min(self._deadline, time.monotonic() + seconds))
        return self.is_over() or self._left() <= 0.0

    def result_while_alive(self, attempt_s: float) -> Any:
        """Return the result, or raise as soon as the server seems to be dead or is busy.

        It seems dead if the connection breaks, or if ``hello`` has no answer within
        ``attempt_s`` seconds, after as many without a result.
        """
        self.fails_over = True
        while not self.wait(attempt_s):
            self._client.hello(attempt_s)
        return self.result()

    def result(self) -> Any:
        """Wait for the result; may be called once, and raises as ``call``."""
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
            answer = self._await_answer()
            # A server of another role or replica at the address is no restart of this one:
            # the identity is checked first.
            if isinstance(answer, Reply):
                try:
                    result = method.read_result(answer.body, answer.arrays)
                except ProtocolError as exc:
                    raise self._error(ProtocolError, str(exc)) from exc
                if isinstance(result, Hello):
                    client._check_identity(result)
                if self.handles_restart:
                    client._handle_restart(answer.incarnation)
                return result
            error = error_from_body(answer.body, client.origin(method.name))
            if not isinstance(error, WrongReplica):
                client._handle_restart(answer.incarnation)
            if self.fails_over:
                raise error
            if isinstance(error, ServiceBusy) and pause_s < self._left():
                client._count("busy")
                # Not time.sleep: closing the client ends the pause.
                client._closed.wait(pause_s * _jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            elif not (
                isinstance(error, NotConfigured)
                and client._on_restart is not None
                # The call was sent to the process before, so this one has been configured
                # since.
                and self._incarnation_before not in (None, answer.incarnation)
            ):
                raise error
            self._begin()

    def _await_answer(self) -> Reply | Failure:
        """Wait for the answer, or raise the reason why there will be none."""
        name = self._method.name
        try:
            answer = self._wait()
        finally:
            self.cancel()
        if isinstance(answer, (Reply, Failure)):
            return answer
        if answer is not None:
            # A fresh one: one error may end many calls, each with its own traceback.
            raise self._error(type(answer), f"{name}: {answer}")
        if self.was_sent:
            text = f"no answer to {name} within {self._timeout_s:g} s"
            raise self._error(ServiceTimeout, text)
        text = f"no connection within {self._timeout_s:g} s, for {name}"
        raise self._error(ServiceUnavailable, text)

    def _error(self, cls: type[ServiceError], text: str) -> ServiceError:
        origin = self._client.origin(self._method.name)
        return origin.error(cls, f"{origin}: {text}")

    def _wait(self) -> Reply | Failure | ServiceError | None:
        """Wait, and send again where that is safe, until there is an answer or no time."""
        client = self._client
        while True:
            self._wait_until(min(self._deadline, time.monotonic() + client._attempt_s))
            # Read once: the channel's thread may set it at any time.
            is_lost, outgoing = self.is_lost, self.outgoing
            if self.answer is not None:
                return self.answer
            # A loss is reported as such even when no time is left.
            if outgoing is None or (not is_lost and self._left() <= 0.0):
                return None
            if is_lost and self.fails_over:
                return ServiceUnavailable("the connection broke")
            if not is_lost:
                client._log_waiting(self._method.name, outgoing.was_sent)
            # An unsent message is encoded again, with the time that is left.
            if not outgoing.cancel():
                if not self._is_repeatable:
                    if is_lost:
                        return ServiceUnavailable(
                            "the connection broke; it may or may not have been executed"
                        )
                    continue
                self._num_repeats += 1
            if self._left() <= 0.0:
                return None
            self._send()

    def _wait_until(self, until: float) -> None:
        """Wait until it is over, or until that monotonic time."""
        while not self.is_over():
            left = until - time.monotonic()
            if left <= 0.0:
                return
            # Never sent: there was no time left.
            if self.channel is None:
                self.sleep(left)
            else:
                self.channel.wait(self, left)
