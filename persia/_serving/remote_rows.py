"""Rows in read-only serving servers, seen by the process that serves a model.

``CopiedServer`` stands for one replica of which there are several copies. A lookup goes to the
copy with fewest lookups under way. If it has no answer after the time in which 95 % of the
last ones had theirs, it goes to another copy too, and the first answer counts. A copy is left
out that fails, that has not the version asked for, or that others overtake again and again;
it is asked for its identity from time to time until it answers:

    unknown, left out ---hello---> in use ---a failure---> left out

``CachedServer`` stands before either, or before one server, and keeps rows for at most
``ttl_s``. A reply is of one version, cached or not: what is kept is of one version, and is
forgotten with the first reply that says another. A lookup that finds all its rows here asks
no server, so it may be of a version that the server had ``ttl_s`` ago. Rows of a change log
have no version: each is one that the server had at some moment of the last ``ttl_s``.

Both stand where a ``RemoteParameterServer`` would: an embedding-worker begins the calls of all
of them, and then awaits them in its own thread. ``RemoteRows`` makes and closes them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._core.table.row_table import RowTable
from persia._rpc.client import Client, PendingCall
from persia._rpc.deadlines import caller_deadline
from persia._rpc.messages import LookupReply, LookupRequest, TableRows, TableSigns
from persia._rpc.methods import Hello, parameter_server
from persia._rpc.stubs import RemoteParameterServer
from persia.errors import (
    ConfigError,
    NotAllowed,
    NotConfigured,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    WrongReplica,
)

if TYPE_CHECKING:
    from persia._rpc.zmq_transport import ZmqTransport

_logger = logging.getLogger("persia.rows")

Signs = NDArray[np.uint64]
Rows = NDArray[np.float32]

_READS = frozenset({"hello", "lookup", "ready_for_serving", "get_embedding_size", "stats"})
# Answers that another copy may do better.
_PASSING = (ServiceUnavailable, ServiceTimeout, ServiceBusy, NotConfigured, WrongReplica)
_LOOK_S = 0.001  # between two copies that are both awaited
_WINDOW_S = 10.0  # of the times that say when to hedge
_FIRST_HEDGE_S = 0.05  # while there are few of them
_LEAST_HEDGE_S = 0.001
_SILENT_S = 0.25  # until another copy is asked in any case
_FEW = 20
_HEDGE_SHARE = 0.1  # of the lookups may be asked twice: a slow set gets no double load
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PROBE_S = 2.0
_MANY_LOST = 3  # lookups in a row that another copy answered first, though asked later
_TOUCH_S = 2.0  # between two questions that keep a version in the servers


def _check_is_read(method: str, arguments: tuple[Any, ...]) -> None:
    is_training = method == "lookup" and arguments[0].is_training
    if method not in _READS or is_training:
        raise NotAllowed(
            f"{method}: expected a lookup for evaluation: served rows are not changed",
            role=parameter_server().name,
            method=method,
        )


class _Copy:
    """One server process; the set's lock guards it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.is_used = False
        self.num_calls = 0  # under way
        self.num_lost = 0  # since its last answer
        self.pause_s = _FIRST_PAUSE_S
        self.probe_at = 0.0
        self.probe: PendingCall | None = None
        self.probe_until = 0.0


class _CopiesClient:
    """Begins calls of the copies of one replica, as a ``Client`` does of one server."""

    def __init__(self, clients: Sequence[Client], timeout_s: float) -> None:
        self.copies = [_Copy(client) for client in clients]
        self.timeout_s = timeout_s
        self.hello: Hello | None = None  # of the first that answered; all must have it
        self._lock = threading.Lock()  # guards all below, and the copies
        self._took: deque[tuple[float, float]] = deque(maxlen=512)  # when, and seconds
        self._hedge_s, self._computed_at = _FIRST_HEDGE_S, -math.inf
        self._hedges_left = 1.0
        self._counts: Counter[str] = Counter()
        self._turn = 0
        self.incarnation = None

    def close(self) -> None:
        for copy in self.copies:
            copy.client.close()

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and ``copies_used`` now.

        ``calls``; ``hedged``: asked another copy too; ``overtaken`` by it; ``failed_over``;
        ``found_again``.
        """
        with self._lock:
            used = sum(copy.is_used for copy in self.copies)
            return {**self._counts, "copies_used": used}

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return self.begin(method, *arguments, timeout_s=timeout_s).result()

    def begin(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> _CopiedCall:
        _check_is_read(method, arguments)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.look_for_copies()
        with self._lock:
            self._counts["calls"] += 1
            self._hedges_left = min(self._hedges_left + _HEDGE_SHARE, 10.0)
        return _CopiedCall(self, method, arguments, timeout_s)

    def take(self, without: Sequence[_Copy]) -> _Copy | None:
        """Return the least loaded copy in use but these, and count a call of it."""
        with self._lock:
            self._turn += 1
            num = len(self.copies)
            found = [self.copies[(self._turn + i) % num] for i in range(num)]
            found = [copy for copy in found if copy.is_used and copy not in without]
            copy = min(found, key=lambda one: one.num_calls, default=None)
            if copy is not None:
                copy.num_calls += 1
            return copy

    def may_hedge(self) -> bool:
        with self._lock:
            if self._hedges_left < 1.0:
                return False
            self._hedges_left -= 1.0
            self._counts["hedged"] += 1
            return True

    def hedge_after_s(self) -> float:
        """Return the seconds in which 95 % of the last answers came."""
        now = time.monotonic()
        with self._lock:
            if now - self._computed_at > 0.2:
                self._computed_at = now
                took = sorted(took for at, took in self._took if now - at < _WINDOW_S)
                if len(took) >= _FEW:
                    self._hedge_s = max(took[int(0.95 * len(took))], _LEAST_HEDGE_S)
            return self._hedge_s

    def end(self, copy: _Copy, took_s: float | None, error: Exception | None) -> None:
        """Take note of how a call of a copy ended; neither if it was given up."""
        now = time.monotonic()
        with self._lock:
            copy.num_calls -= 1
            if took_s is not None:
                self._took.append((now, took_s))
                copy.pause_s, copy.num_lost = _FIRST_PAUSE_S, 0
            if error is not None:
                self._counts["failed_over"] += 1
                self._leave_out(copy, now)

    def end_overtaken(self, copy: _Copy) -> None:
        """Take note that another copy answered first, though it was asked later."""
        with self._lock:
            copy.num_calls -= 1
            copy.num_lost += 1
            self._counts["overtaken"] += 1
            if copy.num_lost >= _MANY_LOST:
                self._leave_out(copy, time.monotonic())

    def _leave_out(self, copy: _Copy, now: float) -> None:
        copy.is_used, copy.num_lost = False, 0
        copy.probe_at = now + copy.pause_s
        copy.pause_s = min(2.0 * copy.pause_s, _LONGEST_PAUSE_S)

    def look_for_copies(self) -> None:
        """Ask copies that are left out for their identity, and use those that have answered.

        It never waits: an answer is taken at the call after it came.
        """
        now = time.monotonic()
        for copy in self.copies:
            # Without the lock: in the usual case all are in use.
            if copy.is_used:
                continue
            with self._lock:
                probe, begins = copy.probe, copy.probe is None and now >= copy.probe_at
                if begins:
                    copy.probe_at = math.inf  # this thread begins it
                elif probe is not None and (probe.is_over() or now >= copy.probe_until):
                    copy.probe = None
                else:
                    continue
            if begins:
                begun = copy.client.begin("hello", timeout_s=_PROBE_S)
                begun.fails_over = True
                with self._lock:
                    copy.probe, copy.probe_at = begun, now + _PROBE_S
                    copy.probe_until = now + _PROBE_S
            elif probe is not None:
                self._end_probe(copy, probe)

    def _end_probe(self, copy: _Copy, probe: PendingCall) -> None:
        try:
            if not probe.is_over():
                probe.cancel()
                raise ServiceTimeout(f"{copy.client.address}: silence")
            hello = probe.result()
        except (ServiceError, ConfigError) as error:
            with self._lock:
                self._leave_out(copy, time.monotonic())
            if isinstance(error, ConfigError):
                _logger.error("%s", error)
            return
        with self._lock:
            self.hello = self.hello or hello
            is_copy = _identity(hello) == _identity(self.hello)
            if is_copy:
                # From here on calls carry the index, and another replica refuses them.
                copy.client.replica = hello.replica_index
                copy.is_used = True
                self._counts["found_again"] += 1
            else:
                self._leave_out(copy, time.monotonic())
        if not is_copy:
            _logger.error(
                "%s is not used: expected a copy of %s, got %s",
                copy.client.address,
                _identity(self.hello),
                _identity(hello),
            )

    def touch(self, version: str) -> None:
        """Ask each copy for no rows of a version, which it then keeps; look for the others."""
        self.look_for_copies()
        request, begun = LookupRequest(0, False, (), version), []
        with self._lock:
            used = [copy for copy in self.copies if copy.is_used]
            for copy in used:
                copy.num_calls += 1
        for copy in used:
            pending = copy.client.begin("lookup", request, timeout_s=_PROBE_S)
            pending.fails_over = True
            begun.append((copy, pending))
        for copy, pending in begun:
            error: Exception | None = None
            try:
                pending.result()
            except _PASSING as failure:
                error = failure
            self.end(copy, None, error)


def _identity(hello: Hello) -> tuple[object, ...]:
    return hello.role, hello.replica_index, hello.replica_size, hello.schema_fingerprint


class _CopiedCall:
    """A call of one copy and, when that is slow or fails, of others."""

    def __init__(
        self, client: _CopiesClient, method: str, arguments: tuple[Any, ...], timeout_s: float
    ) -> None:
        self._client = client
        self._method, self._arguments = method, arguments
        self._begun_at = time.monotonic()
        self._deadline = min(self._begun_at + timeout_s, caller_deadline.get())
        self._wanted = arguments[0].version if method == "lookup" else ""
        self._other: LookupReply | None = None  # of another version than is wanted
        self._under_way: list[tuple[_Copy, PendingCall, float]] = []
        self._asked: list[_Copy] = []
        self._error: Exception | None = None
        self._ask_another()

    def _ask_another(self) -> bool:
        copy = self._client.take(self._asked)
        if copy is None:
            return False
        self._asked.append(copy)
        now = time.monotonic()
        try:
            left = max(0.0, self._deadline - now)
            pending = copy.client.begin(self._method, *self._arguments, timeout_s=left)
        except BaseException:
            self._client.end(copy, None, None)
            raise
        pending.fails_over = True
        self._under_way.append((copy, pending, now))
        return True

    def cancel(self) -> None:
        """Give up; nothing if it has ended."""
        under_way, self._under_way = self._under_way, []
        for copy, pending, _ in under_way:
            pending.cancel()
            self._client.end(copy, None, None)

    def result(self) -> Any:
        """Wait for the first answer; raise what the last copy failed with, if all did.

        An answer of another version than is wanted counts when no copy has a better one.
        """
        try:
            return self._result()
        finally:
            self.cancel()

    def _result(self) -> Any:
        hedge_at = self._begun_at + self._client.hedge_after_s()
        pause = threading.Event()  # never set
        while True:
            now = time.monotonic()
            for entry in list(self._under_way):
                if entry[1].is_over():
                    is_answered, result = self._end(entry)
                    if is_answered:
                        return result
            if now >= self._deadline:
                # Those that are silent for so long are not asked again for a while.
                for copy, pending, _ in self._under_way:
                    pending.cancel()
                    self._client.end(copy, None, ServiceTimeout("silence"))
                self._under_way = []
                raise self._error or self._no_answer()
            if not self._under_way:
                if not self._ask_another():
                    if self._other is not None:
                        return self._other
                    # All have failed: until the deadline, one may be found again.
                    self._asked.clear()
                    self._client.look_for_copies()
                    pause.wait(min(0.01, self._deadline - now))
            elif now >= hedge_at:
                hedge_at = math.inf
                self._drop_unsent()
                if not self._under_way:
                    continue
                if len(self._client.copies) > len(self._asked):
                    if self._client.may_hedge() or now >= self._begun_at + _SILENT_S:
                        self._ask_another()
                    else:  # not more often, unless it is silent for long
                        hedge_at = self._begun_at + _SILENT_S
            else:
                self._await(min(hedge_at, self._deadline))
                continue
            self._await(min(hedge_at, self._deadline))

    def _drop_unsent(self) -> None:
        """Leave out copies to which there is no connection."""
        for entry in list(self._under_way):
            copy, pending, _ = entry
            if not pending.was_sent and pending.answer is None:
                self._under_way.remove(entry)
                pending.cancel()
                self._error = ServiceUnavailable(f"{copy.client.address}: no connection")
                self._client.end(copy, None, self._error)

    def _await(self, until: float) -> None:
        """Wait for one of those under way, at most until then."""
        if len(self._under_way) > 1:
            until = min(until, time.monotonic() + _LOOK_S)
        for _, pending, _ in self._under_way:
            pending.wait(until - time.monotonic())

    def _end(self, entry: tuple[_Copy, PendingCall, float]) -> tuple[bool, Any]:
        self._under_way.remove(entry)
        copy, pending, begun_at = entry
        try:
            result = pending.result()
        except _PASSING as error:
            self._error = error
            self._client.end(copy, None, error)
            return False, None
        except BaseException:
            self._client.end(copy, None, None)
            raise
        if self._wanted and result.version != self._wanted:
            self._other = result
            self._client.end(copy, None, self._other_version(copy, result.version))
            return False, None
        self._client.end(copy, time.monotonic() - begun_at, None)
        for other in [one for one in self._under_way if one[2] < begun_at]:
            self._under_way.remove(other)
            other[1].cancel()
            self._client.end_overtaken(other[0])
        return True, result

    def _other_version(self, copy: _Copy, version: str) -> Exception | None:
        """Return why to leave out a copy of another version; None if it is the only one."""
        if len(self._client.copies) == 1:
            return None
        return ServiceBusy(f"{copy.client.address}: has {version or 'no version'}")

    def _no_answer(self) -> ServiceError:
        addresses = " and ".join(copy.client.address for copy in self._client.copies)
        return ServiceTimeout(
            f"{addresses}: no answer to {self._method} in "
            f"{self._deadline - self._begun_at:.3g} s",
            role=parameter_server().name,
            method=self._method,
        )


class CopiedServer(RemoteParameterServer):
    """One replica of read-only rows, of which there are several copies."""

    @classmethod
    def connect_copies(
        cls, transport: ZmqTransport, addresses: Sequence[str], *, timeout_s: float
    ) -> CopiedServer:
        """Connect to the copies at these addresses, and wait until one answers.

        One that turns out to be no copy of that is not used, and logged. ServiceUnavailable if
        none answers in time.
        """
        role = parameter_server()
        clients = [
            Client(transport, address, role, timeout_s=timeout_s) for address in addresses
        ]
        copies = _CopiesClient(clients, timeout_s)
        try:
            deadline, pause = time.monotonic() + timeout_s, threading.Event()
            while copies.hello is None:
                copies.look_for_copies()
                if time.monotonic() >= deadline:
                    raise ServiceUnavailable(
                        f"{' and '.join(addresses)}: no answer within {timeout_s:g} s",
                        role=role.name,
                    )
                pause.wait(0.002)
            return cls(cast("Client", copies), copies.hello)
        except BaseException:
            copies.close()
            raise


@dataclass(frozen=True, slots=True)
class CacheMoment:
    """What a cache held when a lookup began."""

    version: str | None  # of the rows; None before there were any
    half: int  # number of the half that ``young`` is of
    num_flushes: int
    young: RowTable
    old: RowTable


class RowCache:
    """Rows that were read in the last ``ttl_s``, all of one version; any thread may call it.

    They are in two tables, of this half of the time and the half before, of which the older
    one is dropped whole: no row is older than ``ttl_s``, and none needs a time of its own.

    With ``wanted`` it keeps only rows that were asked for by that version. Otherwise it keeps
    what is answered where none was asked for, so that it follows the server to a newer one.
    """

    def __init__(
        self,
        dims: Sequence[int],
        *,
        ttl_s: float = 1.0,
        max_rows: int = 100_000,
        wanted: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ttl_s <= 0.0 or max_rows < 2:
            raise ConfigError(
                f"row cache: expected a positive time and at least 2 rows, got {ttl_s:g} s and "
                f"{max_rows}"
            )
        self.dims, self.wanted = tuple(dims), wanted
        self._half_s, self._max_half = ttl_s / 2.0, max_rows // 2
        self._clock = clock
        self._lock = threading.Lock()  # guards the rest
        self._half = -1  # number of the half that ``_young`` is of
        self._young = RowTable(self.dims)
        self._old = RowTable(self.dims)
        self._version: str | None = None
        self._num_flushes = 0
        self._counts: Counter[str] = Counter()

    def now(self) -> CacheMoment:
        """Return what may be read at this moment."""
        half = int(self._clock() // self._half_s)
        with self._lock:
            if half > self._half:
                is_next = half == self._half + 1
                self._old = self._young if is_next else RowTable(self.dims)
                self._young, self._half = RowTable(self.dims), half
            return CacheMoment(
                self._version, self._half, self._num_flushes, self._young, self._old
            )

    def flush(self) -> None:
        """Forget all rows, and those that are under way."""
        with self._lock:
            self._flush(None)

    def _flush(self, version: str | None) -> None:
        self._young, self._old = RowTable(self.dims), RowTable(self.dims)
        self._version = version
        self._num_flushes += 1

    def keep(
        self, begun: CacheMoment, version: str, rows: Sequence[tuple[int, Signs, Rows]]
    ) -> None:
        """Keep rows of a version, by table, that were asked for at a moment.

        A row of zeros may be an id without a row, which may get one: it is asked for again.
        """
        with self._lock:
            if begun.num_flushes != self._num_flushes:
                return  # it may be older than what made them be forgotten
            if version != self._version:
                if self._version is None:
                    self._version = version
                else:
                    self._flush(version)
            if begun.half != self._half:
                return
            for table, signs, values in rows:
                found = np.flatnonzero(values.any(axis=1))
                found = found[: max(0, self._max_half - len(self._young))]
                if len(found):
                    self._young.write(table, signs[found], np.ascontiguousarray(values[found]))

    def count(self, hits: int, misses: int) -> None:
        """Count rows that were found here, and that were not."""
        with self._lock:
            self._counts["hits"] += hits
            self._counts["misses"] += misses

    def stats(self) -> Mapping[str, int]:
        """Return ``rows`` now, and ``hits``, ``misses`` and ``flushes`` since the start."""
        with self._lock:
            rows = len(self._young) + len(self._old)
            return {**self._counts, "flushes": self._num_flushes, "rows": rows}


class _CachedClient:
    """Begins lookups of what the cache lacks."""

    def __init__(self, client: Client, cache: RowCache) -> None:
        self.client, self.cache = client, cache
        self.incarnation = None

    def close(self) -> None:
        self.client.close()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return self.begin(method, *arguments, timeout_s=timeout_s).result()

    def begin(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        _check_is_read(method, arguments)
        if method != "lookup":
            return self.client.begin(method, *arguments, timeout_s=timeout_s)
        return _CachedLookup(self.client, self.cache, arguments[0], timeout_s)


class _CachedLookup:
    """A lookup of which a part is in the cache."""

    def __init__(
        self, client: Client, cache: RowCache, request: LookupRequest, timeout_s: float | None
    ) -> None:
        self._client, self._cache, self._request = client, cache, request
        self._timeout_s = timeout_s
        self._begun = cache.now()
        self._rows: list[Rows] = []
        self._missing: list[NDArray[np.intp]] = []
        asked = sum(len(part.signs) for part in request.tables)
        # Rows of another version than is asked for are of no use.
        is_usable = request.version in ("", self._begun.version)
        if is_usable and self._begun.version is not None:
            for part in request.tables:
                rows, missing = self._read(part)
                self._rows.append(rows)
                self._missing.append(missing)
            num_missing = sum(map(len, self._missing))
        else:
            num_missing = asked
        cache.count(asked - num_missing, num_missing)
        self._has_hits = num_missing < asked
        self._rest = request
        if self._has_hits:
            parts = tuple(
                TableSigns(part.table, np.ascontiguousarray(part.signs[missing]))
                for part, missing in zip(request.tables, self._missing, strict=True)
            )
            self._rest = LookupRequest(request.batch_id, False, parts, request.version)
        self._pending: PendingCall | None = None
        if num_missing or not asked:
            self._pending = self._ask(self._rest)

    def _ask(self, request: LookupRequest) -> PendingCall:
        return self._client.begin("lookup", request, timeout_s=self._timeout_s)

    def _read(self, part: TableSigns) -> tuple[Rows, NDArray[np.intp]]:
        shape = (len(part.signs), self._cache.dims[part.table])
        rows, state = np.zeros(shape, np.float32), np.zeros(shape[0], np.uint8)
        if not self._begun.young.lookup(part.table, part.signs, rows, state):
            return rows, np.empty(0, np.intp)
        missing = np.flatnonzero(state != 1)
        signs = np.ascontiguousarray(part.signs[missing])
        older, state = np.zeros((len(missing), shape[1]), np.float32), state[: len(missing)] * 0
        self._begun.old.lookup(part.table, signs, older, state)
        rows[missing] = older
        return rows, missing[state != 1]

    def cancel(self) -> None:
        """Give up; nothing if it has ended."""
        if self._pending is not None:
            self._pending.cancel()

    def result(self) -> LookupReply:
        """Wait for the rows that were missing; all are of one version."""
        if self._pending is None:
            return self._reply()
        reply: LookupReply = self._pending.result()
        if not self._keep(self._rest, reply):
            return reply
        if not self._has_hits:
            return reply
        if reply.version != self._begun.version:
            # What was kept is of another version than the answer.
            self._begun = self._cache.now()
            self._pending = self._ask(self._request)
            whole: LookupReply = self._pending.result()
            self._keep(self._request, whole)
            return whole
        for rows, missing, answer in zip(self._rows, self._missing, reply.tables, strict=True):
            rows[missing] = answer.rows
        return self._reply()

    def _keep(self, request: LookupRequest, reply: LookupReply) -> bool:
        """Keep an answer; False if it is none, as the worker will find."""
        expected = [
            (part.table, (len(part.signs), self._cache.dims[part.table]))
            for part in request.tables
        ]
        if expected != [(answer.table, answer.rows.shape) for answer in reply.tables]:
            return False
        wanted = self._cache.wanted
        if request.version == wanted and wanted in ("", reply.version):
            self._cache.keep(
                self._begun,
                reply.version,
                [
                    (part.table, part.signs, answer.rows)
                    for part, answer in zip(request.tables, reply.tables, strict=True)
                ],
            )
        return True

    def _reply(self) -> LookupReply:
        return LookupReply(
            tuple(
                TableRows(part.table, rows, None)
                for part, rows in zip(self._request.tables, self._rows, strict=True)
            ),
            self._begun.version or "",
        )


class CachedServer(RemoteParameterServer):
    """A server of read-only rows, behind a cache of those that were read last."""

    @classmethod
    def before(cls, server: RemoteParameterServer, cache: RowCache) -> CachedServer:
        """Put a cache before a server; closing it closes the server's client."""
        return cls(cast("Client", _CachedClient(server.client, cache)), server._hello)


@dataclass(frozen=True, slots=True)
class RowServers:
    """Where servers of rows are, and how they are asked.

    They are ``embedding-parameter-server`` processes with ``job_type: Infer``.
    """

    replicas: Sequence[Sequence[str]]  # addresses of the copies of each
    cache_ttl_ms: float = 0.0  # how long a row may be answered from the cache; 0: no cache
    cache_rows: int = 100_000  # of each replica
    timeout_s: float = 5.0  # of a lookup
    connect_timeout_s: float = 5.0

    @classmethod
    def listed(cls, **options: Any) -> RowServers:
        """Take the addresses from the environment; ConfigError if there are none."""
        replicas = env.serving_replicas()
        if not replicas:
            raise ConfigError(
                f"rows in servers: expected {env.serving_replicas.name} to list addresses as "
                "in `host:1|host:2,host:3`, got nothing"
            )
        return cls(replicas, **options)


class RemoteRows:
    """The whole set of servers of a version, from which an embedding-worker takes its rows.

    A thread asks each of them for the version every few seconds: servers that have gone on to
    the next one keep it as long as it is asked for.

    Args:
        transport: Of the calls.
        settings: Which servers.
        dims: Of the tables.
        version: The checkpoint whose rows are wanted; "" is whichever the servers have.

    Raises:
        ServiceUnavailable: If a replica has no copy that answers in time.
        ServiceBusy: If it has other rows, or none yet.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        settings: RowServers,
        dims: Sequence[int],
        version: str = "",
    ) -> None:
        self._version = version
        self._copies: list[CopiedServer] = []
        self._caches: list[RowCache] = []
        self._stop = threading.Event()
        try:
            for addresses in settings.replicas:
                copies = CopiedServer.connect_copies(
                    transport, addresses, timeout_s=settings.connect_timeout_s
                )
                cast("_CopiesClient", copies.client).timeout_s = settings.timeout_s
                self._copies.append(copies)
                self._check(copies)
        except BaseException:
            self.close()
            raise
        self.servers: list[RemoteParameterServer] = list(self._copies)
        if settings.cache_ttl_ms > 0.0:
            for number, server in enumerate(self._copies):
                cache = RowCache(
                    dims,
                    ttl_s=settings.cache_ttl_ms / 1e3,
                    max_rows=settings.cache_rows,
                    wanted=version,
                )
                self._caches.append(cache)
                self.servers[number] = CachedServer.before(server, cache)
        self._thread = threading.Thread(target=self._touch, name="persia-copies", daemon=True)
        self._thread.start()

    def _check(self, server: CopiedServer) -> None:
        reply = server.lookup(LookupRequest(0, False, (), self._version))
        if self._version and reply.version != self._version:
            role = parameter_server().name
            raise ServiceBusy(
                f"{role} {server.replica_index}: expected rows of checkpoint {self._version}, "
                f"got those of {reply.version or 'a change log'}",
                role=role,
                replica=server.replica_index,
                method="lookup",
            )

    def _touch(self) -> None:
        while not self._stop.wait(_TOUCH_S):
            for server in self._copies:
                try:
                    cast("_CopiesClient", server.client).touch(self._version)
                except ServiceError as error:
                    _logger.warning("servers of rows: %s", error)

    def stats(self) -> Mapping[str, int]:
        """Return the counts of copies and caches, those of all replicas added up."""
        counts: Counter[str] = Counter()
        for server in self._copies:
            counts.update(server.client.stats())
        for cache in self._caches:
            counts.update({f"cache_{name}": n for name, n in cache.stats().items()})
        return dict(counts)

    def close(self) -> None:
        """End the connections; calls in flight raise ServiceUnavailable."""
        self._stop.set()
        for server in self._copies:
            server.close()
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.join(_PROBE_S)
