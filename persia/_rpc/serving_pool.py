"""Several embedding-workers as one, for serving: any of those that are there answers.

A lookup without gradients leaves nothing behind, so it may go to any embedding-worker. A thread
for each address asks for its health; those that do not answer are avoided, and found again.

    connection breaks          the next one is asked at once
    no answer for 0.1 s        its health is asked: if there is no answer to that either in
                               0.1 s, the next one is asked; else it is slow, and waited for
    ServiceBusy                as it starts, or has too much to do: the next one is asked
    NotReady                   one of its servers is dead: the next one is asked, and this one
                               is avoided until it says that it is ready for serving
    none is left               all are asked again, with more time for each, to the deadline

With one address there is no other to ask: it is asked again until the deadline.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from persia import env
from persia._rpc.client import Client
from persia._rpc.deadlines import Retry
from persia._rpc.messages import BatchGradients, EmbeddingWorker, IDFeatures, LookupResult
from persia._rpc.methods import Hello, embedding_worker
from persia.config import SAME_EVERYWHERE, describe_differences
from persia.errors import (
    ConfigError,
    NotReady,
    PersiaError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)

if TYPE_CHECKING:
    from persia._rpc.messages import IDRows, Signs, TableEntries, UpdateReport
    from persia._rpc.zmq_transport import ZmqTransport

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_ROLE = embedding_worker().name
# Seconds without an answer to a call until its server's health is asked, and then to that. A
# dead server costs a call both, once.
ATTEMPT_S = 0.1
_LONGEST_ATTEMPT_S = 2.0
# Seconds between two questions for health, and of each.
HEALTH_S = 0.5
HEALTH_TIMEOUT_S = 1.0
# Seconds between two look-ups of names, and two lines about what is waited for.
_RESOLVE_S = 3.0
_LINE_S = 3.0
# Seconds between two rounds over all workers.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
# A silent connection is closed after this many seconds, so that a host that comes back is found
# soon: what TCP has still to repeat would come late.
SILENCE_S = 2.0


class _PooledServer:
    """One address: its client, whether it answers, and the thread that asks for that."""

    def __init__(self, address: str, client: Client) -> None:
        self.address = address
        self.client = client
        self.is_up = False  # guarded by the pool's condition, as the next four
        self.lacks_servers = False  # it answers, but is not ready for serving
        self.was_asked = False  # for its health, and answered or did not
        self.problem = f"no connection to {address}"  # while it is not up
        self.hello: Hello | None = None  # the last
        self.is_closed = threading.Event()


def _of_any(declared: F) -> F:
    """Return the method that asks any worker for what a method of the Protocol declares."""

    def call(self: ServingWorkers, *arguments: Any) -> Any:
        return self.call(declared.__name__, *arguments)

    return cast("F", call)


class ServingWorkers(EmbeddingWorker):
    """Implements ``EmbeddingWorker``, but for batches with gradients, over any that answer.

    ``addresses`` returns where they are, and is asked again every few seconds if ``has_names``.
    A lookup takes ``timeout_s`` seconds at most. Workers must have this ``schema_fingerprint``,
    or that of the first which answers. ``transport`` is closed with this.

    Raises:
        ConfigError: If what answers is no embedding-worker, or has another schema than others.
        ServiceUnavailable: If none has answered within ``PERSIA_RPC_TIMEOUT``.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        addresses: Callable[[], Sequence[str]],
        *,
        has_names: bool = False,
        timeout_s: float | None = None,
        schema_fingerprint: str | None = None,
    ) -> None:
        self._transport = transport
        self._addresses = addresses
        self._timeout_s = env.rpc_timeout_s() if timeout_s is None else timeout_s
        self._closed = threading.Event()
        self._turn = itertools.count()
        self._changed = threading.Condition()  # guards the next three
        self._servers: dict[str, _PooledServer] = {}  # by address; replaced, not changed
        self._failure: ConfigError | None = None  # before the first has answered
        self.schema_fingerprint = schema_fingerprint
        self._threads: list[threading.Thread] = []
        try:
            self._update_addresses()
            if has_names:
                self._start("persia-addresses", self._follow_addresses)
            self._await_first()
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """End the connections."""
        self._stop()
        self._transport.close()

    def _stop(self) -> None:
        self._closed.set()
        with self._changed:
            servers = list(self._servers.values())
            self._changed.notify_all()
        for server in servers:
            server.is_closed.set()
            server.client.close()
        for thread in list(self._threads):
            thread.join(HEALTH_TIMEOUT_S)

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(None, target, name, arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def clients(self) -> tuple[Client, ...]:
        """The clients of all addresses."""
        return tuple(server.client for server in self._servers.values())

    # --- addresses and health ---------------------------------------------------------------

    def _follow_addresses(self) -> None:
        while not self._closed.wait(_RESOLVE_S):
            self._update_addresses()

    def _update_addresses(self) -> None:
        """Begin to ask at new addresses, and leave those that nothing leads to any more."""
        wanted = list(dict.fromkeys(self._addresses()))
        if not wanted or self._closed.is_set():
            return  # names that are unknown for a moment keep their hosts
        before = self._servers
        servers = {one: before.get(one) or self._connect(one) for one in wanted}
        with self._changed:
            self._servers = servers
            gone = [server for address, server in before.items() if address not in servers]
        for server in gone:
            server.is_closed.set()
            server.client.close()
        for address in servers.keys() - before.keys():
            self._start(f"persia-health {address}", self._follow_health, servers[address])
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _connect(self, address: str) -> _PooledServer:
        # No replica number: the one that is at an address may be replaced by any other.
        client = Client(
            self._transport, address, embedding_worker(), timeout_s=env.rpc_timeout_s()
        )
        return _PooledServer(address, client)

    def _follow_health(self, server: _PooledServer) -> None:
        while not (server.is_closed.is_set() or self._closed.is_set()):
            try:
                hello: Hello = server.client.call("hello", timeout_s=HEALTH_TIMEOUT_S)
                is_ready = server.lacks_servers and _is_ready(server.client)
                self._admit(server, hello, is_ready=is_ready)
            except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as error:
                self._avoid(server, str(error))
            except PersiaError as error:
                self._refuse(server, error)
            server.is_closed.wait(HEALTH_S)

    def _admit(self, server: _PooledServer, hello: Hello, *, is_ready: bool = False) -> None:
        """Note an answer; ConfigError if the worker is not of this set.

        One that lacked servers stays avoided until it ``is_ready``.
        """
        with self._changed:
            here = self.schema_fingerprint
            if here is None:
                here = self.schema_fingerprint = hello.schema_fingerprint
            if hello.schema_fingerprint != here:
                differences = describe_differences(
                    hello.schema_fingerprint, here, f"at {server.address}", "here"
                )
                raise ConfigError(
                    f"embedding_config: {_ROLE} at {server.address} has another one: "
                    f"{differences}; {SAME_EVERYWHERE}"
                )
            if server.lacks_servers and not is_ready:
                server.hello = hello
                return
            server.lacks_servers = False
            is_new = not server.is_up
            if is_new and server.hello is not None:
                logger.warning("%s at %s answers again", _ROLE, server.address)
            server.is_up, server.hello, server.problem = True, hello, ""
            if is_new:
                self._changed.notify_all()

    def _avoid(
        self, server: _PooledServer, problem: str, *, lacks_servers: bool = False
    ) -> None:
        """Ask others before a server, until it answers for its health, or is ready."""
        with self._changed:
            server.lacks_servers |= lacks_servers
            if server.is_up and not server.is_closed.is_set():
                until = "is ready" if server.lacks_servers else "answers"
                logger.warning("%s; it is avoided until it %s", problem, until)
            server.is_up, server.problem, server.was_asked = False, problem, True
            self._changed.notify_all()

    def _refuse(self, server: _PooledServer, error: Exception) -> None:
        """Avoid what is not one of the workers; that is an error before the first answers."""
        with self._changed:
            if server.problem != str(error):
                logger.error("%s; it is not asked", error)
            server.is_up, server.problem, server.was_asked = False, str(error), True
            if isinstance(error, ConfigError):
                self._failure = error
            self._changed.notify_all()

    def _await_first(self) -> None:
        """Wait until one worker answers."""
        timeout_s = env.rpc_timeout_s()
        deadline = time.monotonic() + timeout_s
        next_line = time.monotonic() + _LINE_S
        with self._changed:
            while not any(server.is_up for server in self._servers.values()):
                # Not before each was asked: a right one may answer after a wrong one.
                were_asked = all(server.was_asked for server in self._servers.values())
                if self._failure is not None and were_asked:
                    raise self._failure
                now = time.monotonic()
                if now >= min(deadline, next_line):
                    problems = [server.problem for server in self._servers.values()]
                    missing = f"no {_ROLE} answers: {'; '.join(problems) or 'no address'}"
                    if now >= deadline:
                        raise ServiceUnavailable(
                            f"{missing}; waited {timeout_s:g} s", role=_ROLE, method="hello"
                        )
                    next_line = now + _LINE_S
                    logger.warning("waiting: %s", missing)
                self._changed.wait(max(0.0, min(deadline, next_line) - now))

    # --- calls ------------------------------------------------------------------------------

    def _in_order(self) -> list[_PooledServer]:
        """Return the servers in turn, those that do not answer last."""
        servers = list(self._servers.values())
        first = next(self._turn) % max(1, len(servers))
        # Sorting is stable. Read without the lock: a stale answer costs one try.
        return sorted(servers[first:] + servers[:first], key=lambda server: not server.is_up)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call any worker that answers; ``PERSIA_RPC_TIMEOUT`` if no time is given."""
        timeout_s = env.rpc_timeout_s() if timeout_s is None else timeout_s
        retry = Retry(
            timeout_s, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, stop=self._closed
        )
        failure: ServiceError | None = None
        attempt_s = ATTEMPT_S
        for _ in retry:
            for server in self._in_order():
                if failure is not None and retry.left_s <= 0.0:
                    raise failure
                try:
                    return self._ask(server, method, arguments, retry.left_s, attempt_s)
                except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as error:
                    # What is missing says more than that there was no time for another try.
                    is_known = isinstance(failure, NotReady) and not isinstance(error, NotReady)
                    failure = failure if is_known else error
            # A server that is slow, not dead, must get enough time before the deadline.
            attempt_s = min(2 * attempt_s, _LONGEST_ATTEMPT_S)
        raise failure or ServiceUnavailable("the connections were closed", role=_ROLE)

    def _ask(
        self,
        server: _PooledServer,
        method: str,
        arguments: tuple[Any, ...],
        left_s: float,
        attempt_s: float,
    ) -> Any:
        """Call one worker, and wait as long as it is alive."""
        client = server.client
        pending = client.begin(method, *arguments, timeout_s=left_s)
        pending.fails_over = True
        try:
            while not pending.wait(attempt_s):
                self._check(server, attempt_s)
            result = pending.result()
            hello = server.hello
            if hello is None or client.incarnation != hello.incarnation:
                self._check(server, attempt_s)  # another process: perhaps of another job
            return result
        except NotReady as error:
            self._avoid(server, f"{server.address}: {error}", lacks_servers=True)
            raise
        except (ServiceUnavailable, ServiceTimeout) as error:
            # With another role it answered, and a server behind it did not.
            if error.role in ("", _ROLE):
                self._avoid(server, str(error))
            raise
        finally:
            pending.cancel()

    def _check(self, server: _PooledServer, timeout_s: float) -> None:
        """Ask a worker for its health; ServiceUnavailable if it is not one of this set."""
        try:
            self._admit(server, server.client.call("hello", timeout_s=timeout_s))
        except ConfigError as error:
            self._refuse(server, error)
            raise ServiceUnavailable(str(error), role=_ROLE) from error

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Look up a batch without gradients."""
        if features.requires_grad:
            self._refuse_gradients("lookup_direct")
        result: LookupResult = self.call("lookup_direct", features, timeout_s=self._timeout_s)
        return result

    def _refuse_gradients(self, method: str) -> NoReturn:
        raise ConfigError(
            f"{method}: expected a batch without gradients, as an InferCtx has them; train in "
            "a TrainCtx"
        )

    def register(self, features: IDFeatures) -> int:
        """Raise a ConfigError, as the next three: only batches of a training are registered."""
        self._refuse_gradients("register")

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        """As ``register``."""
        self._refuse_gradients("lookup")

    def update(self, gradients: BatchGradients) -> UpdateReport:
        """As ``register``."""
        self._refuse_gradients("update")

    def release(self, ref: int) -> None:
        """As ``register``."""
        self._refuse_gradients("release")

    # Every worker knows every server, so any answer is complete; each call is idempotent.
    configure = _of_any(EmbeddingWorker.configure)
    register_optimizer = _of_any(EmbeddingWorker.register_optimizer)
    feature_order = _of_any(EmbeddingWorker.feature_order)
    fix_feature_order = _of_any(EmbeddingWorker.fix_feature_order)
    tables_at_rate = _of_any(EmbeddingWorker.tables_at_rate)
    ready_for_serving = _of_any(EmbeddingWorker.ready_for_serving)
    table_info = _of_any(EmbeddingWorker.table_info)
    read_rows = _of_any(EmbeddingWorker.read_rows)
    scan_rows = _of_any(EmbeddingWorker.scan_rows)
    count_rows = _of_any(EmbeddingWorker.count_rows)
    get_embedding_size = _of_any(EmbeddingWorker.get_embedding_size)
    begin_cut = _of_any(EmbeddingWorker.begin_cut)
    write_cut = _of_any(EmbeddingWorker.write_cut)
    cut_status = _of_any(EmbeddingWorker.cut_status)
    end_cut = _of_any(EmbeddingWorker.end_cut)
    load = _of_any(EmbeddingWorker.load)
    server_stats = _of_any(EmbeddingWorker.server_stats)
    feature_stats = _of_any(EmbeddingWorker.feature_stats)
    stats = _of_any(EmbeddingWorker.stats)

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, by one worker: the write is not repeatable."""
        self._in_order()[0].client.call("set_embedding", tables)

    def write_rows(self, rows: IDRows) -> None:
        """Write rows of a feature, as ``set_embedding``."""
        self._in_order()[0].client.call("write_rows", rows)

    def delete_rows(self, feature: str, ids: Signs) -> int:
        """Drop rows of a feature, as ``set_embedding``."""
        num_rows: int = self._in_order()[0].client.call("delete_rows", feature, ids)
        return num_rows

    def clear_embeddings(self) -> None:
        """Drop every row of every server, as ``set_embedding``."""
        self._in_order()[0].client.call("clear_embeddings")


def _is_ready(client: Client) -> bool:
    """Ask a worker whether its servers answer; a ServiceError is a no as well."""
    pending = client.begin("ready_for_serving", timeout_s=HEALTH_TIMEOUT_S)
    pending.fails_over = True
    is_ready: bool = pending.result()
    return is_ready
