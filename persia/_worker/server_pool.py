"""The parameter servers of an embedding-worker, asked all at once.

A server that was started anew may be empty and have no settings. Its set remembers what the
servers were told last and tells it again, so that it is at once usable. Its rows are lost, and
loudly, unless it found them again (``docs/recovery.md``).
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from persia._rpc.client import CallInFlight
from persia._rpc.messages import (
    HyperParameters,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    ParameterServer,
)
from persia._rpc.stubs import Remote
from persia.config import (
    SAME_EVERYWHERE,
    EmbeddingSchema,
    describe_differences,
    schema_fingerprint,
)
from persia.errors import ConfigError, ProtocolError

S = TypeVar("S")

logger = logging.getLogger(__name__)


class ServerSet:
    """A whole set of servers, by replica number; any thread may call it.

    Args:
        servers: All parameter servers, in any order.
        schema: The embedding config.
        num_threads: Servers of this process asked at the same time; all, if not given.

    Raises:
        ConfigError: If the servers are not exactly the replicas of one set, or number
            tables and groups otherwise than ``schema`` does.
    """

    def __init__(
        self,
        servers: Sequence[ParameterServer],
        schema: EmbeddingSchema,
        num_threads: int | None = None,
    ) -> None:
        self._servers = _whole_set(servers, schema)
        self._dims = tuple(table.dim for table in schema.tables)
        # Threads that ask servers of this process; those elsewhere need none to work at once.
        self._pool: ThreadPoolExecutor | None = None
        num_here = sum(not isinstance(server, Remote) for server in self._servers)
        if num_here > 1:
            # The caller's own thread asks one server.
            self._pool = ThreadPoolExecutor(
                max(1, (num_threads or num_here) - 1), thread_name_prefix="persia-fan-out"
            )
        # Guards all below, and is not held while a server is asked.
        self._lock = threading.Lock()
        self._configured: HyperParameters | None = None
        self._optimizer: OptimizerSettings | None = None
        self._num_restarts = 0

    def __len__(self) -> int:
        return len(self._servers)

    def close(self) -> None:
        """Stop the threads; no server must be asked afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    @property
    def servers(self) -> tuple[ParameterServer, ...]:
        """The servers, by replica number."""
        return self._servers

    @property
    def num_restarts(self) -> int:
        """How often one of them was found to be another process than before."""
        return self._num_restarts

    # --- asking -----------------------------------------------------------------------------

    def ask(self, method: str, requests: Mapping[int, S]) -> dict[int, Any]:
        """Send each server its request, all at once, and wait for all of them.

        Args:
            method: One of ``messages.ParameterServer``'s.
            requests: Its argument, by server.

        Returns:
            By server, in their order, what it answered, or the Exception that it raised.
        """
        return self._ask(method, {server: (asked,) for server, asked in requests.items()})

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call every server and wait for every answer; raise the first failure."""
        answers = self._ask(method, dict.fromkeys(range(len(self._servers)), arguments))
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return list(answers.values())

    def _ask(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of each server with these arguments; returns as ``ask``."""
        begun: dict[int, Callable[[], Any]] = {}
        flights: list[CallInFlight] = []
        try:
            for number, arguments in calls.items():
                server = self._servers[number]
                if isinstance(server, Remote):
                    begun[number] = _begin(server, method, arguments, flights)
                else:
                    call = functools.partial(getattr(server, method), *arguments)
                    # The first by this thread, when the others are under way.
                    begun[number] = self._submit(call) if begun else call
            return {number: _answer(result) for number, result in begun.items()}
        finally:
            for flight in flights:
                flight.cancel()

    def _submit(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Call in another thread, in a copy of this context: it holds the deadline."""
        if self._pool is None:
            return call
        return self._pool.submit(contextvars.copy_context().run, call).result

    def lookup(self, requests: Mapping[int, LookupRequest]) -> dict[int, LookupReply]:
        """Ask each server for rows.

        Raises:
            ProtocolError: If one answers with other rows than it was asked for.
            PersiaError: What the first server that failed raised.
        """
        replies = {}
        for number, reply in self.ask("lookup", requests).items():
            if isinstance(reply, Exception):
                raise reply
            wrong = self._why_wrong(requests[number], reply)
            if wrong:
                raise ProtocolError(
                    f"embedding-parameter-server {number} answered a lookup wrongly: {wrong}",
                    role="embedding-parameter-server",
                    replica=number,
                    method="lookup",
                )
            replies[number] = reply
        return replies

    def _why_wrong(self, request: LookupRequest, reply: LookupReply) -> str:
        """Say why a reply is none to the request; "" if it is one."""
        asked, told = [[part.table for part in x.tables] for x in (request, reply)]
        if asked != told:
            return f"expected tables {asked}, got {told}"
        for part, rows in zip(request.tables, reply.tables, strict=True):
            want = (len(part.signs), self._dims[part.table])
            if rows.rows.shape != want:
                got = list(rows.rows.shape)
                return f"expected rows {list(want)} of table {part.table}, got {got}"
            if request.is_training and (rows.hints is None or rows.hints.shape != want[:1]):
                hints = "none" if rows.hints is None else f"{list(rows.hints.shape)}"
                return f"expected hints [{want[0]}] of table {part.table}, got {hints}"
        return ""

    # --- settings ---------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings, also those that come later."""

        def keep() -> None:
            self._configured = settings

        self._tell_all("configure", settings, keep)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, also those that come later."""

        def keep() -> None:
            self._optimizer = settings

        self._tell_all("register_optimizer", settings, keep)

    def _tell_all(self, method: str, settings: object, keep: Callable[[], None]) -> None:
        """Tell every server, then keep what it was, since a refused setting is none."""
        while True:
            before = self._num_restarts
            self.ask_all(method, settings)
            with self._lock:
                keep()
                if self._num_restarts == before:
                    return
            # A server was restarted meanwhile, perhaps after it had been told, and was given
            # what was kept then. Telling the same twice changes nothing.

    def restarted(self, number: int) -> None:
        """Give a server that was started anew its settings.

        Runs inside a call to that server, which goes on afterwards.
        """
        with self._lock:
            self._num_restarts += 1
            configured, optimizer = self._configured, self._optimizer
        server = self._servers[number]
        recovered = server.stats().get("recovered_rows", 0)
        if recovered:
            logger.warning(
                "embedding-parameter-server %d was restarted and has its %d rows again; "
                "training goes on",
                number,
                recovered,
            )
        elif configured is None:  # nor has this worker ever been asked for rows to train
            logger.info(
                "embedding-parameter-server %d was restarted; no trainer has configured it "
                "here yet, so no row of a training is lost",
                number,
            )
        else:
            logger.error(
                "embedding-parameter-server %d was restarted and THE ROWS IT HELD ARE LOST: "
                "their ids begin anew; it is given the settings again and training goes on",
                number,
            )
        if configured is not None:
            server.configure(configured)
        if optimizer is not None:
            server.register_optimizer(optimizer)


def _begin(
    server: Remote, method: str, arguments: tuple[Any, ...], flights: list[CallInFlight]
) -> Callable[[], Any]:
    """Begin a call and append it to ``flights``; returns what gives its result."""
    try:
        flights.append(server.begin(method, *arguments))
    except Exception as error:
        return functools.partial(_raise, error)
    return flights[-1].result


def _raise(error: Exception) -> None:
    raise error


def _answer(result: Callable[[], Any]) -> Any:
    try:
        return result()
    except Exception as error:
        return error


def _whole_set(
    servers: Sequence[ParameterServer], schema: EmbeddingSchema
) -> tuple[ParameterServer, ...]:
    """Return the servers by replica index.

    Raises:
        ConfigError: If one is missing, comes twice, or belongs to another set or schema.
    """
    if not servers:
        raise ConfigError("parameter servers: expected at least one, got none")
    fingerprint = schema_fingerprint(schema)
    by_index: dict[int, ParameterServer] = {}
    for server in servers:
        index, size = server.replica_index, server.replica_size
        if size != len(servers):
            raise ConfigError(
                f"parameter server {index} is one of {size}, expected one of {len(servers)}, "
                f"which is how many were given"
            )
        if index in by_index:
            raise ConfigError(
                f"parameter server {index} of {size} was given twice; missing: "
                f"{sorted(set(range(size)) - {s.replica_index for s in servers})}"
            )
        if server.schema_fingerprint != fingerprint:
            theirs = describe_differences(
                server.schema_fingerprint, fingerprint, "there", "here"
            )
            raise ConfigError(
                f"parameter server {index} of {size} has another embedding config: {theirs}; "
                f"{SAME_EVERYWHERE}"
            )
        by_index[index] = server
    return tuple(by_index[index] for index in sorted(by_index))
