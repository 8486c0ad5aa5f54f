"""Several embedding-workers as one: what an nn-worker asks in services mode.

A batch belongs to the embedding-worker that registered it, so a ref of it says which: its
*handle* is ``replica << 64 | ref``, which no other process ever sees. Batches that come without
a data-loader are registered here, in turn, and at another worker if the one whose turn it is
does not answer. One that did not answer is asked last for a while, so that a dead worker costs
its batches some seconds once, not each of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from persia import env
from persia._rpc.client import Client
from persia._rpc.deadlines import Tries
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
    RemoteRef,
    TableEntries,
    UpdateReport,
    WriteRequest,
)
from persia.errors import (
    ConfigError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    UnknownRef,
)

if TYPE_CHECKING:
    from persia._rpc.stubs import RemoteEmbeddingWorker
    from persia._rpc.transport import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ROLE = "embedding-worker"
_REF_BITS = 64
# Seconds before another worker is tried, where another will do; of one that did not answer
# lately; how long that is; and between two rounds over all of them.
_TRY_S = 10.0
_PROBE_S = 1.0
_AVOID_S = 30.0
_PAUSE_S = 0.1
# Seconds between two lines that say which server a worker waits for.
_LINE_S = 3.0


def handle_of(ids: RemoteRef) -> int:
    """Return the handle of a ref."""
    return ids.worker << _REF_BITS | ids.ref


class EmbeddingWorkers:
    """Implements ``messages.EmbeddingWorker`` over all of a job's.

    Args:
        transport: Closed with this.
        connect: Returns the workers by replica index; is given what to call with the index of
            one that was restarted.
    """

    def __init__(
        self,
        transport: Transport,
        connect: Callable[[Callable[[int], None]], Sequence[RemoteEmbeddingWorker]],
    ) -> None:
        self._lock = threading.Lock()  # guards the next four
        self._avoided: dict[int, float] = {}  # replica -> monotonic seconds until then
        self._settings: HyperParameters | None = None
        self._optimizer: OptimizerSettings | None = None
        self._counts: Counter[str] = Counter()
        self._closed = threading.Event()
        self._transport = transport
        self._workers = tuple(connect(self._configure_again))

    @property
    def schema_fingerprint(self) -> str:
        """What the workers take signs and tables to mean."""
        return self._workers[0].schema_fingerprint

    @property
    def clients(self) -> tuple[Client, ...]:
        """What calls go through, by replica index."""
        return tuple(worker.client for worker in self._workers)

    def close(self) -> None:
        """End the connections."""
        self._closed.set()
        for worker in self._workers:
            worker.close()
        self._transport.close()

    def _configure_again(self, replica: int) -> None:
        """Tell a worker that was restarted what it has to tell servers that are."""
        with self._lock:
            settings, optimizer = self._settings, self._optimizer
            self._counts["worker_restarts"] += 1
        if settings is not None:
            self._workers[replica].configure(settings)
        if optimizer is not None:
            self._workers[replica].register_optimizer(optimizer)

    def _of(self, handle: int) -> tuple[RemoteEmbeddingWorker, int]:
        replica, ref = handle >> _REF_BITS, handle & ((1 << _REF_BITS) - 1)
        if replica >= len(self._workers):
            raise ConfigError(
                f"a batch was registered at embedding-worker {replica}, but this nn-worker "
                f"knows {len(self._workers)} of them: PERSIA_EMBEDDING_WORKERS differs between "
                "the data-loader and the nn-worker"
            )
        return self._workers[replica], ref

    def _is_avoided(self, worker: RemoteEmbeddingWorker) -> bool:
        with self._lock:
            return self._avoided.get(worker.replica_index, 0.0) > time.monotonic()

    def _ask(
        self,
        worker: RemoteEmbeddingWorker,
        ask: Callable[[RemoteEmbeddingWorker, float], T],
        timeout_s: float,
    ) -> T:
        """Ask one worker, and note whether it answers."""
        try:
            answer = ask(worker, timeout_s)
        except (ServiceUnavailable, ServiceTimeout):
            with self._lock:
                self._avoided[worker.replica_index] = time.monotonic() + _AVOID_S
            raise
        with self._lock:
            self._avoided.pop(worker.replica_index, None)
        return answer

    def _any(self, first: int, ask: Callable[[RemoteEmbeddingWorker, float], T]) -> T:
        """Ask one worker, or the next ones if it does not answer, until the deadline."""
        count = len(self._workers)
        left = timeout_s = env.rpc_timeout_s()
        if count == 1:
            return ask(self._workers[0], timeout_s)
        deadline = time.monotonic() + timeout_s
        in_turn = [self._workers[(first + step) % count] for step in range(count)]
        try_s = _TRY_S
        while True:
            for worker in sorted(in_turn, key=self._is_avoided):
                try:
                    return self._ask(worker, ask, max(0.0, min(try_s, left)))
                except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as error:
                    left = deadline - time.monotonic()
                    if left <= 0.0 or self._closed.is_set():
                        raise
                    logger.warning("%s; another embedding-worker is asked", error)
            self._closed.wait(_PAUSE_S)
            try_s *= 2

    def _owner(
        self,
        worker: RemoteEmbeddingWorker,
        ask: Callable[[RemoteEmbeddingWorker, float], T],
    ) -> T:
        """Ask the worker that has a batch, which another can be given if this one is gone.

        Raises:
            ServiceUnavailable: If there is no connection to it; soon, if there are others.
        """
        if len(self._workers) > 1:
            try:
                return self._ask(worker, ask, _PROBE_S if self._is_avoided(worker) else _TRY_S)
            except (ServiceTimeout, ServiceUnavailable, ServiceBusy) as error:
                if isinstance(error, ServiceUnavailable) and error.role in ("", _ROLE):
                    raise
                # It is there, and slow, or waits for a server that others would wait for too;
                # or was started anew and looks for the servers: then it will not know the ref.
                logger.warning("%s; it has the batch, and is waited for", error)
        return self._ask(worker, ask, env.rpc_timeout_s())

    # --- batches ----------------------------------------------------------------------------

    def register(self, features: IDFeatures) -> int:
        """Take the ids of a batch, at the worker whose turn it is; returns their handle."""

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> int:
            ref: int = worker.client.call("register", features, timeout_s=timeout_s)
            return handle_of(RemoteRef(worker.replica_index, ref))

        return self._any(features.batch_id % len(self._workers), ask)

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        """Return the outputs of a registered batch."""
        worker, theirs = self._of(ref)

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> LookupResult:
            result: LookupResult = worker.client.call(
                "lookup", theirs, is_training, timeout_s=timeout_s
            )
            return result

        result = self._owner(worker, ask)
        return result if result.ref is None else replace(result, ref=ref)

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Register and look up.

        With gradients these are two calls, each of which can be repeated: a lost answer then
        leaves no ref that nobody knows.
        """
        if not features.requires_grad:

            def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> LookupResult:
                result: LookupResult = worker.client.call(
                    "lookup_direct", features, timeout_s=timeout_s
                )
                return result

            return self._any(features.batch_id % len(self._workers), ask)
        tries = Tries(env.rpc_timeout_s())
        while True:
            handle = self.register(features)
            try:
                return self.lookup(handle, True)
            except (UnknownRef, ServiceUnavailable) as error:
                if not tries.another():
                    raise
                logger.warning("%s; its ids are registered again", error)

    def update(self, gradients: BatchGradients) -> UpdateReport:
        """Step the rows of a batch and retire its ref."""
        worker, ref = self._of(gradients.ref)
        theirs = replace(gradients, ref=ref)

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> UpdateReport:
            report: UpdateReport = worker.client.call("update", theirs, timeout_s=timeout_s)
            return report

        return self._owner(worker, ask)

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come; a dead worker's has gone with it."""
        worker, theirs = self._of(ref)

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> None:
            worker.client.call("release", theirs, timeout_s=timeout_s)

        try:
            self._ask(worker, ask, _PROBE_S if self._is_avoided(worker) else _TRY_S)
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
        """Wait for a worker that waits for parameter servers, and say for which.

        If they do not come it ends, and nobody else could say why.

        Raises:
            ServiceUnavailable: If they are missing at the deadline.
        """
        timeout_s = env.rpc_timeout_s()
        deadline = time.monotonic() + timeout_s
        place = worker.client.place("configure")
        why = since = ""
        while not self._closed.is_set():
            left = deadline - time.monotonic()
            try:
                worker.client.call("ready_for_serving", timeout_s=max(0.0, min(_LINE_S, left)))
                return
            except ServiceBusy as error:
                why, since = f"{place}: {error}", ""
            except (ServiceUnavailable, ServiceTimeout) as error:
                if not why or error.role != _ROLE:
                    return  # the call that comes says whom it waits for
                since = "; and it has gone since"
            if left <= _LINE_S:
                raise ServiceUnavailable(
                    f"{why}{since}; waited {timeout_s:g} s",
                    role="embedding-parameter-server",
                )
            logger.warning("waiting: %s%s", why, since)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer, by every worker."""
        with self._lock:
            self._optimizer = settings
        for worker in self._workers:
            worker.register_optimizer(settings)

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        """Return the tables that a learning rate of a group, or of all groups, is for."""

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> tuple[int, ...]:
            tables: tuple[int, ...] = worker.client.call(
                "tables_at_rate", group, timeout_s=timeout_s
            )
            return tables

        return self._any(0, ask)

    def ready_for_serving(self) -> bool:
        """Whether every worker finds every server ready."""
        return all(worker.ready_for_serving() for worker in self._workers)

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, each to the server that owns its sign."""
        self._workers[0].set_embedding(tables)

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows of each server."""

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> list[int]:
            sizes: list[int] = worker.client.call("get_embedding_size", timeout_s=timeout_s)
            return sizes

        return self._any(0, ask)

    def server_stats(self) -> list[Mapping[str, int]]:
        """Return the counts of each server."""

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> list[Mapping[str, int]]:
            stats: list[Mapping[str, int]] = worker.client.call(
                "server_stats", timeout_s=timeout_s
            )
            return stats

        return self._any(0, ask)

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        """Return what all workers together have seen of each feature."""
        total: dict[str, FeatureStats] = {}
        for worker in self._workers:
            for one in worker.feature_stats():
                seen = total.get(one.name)
                total[one.name] = one if seen is None else _together(seen, one)
        return tuple(total.values())

    def clear_embeddings(self) -> None:
        """Drop every row of every server."""
        self._workers[0].clear_embeddings()

    # --- checkpoints ------------------------------------------------------------------------

    def begin_cut(self, request: CutRequest) -> tuple[CutInfo, ...]:
        """Begin a cut on every server at once; any worker that answers passes it on."""
        infos: tuple[CutInfo, ...] = self._pass_on("begin_cut", request)
        return infos

    def write_cut(self, request: WriteRequest) -> None:
        """Have every server write its parts, in the background."""
        self._pass_on("write_cut", request)

    def cut_status(self, cut_id: int) -> tuple[CutStatus, ...]:
        """Return how far each server is with a cut."""
        statuses: tuple[CutStatus, ...] = self._pass_on("cut_status", cut_id)
        return statuses

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """End a cut on every server."""
        self._pass_on("end_cut", cut_id, committed)

    def load(self, request: LoadRequest) -> tuple[LoadStatus, ...]:
        """Begin a step of a load on every server, or return how far each is with it."""
        statuses: tuple[LoadStatus, ...] = self._pass_on("load", request)
        return statuses

    def _pass_on(self, method: str, *arguments: object) -> Any:
        """Ask a worker for what all servers are to do; asked again, it changes nothing."""
        return self._any(
            0,
            lambda worker, timeout_s: worker.client.call(
                method, *arguments, timeout_s=timeout_s
            ),
        )

    def stats(self) -> Mapping[str, int]:
        """Return the counts of all workers together, and what was seen of them here.

        ``unanswered`` is the number of workers whose own counts are missing, as they are gone.

        Raises:
            ServiceError: If none of them answers.
        """

        def ask(worker: RemoteEmbeddingWorker, timeout_s: float) -> Mapping[str, int]:
            stats: Mapping[str, int] = worker.client.call("stats", timeout_s=timeout_s)
            return stats

        with self._lock:
            total = Counter(self._counts)
        failures: list[ServiceError] = []
        for worker in self._workers:
            try:
                total.update(self._owner(worker, ask))
            except (ServiceUnavailable, ServiceTimeout) as error:
                logger.warning("the counts of an embedding-worker are missing: %s", error)
                failures.append(error)
        if len(failures) == len(self._workers):
            raise failures[0]
        if failures:
            total["unanswered"] = len(failures)
        return dict(total)


def _together(one: FeatureStats, other: FeatureStats) -> FeatureStats:
    return FeatureStats(
        one.name,
        one.dim,
        one.num_samples + other.num_samples,
        one.num_empty + other.num_empty,
        one.num_ids + other.num_ids,
        np.maximum(one.registers, other.registers),
    )
