"""The embedding-worker: batches in flight, between the nn-workers and the servers.

    register(features) -> ref       ids hashed, packed and sorted by server; nothing asked yet
    lookup(ref)                     rows of all servers, pooled; may be repeated
    update(gradients of ref)        one summed gradient per sign, to all servers
    release(ref)                    no gradient will come

Each call may be repeated when its answer is lost: the same batch registered twice has one ref,
a lookup draws the same admissions, an update is applied once (the servers know its id), and one
that is acknowledged is answered again.

    registered ---lookup (training)---> looked up ---update, all servers---> acknowledged
        |                                   |
        +--------- release, expiry ---------+----> released, expired

A ref is a handle that may be used again until it is retired, which the right side is. As many
acknowledged ones as there may be in flight are remembered, with their report.

A plain object: embedded mode calls it, a transport serves it. Any thread may call any method.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import is_matrix
from persia._core.base.halves import widen
from persia._core.base.hashing import owners
from persia._core.base.threads import ThreadPool
from persia._metrics.timings import Timings
from persia._rpc.messages import (
    BatchGradients,
    CutInfo,
    CutRequest,
    CutStatus,
    FeatureOrder,
    FeatureScan,
    FeatureStats,
    Floats,
    FoundRows,
    HyperParameters,
    IDFeatures,
    IDRows,
    IDsRequest,
    LoadRequest,
    LoadStatus,
    LookupResult,
    OptimizerSettings,
    ParameterServer,
    RowPiece,
    Signs,
    SlotOutput,
    TableEntries,
    TableInfo,
    UpdateReport,
    WriteRequest,
)
from persia._worker.compensation import compensated, moved
from persia._worker.packing import (
    BatchPlanner,
    FeatureStatistics,
    LookedUp,
    Maxima,
    PackedBatch,
    check_names,
    join_rows,
    need_hashes,
    pack_batch,
    split_entries,
    split_lookup,
)
from persia._worker.pooling import pool_outputs, split_update, sum_gradients
from persia._worker.rows_by_id import RowsByID
from persia._worker.server_pool import ServerSet
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, tables_at_rate
from persia.errors import DataError, DataTypeError, ServiceBusy, UnknownRef
from persia.logger import get_logger

_logger = get_logger("persia.embedding_worker")

ROLE = "embedding-worker"
_STEPS = ("preprocess", "rpc", "postprocess", "total")  # of a lookup, in names of metrics
_F32 = np.dtype(np.float32)
_ONE = np.float32(1.0)
_GRADIENT_DTYPES = (_F32, np.dtype(np.float16))


class ForwardBuffer:
    """Registers, finds and retires refs; any thread may call it.

    ``forward_buffer_size`` bounds the refs, ``buffered_data_expired_sec`` how long one may lie
    unused, in seconds of ``clock``.
    """

    def __init__(self, settings: EmbeddingWorkerConfig, clock: Callable[[], float]) -> None:
        self._max_in_flight = settings.forward_buffer_size
        self._expiry_s = float(settings.buffered_data_expired_sec)
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        # Upper bits are this worker's incarnation: a ref of one that died must not mean
        # another batch to its successor.
        self._next_ref = secrets.randbits(31) << 32
        # Least recently used first.
        self._in_flight: OrderedDict[int, PackedBatch] = OrderedDict()
        self._ref_of_batch: dict[int, int] = {}  # batch id -> latest registered ref
        self._retired: OrderedDict[int, tuple[tuple[int, int], UpdateReport]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def add(self, batch: PackedBatch, *, is_repeatable: bool) -> PackedBatch:
        """Give a batch a ref; return it, or the same batch that has one already, if it may."""
        with self._lock:
            now = self._clock()
            self._expire(now)
            if is_repeatable:
                known = self._in_flight.get(self._ref_of_batch.get(batch.batch_id, -1))
                if known is not None and known.is_same(batch):
                    self._counts["registered_again"] += 1
                    known.used_at = now
                    self._in_flight.move_to_end(known.ref)
                    return known
            if len(self._in_flight) >= self._max_in_flight:
                self._counts["refused_busy"] += 1
                raise ServiceBusy(
                    f"{len(self._in_flight)} batches are in flight, expected fewer than "
                    f"forward_buffer_size = {self._max_in_flight}; try again when one is done",
                    role=ROLE,
                    method="register",
                )
            batch.ref, batch.used_at = self._next_ref, now
            self._next_ref += 1
            self._in_flight[batch.ref] = batch
            if is_repeatable:
                self._ref_of_batch[batch.batch_id] = batch.ref
            self._counts["registered"] += 1
        return batch

    def find(self, ref: int, method: str) -> PackedBatch:
        """Return a batch in flight, whose expiry begins again, or raise UnknownRef."""
        with self._lock:
            return self._find(ref, method)

    def find_for_update(
        self, ref: int, update_id: tuple[int, int]
    ) -> PackedBatch | UpdateReport:
        """Return a batch in flight, or what this very update was answered, or raise."""
        with self._lock:
            retired = self._retired.get(ref)
            if retired is not None and retired[0] == update_id:
                self._counts["updates_again"] += 1
                return retired[1]
            return self._find(ref, "update")

    def _find(self, ref: int, method: str) -> PackedBatch:
        now = self._clock()
        self._expire(now)
        batch = self._in_flight.get(ref)
        if batch is None:
            raise self.unknown_ref(ref, method)
        batch.used_at = now
        self._in_flight.move_to_end(ref)
        return batch

    def unknown_ref(self, ref: int, method: str) -> UnknownRef:
        """Make the error that says that a ref is not in flight."""
        return UnknownRef(
            f"no batch in flight has ref {ref}: it was acknowledged, released, unused for "
            f"{self._expiry_s:g} s (buffered_data_expired_sec), or is another worker's; "
            f"register the batch again",
            role=ROLE,
            method=method,
        )

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; nothing if it is retired already."""
        with self._lock:
            if self._retire(ref):
                self._counts["released"] += 1

    def acknowledge(
        self, batch: PackedBatch, update_id: tuple[int, int], report: UpdateReport
    ) -> None:
        """Retire a batch whose update is applied, and remember its report."""
        with self._lock:
            self._retire(batch.ref)
            self._retired[batch.ref] = update_id, report
            if len(self._retired) > self._max_in_flight:
                self._retired.popitem(last=False)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, ``in_flight``, the refs now, and how many may be."""
        with self._lock:
            self._expire(self._clock())
            counts = dict(self._counts, forward_buffer_size=self._max_in_flight)
            return counts | {"in_flight": len(self._in_flight)}

    def measure(self) -> tuple[int, int, int]:
        """Return how many batches wait for a lookup, and for an update, and their bytes."""
        with self._lock:
            batches = list(self._in_flight.values())
        # Outside the lock: these are some dozen arrays of each.
        looked_up = sum(batch.looked_up is not None for batch in batches)
        num_bytes = sum(batch.num_bytes() for batch in batches)
        return len(batches) - looked_up, looked_up, num_bytes

    # --- the lock is held -------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """Retire what lies unused for too long."""
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
                "%d batches expired: no lookup and no gradients of them for %g s",
                num_expired,
                self._expiry_s,
            )

    def _retire(self, ref: int) -> bool:
        """Forget a ref; False if it was not in flight."""
        batch = self._in_flight.pop(ref, None)
        if batch is None:
            return False
        if self._ref_of_batch.get(batch.batch_id) == ref:
            del self._ref_of_batch[batch.batch_id]
        return True


class EmbeddingWorker:
    """Implements ``messages.EmbeddingWorker`` over a whole set of parameter servers.

    Args:
        schema: The embedding config.
        settings: Section ``embedding_worker_config``.
        servers: All parameter servers, in any order.
        num_threads: Servers of this process asked at the same time; all of them, if not given.
        num_pooling_threads: Threads that pool one batch, or sum its gradients.
        clock: Monotonic seconds.
        rows_version: Checkpoint that rows must be of; "" for any.
        fails_over: Whether a read raises NotReady, rather than wait, when a server seems dead:
            other embedding-workers have other servers with the same rows.

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
        rows_version: str = "",
        fails_over: bool = False,
    ) -> None:
        need_hashes(schema)
        self._schema = schema
        self._servers = ServerSet(
            servers, schema, num_threads, rows_version, fails_over=fails_over
        )
        self._num_servers = len(servers)
        self._incarnation = secrets.randbits(64)  # first half of the refs of its lookups
        self._threads = ThreadPool(num_pooling_threads)
        self._owners = owners(len(servers))
        self._planner = BatchPlanner(schema)
        self.buffer = ForwardBuffer(settings, clock)
        self.statistics = FeatureStatistics(schema)
        self._rows = RowsByID(
            schema, self._servers, self._owners, self._threads, self.statistics
        )
        self._lock = threading.Lock()  # guards the next two
        self._counts: Counter[str] = Counter()
        self._order: FeatureOrder | None = None
        names = [f"lookup_{step}_time_cost_sec" for step in _STEPS]
        self._compensation = settings.delay_compensation
        own = ["persia_delay_compensation_seconds"] if self._compensation else []
        self.timings = Timings(*names, "update_gradient_time_cost_sec", *own)
        self._pack_time, self._rpc_time, self._pool_time, self._lookup_time = (
            self.timings[name] for name in names
        )
        self._update_time = self.timings["update_gradient_time_cost_sec"]

    def close(self) -> None:
        """Stop the worker's threads; it must not be called afterwards."""
        self._servers.close()
        self._threads.close()

    @property
    def schema(self) -> EmbeddingSchema:
        """The embedding config."""
        return self._schema

    @property
    def servers(self) -> tuple[ParameterServer, ...]:
        """The parameter servers, by replica index."""
        return self._servers.servers

    def reconfigure_server(self, number: int) -> None:
        """Give a parameter server that was restarted its settings; its client calls this."""
        self._servers.reconfigure(number)

    # --- registration -----------------------------------------------------------------------

    def register(self, features: IDFeatures) -> int:
        """Buffer the ids of a batch and return its ref, the same one if it is in flight.

        Raises:
            DataError: If a feature is unknown or comes twice, batch sizes differ, or ids do
                not fit in strict mode.
            ServiceBusy: If ``forward_buffer_size`` batches are in flight.
        """
        return self._register(features, is_repeatable=True).ref

    def _register(self, features: IDFeatures, *, is_repeatable: bool) -> PackedBatch:
        packed = self._pack(features)
        batch = self.buffer.add(packed, is_repeatable=is_repeatable)
        if batch is packed:  # or it is the same that came before, and was counted
            self.statistics.add(packed, self._threads)
        return batch

    def _pack(self, features: IDFeatures) -> PackedBatch:
        begin = time.perf_counter()
        plan = self._planner.plan(tuple([feature.name for feature in features.features]))
        packed = pack_batch(
            features, plan, self._schema, self._owners, self._num_servers, self._threads
        )
        self._pack_time.add(time.perf_counter() - begin)
        return packed

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; nothing if it is retired already."""
        self.buffer.release(ref)

    # --- lookup -----------------------------------------------------------------------------

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        """Return the outputs of a registered batch; the ref stays.

        In training, rows are inserted and used, for an update that follows.

        Raises:
            UnknownRef: If the ref is retired or not this worker's.
            NotConfigured: If it is training and the servers have no settings yet.
        """
        batch = self.buffer.find(ref, "lookup")
        outputs = self._lookup(batch, is_training)
        return LookupResult(outputs, ref if is_training else None)

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Register and look up in one, with their errors.

        Without gradients nothing stays in flight, and no buffer is too full.
        """
        if not features.requires_grad:
            packed = self._pack(features)
            self.statistics.add(packed, self._threads)
            return LookupResult(self._lookup(packed, False), None)
        batch = self._register(features, is_repeatable=False)
        try:
            outputs = self._lookup(batch, True)
        except BaseException:
            self.release(batch.ref)  # the caller has no ref to release it by
            raise
        return LookupResult(outputs, batch.ref)

    def _lookup(self, batch: PackedBatch, is_training: bool) -> tuple[SlotOutput, ...]:
        begin = time.perf_counter()
        requests = split_lookup(batch, is_training, self._num_servers)
        ref = (self._incarnation, batch.ref) if is_training else None
        replies = self._servers.lookup(requests, ref)
        rows, hints = join_rows(batch, replies)
        fetched = time.perf_counter()
        outputs, maxima = pool_outputs(batch, rows, self._threads)
        end = time.perf_counter()
        self._rpc_time.add(fetched - begin)
        self._pool_time.add(end - fetched)
        self._lookup_time.add(end - begin)
        if is_training:
            load_ids = {server: reply.load_id for server, reply in replies.items()}
            # Others than pooled ones have no gradient of a sample.
            is_corrected = self._compensation and any(
                feature.pooled >= 0 for feature in batch.plan.features
            )
            seen = rows if is_corrected else None
            batch.looked_up = LookedUp(hints, maxima, seen, load_ids)
        with self._lock:
            self._counts["lookups"] += 1
        return outputs

    # --- update -----------------------------------------------------------------------------

    def update(self, gradients: BatchGradients) -> UpdateReport:
        """Step the rows of a batch; its ref is retired once all servers have acknowledged.

        Raises:
            UnknownRef: If the ref is retired, unless by this very update, or not this worker's.
            DataError: If a gradient is of no feature of the batch, comes twice, or has another
                shape than its output; if ``scale`` is not a positive number; if no training
                lookup came before.
            DataTypeError: If a gradient is neither f32 nor f16.
            ServiceError: What the first server that failed raised; the ref stays.
        """
        batch = self.buffer.find_for_update(gradients.ref, gradients.update_id)
        if isinstance(batch, UpdateReport):
            return replace(batch, repeated=True)
        with batch.updating:
            if batch.report is not None:  # acknowledged while this call waited
                if batch.update_id != gradients.update_id:
                    raise self.buffer.unknown_ref(gradients.ref, "update")
                return replace(batch.report, repeated=True)
            begin = time.perf_counter()
            report = self._update(batch, gradients)
            self._update_time.add(time.perf_counter() - begin)
            return report

    def _update(self, batch: PackedBatch, gradients: BatchGradients) -> UpdateReport:
        looked_up = batch.looked_up  # replaced by other threads
        if looked_up is None:
            raise DataError(
                f"ref {batch.ref}: expected a training lookup before its gradients, got none"
            )
        maxima, seen = looked_up.maxima, looked_up.rows
        if batch.update_id not in (None, gradients.update_id):
            raise DataError(
                f"ref {batch.ref}: expected update id {batch.update_id} again, which a part of "
                f"the servers have applied, got {gradients.update_id}"
            )
        arrays = _checked_gradients(batch, gradients)
        if seen is not None and not gradients.is_by_id:
            arrays = self._compensated(batch, arrays, seen, maxima, gradients.num_averaged)
        sums, nan_samples, nan_rows = sum_gradients(batch, arrays, maxima, self._threads)
        servers = [x for x in range(self._num_servers) if x not in batch.acknowledged]
        requests = split_update(batch, gradients, sums, looked_up, servers)
        batch.update_id = gradients.update_id
        failure: Exception | None = None
        replies = self._servers.update(requests, (self._incarnation, batch.ref))
        for server, reply in replies.items():
            if isinstance(reply, Exception):
                failure = failure or reply
            else:
                batch.acknowledged[server] = reply
        if failure is not None:
            with self._lock:
                self._counts["failed_updates"] += 1
            raise failure
        num_missing, repeated = 0, False
        for reply in batch.acknowledged.values():
            num_missing += reply.num_missing
            repeated = repeated or reply.repeated
        names = zip(batch.plan.names, arrays, strict=True)
        skipped = tuple([name for name, array in names if array is None])
        report = UpdateReport(num_missing, nan_samples, nan_rows, skipped, repeated)
        batch.report = report
        self.buffer.acknowledge(batch, gradients.update_id, report)
        self._count_update(report)
        return report

    def _compensated(
        self,
        batch: PackedBatch,
        gradients: list[Floats | None],
        seen: Sequence[Floats],
        maxima: Maxima,
        num_averaged: int,
    ) -> list[Floats | None]:
        """Correct gradients for what rows have moved by since the lookup that saw ``seen``."""
        begin = time.perf_counter()
        if batch.movement is None:
            # As in evaluation: it changes neither rows nor their order of use.
            requests = split_lookup(batch, False, self._num_servers)
            rows, _ = join_rows(batch, self._servers.lookup(requests))
            batch.movement = moved(seen, rows)
        # Gradients are this rank's part of a mean over ranks, the formula's of its own loss.
        strength = self._compensation * num_averaged
        found = compensated(batch, gradients, batch.movement, maxima, strength, self._threads)
        self.timings["persia_delay_compensation_seconds"].add(time.perf_counter() - begin)
        return found

    def _count_update(self, report: UpdateReport) -> None:
        with self._lock:
            self._counts["updates"] += 1
            self._counts["repeated_updates"] += report.repeated
            self._counts["missing"] += report.num_missing
            self._counts["skipped_slots"] += len(report.skipped)
            for name, count in report.nan_samples.items():
                self._counts[f"nan_samples.{name}"] += count
            for name, count in report.nan_rows.items():
                self._counts[f"nan_rows.{name}"] += count
        if report.skipped:
            self.statistics.add_skipped(report.skipped)

    # --- all servers ------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings, also one that is restarted later."""
        self._servers.configure_all("configure", settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, also one that is restarted later."""
        self._servers.configure_all("register_optimizer", settings)

    def feature_order(self) -> FeatureOrder | None:
        """Return the order in which models receive features; None before it is fixed."""
        return self._order

    def fix_feature_order(
        self, order: FeatureOrder, replaces: FeatureOrder | None
    ) -> FeatureOrder:
        """Keep an order, unless one other than ``replaces`` is there; return what is there."""
        with self._lock:
            if self._order is None or self._order == replaces:
                self._order = order
            return self._order

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        """Return the tables that a learning rate of a group is for; None is all without one.

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
            StoreError: If a table is unknown or lengths differ; DimMismatch of another dim.
        """
        requests = split_entries(tables, self._owners, self._num_servers)
        for answer in self._servers.ask("set_embedding", requests).values():
            if isinstance(answer, Exception):
                raise answer

    def table_info(self, feature: str) -> TableInfo:
        """Return what the embedding config says of a feature's rows; DataError: unknown."""
        return self._rows.info(feature)

    def read_rows(self, request: IDsRequest) -> FoundRows:
        """Return rows by id, in the order asked for."""
        return self._rows.read(request)

    def write_rows(self, rows: IDRows) -> None:
        """Write rows by id, each to the server that owns its sign."""
        self._rows.write(rows)

    def delete_rows(self, feature: str, ids: Signs) -> int:
        """Drop rows by id; returns how many there were."""
        return self._rows.delete(feature, ids)

    def scan_rows(self, request: FeatureScan) -> RowPiece:
        """Return a piece of a feature's rows on one server."""
        return self._rows.scan(request)

    def count_rows(self, feature: str) -> list[int]:
        """Return the number of a feature's rows on each server."""
        return self._rows.count(feature)

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
        """Begin a cut on every server at once."""
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
        """Have servers of this process write the rows that have changed, if they are to."""
        for server in self._servers.servers:
            flush = getattr(server, "flush_changes", None)
            if flush is not None:
                flush()

    def load(self, request: LoadRequest) -> tuple[LoadStatus, ...]:
        """Begin a step of a load on every server, or return how far each is with it."""
        return tuple(self._servers.ask_all("load", request))

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and ``in_flight``, the refs now.

        Counts by feature are named ``masked_ids.<feature>``, ``nan_samples.<feature>`` and
        ``nan_rows.<feature>``; those that are zero are absent. With a delay compensation there
        are ``compensated_updates``, those for which rows were looked up again, and the
        microseconds that it took.
        """
        counts = self.statistics.count_ids()
        buffered = self.buffer.stats()
        with self._lock:
            stats = {**buffered, **self._counts}
        stats.update({f"masked_ids.{name}": n for name, (*_, n, _) in counts.items() if n})
        if self._compensation:
            took = self.timings["persia_delay_compensation_seconds"].read()
            stats["compensated_updates"] = took.num
            stats["compensation_us"] = round(took.seconds * 1e6)
        if self._servers.num_restarts:
            stats["server_restarts"] = self._servers.num_restarts
        return stats

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        """Return what was seen of each feature, with a sketch of its distinct ids."""
        return self.statistics.read()


def _checked_gradients(
    packed: PackedBatch, gradients: BatchGradients
) -> list[NDArray[np.float32] | None]:
    """Return the gradients as f32 without the loss's scale, in the order of the features."""
    names = packed.plan.names
    given: dict[str, Any] = {item.name: item.gradient for item in gradients.gradients}
    if len(given) != len(gradients.gradients) or given.keys() - names:
        check_names([x.name for x in gradients.gradients], names, "the batch of this ref")
    unscale = _ONE if gradients.scale == 1.0 else _unscale(gradients)
    if gradients.num_averaged < 1:
        raise DataError(
            f"num_averaged of ref {gradients.ref}: expected at least 1 rank, got "
            f"{gradients.num_averaged}"
        )
    arrays: list[NDArray[np.float32] | None] = []
    for place, (name, feature) in enumerate(zip(names, packed.plan.features, strict=True)):
        gradient = given.get(name)
        if gradient is None:
            arrays.append(None)
        elif (  # what it mostly is, and needs no closer look
            unscale is _ONE
            and feature.pooled >= 0
            and is_matrix(gradient, packed.batch_size, feature.slot.dim)
        ):
            arrays.append(gradient)
        else:
            arrays.append(_checked_gradient(packed, place, gradient, unscale))
    return arrays


def _unscale(gradients: BatchGradients) -> np.float32:
    """Return what the gradients are multiplied by."""
    scale = gradients.scale
    with np.errstate(all="ignore"):
        unscale: np.float32 = np.float32(1.0 / scale) if scale > 0.0 else np.float32(np.nan)
    if not np.isfinite(unscale) or unscale == 0.0:
        raise DataError(
            f"scale of ref {gradients.ref}: expected a positive number with a reciprocal in "
            f"f32, got {scale}"
        )
    return unscale


def _checked_gradient(
    packed: PackedBatch,
    place: int,
    gradient: NDArray[np.float32] | NDArray[np.float16],
    unscale: np.float32,
) -> NDArray[np.float32]:
    plan = packed.plan.features[place]
    slot = plan.slot
    if not isinstance(gradient, np.ndarray) or gradient.dtype not in _GRADIENT_DTYPES:
        got = gradient.dtype if isinstance(gradient, np.ndarray) else type(gradient).__name__
        raise DataTypeError(
            f"gradient of feature {slot.name!r}: expected float32 or float16, got {got}"
        )
    num_rows = packed.batch_size
    if plan.pooled < 0:
        num_rows = packed.features[place].ids.num_distinct
    if gradient.shape != (num_rows, slot.dim):
        raise DataError(
            f"gradient of feature {slot.name!r} ({slot.pooling}): expected shape "
            f"{[num_rows, slot.dim]}, got {list(gradient.shape)}"
        )
    if gradient.dtype == np.float16:
        halves = np.ascontiguousarray(gradient).reshape(-1).view(np.uint16)
        floats = widen(halves, "float16").reshape(gradient.shape)
    else:
        floats = np.ascontiguousarray(gradient, np.float32)
    if unscale != 1.0:
        # Inf and overflow are looked for when the sums are; they are no event here.
        with np.errstate(all="ignore"):
            floats = floats * unscale
    return floats
