"""The embedding-worker: batches in flight, between the nn-workers and the servers.

    register(features) -> ref       ids hashed, packed and sorted by server; nothing asked yet
    lookup(ref)                     rows of all servers, pooled; may be repeated
    update(gradients of ref)        one summed gradient per sign, to all servers
    release(ref)                    no gradient will come

A ref is a handle that may be used again until it is retired: by an update that all servers
acknowledged, by ``release``, or by lying unused for too long. So whoever lost an answer asks
again: the same batch registered twice has one ref, a lookup draws the same admissions, an
update is applied once (the servers know its id), and a retired one is answered again.

A plain object: embedded mode calls it, a transport serves it. Any thread may call any method.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from persia._core.hashing import owners, route
from persia._rpc.messages import (
    BatchGradients,
    Floats,
    HyperParameters,
    IDFeatures,
    LookupRequest,
    LookupResult,
    Numbers,
    OptimizerSettings,
    ParameterServer,
    SlotGradient,
    TableEntries,
    TableGradients,
    TableSigns,
    UpdateReply,
    UpdateReport,
    UpdateRequest,
)
from persia._services.batch import (
    GradientCounts,
    PackedBatch,
    TableSums,
    is_same_batch,
    pack_batch,
    pool_outputs,
    sum_gradients,
)
from persia._services.plan import POOLED, Planner, check_names, schema_fingerprint
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
    ProtocolError,
    ServiceBusy,
    StoreError,
    UnknownRef,
)
from persia.logger import get_logger

S = TypeVar("S")
T = TypeVar("T")

_logger = get_logger("persia.embedding_worker")

ROLE = "embedding-worker"


@dataclass(frozen=True, slots=True)
class _LookedUp:
    """What the update of a batch needs from its last training lookup."""

    hints: tuple[Numbers, ...]  # by table of the plan, in the order of its signs
    maxima: tuple[NDArray[np.int32] | None, ...]  # by feature


@dataclass(slots=True)
class _InFlight:
    """One ref."""

    ref: int
    batch_id: int
    requires_grad: bool
    packed: PackedBatch
    used_at: float  # monotonic seconds; guarded by the worker's lock
    looked_up: _LookedUp | None = None
    # One update at a time; the fields below are the update's.
    updating: threading.Lock = field(default_factory=threading.Lock)
    update_id: tuple[int, int] | None = None
    acknowledged: dict[int, UpdateReply] = field(default_factory=dict)  # by server
    report: UpdateReport | None = None  # set when all servers have acknowledged


class EmbeddingWorker:
    """Implements ``messages.EmbeddingWorker`` over a whole set of parameter servers.

    Args:
        schema: The embedding config.
        settings: Section ``embedding_worker_config``.
        servers: All parameter servers, in any order.
        num_threads: Servers asked at the same time; as many as there are, if not given.
        clock: Monotonic seconds.

    Raises:
        ConfigError: If the servers are not exactly the replicas of one set, or number
            tables and groups otherwise than ``schema`` does.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        settings: EmbeddingWorkerConfig,
        servers: Sequence[ParameterServer],
        *,
        num_threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schema = schema
        self._servers = _whole_set(servers, schema)
        self._owners = owners(len(self._servers))
        self._planner = Planner(schema)
        self._max_in_flight = settings.forward_buffer_size
        self._expiry_s = float(settings.buffered_data_expired_sec)
        self._clock = clock
        self._pool: ThreadPoolExecutor | None = None
        if len(self._servers) > 1:
            # The caller's own thread asks one server.
            self._pool = ThreadPoolExecutor(
                max(1, (num_threads or len(self._servers)) - 1),
                thread_name_prefix="persia-fan-out",
            )
        self._lock = threading.Lock()  # guards all below
        # Upper bits are this worker's incarnation: a ref of one that died must not mean
        # another batch to its successor.
        self._next_ref = secrets.randbits(31) << 32
        self._in_flight: OrderedDict[int, _InFlight] = (
            OrderedDict()
        )  # least recently used first
        self._ref_of_batch: dict[int, int] = {}  # batch id -> latest registered ref
        self._retired: OrderedDict[int, tuple[tuple[int, int], UpdateReport]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._masked_ids: Counter[str] = Counter()

    def close(self) -> None:
        """Stop the worker's threads; it must not be called afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    # --- refs -------------------------------------------------------------------------------

    @property
    def servers(self) -> tuple[ParameterServer, ...]:
        """The parameter servers, by replica index."""
        return self._servers

    def register(self, features: IDFeatures) -> int:
        """Take the ids of a batch and return its ref.

        The same batch (batch id, features and ids) has the same ref as long as it is in
        flight, so a caller who got no answer may send it again.

        Raises:
            DataError: If a feature is unknown or comes twice, batch sizes differ, or ids do
                not fit in strict mode.
            ServiceBusy: If ``forward_buffer_size`` batches are in flight.
        """
        return self._register(features, is_repeatable=True).ref

    def _register(self, features: IDFeatures, *, is_repeatable: bool) -> _InFlight:
        packed = self._pack(features)
        with self._lock:
            now = self._clock()
            self._expire(now)
            if is_repeatable:
                known = self._in_flight.get(self._ref_of_batch.get(features.batch_id, -1))
                if (
                    known is not None
                    and known.requires_grad is features.requires_grad
                    and is_same_batch(known.packed, packed)
                ):
                    self._counts["registered_again"] += 1
                    self._touch(known, now)
                    return known
            if len(self._in_flight) >= self._max_in_flight:
                self._counts["refused_busy"] += 1
                raise ServiceBusy(
                    f"{len(self._in_flight)} batches are in flight, expected fewer than "
                    f"forward_buffer_size = {self._max_in_flight}; try again when one is done",
                    role=ROLE,
                    method="register",
                )
            ref = self._next_ref
            self._next_ref += 1
            batch = _InFlight(ref, features.batch_id, features.requires_grad, packed, now)
            self._in_flight[ref] = batch
            if is_repeatable:
                self._ref_of_batch[features.batch_id] = ref
            self._counts["registered"] += 1
        self._count_masked(packed)
        return batch

    def _pack(self, features: IDFeatures) -> PackedBatch:
        plan = self._planner.plan(tuple(feature.name for feature in features.features))
        return pack_batch(
            features.features, plan, self._schema, self._owners, len(self._servers)
        )

    def _count_masked(self, packed: PackedBatch) -> None:
        for name, count in packed.num_masked.items():
            with self._lock:
                is_first = name not in self._masked_ids
                self._masked_ids[name] += count
            if is_first:
                index_bits = 64 - self._schema.prefix_bits
                _logger.warning(
                    "feature %r: %d ids of a batch need more than %d bits (64 - "
                    "feature_index_prefix_bit) and were cut to them, so that they may share "
                    "rows; later ones are only counted. strict_ids: true makes this an error",
                    name,
                    count,
                    index_bits,
                )

    def _find(self, ref: int, method: str) -> _InFlight:
        with self._lock:
            now = self._clock()
            self._expire(now)
            batch = self._in_flight.get(ref)
            if batch is None:
                raise self._unknown(ref, method)
            self._touch(batch, now)
            return batch

    def _unknown(self, ref: int, method: str) -> UnknownRef:
        return UnknownRef(
            f"no batch in flight has ref {ref}: it was acknowledged, released, unused for "
            f"{self._expiry_s:g} s (buffered_data_expired_sec), or is another worker's; "
            f"register the batch again",
            role=ROLE,
            method=method,
        )

    def _touch(self, batch: _InFlight, now: float) -> None:
        batch.used_at = now
        self._in_flight.move_to_end(batch.ref)

    def _expire(self, now: float) -> None:
        """Retire what nobody has used for too long. The lock is held."""
        num_expired = 0
        while self._in_flight:
            oldest = next(iter(self._in_flight.values()))
            if now - oldest.used_at < self._expiry_s:
                break
            self._retire(oldest.ref)
            num_expired += 1
        if num_expired:
            self._counts["expired"] += num_expired
            _logger.warning(
                "%d batches expired: nobody looked them up or sent their gradients for %g s",
                num_expired,
                self._expiry_s,
            )

    def _retire(self, ref: int) -> bool:
        """Forget a ref; False if it was not in flight. The lock is held."""
        batch = self._in_flight.pop(ref, None)
        if batch is None:
            return False
        if self._ref_of_batch.get(batch.batch_id) == ref:
            del self._ref_of_batch[batch.batch_id]
        return True

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; nothing if it is retired already."""
        with self._lock:
            if self._retire(ref):
                self._counts["released"] += 1

    # --- lookup -----------------------------------------------------------------------------

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        """Return the outputs of a registered batch; the ref stays.

        Args:
            ref: From ``register``.
            is_training: Whether rows are inserted and used, for an update that follows.

        Raises:
            UnknownRef: If the ref is retired or not this worker's.
            NotConfigured: If it is training and the servers have no settings yet.
        """
        batch = self._find(ref, "lookup")
        result = self._lookup(batch.packed, batch.batch_id, batch if is_training else None)
        return replace(result, ref=ref if is_training else None)

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Register and look up in one; without gradients nothing stays in flight.

        Raises:
            DataError: As ``register``.
            ServiceBusy: As ``register``, if gradients are to follow.
            NotConfigured: If it is training and the servers have no settings yet.
        """
        if not features.requires_grad:
            packed = self._pack(features)
            self._count_masked(packed)
            return self._lookup(packed, features.batch_id, None)
        batch = self._register(features, is_repeatable=False)
        try:
            result = self._lookup(batch.packed, batch.batch_id, batch)
        except BaseException:
            self.release(batch.ref)  # the caller never learns it
            raise
        return replace(result, ref=batch.ref)

    def _lookup(
        self, packed: PackedBatch, batch_id: int, training: _InFlight | None
    ) -> LookupResult:
        is_training = training is not None
        rows, hints = self._fetch(packed, batch_id, is_training)
        outputs, maxima = pool_outputs(packed, rows)
        if training is not None:
            training.looked_up = _LookedUp(tuple(hints), maxima)
        with self._lock:
            self._counts["lookups"] += 1
        return LookupResult(outputs, None)

    def _fetch(
        self, packed: PackedBatch, batch_id: int, is_training: bool
    ) -> tuple[list[Floats], list[Numbers]]:
        """Return rows and hints (empty in evaluation) by table, in the order of the signs."""
        requests: dict[int, LookupRequest] = {}
        asked: dict[int, list[int]] = {}  # server -> places of its tables in the plan
        for server in range(len(self._servers)):
            parts = []
            places = []
            for place, table in enumerate(packed.tables):
                start, stop = table.starts[server : server + 2]
                if stop > start:
                    number = packed.plan.tables[place].number
                    parts.append(TableSigns(number, table.signs[start:stop]))
                    places.append(place)
            if parts:
                requests[server] = LookupRequest(batch_id, is_training, tuple(parts))
                asked[server] = places
        replies = self._ask(requests, lambda server, request: server.lookup(request))
        for reply in replies.values():
            if isinstance(reply, Exception):
                raise reply

        rows: list[Floats] = []
        hints: list[Numbers] = []
        for table, plan in zip(packed.tables, packed.plan.tables, strict=True):
            rows.append(np.empty((len(table.signs), plan.dim), np.float32))
            hints.append(np.empty(len(table.signs) if is_training else 0, np.uint32))
        for server, reply in replies.items():
            if isinstance(reply, Exception):
                continue
            for place, part in zip(asked[server], reply.tables, strict=True):
                table, dim = packed.tables[place], packed.plan.tables[place].dim
                start, stop = table.starts[server : server + 2]
                if part.rows.shape != (stop - start, dim):
                    raise ProtocolError(
                        f"expected rows {[stop - start, dim]} of table {part.table}, "
                        f"got {list(part.rows.shape)}",
                        role="embedding-parameter-server",
                        replica=server,
                        method="lookup",
                    )
                if stop - start == len(table.signs):
                    rows[place] = part.rows
                else:
                    rows[place][start:stop] = part.rows
                if is_training and part.hints is not None:
                    hints[place][start:stop] = part.hints
        return rows, hints

    def _ask(
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
        futures = {server: self._pool.submit(answer, server) for server in others}
        answers = {mine: answer(mine)}
        for server, future in futures.items():
            answers[server] = future.result()
        return answers

    # --- update -----------------------------------------------------------------------------

    def update(self, gradients: BatchGradients) -> UpdateReport:
        """Step the rows of a batch; its ref is retired once all servers have acknowledged.

        If a server fails, the ref stays and the same call may be made again: servers that
        have applied the update do not apply it twice.

        Raises:
            UnknownRef: If the ref is retired (unless by this very update, which is answered
                again) or not this worker's.
            DataError: If a gradient is of a feature that the batch does not have, comes
                twice, or has another shape than its output; if ``scale`` is not a positive
                number; if no training lookup came before.
            DataTypeError: If a gradient is neither f32 nor f16.
            ServiceError: Whatever the first server that failed raised.
        """
        with self._lock:
            retired = self._retired.get(gradients.ref)
            if retired is not None and retired[0] == gradients.update_id:
                self._counts["updates_again"] += 1
                return replace(retired[1], repeated=True)
        batch = self._find(gradients.ref, "update")
        with batch.updating:
            if batch.report is not None:  # acknowledged while this call waited
                if batch.update_id != gradients.update_id:
                    raise self._unknown(gradients.ref, "update")
                return replace(batch.report, repeated=True)
            return self._update(batch, gradients)

    def _update(self, batch: _InFlight, gradients: BatchGradients) -> UpdateReport:
        looked_up = batch.looked_up
        if looked_up is None:
            raise DataError(
                f"ref {batch.ref}: expected a training lookup before its gradients, got none"
            )
        if batch.update_id not in (None, gradients.update_id):
            raise DataError(
                f"ref {batch.ref}: expected update id {batch.update_id} again, which a part of "
                f"the servers have applied, got {gradients.update_id}"
            )
        arrays = _checked_gradients(batch.packed, gradients)
        sums, counts = sum_gradients(batch.packed, arrays, looked_up.maxima)
        requests = self._requests(batch, gradients.update_id, sums, looked_up)
        batch.update_id = gradients.update_id
        failure: Exception | None = None
        for server, reply in self._ask(requests, lambda s, request: s.update(request)).items():
            if isinstance(reply, Exception):
                failure = failure or reply
            else:
                batch.acknowledged[server] = reply
        if failure is not None:
            with self._lock:
                self._counts["failed_updates"] += 1
            raise failure
        names = batch.packed.plan.names
        report = UpdateReport(
            num_missing=sum(reply.num_missing for reply in batch.acknowledged.values()),
            nan_samples=counts.samples,
            nan_rows=counts.rows,
            skipped=tuple(
                name for name, array in zip(names, arrays, strict=True) if array is None
            ),
            repeated=any(reply.repeated for reply in batch.acknowledged.values()),
        )
        batch.report = report
        self._acknowledge(batch, gradients.update_id, report, counts)
        return report

    def _requests(
        self,
        batch: _InFlight,
        update_id: tuple[int, int],
        sums: Sequence[TableSums],
        looked_up: _LookedUp,
    ) -> dict[int, UpdateRequest]:
        """The requests of the servers that have a step to make and have not acknowledged it."""
        packed = batch.packed
        requests: dict[int, UpdateRequest] = {}
        for server in range(len(self._servers)):
            if server in batch.acknowledged:
                continue
            parts = []
            for place, table in enumerate(packed.tables):
                window = slice(*table.starts[server : server + 2])
                signs, gradients = table.signs[window], sums[place].sums[window]
                hints = looked_up.hints[place][window]
                keep = sums[place].keep
                if keep is not None:
                    kept = keep[window]
                    signs, gradients, hints = signs[kept], gradients[kept], hints[kept]
                if len(signs):
                    number = packed.plan.tables[place].number
                    parts.append(TableGradients(number, signs, hints, gradients))
            if parts:
                requests[server] = UpdateRequest(update_id, tuple(parts))
        return requests

    def _acknowledge(
        self,
        batch: _InFlight,
        update_id: tuple[int, int],
        report: UpdateReport,
        counts: GradientCounts,
    ) -> None:
        with self._lock:
            self._retire(batch.ref)
            self._retired[batch.ref] = update_id, report
            if len(self._retired) > self._max_in_flight:
                self._retired.popitem(last=False)
            self._counts["updates"] += 1
            self._counts["repeated_updates"] += report.repeated
            self._counts["missing"] += report.num_missing
            self._counts["skipped_slots"] += len(report.skipped)
            for name, count in counts.samples.items():
                self._counts[f"nan_samples.{name}"] += count
            for name, count in counts.rows.items():
                self._counts[f"nan_rows.{name}"] += count

    # --- all servers ------------------------------------------------------------------------

    def _ask_all(self, call: Callable[[ParameterServer], T]) -> list[T]:
        """Call every server and wait for every answer; raise the first failure."""
        everyone = dict.fromkeys(range(len(self._servers)))
        answers = self._ask(everyone, lambda server, _: call(server))
        results = []
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
            results.append(answer)
        return results

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings; returns when all have them."""
        self._ask_all(lambda server: server.configure(settings))

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer; returns when all have it."""
        self._ask_all(lambda server: server.register_optimizer(settings))

    def ready_for_serving(self) -> bool:
        """Whether every server is ready."""
        return all(self._ask_all(lambda server: server.ready_for_serving()))

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, each to the server that owns its sign.

        Raises:
            StoreError: If a table is unknown or lengths differ.
            DimMismatch: If values are not of the table's dim.
            DataTypeError: If an array has another dtype than its message says.
        """
        requests: dict[int, list[TableEntries]] = {}
        for part in tables:
            signs = part.signs
            lengths = {len(signs), len(part.values)}
            lengths |= set() if part.states is None else {len(part.states)}
            if len(lengths) > 1:
                raise StoreError(
                    f"table {part.table}: expected as many values and states as signs, "
                    f"{len(signs)}, got {sorted(lengths)}"
                )
            if not isinstance(signs, np.ndarray) or signs.dtype != np.uint64:
                raise DataTypeError(f"table {part.table}: expected signs as uint64 array")
            order, starts = route(np.ascontiguousarray(signs), self._owners, len(self._servers))
            for server in range(len(self._servers)):
                chosen = order[starts[server] : starts[server + 1]]
                if len(chosen):
                    entries = TableEntries(
                        part.table,
                        signs[chosen],
                        part.values[chosen],
                        None if part.states is None else part.states[chosen],
                    )
                    requests.setdefault(server, []).append(entries)
        for answer in self._ask(requests, lambda server, r: server.set_embedding(r)).values():
            if isinstance(answer, Exception):
                raise answer

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows of each server."""
        return self._ask_all(lambda server: server.get_embedding_size())

    def clear_embeddings(self) -> None:
        """Drop every row of every server."""
        self._ask_all(lambda server: server.clear_embeddings())

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and ``in_flight``, the refs now.

        Counts by feature are named ``masked_ids.<feature>``, ``nan_samples.<feature>`` and
        ``nan_rows.<feature>``; those that are zero are absent.
        """
        with self._lock:
            self._expire(self._clock())
            masked = {f"masked_ids.{name}": n for name, n in self._masked_ids.items()}
            return {**self._counts, **masked, "in_flight": len(self._in_flight)}


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
            raise ConfigError(
                f"parameter server {index} of {size} has another embedding config: its "
                f"fingerprint is {server.schema_fingerprint}, expected {fingerprint}; slots, "
                f"groups, dims and feature_index_prefix_bit must be the same everywhere"
            )
        by_index[index] = server
    return tuple(by_index[index] for index in sorted(by_index))


def _checked_gradients(
    packed: PackedBatch, gradients: BatchGradients
) -> list[NDArray[np.float32] | None]:
    """Return the gradients as f32 without the loss's scale, in the order of the features."""
    names = packed.plan.names
    check_names([given.name for given in gradients.gradients], names, "the batch of this ref")
    scale = gradients.scale
    with np.errstate(all="ignore"):
        unscale = np.float32(1.0 / scale) if scale > 0.0 else np.float32(np.nan)
    if not np.isfinite(unscale) or unscale == 0.0:
        raise DataError(
            f"scale of ref {gradients.ref}: expected a positive number with a reciprocal in "
            f"f32, got {scale}"
        )
    given = {item.name: item for item in gradients.gradients}
    return [
        None if name not in given else _checked_gradient(packed, place, given[name], unscale)
        for place, name in enumerate(names)
    ]


def _checked_gradient(
    packed: PackedBatch, place: int, given: SlotGradient, unscale: np.float32
) -> NDArray[np.float32] | None:
    gradient = given.gradient
    if gradient is None:
        return None
    slot = packed.plan.features[place].slot
    if not isinstance(gradient, np.ndarray) or gradient.dtype not in (np.float32, np.float16):
        got = gradient.dtype if isinstance(gradient, np.ndarray) else type(gradient).__name__
        raise DataTypeError(
            f"gradient of feature {slot.name!r}: expected float32 or float16, got {got}"
        )
    num_rows = packed.batch_size
    if slot.pooling not in POOLED:
        num_rows = packed.features[place].ids.num_distinct
    if gradient.shape != (num_rows, slot.dim):
        raise DataError(
            f"gradient of feature {slot.name!r} ({slot.pooling}): expected shape "
            f"{[num_rows, slot.dim]}, got {list(gradient.shape)}"
        )
    floats = np.ascontiguousarray(gradient, np.float32)
    if unscale != 1.0:
        # Inf and overflow are looked for when the sums are; they are no event here.
        with np.errstate(all="ignore"):
            floats = floats * unscale
    return floats
