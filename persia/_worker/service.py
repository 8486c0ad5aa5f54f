"""The embedding-worker: batches in flight, between the nn-workers and the servers.

    register(features) -> ref       ids hashed, packed and sorted by server; nothing asked yet
    lookup(ref)                     rows of all servers, pooled; may be repeated
    update(gradients of ref)        one summed gradient per sign, to all servers
    release(ref)                    no gradient will come

Whoever lost an answer asks again (see ``refs``): the same batch registered twice has one ref, a
lookup draws the same admissions, an update is applied once (the servers know its id), and a
retired one is answered again.

A plain object: embedded mode calls it, a transport serves it. Any thread may call any method.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import owners, route
from persia._core.base.threads import ThreadPool
from persia._metrics.timings import Timings
from persia._rpc.messages import (
    BatchGradients,
    CutInfo,
    CutRequest,
    CutStatus,
    FeatureStats,
    Floats,
    HyperParameters,
    IDFeatures,
    LoadRequest,
    LoadStatus,
    LookupRequest,
    LookupResult,
    Numbers,
    OptimizerSettings,
    ParameterServer,
    TableEntries,
    TableGradients,
    TableSigns,
    UpdateReport,
    UpdateRequest,
    WriteRequest,
)
from persia._worker.batch import (
    GradientCounts,
    PackedBatch,
    TableSums,
    pack_batch,
    pool_outputs,
    sum_gradients,
)
from persia._worker.batch_plan import POOLED, BatchPlanner, check_names
from persia._worker.feature_statistics import FeatureStatistics
from persia._worker.forward_buffer import BufferedBatch, ForwardBuffer, LookedUp
from persia._worker.server_pool import ServerSet
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, tables_at_rate
from persia.errors import (
    DataError,
    DataTypeError,
    StoreError,
)
from persia.logger import get_logger

S = TypeVar("S")
T = TypeVar("T")

_logger = get_logger("persia.embedding_worker")

_F32 = np.dtype(np.float32)
_GRADIENT_DTYPES = (_F32, np.dtype(np.float16))


class EmbeddingWorker:
    """Implements ``messages.EmbeddingWorker`` over a whole set of parameter servers.

    Args:
        schema: The embedding config.
        settings: Section ``embedding_worker_config``.
        servers: All parameter servers, in any order.
        num_threads: Servers of this process asked at the same time; all of them, if not given.
        num_pooling_threads: Threads that pool one batch, or sum its gradients.
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
        num_pooling_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schema = schema
        self._servers = ServerSet(servers, schema, num_threads)
        self._crew = ThreadPool(num_pooling_threads)
        self._owners = owners(len(self._servers))
        self._planner = BatchPlanner(schema)
        self._refs = ForwardBuffer(settings, clock)
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[str] = Counter()
        self._masked_ids: Counter[str] = Counter()
        self._ids: Counter[str] = Counter()
        self._distinct_ids: Counter[str] = Counter()
        self._skipped_slots: Counter[str] = Counter()
        self._tally = FeatureStatistics(schema)
        self.timings = Timings(
            "lookup_preprocess_time_cost_sec",
            "lookup_rpc_time_cost_sec",
            "lookup_postprocess_time_cost_sec",
            "lookup_total_time_cost_sec",
            "update_gradient_time_cost_sec",
        )

    def close(self) -> None:
        """Stop the worker's threads; it must not be called afterwards."""
        self._servers.close()
        self._crew.close()

    # --- refs -------------------------------------------------------------------------------

    @property
    def servers(self) -> tuple[ParameterServer, ...]:
        """The parameter servers, by replica index."""
        return self._servers.servers

    def server_restarted(self, number: int) -> None:
        """Give a parameter server that was started anew its settings; its rows are lost.

        Args:
            number: The server's, whose client calls this, see ``Client``.
        """
        self._servers.restarted(number)

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

    def _register(self, features: IDFeatures, *, is_repeatable: bool) -> BufferedBatch:
        packed = self._pack(features)
        batch, is_new = self._refs.add(features, packed, is_repeatable=is_repeatable)
        if is_new:
            self._count_ids(packed)
            if features.requires_grad:  # evaluation says nothing of what is trained
                for feature in packed.features:
                    self._tally.add(feature.ids)
        return batch

    def _pack(self, features: IDFeatures) -> PackedBatch:
        begin = time.perf_counter()
        plan = self._planner.plan(tuple(feature.name for feature in features.features))
        packed = pack_batch(
            features.features,
            plan,
            self._schema,
            self._owners,
            len(self._servers),
            self._crew,
        )
        took_s = time.perf_counter() - begin
        self.timings["lookup_preprocess_time_cost_sec"].add(took_s)
        return packed

    def _count_ids(self, packed: PackedBatch) -> None:
        with self._lock:
            for feature in packed.features:
                ids = feature.ids
                name = ids.name
                self._ids[name] += ids.num_ids
                self._distinct_ids[name] += ids.num_distinct
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

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; nothing if it is retired already."""
        self._refs.release(ref)

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
        batch = self._refs.find(ref, "lookup")
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
            self._count_ids(packed)
            return self._lookup(packed, features.batch_id, None)
        batch = self._register(features, is_repeatable=False)
        try:
            result = self._lookup(batch.packed, batch.batch_id, batch)
        except BaseException:
            self.release(batch.ref)  # the caller never learns it
            raise
        return replace(result, ref=batch.ref)

    def _lookup(
        self, packed: PackedBatch, batch_id: int, training: BufferedBatch | None
    ) -> LookupResult:
        is_training = training is not None
        begin = time.perf_counter()
        rows, hints = self._fetch(packed, batch_id, is_training)
        fetched = time.perf_counter()
        outputs, maxima = pool_outputs(packed, rows, self._crew)
        end = time.perf_counter()
        self.timings["lookup_rpc_time_cost_sec"].add(fetched - begin)
        self.timings["lookup_postprocess_time_cost_sec"].add(end - fetched)
        self.timings["lookup_total_time_cost_sec"].add(end - begin)
        if training is not None:
            training.looked_up = LookedUp(tuple(hints), maxima)
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
        replies = self._servers.lookup(requests)

        rows: dict[int, Floats] = {}
        hints: dict[int, Numbers] = {}
        for server, reply in replies.items():
            for place, part in zip(asked[server], reply.tables, strict=True):
                table = packed.tables[place]
                start, stop = table.starts[server : server + 2]
                if stop - start == len(table.signs):
                    rows[place] = part.rows
                    if part.hints is not None:
                        hints[place] = part.hints
                    continue
                if place not in rows:
                    dim = packed.plan.tables[place].dim
                    rows[place] = empty_floats(len(table.signs), dim)
                    hints[place] = np.empty(len(table.signs), np.uint32)
                rows[place][start:stop] = part.rows
                if part.hints is not None:
                    hints[place][start:stop] = part.hints
        for place, plan in enumerate(packed.plan.tables):
            if place not in rows:  # no signs
                rows[place] = empty_floats(0, plan.dim)
        none = np.empty(0, np.uint32)
        count = len(packed.tables)
        return [rows[at] for at in range(count)], [hints.get(at, none) for at in range(count)]

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
        batch = self._refs.find_for_update(gradients.ref, gradients.update_id)
        if isinstance(batch, UpdateReport):
            return replace(batch, repeated=True)
        with batch.updating:
            if batch.report is not None:  # acknowledged while this call waited
                if batch.update_id != gradients.update_id:
                    raise self._refs.unknown(gradients.ref, "update")
                return replace(batch.report, repeated=True)
            begin = time.perf_counter()
            report = self._update(batch, gradients)
            took_s = time.perf_counter() - begin
            self.timings["update_gradient_time_cost_sec"].add(took_s)
            return report

    def _update(self, batch: BufferedBatch, gradients: BatchGradients) -> UpdateReport:
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
        sums, counts = sum_gradients(batch.packed, arrays, looked_up.maxima, self._crew)
        requests = self._requests(batch, gradients, sums, looked_up)
        batch.update_id = gradients.update_id
        failure: Exception | None = None
        for server, reply in self._servers.ask("update", requests).items():
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
        self._refs.acknowledge(batch, gradients.update_id, report)
        self._count_update(report, counts)
        return report

    def _requests(
        self,
        batch: BufferedBatch,
        gradients: BatchGradients,
        sums: Sequence[TableSums],
        looked_up: LookedUp,
    ) -> dict[int, UpdateRequest]:
        """The requests of the servers that have a step to make and have not acknowledged it."""
        packed = batch.packed
        rates = {rate.table: rate.lr for rate in gradients.learning_rates}
        requests: dict[int, UpdateRequest] = {}
        for server in range(len(self._servers)):
            if server in batch.acknowledged:
                continue
            parts = []
            for place, table in enumerate(packed.tables):
                window = slice(*table.starts[server : server + 2])
                signs, summed = table.signs[window], sums[place].sums[window]
                hints = looked_up.hints[place]
                if len(hints) != len(signs):  # a whole array may know more than its numbers
                    hints = hints[window]
                keep = sums[place].keep
                if keep is not None:
                    kept = keep[window]
                    signs, summed, hints = signs[kept], summed[kept], hints[kept]
                if len(signs):
                    number = packed.plan.tables[place].number
                    lr = rates.get(number)
                    parts.append(TableGradients(number, signs, hints, summed, lr))
            if parts:
                requests[server] = UpdateRequest(gradients.update_id, tuple(parts))
        return requests

    def _count_update(self, report: UpdateReport, counts: GradientCounts) -> None:
        with self._lock:
            self._counts["updates"] += 1
            self._counts["repeated_updates"] += report.repeated
            self._counts["missing"] += report.num_missing
            self._counts["skipped_slots"] += len(report.skipped)
            self._skipped_slots.update(report.skipped)
            for name, count in counts.samples.items():
                self._counts[f"nan_samples.{name}"] += count
            for name, count in counts.rows.items():
                self._counts[f"nan_rows.{name}"] += count

    # --- all servers ------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings, also one that is started anew later."""
        self._servers.configure(settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, also one that is started anew later."""
        self._servers.register_optimizer(settings)

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        """Return the tables that a learning rate of a group, or of all groups, is for.

        None leaves out those whose learning rate the embedding config says.

        Raises:
            ConfigError: If there is no such group, or it shares its table with others.
        """
        return tables_at_rate(self._schema, group)

    def ready_for_serving(self) -> bool:
        """Whether every server is ready."""
        return all(self._servers.ask_all("ready_for_serving"))

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
        for answer in self._servers.ask("set_embedding", requests).values():
            if isinstance(answer, Exception):
                raise answer

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows of each server."""
        return self._servers.ask_all("get_embedding_size")

    def server_stats(self) -> list[Mapping[str, int]]:
        """Return the counts of each server: ``ParameterServer.stats``."""
        return self._servers.ask_all("stats")

    def clear_embeddings(self) -> None:
        """Drop every row of every server."""
        self._servers.ask_all("clear_embeddings")

    # --- checkpoints ------------------------------------------------------------------------

    def begin_cut(self, request: CutRequest) -> tuple[CutInfo, ...]:
        """Begin a cut on every server at once.

        Raises:
            CheckpointError: If a server has no rows to speak of yet, or another cut under way.
        """
        return tuple(self._servers.ask_all("begin_cut", request))

    def write_cut(self, request: WriteRequest) -> None:
        """Have every server write its parts, in the background."""
        self._servers.ask_all("write_cut", request)

    def cut_status(self, cut_id: int) -> tuple[CutStatus, ...]:
        """Return how far each server is with a cut."""
        return tuple(self._servers.ask_all("cut_status", cut_id))

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """End a cut on every server; nothing where it has ended."""
        self._servers.ask_all("end_cut", cut_id, committed)

    def flush_changes(self) -> None:
        """Have servers of this process write the rows that have changed, if that is asked for.

        Raises:
            CheckpointError: If they cannot be written.
        """
        for server in self._servers.servers:
            flush = getattr(server, "flush_changes", None)
            if flush is not None:
                flush()

    def load(self, request: LoadRequest) -> tuple[LoadStatus, ...]:
        """Begin a step of a load on every server, or return how far each is with it."""
        return tuple(self._servers.ask_all("load", request))

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and ``in_flight``, the refs now.

        ``forward_buffer_size`` is the most of them there may be.
        ``server_restarts`` counts parameter servers that came back empty.
        Counts by feature are named ``masked_ids.<feature>``, ``nan_samples.<feature>`` and
        ``nan_rows.<feature>``; those that are zero are absent.
        """
        refs = self._refs.stats()
        with self._lock:
            masked = {f"masked_ids.{name}": n for name, n in self._masked_ids.items()}
            counts = {**refs, **self._counts, **masked}
        if self._servers.num_restarts:
            counts["server_restarts"] = self._servers.num_restarts
        return counts

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        """Return what was seen of each feature, with a sketch of its distinct ids."""
        return self._tally.read()

    def measure(self) -> tuple[int, int, int]:
        """Return how many batches wait for a lookup, and for an update, and their bytes."""
        return self._refs.measure()

    def id_counts(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Return by feature: ids, distinct ids batch by batch, masked, gradients skipped."""
        with self._lock:
            names = self._ids.keys() | self._skipped_slots.keys()
            return {
                name: (
                    self._ids[name],
                    self._distinct_ids[name],
                    self._masked_ids[name],
                    self._skipped_slots[name],
                )
                for name in names
            }


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
    given = {item.name: item.gradient for item in gradients.gradients}
    arrays: list[NDArray[np.float32] | None] = []
    for place, (name, feature) in enumerate(zip(names, packed.plan.features, strict=True)):
        gradient = given.get(name)
        if gradient is None:
            arrays.append(None)
        elif (  # what it mostly is, and needs no closer look
            type(gradient) is np.ndarray
            and unscale == 1.0
            and feature.pooled >= 0
            and gradient.dtype is _F32
            and gradient.shape == (packed.batch_size, feature.slot.dim)
            and gradient.flags.c_contiguous
        ):
            arrays.append(cast("NDArray[np.float32]", gradient))
        else:
            arrays.append(_checked_gradient(packed, place, gradient, unscale))
    return arrays


def _checked_gradient(
    packed: PackedBatch,
    place: int,
    gradient: NDArray[np.float32] | NDArray[np.float16],
    unscale: np.float32,
) -> NDArray[np.float32]:
    slot = packed.plan.features[place].slot
    if not isinstance(gradient, np.ndarray) or gradient.dtype not in _GRADIENT_DTYPES:
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
