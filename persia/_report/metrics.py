"""The metrics of one context, as sources.

A source keeps what it was read last (for ratios since then), so it lives as long as the
component that it reads, whatever else comes and goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia._cluster import process_metrics
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
    """The sources of one context of a rank."""

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
        role, rank = TRAINER, self._rank
        found: list[tuple[object, Callable[[], MetricSource]]] = [
            (book, lambda: process_metrics.of_inflight(role, rank, book)),
            (self, lambda: MetricSource(role, rank, "steps", self, self._read)),
        ]
        if stream is not None:
            receiver, server = stream.receiver, stream.server
            found += [
                (receiver, lambda: process_metrics.of_receiver(role, rank, receiver)),
                (server, lambda: process_metrics.of_rpc_server(role, rank, server)),
            ]
        if isinstance(worker, EmbeddingWorkers):
            clients = worker.clients
            found.append(
                (worker, lambda: process_metrics.of_clients(role, rank, worker, clients))
            )
        else:
            found += process_metrics.of_embedded(worker)
        self._known = {id(of): self._known.get(id(of)) or make() for of, make in found}
        return list(self._known.values())

    def _read(self) -> Iterable[Sample]:
        yield Sample("persia_steps", self._steps)
        if self._loss is not None:
            yield Sample("persia_loss", self._loss())
        engine = self._engine
        num_waiting, num_bytes = (0, 0) if engine is None else engine.measure()
        yield Sample("persia_update_queue_batches", num_waiting)
        yield Sample("persia_update_queue_bytes", num_bytes)
