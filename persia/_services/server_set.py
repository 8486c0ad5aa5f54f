"""The parameter servers of an embedding-worker, asked all at once.

A server that was started anew may be empty and have no settings. Its set remembers what the
servers were told last and tells it again, so that it is at once usable. Its rows are lost, and
loudly, unless it found them again (``docs/recovery.md``).
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from persia._rpc.messages import (
    HyperParameters,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    ParameterServer,
)
from persia._services.plan import SAME_EVERYWHERE, schema_fingerprint, tell_apart
from persia.config import EmbeddingSchema
from persia.errors import ConfigError, ProtocolError

S = TypeVar("S")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServerSet:
    """A whole set of servers, by replica number; any thread may call it.

    Args:
        servers: All parameter servers, in any order.
        schema: The embedding config.
        num_threads: Servers asked at the same time; as many as there are, if not given.

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
        self._pool: ThreadPoolExecutor | None = None
        if len(self._servers) > 1:
            # The caller's own thread asks one server.
            self._pool = ThreadPoolExecutor(
                max(1, (num_threads or len(self._servers)) - 1),
                thread_name_prefix="persia-fan-out",
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

    def ask(
        self, requests: Mapping[int, S], call: Callable[[ParameterServer, S], T]
    ) -> dict[int, T | Exception]:
        """Send each server its request, all at once, and wait for all of them.

        Returns:
            By server, in their order, what it answered or raised.
        """

        def answer(server: int) -> T | Exception:
            try:
                return call(self._servers[server], requests[server])
            except Exception as error:
                return error

        if self._pool is None or len(requests) < 2:
            return {server: answer(server) for server in requests}
        mine, *others = requests
        # In copies of this context: the calls end with the deadline of the one served here.
        futures = {
            server: self._pool.submit(contextvars.copy_context().run, answer, server)
            for server in others
        }
        answers = {mine: answer(mine)}
        for server, future in futures.items():
            answers[server] = future.result()
        return answers

    def ask_all(self, call: Callable[[ParameterServer], T]) -> list[T]:
        """Call every server and wait for every answer; raise the first failure."""
        everyone = dict.fromkeys(range(len(self._servers)))
        answers = self.ask(everyone, lambda server, _: call(server))
        results = []
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
            results.append(answer)
        return results

    def lookup(self, requests: Mapping[int, LookupRequest]) -> dict[int, LookupReply]:
        """Ask each server for rows.

        Raises:
            ProtocolError: If one answers with other rows than it was asked for.
            PersiaError: What the first server that failed raised.
        """
        replies = {}
        for number, reply in self.ask(requests, lambda s, request: s.lookup(request)).items():
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

        self._tell_all(lambda server: server.configure(settings), keep)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, also those that come later."""

        def keep() -> None:
            self._optimizer = settings

        self._tell_all(lambda server: server.register_optimizer(settings), keep)

    def _tell_all(
        self, tell: Callable[[ParameterServer], None], keep: Callable[[], None]
    ) -> None:
        """Tell every server, then keep what it was, since a refused setting is none."""
        while True:
            before = self._num_restarts
            self.ask_all(tell)
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
            theirs = tell_apart(server.schema_fingerprint, fingerprint, "there", "here")
            raise ConfigError(
                f"parameter server {index} of {size} has another embedding config: {theirs}; "
                f"{SAME_EVERYWHERE}"
            )
        by_index[index] = server
    return tuple(by_index[index] for index in sorted(by_index))
