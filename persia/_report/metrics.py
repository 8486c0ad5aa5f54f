"""What one context tells of itself, as sources of metrics.

A source keeps what it was read last (for ratios since then), so it lives as long as the
component of which it tells, whatever else comes and goes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from persia._metrics import roles
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import Sample, Source
from persia._rpc.worker_pool import EmbeddingWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.inflight import InFlightTracker
    from persia._training.stream import Stream


class TrainingMetrics:
    """The sources of one context.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[int, Source] = {}  # by id of what they tell of, which they keep
        # Of the training loop's last step: how many there were, and its loss.
        self._steps = 0
        self._loss: Callable[[], float] | None = None
        self._engine: BackwardPipeline | None = None

    def note_step(self, steps: int, loss: Callable[[], float]) -> None:
        """Note the last step; its loss is computed when somebody asks."""
        self._steps = steps
        self._loss = loss

    def sources(
        self,
        worker: EmbeddingWorker,
        book: InFlightTracker,
        engine: BackwardPipeline | None,
        stream: Stream | None,
    ) -> list[Source]:
        """Return what there is to be read now."""
        self._engine = engine
        found: dict[int, Source] = {}

        def add(of: object, make: Callable[[], Source]) -> None:
            found[id(of)] = self._known.get(id(of)) or make()

        add(book, lambda: roles.of_book(TRAINER, self._rank, book))
        add(self, lambda: Source(TRAINER, self._rank, "steps", self, self._read))
        if stream is not None:
            inbox, server = stream.inbox, stream.server
            add(inbox, lambda: roles.of_inbox(TRAINER, self._rank, inbox))
            add(server, lambda: roles.of_rpc_server(TRAINER, self._rank, server))
        if isinstance(worker, EmbeddingWorkers):
            clients = worker.clients
            add(worker, lambda: roles.of_clients(TRAINER, self._rank, worker, clients))
        else:
            self._add_own(worker, add)
        self._known = found
        return list(found.values())

    @staticmethod
    def _add_own(worker: object, add: Callable[[object, Callable[[], Source]], None]) -> None:
        """Add the servers of embedded mode; what a user wrote tells nothing."""
        if not isinstance(worker, roles.WorkerStats):
            return
        add(worker, partial(roles.of_worker, 0, worker))
        for server in getattr(worker, "servers", ()):
            if isinstance(server, roles.ServerStats):
                add(server, partial(roles.of_server, server))

    def _read(self) -> Iterable[Sample]:
        yield Sample("persia_steps", self._steps)
        if self._loss is not None:
            yield Sample("persia_loss", self._loss())
        engine = self._engine
        num_waiting, num_bytes = (0, 0) if engine is None else engine.measure()
        yield Sample("persia_update_queue_batches", num_waiting)
        yield Sample("persia_update_queue_bytes", num_bytes)
