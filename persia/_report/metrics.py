"""The metrics of one context, as sources.

A source keeps what it was read last (for ratios since then), so it lives as long as the
component that it reads, whatever else comes and goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia._cluster import metric_sources
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import MetricSource, Sample
from persia._rpc.worker_pool import EmbeddingWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.inflight import InFlightTracker
    from persia._training.receiver import Stream


class TrainingMetrics:
    """The sources of one context.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[int, MetricSource] = {}  # by id of what they tell of, which they keep
        # Of the training loop's last step: how many there were, and its loss.
        self._steps = 0
        self._loss: Callable[[], float] | None = None
        self._engine: BackwardPipeline | None = None

    def note_step(self, steps: int, loss: Callable[[], float]) -> None:
        """Note the last step; its loss is computed when it is read."""
        self._steps = steps
        self._loss = loss

    def sources(
        self,
        worker: EmbeddingWorker,
        book: InFlightTracker,
        engine: BackwardPipeline | None,
        stream: Stream | None,
    ) -> list[MetricSource]:
        """Return what there is to be read now."""
        self._engine = engine
        found: dict[int, MetricSource] = {}

        def add(of: object, make: Callable[[], MetricSource]) -> None:
            found[id(of)] = self._known.get(id(of)) or make()

        add(book, lambda: metric_sources.of_inflight(TRAINER, self._rank, book))
        add(self, lambda: MetricSource(TRAINER, self._rank, "steps", self, self._read))
        if stream is not None:
            receiver, server = stream.receiver, stream.server
            add(receiver, lambda: metric_sources.of_receiver(TRAINER, self._rank, receiver))
            add(server, lambda: metric_sources.of_rpc_server(TRAINER, self._rank, server))
        if isinstance(worker, EmbeddingWorkers):
            clients = worker.clients
            add(worker, lambda: metric_sources.of_clients(TRAINER, self._rank, worker, clients))
        else:
            for of, make in metric_sources.of_embedded(worker):
                add(of, make)
        self._known = found
        return list(found.values())

    def _read(self) -> Iterable[Sample]:
        yield Sample("persia_steps", self._steps)
        if self._loss is not None:
            yield Sample("persia_loss", self._loss())
        engine = self._engine
        num_waiting, num_bytes = (0, 0) if engine is None else engine.measure()
        yield Sample("persia_update_queue_batches", num_waiting)
        yield Sample("persia_update_queue_bytes", num_bytes)
