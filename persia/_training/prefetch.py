"""The forward pipeline of one epoch: dataset, lookups, permits, order.

    dataset thread --Channel--> forward workers --Delivery--> the user's loop
    iterates and copies         permit, then lookup           tensors

A permit is acquired before the lookup, in the order of the batches, and belongs to the batch
from then on (``flight``); it comes back when the update is acknowledged, the lookup fails, or
the batch is released.

Order (``reproducible=True``): batches are taken, numbered, looked up and handed out in the
order of the dataset. With a staleness bound ``s`` no batch is taken before the user asked
for the ``s - 1`` th before it. At staleness 1, then, lookups and updates alternate strictly,
and a loop that is left early has looked up exactly what it was given.

Threads and locks: ``_turn`` makes take, permit and number one step (and, in order, the
lookup too). It is held while waiting for input or a permit; nobody needs it to make progress
elsewhere, and both waits are woken by ``close``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from persia._rpc.messages import IDFeatures
from persia._training.channel import Channel, Closed, Delivery, Finished, join
from persia._training.flight import Reason, State
from persia._training.tensors import StagedBatch
from persia.errors import ConfigError, InternalError, ServiceTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from persia._rpc.messages import EmbeddingWorker, LookupResult
    from persia._training.flight import Book, Ticket
    from persia._training.tensors import (
        Converter,
        HostBatch,
        PersiaTrainingBatch,
        UserBatch,
    )

logger = logging.getLogger(__name__)

# A thread that has not ended by then is inside the user's dataset or a lookup; it is a
# daemon, and is named in a warning.
JOIN_S = 10.0


class Lookups:
    """What a context's lookups need to know, shared by its loaders and direct calls.

    Args:
        worker: Where ids become embeddings.
        book: Tickets of the batches with gradients.
        trains: Whether batches may have gradients at all.
        before_evaluation: Called before each lookup without gradients; waits until this
            rank's updates are acknowledged or have failed.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        book: Book,
        trains: bool,
        before_evaluation: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.book = book
        self.trains = trains
        self.before_evaluation = before_evaluation
        # Two series, by whether there are gradients: update ids and admission depend on the
        # numbers of training batches, and an evaluation must not shift them.
        self._next_numbers = {False: 0, True: 0}
        self._lock = threading.Lock()  # guards _next_numbers

    def number(self, host: HostBatch) -> int:
        """Return the batch id, the next one of its kind in the context."""
        trains = self.has_gradients(host)
        with self._lock:
            number = self._next_numbers[trains]
            self._next_numbers[trains] += 1
            return number

    def has_gradients(self, host: HostBatch) -> bool:
        """Whether this batch is looked up for training."""
        return self.trains and host.requires_grad

    def lookup(
        self, host: HostBatch, batch_id: int, gate: Gate | None = None, in_order: bool = False
    ) -> tuple[LookupResult, Ticket | None]:
        """Look one batch up; if it has gradients its ticket takes the permit over.

        Raises:
            Exception: What the embedding-worker raised; a permit is given back.
        """
        trains = self.has_gradients(host)
        if not trains:
            self.before_evaluation()
        try:
            result = self.worker.lookup_direct(IDFeatures(host.features, batch_id, trains))
            if not trains:
                return result, None
            if result.ref is None:
                raise InternalError(f"the training lookup of batch {batch_id} left no ref")
        except BaseException:
            if trains and gate is not None:
                gate.give_back()
            raise
        return result, self.book.open(result.ref, batch_id, gate, in_order)


class Gate:
    """Decides when the next batch may be taken, and counts permits.

    Args:
        staleness: Most batches between lookup and acknowledged update; None is no bound.
        on_demand: Whether, with a bound, batches wait for the user to ask for them.
    """

    def __init__(self, staleness: int | None, on_demand: bool) -> None:
        self.staleness = staleness
        self._on_demand = on_demand and staleness is not None
        self._changed = threading.Condition()  # guards everything below
        self._lent = 0
        self._taken = 0
        self._asked = 0
        self._closed = False

    def _is_open(self, needs_permit: bool) -> bool:
        if self._closed or self.staleness is None:
            return True
        if needs_permit and self._lent >= self.staleness:
            return False
        return not self._on_demand or self._taken < self._asked + self.staleness - 1

    def enter(self, needs_permit: bool) -> None:
        """Wait until a batch may be taken; lends it a permit if it needs one.

        Raises:
            Closed: If the epoch ends first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_open(needs_permit))
            if self._closed:
                raise Closed
            self._taken += 1
            self._lent += needs_permit

    def ask(self) -> None:
        """The user asks for one more batch."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def give_back(self) -> None:
        """Take a permit back."""
        with self._changed:
            self._lent -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def is_exhausted(self) -> bool:
        """Whether all permits are lent."""
        with self._changed:
            return self.staleness is not None and self._lent >= self.staleness


class Prefetcher:
    """One epoch. ``start``, ``next`` and ``close`` belong to the user's thread.

    Args:
        dataset: Iterated once, in a thread of its own.
        lookups: The context's.
        converter: Of the context's device.
        input_capacity: Batches read ahead of the lookups.
        output_capacity: Batches looked up ahead of the user.
        num_workers: Lookups at the same time.
        reproducible: Keep the dataset's order.
        staleness: Bound on batches in flight, or None.
        timeout_s: How long ``next`` waits.
    """

    def __init__(
        self,
        dataset: Iterable[UserBatch],
        lookups: Lookups,
        converter: Converter,
        *,
        input_capacity: int,
        output_capacity: int,
        num_workers: int,
        reproducible: bool,
        staleness: int | None,
        timeout_s: float,
    ) -> None:
        self._dataset = dataset
        self._lookups = lookups
        self._converter = converter
        self._in_order = reproducible
        self._timeout_s = timeout_s
        self._input: Channel[HostBatch] = Channel(input_capacity)
        # Without updates nothing is stale, and evaluation reads ahead as far as it may.
        self._gate = Gate(staleness if lookups.trains else None, on_demand=reproducible)
        self._delivery: Delivery[StagedBatch | PersiaTrainingBatch] = Delivery(
            output_capacity, reproducible
        )
        self._turn = threading.Lock()  # see the module's docstring
        self._num_taken = 0  # guarded by _turn
        self._counting = threading.Lock()
        self._num_running = num_workers  # workers not yet ended; guarded by _counting
        self._num_looking_up = 0  # for messages only; guarded by _counting
        self._reading_ended = False  # for messages only
        self._last: Ticket | None = None  # handed out last
        self._kept: list[Ticket] = []  # handed out and kept, most of them ended since
        self._threads = [
            threading.Thread(target=self._read, name="persia-dataset", daemon=True),
            *(
                threading.Thread(
                    target=self._forward, name=f"persia-forward-{number}", daemon=True
                )
                for number in range(num_workers)
            ),
        ]
        self._closed = False

    # --- the user's thread ----------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def next(self) -> PersiaTrainingBatch:
        """Return the next batch; the last one is released if it had no backward.

        Raises:
            Finished: If the dataset has ended and all its batches were returned.
            Closed: If the epoch was closed, by a new one or by leaving the context.
            ServiceTimeout: If none came in time; says whom it waited for.
            ConfigError: If kept batches hold all permits, so that none can come.
            BaseException: What the dataset or a lookup raised.
        """
        self._leave_last()
        self._kept = [ticket for ticket in self._kept if ticket.state is State.KEPT]
        staleness = self._gate.staleness
        if staleness is not None and len(self._kept) >= staleness:
            raise ConfigError(
                f"embedding_staleness={staleness} allows no batch beside the "
                f"{len(self._kept)} kept by ctx.keep; to accumulate gradients over k batches "
                "it must be at least k"
            )
        self._gate.ask()
        try:
            item = self._delivery.get(self._timeout_s)
        except TimeoutError as exc:
            raise ServiceTimeout(
                f"no batch came within {self._timeout_s:g} s: waited for {self._culprit()}",
                role="nn-worker",
                method="next batch",
            ) from exc
        batch = self._converter.finish(item) if isinstance(item, StagedBatch) else item
        self._last = batch.ticket
        return batch

    def _leave_last(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        self._lookups.book.release(last, Reason.ABANDONED, even_kept=False)
        if last.state is State.KEPT:
            self._kept.append(last)

    def _culprit(self) -> str:
        if self._num_looking_up:
            return f"{self._num_looking_up} lookups at the embedding-worker"
        if self._gate.is_exhausted():
            return (
                f"the update of a batch in flight, as embedding_staleness="
                f"{self._gate.staleness} allows no more of them"
            )
        if not self._reading_ended:
            return f"the dataset ({type(self._dataset).__name__}) to yield a batch"
        return "the forward workers"

    def close(self) -> None:
        """End the epoch: release what is not handed out, join the threads.

        The batch handed out last is released if it had no backward. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        self._input.close()
        self._gate.close()
        left = self._delivery.close()
        try:
            self._leave_last()
            for item in left:
                self._drop(item.ticket)
        finally:
            self._join()

    def _drop(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._lookups.book.release(ticket, Reason.UNUSED)

    def _join(self) -> None:
        for thread in join(self._threads, JOIN_S):
            logger.warning(
                "%s has not ended %g s after the loop did: it is still inside %s",
                thread.name,
                JOIN_S,
                "the user's dataset" if thread is self._threads[0] else "a lookup",
            )

    # --- the dataset's thread ---------------------------------------------------------------

    def _read(self) -> None:
        iterator = None
        try:
            iterator = iter(self._dataset)
            for batch in iterator:
                self._input.put(self._converter.host(batch))
        except Closed:
            pass
        except BaseException as exc:
            self._reading_ended = True
            self._input.finish(exc)
        else:
            self._reading_ended = True
            self._input.finish()
        self._close_iterator(iterator)  # it may stand still at a batch that was refused

    @staticmethod
    def _close_iterator(iterator: object) -> None:
        """Run the ``finally`` blocks of the user's generator now, in its own thread."""
        if not isinstance(iterator, Generator):
            return  # another iterator's ``close`` may be meant for its owner
        try:
            iterator.close()
        except Exception:
            # The loop is over and nobody is left to raise this at.
            logger.exception("the dataset raised while it was closed")

    # --- forward workers --------------------------------------------------------------------

    def _forward(self) -> None:
        try:
            while True:
                self._forward_one()
        except Finished:
            with self._counting:
                self._num_running -= 1
                is_last = self._num_running == 0
            if is_last:  # all others have delivered what they took
                self._delivery.finish(self._input.failure)
        except Closed:
            pass
        except BaseException as exc:
            self._delivery.fail(exc)

    def _forward_one(self) -> None:
        with self._turn:
            host = self._input.get()
            needs_permit = self._lookups.has_gradients(host)
            self._gate.enter(needs_permit)
            place = self._num_taken
            self._num_taken += 1
            batch_id = self._lookups.number(host)
            if self._in_order:
                result, ticket = self._look_up(host, batch_id)
        if not self._in_order:
            result, ticket = self._look_up(host, batch_id)
        try:
            item: StagedBatch | PersiaTrainingBatch
            item = staged = self._converter.stage(host, result, batch_id, ticket)
            if staged.event is None:
                item = self._converter.finish(staged)
            self._delivery.put(place, item)
        except BaseException:
            self._drop(ticket)
            raise

    def _look_up(self, host: HostBatch, batch_id: int) -> tuple[LookupResult, Ticket | None]:
        with self._counting:
            self._num_looking_up += 1
        try:
            return self._lookups.lookup(host, batch_id, self._gate, self._in_order)
        finally:
            with self._counting:
                self._num_looking_up -= 1
