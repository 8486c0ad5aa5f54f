"""Several embedding-workers as one: what an nn-worker calls in services mode.

A ref belongs to the embedding-worker that registered the batch, so an nn-worker holds a
*handle*, ``replica << 64 | ref``, which no other process sees. Batches that come without a
data-loader are registered here, at each worker in turn, or at the next one if that does not
answer. A worker that did not answer is tried last for a while: a dead one costs some seconds
once, not for each of its batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from persia import env
from persia._rpc.deadlines import Retry
from persia._rpc.messages import (
    BatchGradients,
    EmbeddingWorker,
    FeatureOrder,
    FeatureStats,
    HyperParameters,
    IDFeatures,
    IDRows,
    LookupResult,
    OptimizerSettings,
    RemoteRef,
    Signs,
    TableEntries,
    UpdateReport,
)
from persia._rpc.stubs import RemoteEmbeddingWorker
from persia.errors import (
    ConfigError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    UnknownRef,
)

if TYPE_CHECKING:
    from persia._rpc.zmq_transport import ZmqTransport

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_ROLE = "embedding-worker"
_REF_BITS = 64
# Seconds: of a try where another worker will do; of one at a worker that did not answer lately;
# for how long such a worker is tried last; and between two rounds over all workers.
_TRY_S = 10.0
_PROBE_S = 1.0
AVOID_S = 30.0
_PAUSE_S = 0.1
# Seconds between two lines that name the server a worker waits for.
_LINE_S = 3.0


def handle_of(ids: RemoteRef) -> int:
    """Return the handle of a ref."""
    # May exceed 64 bits; it stays inside this process.
    return ids.worker << _REF_BITS | ids.ref


class WorkerPool:
    """The order in which embedding-workers are tried, for any thread."""

    def __init__(self) -> None:
        self._pool_lock = threading.Lock()  # guards the next
        self._avoided: dict[int, float] = {}  # replica -> monotonic seconds until then

    def is_avoided(self, replica: int) -> bool:
        """Return whether a worker failed lately."""
        with self._pool_lock:
            return self._avoided.get(replica, 0.0) > time.monotonic()

    def avoid(self, replica: int) -> None:
        """Try a worker last for ``AVOID_S`` seconds, as it did not answer."""
        with self._pool_lock:
            self._avoided[replica] = time.monotonic() + AVOID_S

    def readmit(self, replica: int) -> None:
        """End the avoidance of a worker, as it has answered."""
        with self._pool_lock:
            self._avoided.pop(replica, None)

    def order(self, first: int, count: int) -> list[int]:
        """Return the indices of ``count`` workers from ``first`` on, those avoided last."""
        in_turn = [(first + step) % count for step in range(count)]
        # Sorting is stable: within each of the two halves the turn decides. The dict is read
        # without the lock, as a stale answer only costs a try.
        return sorted(in_turn, key=self.is_avoided) if self._avoided else in_turn


def _of_any(declared: F) -> F:
    """Return the method that asks any worker for what a method of the Protocol declares."""

    def call(self: EmbeddingWorkers, *arguments: Any) -> Any:
        return self._call_any(0, declared.__name__, *arguments)[1]

    return cast("F", call)


class EmbeddingWorkers(WorkerPool):
    """Implements ``EmbeddingWorker`` over all embedding-workers of a job.

    ``connect`` returns them by replica index; it is given a function to call with the index of
    one that was restarted. ``transport`` is closed with this.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        connect: Callable[[Callable[[int], None]], Sequence[RemoteEmbeddingWorker]],
    ) -> None:
        super().__init__()
        self._lock = threading.Lock()  # guards the next four
        self._settings: HyperParameters | None = None
        self._optimizer: OptimizerSettings | None = None
        self._order: FeatureOrder | None = None
        self._counts: Counter[str] = Counter()
        self._closed = threading.Event()
        self._transport = transport
        # Last: a restart may be reported while the workers are being connected.
        self._workers = tuple(connect(self._configure_again))
        self.clients = tuple(worker.client for worker in self._workers)  # by replica index
        # Of the workers' embedding config: groups, tables and dims of signs.
        self.schema_fingerprint = self._workers[0].schema_fingerprint

    def close(self) -> None:
        """End the connections."""
        # Before the connections: a call that pauses between two tries ends now.
        self._closed.set()
        for worker in self._workers:
            worker.close()
        self._transport.close()

    def _configure_again(self, replica: int) -> None:
        """Configure a restarted worker, which in turn configures servers that restart."""
        with self._lock:
            settings, optimizer, order = self._settings, self._optimizer, self._order
            self._counts["worker_restarts"] += 1
        # In this order, as servers refuse an optimizer before they are configured.
        if settings is not None:
            self._workers[replica].configure(settings)
        if optimizer is not None:
            self._workers[replica].register_optimizer(optimizer)
        if order is not None:
            self._workers[replica].fix_feature_order(order, None)

    def _owner(self, handle: int) -> tuple[int, int]:
        """Return the replica and the ref of a handle."""
        replica, ref = handle >> _REF_BITS, handle & ((1 << _REF_BITS) - 1)
        # A data-loader chose the replica from its own list of addresses.
        if replica >= len(self._workers):
            raise ConfigError(
                f"a batch was registered at embedding-worker {replica}, but this nn-worker "
                f"knows {len(self._workers)} of them: PERSIA_EMBEDDING_WORKERS differs between "
                "the data-loader and the nn-worker"
            )
        return replica, ref

    # --- calls ------------------------------------------------------------------------------

    def _call(self, replica: int, timeout_s: float, method: str, *arguments: Any) -> Any:
        """Call one worker, and note whether it answers."""
        try:
            answer = self.clients[replica].call(method, *arguments, timeout_s=timeout_s)
        except (ServiceUnavailable, ServiceTimeout):
            # ServiceBusy is an answer: a busy worker is not avoided.
            self.avoid(replica)
            raise
        self.readmit(replica)
        return answer

    def _call_any(self, first: int, method: str, *arguments: Any) -> tuple[int, Any]:
        """Call one worker, or the next if it does not answer; returns which did, and what."""
        # No other worker to try: one call with all of the time, instead of probes.
        if len(self._workers) == 1:
            timeout_s = env.rpc_timeout_s()
            return 0, self.clients[0].call(method, *arguments, timeout_s=timeout_s)
        retry = Retry(
            env.rpc_timeout_s(), first_s=_PAUSE_S, longest_s=_PAUSE_S, stop=self._closed
        )
        failure: ServiceError | None = None
        try_s = _TRY_S
        for _ in retry:
            for replica in self.order(first, len(self._workers)):
                if failure is not None:
                    if retry.left_s <= 0.0 or self._closed.is_set():
                        raise failure
                    logger.warning("%s; another embedding-worker is tried", failure)
                try:
                    timeout_s = min(try_s, retry.left_s)
                    return replica, self._call(replica, timeout_s, method, *arguments)
                except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as error:
                    failure = error
            # A worker that is slow, not dead, must get enough time before the deadline.
            try_s *= 2
        raise failure or ServiceUnavailable("the connections were closed", role=_ROLE)

    def _call_owner(self, replica: int, method: str, *arguments: Any) -> Any:
        """Call the worker that has a batch."""
        # With others the batch can be registered again: the error comes soon if there is no
        # connection to it.
        if len(self._workers) > 1:
            try:
                return self._call(replica, self._try_s(replica), method, *arguments)
            except (ServiceTimeout, ServiceUnavailable, ServiceBusy) as error:
                # The worker itself is unreachable, so its batches are gone. With another
                # role it answered, and a server behind it did not.
                if isinstance(error, ServiceUnavailable) and error.role in ("", _ROLE):
                    raise
                # The worker is slow, or waits for a server that other workers would wait for
                # too; or it restarted and searches for the servers: it then answers UnknownRef.
                logger.warning("%s; it has the batch, so it is waited for", error)
        return self._call(replica, env.rpc_timeout_s(), method, *arguments)

    def _try_s(self, replica: int) -> float:
        return _PROBE_S if self.is_avoided(replica) else _TRY_S

    # --- batches ----------------------------------------------------------------------------

    def register(self, features: IDFeatures) -> int:
        """Take the ids of a batch, at the next worker in turn; returns their handle."""
        first = features.batch_id % len(self._workers)
        return handle_of(RemoteRef(*self._call_any(first, "register", features)))

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        """Return the outputs of a registered batch."""
        replica, own_ref = self._owner(ref)
        result: LookupResult = self._call_owner(replica, "lookup", own_ref, is_training)
        return result if result.ref is None else replace(result, ref=ref)

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Register and look up."""
        # With gradients by two repeatable calls: the loss of an answer then leaves no ref that
        # is never retired.
        if not features.requires_grad:
            first = features.batch_id % len(self._workers)
            result: LookupResult = self._call_any(first, "lookup_direct", features)[1]
            return result
        failure: ServiceError | None = None
        # At once the first time: a worker that restarted has lost the batch, but answers.
        for _ in Retry(env.rpc_timeout_s(), first_s=0.0):
            if failure is not None:
                logger.warning("%s; its ids are registered again", failure)
            handle = self.register(features)
            try:
                return self.lookup(handle, True)
            except (UnknownRef, ServiceUnavailable) as error:
                failure = error
        raise failure or ServiceUnavailable("no time was left", role=_ROLE)

    def update(self, gradients: BatchGradients) -> UpdateReport:
        """Step the rows of a batch and retire its ref."""
        replica, ref = self._owner(gradients.ref)
        report: UpdateReport = self._call_owner(replica, "update", replace(gradients, ref=ref))
        return report

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; it goes with a worker that dies."""
        replica, own_ref = self._owner(ref)
        try:
            self._call(replica, self._try_s(replica), "release", own_ref)
        except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as error:
            logger.warning("a batch was not released: %s", error)
            with self._lock:
                self._counts["not_released"] += 1

    # --- servers ----------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings, by every worker: each has to know them."""
        with self._lock:
            self._settings = settings
        for worker in self._workers:
            self._wait_for_servers(worker)
            worker.configure(settings)

    def _wait_for_servers(self, worker: RemoteEmbeddingWorker) -> None:
        """Wait for a worker that waits for parameter servers, and log for which."""
        # A worker that waits in vain exits: its reason has to be read before that.
        timeout_s = env.rpc_timeout_s()
        origin = worker.client.origin("configure")
        reason = since = ""
        for left_s in Retry(timeout_s, first_s=0.0, longest_s=0.0, stop=self._closed):
            try:
                worker.client.call("ready_for_serving", timeout_s=min(_LINE_S, left_s))
                return
            except ServiceBusy as error:
                reason, since = f"{origin}: {error}", ""
            except (ServiceUnavailable, ServiceTimeout) as error:
                if not reason or error.role != _ROLE:
                    return  # the call of configure that follows raises with the reason
                since = "; and it has gone since"
            if left_s <= _LINE_S:
                raise ServiceUnavailable(
                    f"{reason}{since}; waited {timeout_s:g} s",
                    role="embedding-parameter-server",
                )
            logger.warning("waiting: %s%s", reason, since)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, by every worker."""
        with self._lock:
            self._optimizer = settings
        for worker in self._workers:
            worker.register_optimizer(settings)

    def feature_order(self) -> FeatureOrder | None:
        """Return the order of features; a worker that restarts is given it."""
        order: FeatureOrder | None = self._call_any(0, "feature_order")[1]
        if order is not None:
            with self._lock:
                self._order = order
        return order

    def fix_feature_order(
        self, order: FeatureOrder, replaces: FeatureOrder | None
    ) -> FeatureOrder:
        """Keep an order at every worker; return the one that is there."""
        # One decides, as several ranks may each come with the order of its first batch.
        fixed: FeatureOrder
        first, fixed = self._call_any(0, "fix_feature_order", order, replaces)
        for replica in range(len(self._workers)):
            if replica == first:
                continue
            arguments = "fix_feature_order", fixed, replaces
            try:
                found = self._call(replica, self._try_s(replica), *arguments)
            except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as error:
                # It is given the order when it was restarted.
                logger.warning("an embedding-worker does not know the order: %s", error)
                continue
            if found != fixed:
                # Of a rank that the first one did not answer, and that trains by it already.
                return self.fix_feature_order(found, fixed)
        with self._lock:
            self._order = fixed
        return fixed

    def ready_for_serving(self) -> bool:
        """Return whether every worker finds every server ready."""
        return all(worker.ready_for_serving() for worker in self._workers)

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, each to the server that owns its sign."""
        # Not by another worker if this fails: the write is not repeatable.
        self._workers[0].set_embedding(tables)

    def write_rows(self, rows: IDRows) -> None:
        """Write rows of a feature."""
        # As set_embedding.
        self._workers[0].write_rows(rows)

    def delete_rows(self, feature: str, ids: Signs) -> int:
        """Drop rows of a feature; returns how many there were."""
        # As set_embedding.
        return self._workers[0].delete_rows(feature, ids)

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        """Return the statistics of each feature over all workers."""
        total: dict[str, FeatureStats] = {}
        # Each worker counts its own batches: the sum is over all of them.
        for worker in self._workers:
            for one in worker.feature_stats():
                seen = total.get(one.name)
                total[one.name] = one if seen is None else _merge(seen, one)
        return tuple(total.values())

    def clear_embeddings(self) -> None:
        """Drop every row of every server."""
        # As set_embedding.
        self._workers[0].clear_embeddings()

    # Every worker knows every server, so any answer is complete; each call is idempotent.
    tables_at_rate = _of_any(EmbeddingWorker.tables_at_rate)
    table_info = _of_any(EmbeddingWorker.table_info)
    read_rows = _of_any(EmbeddingWorker.read_rows)
    scan_rows = _of_any(EmbeddingWorker.scan_rows)
    count_rows = _of_any(EmbeddingWorker.count_rows)
    get_embedding_size = _of_any(EmbeddingWorker.get_embedding_size)
    server_stats = _of_any(EmbeddingWorker.server_stats)
    begin_cut = _of_any(EmbeddingWorker.begin_cut)
    write_cut = _of_any(EmbeddingWorker.write_cut)
    cut_status = _of_any(EmbeddingWorker.cut_status)
    end_cut = _of_any(EmbeddingWorker.end_cut)
    load = _of_any(EmbeddingWorker.load)

    def stats(self) -> Mapping[str, int]:
        """Return the sum of all workers' counts, and the counts of this object.

        ``unanswered`` is the number of workers that did not answer; not all of them may.
        """
        with self._lock:
            total = Counter(self._counts)
        failures: list[ServiceError] = []
        for replica in range(len(self._workers)):
            try:
                total.update(self._call_owner(replica, "stats"))
            except (ServiceUnavailable, ServiceTimeout) as error:
                logger.warning("the counts of an embedding-worker are missing: %s", error)
                failures.append(error)
        if len(failures) == len(self._workers):
            raise failures[0]
        if failures:
            total["unanswered"] = len(failures)
        return dict(total)


def _merge(one: FeatureStats, other: FeatureStats) -> FeatureStats:
    return replace(
        one,
        num_samples=one.num_samples + other.num_samples,
        num_empty=one.num_empty + other.num_empty,
        num_ids=one.num_ids + other.num_ids,
        # Sketches of distinct ids merge by the greater of each two registers.
        registers=np.maximum(one.registers, other.registers),
    )
