"""The embedding-worker: batches in flight, between the nn-workers and the servers.

    register(features) -> ref       ids hashed, packed and sorted by server; nothing asked yet
    lookup(ref)                     rows of all servers, pooled; may be repeated
    update(gradients of ref)        one summed gradient per sign, to all servers
    release(ref)                    no gradient will come

Each call may be repeated when its answer is lost (see ``forward_buffer``): the same batch
registered twice has one ref, a lookup draws the same admissions, an update is applied once (the
servers know its id), and one that is acknowledged is answered again.

A plain object: embedded mode calls it, a transport serves it. Any thread may call any method.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.base.hashing import owners
from persia._core.base.threads import ThreadPool
from persia._metrics.timings import Timings
from persia._rpc.messages import (
    BatchGradients,
    CutInfo,
    CutRequest,
    CutStatus,
    FeatureStats,
    HyperParameters,
    IDFeatures,
    LoadRequest,
    LoadStatus,
    LookupResult,
    OptimizerSettings,
    ParameterServer,
    SlotOutput,
    TableEntries,
    UpdateReport,
    WriteRequest,
)
from persia._worker.batch_plan import BatchPlanner, check_names
from persia._worker.feature_statistics import FeatureStatistics
from persia._worker.forward_buffer import BufferedBatch, ForwardBuffer
from persia._worker.packing import (
    PackedBatch,
    join_rows,
    pack_batch,
    split_entries,
    split_lookup,
)
from persia._worker.pooling import (
    GradientCounts,
    pool_outputs,
    split_update,
    sum_gradients,
)
from persia._worker.server_pool import ServerSet
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, tables_at_rate
from persia.errors import DataError, DataTypeError

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
        self._num_servers = len(servers)
        self._threads = ThreadPool(num_pooling_threads)
        self._owners = owners(len(servers))
        self._planner = BatchPlanner(schema)
        self._buffer = ForwardBuffer(settings, clock)
        self._statistics = FeatureStatistics(schema)
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[str] = Counter()
        names = ("preprocess", "rpc", "postprocess", "total")
        self.timings = Timings(
            *(f"lookup_{name}_time_cost_sec" for name in names),
            "update_gradient_time_cost_sec",
        )
        self._pack_time, self._rpc_time, self._pool_time, self._lookup_time = (
            self.timings[f"lookup_{name}_time_cost_sec"] for name in names
        )
        self._update_time = self.timings["update_gradient_time_cost_sec"]

    def close(self) -> None:
        """Stop the worker's threads; it must not be called afterwards."""
        self._servers.close()
        self._threads.close()

    @property
    def servers(self) -> tuple[ParameterServer, ...]:
        """The parameter servers, by replica index."""
        return self._servers.servers

    def reconfigure_server(self, number: int) -> None:
        """Give a parameter server that was restarted its settings; its rows are lost.

        Args:
            number: The server's, whose client calls this, see ``Client``.
        """
        self._servers.reconfigure(number)

    # --- registration -----------------------------------------------------------------------

    def register(self, features: IDFeatures) -> int:
        """Buffer the ids of a batch and return its ref.

        The same batch (batch id, features and ids) has the same ref as long as it is in
        flight, so a call without an answer may be repeated.

        Raises:
            DataError: If a feature is unknown or comes twice, batch sizes differ, or ids do
                not fit in strict mode.
            ServiceBusy: If ``forward_buffer_size`` batches are in flight.
        """
        return self._register(features, is_repeatable=True).ref

    def _register(self, features: IDFeatures, *, is_repeatable: bool) -> BufferedBatch:
        packed = self._pack(features)
        batch, is_new = self._buffer.add(features, packed, is_repeatable=is_repeatable)
        if is_new:
            self._statistics.add(packed, is_training=features.requires_grad)
        return batch

    def _pack(self, features: IDFeatures) -> PackedBatch:
        begin = time.perf_counter()
        plan = self._planner.plan(tuple([feature.name for feature in features.features]))
        packed = pack_batch(
            features.features,
            plan,
            self._schema,
            self._owners,
            self._num_servers,
            self._threads,
        )
        self._pack_time.add(time.perf_counter() - begin)
        return packed

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; nothing if it is retired already."""
        self._buffer.release(ref)

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
        batch = self._buffer.find(ref, "lookup")
        outputs = self._lookup(batch.packed, batch.batch_id, batch if is_training else None)
        return LookupResult(outputs, ref if is_training else None)

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Register and look up in one; without gradients nothing stays in flight.

        Raises:
            DataError: As ``register``.
            ServiceBusy: As ``register``, if gradients are to follow.
            NotConfigured: If it is training and the servers have no settings yet.
        """
        if not features.requires_grad:
            packed = self._pack(features)
            self._statistics.add(packed, is_training=False)
            return LookupResult(self._lookup(packed, features.batch_id, None), None)
        batch = self._register(features, is_repeatable=False)
        try:
            outputs = self._lookup(batch.packed, batch.batch_id, batch)
        except BaseException:
            self.release(batch.ref)  # the caller has no ref to release it by
            raise
        return LookupResult(outputs, batch.ref)

    def _lookup(
        self, packed: PackedBatch, batch_id: int, training: BufferedBatch | None
    ) -> tuple[SlotOutput, ...]:
        begin = time.perf_counter()
        requests = split_lookup(packed, batch_id, training is not None, self._num_servers)
        rows, hints = join_rows(packed, self._servers.lookup(requests))
        fetched = time.perf_counter()
        outputs, maxima = pool_outputs(packed, rows, self._threads)
        end = time.perf_counter()
        self._rpc_time.add(fetched - begin)
        self._pool_time.add(end - fetched)
        self._lookup_time.add(end - begin)
        if training is not None:
            training.looked_up = hints, maxima
        with self._lock:
            self._counts["lookups"] += 1
        return outputs

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
        batch = self._buffer.find_for_update(gradients.ref, gradients.update_id)
        if isinstance(batch, UpdateReport):
            return replace(batch, repeated=True)
        with batch.updating:
            if batch.report is not None:  # acknowledged while this call waited
                if batch.update_id != gradients.update_id:
                    raise self._buffer.unknown_ref(gradients.ref, "update")
                return replace(batch.report, repeated=True)
            begin = time.perf_counter()
            report = self._update(batch, gradients)
            self._update_time.add(time.perf_counter() - begin)
            return report

    def _update(self, batch: BufferedBatch, gradients: BatchGradients) -> UpdateReport:
        if batch.looked_up is None:
            raise DataError(
                f"ref {batch.ref}: expected a training lookup before its gradients, got none"
            )
        hints, maxima = batch.looked_up
        if batch.update_id not in (None, gradients.update_id):
            raise DataError(
                f"ref {batch.ref}: expected update id {batch.update_id} again, which a part of "
                f"the servers have applied, got {gradients.update_id}"
            )
        arrays = _checked_gradients(batch.packed, gradients)
        sums, counts = sum_gradients(batch.packed, arrays, maxima, self._threads)
        servers = [x for x in range(self._num_servers) if x not in batch.acknowledged]
        requests = split_update(batch.packed, gradients, sums, hints, servers)
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
        num_missing, repeated = 0, False
        for reply in batch.acknowledged.values():
            num_missing += reply.num_missing
            repeated = repeated or reply.repeated
        names = zip(batch.packed.plan.names, arrays, strict=True)
        skipped = tuple([name for name, array in names if array is None])
        report = UpdateReport(num_missing, counts.samples, counts.rows, skipped, repeated)
        batch.report = report
        self._buffer.acknowledge(batch, gradients.update_id, report)
        self._count_update(report, counts)
        return report

    def _count_update(self, report: UpdateReport, counts: GradientCounts) -> None:
        with self._lock:
            self._counts["updates"] += 1
            self._counts["repeated_updates"] += report.repeated
            self._counts["missing"] += report.num_missing
            self._counts["skipped_slots"] += len(report.skipped)
            for name, count in counts.samples.items():
                self._counts[f"nan_samples.{name}"] += count
            for name, count in counts.rows.items():
                self._counts[f"nan_rows.{name}"] += count
        if report.skipped:
            self._statistics.add_skipped(report.skipped)

    # --- all servers ------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings, also one that is restarted later."""
        self._servers.configure_all("configure", settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, also one that is restarted later."""
        self._servers.configure_all("register_optimizer", settings)

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
        requests = split_entries(tables, self._owners, self._num_servers)
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
        counts = self._statistics.count_ids()
        buffered = self._buffer.stats()
        with self._lock:
            stats = {**buffered, **self._counts}
        stats.update({f"masked_ids.{name}": n for name, (*_, n, _) in counts.items() if n})
        if self._servers.num_restarts:
            stats["server_restarts"] = self._servers.num_restarts
        return stats

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        """Return what was seen of each feature, with a sketch of its distinct ids."""
        return self._statistics.read()

    def measure(self) -> tuple[int, int, int]:
        """Return how many batches wait for a lookup, and for an update, and their bytes."""
        return self._buffer.measure()

    def id_counts(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Return by feature: ids, distinct ids batch by batch, masked, gradients skipped."""
        return self._statistics.count_ids()


def _checked_gradients(
    packed: PackedBatch, gradients: BatchGradients
) -> list[NDArray[np.float32] | None]:
    """Return the gradients as f32 without the loss's scale, in the order of the features."""
    names = packed.plan.names
    given: dict[str, Any] = {item.name: item.gradient for item in gradients.gradients}
    if len(given) != len(gradients.gradients) or given.keys() - names:
        check_names([x.name for x in gradients.gradients], names, "the batch of this ref")
    scale = gradients.scale
    with np.errstate(all="ignore"):
        unscale = np.float32(1.0 / scale) if scale > 0.0 else np.float32(np.nan)
    if not np.isfinite(unscale) or unscale == 0.0:
        raise DataError(
            f"scale of ref {gradients.ref}: expected a positive number with a reciprocal in "
            f"f32, got {scale}"
        )
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
            arrays.append(gradient)
        else:
            arrays.append(_checked_gradient(packed, place, gradient, unscale))
    return arrays


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
    floats = np.ascontiguousarray(gradient, np.float32)
    if unscale != 1.0:
        # Inf and overflow are looked for when the sums are; they are no event here.
        with np.errstate(all="ignore"):
            floats = floats * unscale
    return floats
