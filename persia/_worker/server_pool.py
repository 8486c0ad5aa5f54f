"""The parameter servers of an embedding-worker, all asked at the same time.

A server that was restarted may be empty and have no settings. Its set remembers what the
servers were configured with and configures it again, so that it is at once usable. Its rows
are lost, and an error says so, unless it found them again (``docs/recovery.md``).

Calls wait for a server that does not answer, until their deadline. Those of an inference job
need not: other embedding-workers, with servers of their own, have the same rows. There a read
raises NotReady as soon as a server seems dead, for the caller to ask another one, and from then
on at once, until the server has answered for its health.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from persia._rpc.client import Client, PendingCall
from persia._rpc.deadlines import Retry, caller_deadline
from persia._rpc.messages import (
    HyperParameters,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    ParameterServer,
    UpdateReport,
    UpdateRequest,
)
from persia._rpc.stubs import Remote
from persia.config import (
    SAME_EVERYWHERE,
    EmbeddingSchema,
    describe_differences,
    schema_fingerprint,
)
from persia.errors import (
    ConfigError,
    NotReady,
    ProtocolError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    UnknownRef,
)

S = TypeVar("S")

logger = logging.getLogger(__name__)

_ROLE = "embedding-parameter-server"
# Seconds until servers of an inference job have a version in common, or a request fails.
_SETTLE_S = 10.0
# Seconds for which their common version is asked for before a newer one is tried.
_REMEMBER_S = 0.2
_NO_SIGNS = np.empty(0, np.uint64)
_SETTINGS = ("configure", "register_optimizer")  # methods, in the order of their calls
# Where reads fail over: these methods, and seconds without an answer until a server's health is
# asked, and then to that. Doubled where the server answers for its health after all, until it
# has answered a read: a slow machine is not a dead one.
_READS = frozenset({"lookup", "read_rows", "ready_for_serving"})
ATTEMPT_S = 0.07
_LONGEST_ATTEMPT_S = 1.0
# Seconds for an answer of a server that seems dead, which no caller waits for.
_PROBE_S = 1.0


class _Silent:
    """A server that seems dead, and the question for its health that is under way."""

    def __init__(self, client: Client, error: ServiceError) -> None:
        self._client, self._error = client, error
        self._lock = threading.Lock()  # held by the thread that looks for an answer
        self._begin()

    def _begin(self) -> None:
        self._until = time.monotonic() + _PROBE_S
        self._probe = self._client.begin("hello", timeout_s=_PROBE_S)
        self._probe.fails_over = True
        self._probe.handles_restart = False  # the next call does: it may take long

    def has_answered(self) -> bool:
        """Return whether it lives, without waiting; ask again where there was no answer."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._probe.is_over():
                self._probe.result()
                return True
            if time.monotonic() >= self._until:
                self._probe.cancel()
                self._begin()
        except ConfigError:  # of another server at its address, which a read will say as well
            return True
        except ServiceError:
            self._begin()
        finally:
            self._lock.release()
        return False

    def not_ready(self, method: str) -> NotReady:
        """Return the error of a read."""
        error = self._error
        return NotReady(
            str(error),
            role=error.role,
            replica=error.replica,
            address=error.address,
            method=method,
        )

    def cancel(self) -> None:
        """Wait for no answer any more."""
        self._probe.cancel()


class ServerSet:
    """A whole set of servers, by replica number; any thread may call it.

    Arguments and errors are those of ``EmbeddingWorker``.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        schema: EmbeddingSchema,
        num_threads: int | None = None,
        rows_version: str = "",
        fails_over: bool = False,
    ) -> None:
        self._wanted = rows_version
        self._fails_over = fails_over
        self._attempts_s = [ATTEMPT_S] * len(servers)
        self._silent: dict[int, _Silent] = {}  # changed under the lock below
        self.servers = _sort_servers(servers, schema)  # by replica number
        self._dims = tuple(table.dim for table in schema.tables)
        # Threads that ask servers of this process; remote ones need none to work at once.
        self._threads: ThreadPoolExecutor | None = None
        self._num_remote = sum(isinstance(server, Remote) for server in self.servers)
        num_local = len(self.servers) - self._num_remote
        if num_local > 1:
            # The caller's own thread asks one server.
            self._threads = ThreadPoolExecutor(
                max(1, (num_threads or num_local) - 1), thread_name_prefix="persia-fan-out"
            )
        # Guards all below, and is not held while a server is asked.
        self._lock = threading.Lock()
        self._settings: dict[str, HyperParameters | OptimizerSettings] = {}  # by method
        # Version, and until when to ask for it, while servers switch to another one. Replaced
        # as a whole.
        self._settled: tuple[str, float] | None = None
        self.num_restarts = 0  # how often a server was found to be another process

    def close(self) -> None:
        """Stop the threads; no server must be asked afterwards."""
        with self._lock:
            for silent in self._silent.values():
                silent.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    # --- asking -----------------------------------------------------------------------------

    def ask(self, method: str, requests: Mapping[int, S]) -> dict[int, Any]:
        """Send each server its request, all at once, and wait for all of them.

        Returns by server, in their order, what it answered, or the Exception that it raised.
        NotReady is raised, where reads fail over, without waiting for other servers.
        """
        return self._ask(method, {server: (request,) for server, request in requests.items()})

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call every server and wait for every answer; raise the first failure."""
        answers = self._ask(method, dict.fromkeys(range(len(self.servers)), arguments))
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return list(answers.values())

    def _ask(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of each server with these arguments; return as ``ask``."""
        if self._silent and method in _READS:
            self._check_alive(method, calls)
        answers: dict[int, Any] = dict.fromkeys(calls)
        pending: dict[int, Callable[[], Any]] = {}
        remote_calls: list[PendingCall] = []
        try:
            for number, arguments in calls.items():
                server = self.servers[number]
                if isinstance(server, Remote):
                    try:
                        remote_calls.append(server.client.begin(method, *arguments))
                    except Exception as error:
                        answers[number] = error
                    else:
                        pending[number] = partial(
                            self._result, method, number, server.client, remote_calls[-1]
                        )
                elif self._threads is not None and pending:
                    # In a copy of this context, which holds the caller's deadline.
                    run, call = contextvars.copy_context().run, getattr(server, method)
                    pending[number] = self._threads.submit(run, call, *arguments).result
                else:  # by this thread, once the others are under way
                    pending[number] = partial(getattr(server, method), *arguments)
            for number, result in pending.items():
                try:
                    answers[number] = result()
                except NotReady:
                    raise
                except Exception as error:
                    answers[number] = error
            return answers
        finally:
            for remote_call in remote_calls:
                remote_call.cancel()

    def _result(self, method: str, number: int, client: Client, call: PendingCall) -> Any:
        if not (self._fails_over and method in _READS):
            return call.result()
        attempt_s = self._attempts_s[number]
        # So that the caller has the answer in its time, and some left for another worker.
        left_s = caller_deadline.get() - time.monotonic()
        try:
            answer = call.result_while_alive(min(attempt_s, max(0.0, left_s / 4)))
        except (ServiceUnavailable, ServiceTimeout) as error:
            silent = _Silent(client, error)
            with self._lock:
                # A caller in a hurry does not know that the server is dead.
                is_kept = number not in self._silent and attempt_s <= left_s / 4
                if is_kept:
                    self._silent[number] = silent
            if not is_kept:
                silent.cancel()
            raise silent.not_ready(method) from error
        self._attempts_s[number] = ATTEMPT_S
        return answer

    def _check_alive(self, method: str, numbers: Iterable[int]) -> None:
        """Raise NotReady if one of these servers seemed dead, and has not answered since."""
        failure = None
        for number in numbers:
            silent = self._silent.get(number)
            if silent is None:
                continue
            if not silent.has_answered():
                failure = failure or silent.not_ready(method)
                continue
            with self._lock:
                if self._silent.get(number) is silent:
                    del self._silent[number]
                    attempt_s = 2 * self._attempts_s[number]
                    self._attempts_s[number] = min(attempt_s, _LONGEST_ATTEMPT_S)
        if failure is not None:
            raise failure

    def lookup(
        self, requests: Mapping[int, LookupRequest], ref: tuple[int, int] | None = None
    ) -> dict[int, LookupReply]:
        """Ask each server for rows; raise what the first that failed raised.

        All are of one version: the one that is wanted, or whichever the servers have in common.
        Servers of other processes keep what they were asked for under ``ref``.
        """
        if ref is not None and self._num_remote:
            requests = {
                n: replace(request, ref=ref) if isinstance(self.servers[n], Remote) else request
                for n, request in requests.items()
            }
        if self._wanted:
            return self._lookup_wanted(requests)
        if self._settled is not None:
            requests = self._at_version(requests)
        replies = self._checked(requests)
        versions = {reply.version for reply in replies.values()}
        # Rows of training servers, and of a log, have no version, and no moment in common.
        if len(versions) <= 1 or "" in versions:
            return replies
        return self._settle(requests, replies)

    def update(
        self, requests: Mapping[int, UpdateRequest], ref: tuple[int, int]
    ) -> dict[int, UpdateReport | Exception]:
        """Send each server its update; returns as ``ask``.

        Servers of other processes are sent the signs only if they have not kept the lookup with
        this ``ref``: then it was long ago, or they were restarted.
        """
        if not self._num_remote:
            return self._ask("update", {n: (request,) for n, request in requests.items()})
        named = {
            n: _by_ref(request, ref) if isinstance(self.servers[n], Remote) else request
            for n, request in requests.items()
        }
        reports = self.ask("update", named)
        unknown = {n: requests[n] for n, x in reports.items() if isinstance(x, UnknownRef)}
        return reports | self.ask("update", unknown) if unknown else reports

    def _lookup_wanted(self, requests: Mapping[int, LookupRequest]) -> dict[int, LookupReply]:
        replies = self._checked(
            {n: replace(request, version=self._wanted) for n, request in requests.items()}
        )
        for number, reply in replies.items():
            if reply.version != self._wanted:
                raise ServiceBusy(
                    f"{_ROLE} {number}: expected rows of checkpoint {self._wanted}, got those "
                    f"of {reply.version or 'a change log'}",
                    role=_ROLE,
                    replica=number,
                    method="lookup",
                )
        return replies

    def _checked(self, requests: Mapping[int, LookupRequest]) -> dict[int, LookupReply]:
        replies = self.ask("lookup", requests)
        for number, reply in replies.items():
            if isinstance(reply, Exception):
                raise reply
            # The codec has checked types. Only here is it known what was asked for.
            if isinstance(self.servers[number], Remote):
                self._check_reply(number, requests[number], reply)
        return replies

    def _at_version(self, requests: Mapping[int, LookupRequest]) -> Mapping[int, LookupRequest]:
        """Ask for the version that servers had in common, as long as it is remembered."""
        settled = self._settled
        if settled is None or time.monotonic() > settled[1]:
            self._settled = None
            return requests
        return {n: replace(request, version=settled[0]) for n, request in requests.items()}

    def _settle(
        self, requests: Mapping[int, LookupRequest], replies: dict[int, LookupReply]
    ) -> dict[int, LookupReply]:
        """Ask again those whose rows are of another version, until all are of one.

        Servers switch to a newer checkpoint one after the other, and keep the one before for a
        while: all have the oldest of the versions then.
        """
        for _ in Retry(min(_SETTLE_S, caller_deadline.get() - time.monotonic()), first_s=0.0):
            versions = {reply.version for reply in replies.values()}
            if len(versions) == 1:
                (version,) = versions
                self._settled = version, time.monotonic() + _REMEMBER_S
                return replies
            for wanted in sorted(versions):
                again = {
                    number: replace(requests[number], version=wanted)
                    for number, reply in replies.items()
                    if reply.version != wanted
                }
                replies = replies | self._checked(again)
                if all(reply.version == wanted for reply in replies.values()):
                    break
        found = ", ".join(f"{n}: {reply.version}" for n, reply in replies.items())
        raise ServiceBusy(
            f"rows of the parameter servers are of several checkpoints ({found}); ask again "
            "when each has loaded the newest",
            role=_ROLE,
            method="lookup",
        )

    def _check_reply(self, number: int, request: LookupRequest, reply: LookupReply) -> None:
        expected = []
        for asked in request.tables:
            n = len(asked.signs)
            hints = (n,) if request.is_training and request.ref is None else None
            expected.append((asked.table, (n, self._dims[asked.table]), hints))
        got = [
            (part.table, part.rows.shape, None if part.hints is None else part.hints.shape)
            for part in reply.tables
        ]
        if expected != got:
            raise ProtocolError(
                f"{_ROLE} {number}: expected a reply with (table, shape of rows, shape of "
                f"hints) {expected}, got {got}",
                role=_ROLE,
                replica=number,
                method="lookup",
            )

    # --- settings ---------------------------------------------------------------------------

    def configure_all(self, method: str, settings: HyperParameters | OptimizerSettings) -> None:
        """Give every server settings by one of ``_SETTINGS``, also those that come later."""
        while True:
            before = self.num_restarts
            self.ask_all(method, settings)
            with self._lock:
                self._settings[method] = settings  # only now: a refused setting is none
                if self.num_restarts == before:
                    return
            # A server was restarted meanwhile, perhaps after it had been asked, and was given
            # what was remembered then. Configuring is idempotent.

    def reconfigure(self, number: int) -> None:
        """Give a server that was restarted its settings, inside a call to it."""
        with self._lock:
            self.num_restarts += 1
            settings = dict(self._settings)
        server = self.servers[number]
        name = f"{_ROLE} {number} was restarted and"
        num_recovered = server.stats().get("recovered_rows", 0)
        if num_recovered:
            logger.warning("%s has its %d rows again; training goes on", name, num_recovered)
        elif "configure" not in settings:  # nor was this worker ever asked for rows to train
            logger.info("%s gets no settings: no trainer has configured it here yet", name)
        else:
            logger.error(
                "%s THE ROWS IT HELD ARE LOST: their ids start from initial values; it is "
                "given the settings again and training goes on",
                name,
            )
        for method in _SETTINGS:
            if method in settings:
                getattr(server, method)(settings[method])


def _by_ref(request: UpdateRequest, ref: tuple[int, int]) -> UpdateRequest:
    """Return an update that names its lookup in place of the signs."""
    parts = [replace(part, signs=_NO_SIGNS, hints=None) for part in request.tables]
    return replace(request, tables=tuple(parts), ref=ref)


def _sort_servers(
    servers: Sequence[ParameterServer], schema: EmbeddingSchema
) -> tuple[ParameterServer, ...]:
    """Return the servers by replica index, if they are a whole set of this schema."""
    if not servers:
        raise ConfigError("parameter servers: expected at least one, got none")
    fingerprint = schema_fingerprint(schema)
    by_index: dict[int, ParameterServer] = {}
    for server in servers:
        index, size = server.replica_index, server.replica_size
        if size != len(servers):
            raise ConfigError(
                f"parameter server {index} is one of {size}, expected one of {len(servers)}, "
                f"the number given"
            )
        if index in by_index:
            missing = sorted(set(range(size)) - {one.replica_index for one in servers})
            raise ConfigError(
                f"parameter server {index} of {size} was given twice; missing: {missing}"
            )
        if server.schema_fingerprint != fingerprint:
            differences = describe_differences(
                server.schema_fingerprint, fingerprint, "there", "here"
            )
            raise ConfigError(
                f"parameter server {index} of {size} has another embedding config: "
                f"{differences}; {SAME_EVERYWHERE}"
            )
        by_index[index] = server
    return tuple(by_index[index] for index in sorted(by_index))
