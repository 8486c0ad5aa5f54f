"""From a batch of a dataset to its lookup: numbers, refs, and ids that got lost.

A batch comes with its ids, or with the ref under which a data-loader has registered them.
Either way its ids can be had again until it has ended (its *origin*): an embedding-worker that
was started anew knows no refs, and is told them once more.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from persia import env
from persia._rpc.deadlines import Tries
from persia._rpc.messages import IDFeatures
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._training.resume import Progress
from persia.errors import InternalError, ServiceUnavailable, UnknownRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from persia._rpc.messages import EmbeddingWorker, LookupResult
    from persia._training.forward import StalenessLimiter
    from persia._training.inflight import InFlightBatch, InFlightTracker, Reason
    from persia._training.transfer import HostBatch
    from persia.errors import ServiceError

logger = logging.getLogger(__name__)


class IdSource(Protocol):
    """Where the ids of a batch can be had again."""

    def register_again(self, why: ServiceError) -> int:
        """Register them at an embedding-worker once more and return the new ref.

        Args:
            why: What the one that had them raised.
        """

    def ended(self) -> None:
        """Nobody needs them any more."""


class LocalIds:
    """The origin of a batch of this process, whose embedding-worker may be another one's."""

    def __init__(self, worker: EmbeddingWorker, features: IDFeatures) -> None:
        self._worker = worker
        self._features = features

    def register_again(self, why: ServiceError) -> int:
        """Register the ids once more."""
        return self._worker.register(self._features)

    def ended(self) -> None:
        """Nothing to do: they go with this object."""


@dataclass(slots=True)
class Item:
    """A batch on its way to its lookup."""

    host: HostBatch
    ref: int | None = None  # under which the ids, if not in ``host``, are registered
    origin: IdSource | None = None
    # The key of admission draws, from the data-loader or by ``Lookups.number``.
    batch_id: int = -1
    # Running number of the training batches of this context: second half of the update id.
    number: int = -1
    # Called when no run that is resumed needs the batch; see ``progress``.
    done: Callable[[], None] | None = None


class Lookups:
    """What a context's lookups need to know, shared by its loaders and direct calls.

    Args:
        worker: Where ids become embeddings.
        book: Tickets of the batches with gradients.
        trains: Whether batches may have gradients at all.
        before_evaluation: Called before each lookup without gradients; waits until this
            rank's updates are acknowledged or have failed.
        rank: This rank, of ``world_size``: ranks give their own batches ids in turn.
        world_size: Number of ranks.
        progress: Where it is noted what was trained; one of its own if not given.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        book: InFlightTracker,
        trains: bool,
        before_evaluation: Callable[[], None],
        rank: int = 0,
        world_size: int = 1,
        progress: Progress | None = None,
    ) -> None:
        self.worker = worker
        self.book = book
        self.trains = trains
        self.before_evaluation = before_evaluation
        self.progress = Progress() if progress is None else progress
        self._rank = rank
        self._world_size = world_size
        # Two series, by whether there are gradients: update ids and admission depend on the
        # numbers of training batches, and an evaluation must not shift them.
        self._next_numbers = {False: 0, True: 0}
        self._lock = threading.Lock()  # guards _next_numbers
        # One in this process never forgets a batch.
        self._keeps_ids = isinstance(worker, EmbeddingWorkers)

    def number(self, item: Item) -> None:
        """Give a batch the next number of its kind, and an id if it has none."""
        trains = self.has_gradients(item.host)
        with self._lock:
            item.number = self._next_numbers[trains]
            self._next_numbers[trains] += 1
        if trains:
            item.done = partial(self.progress.done, item.number, item.done)
        if item.ref is None:
            item.batch_id = item.number * self._world_size + self._rank

    def resume(self, next_number: int) -> None:
        """Give the next training batch this number, as if those below had been given out."""
        with self._lock:
            self._next_numbers[True] = next_number

    def has_gradients(self, host: HostBatch) -> bool:
        """Whether this batch is looked up for training."""
        return self.trains and host.requires_grad

    def lookup(
        self,
        item: Item,
        gate: StalenessLimiter | None = None,
        in_order: bool = False,
        in_turn: bool = False,
    ) -> tuple[LookupResult, InFlightBatch | None]:
        """Look one batch up; if it has gradients its ticket takes the permit over.

        Raises:
            Exception: What the embedding-worker raised; a permit is given back.
        """
        trains = self.has_gradients(item.host)
        if not trains:
            self.before_evaluation()
        begin = time.perf_counter()
        try:
            result = self._ask(item, trains)
            if trains and result.ref is None:
                raise InternalError(f"the training lookup of batch {item.batch_id} left no ref")
        except BaseException:
            self.book.fail_lookup()
            if trains and gate is not None:
                gate.give_back()
            self._lose(item)
            raise
        took_s = time.perf_counter() - begin
        self.book.timings["forward_client_time_cost_sec"].add(took_s)
        if result.ref is None or not trains:
            if item.done is not None:
                item.done()
            self._leave(item)
            return result, None
        ticket = self.book.open(
            result.ref,
            item.batch_id,
            gate,
            in_order,
            in_turn=in_turn,
            number=item.number,
            origin=item.origin,
            done=item.done,
            num_samples=item.host.batch_size,
        )
        return result, ticket

    def _ask(self, item: Item, trains: bool) -> LookupResult:
        if item.ref is None:
            features = IDFeatures(item.host.features, item.batch_id, trains)
            if trains and self._keeps_ids:
                item.origin = LocalIds(self.worker, features)
            return self.worker.lookup_direct(features)
        tries = Tries(env.rpc_timeout_s())
        while True:
            try:
                return self.worker.lookup(item.ref, trains)
            except (UnknownRef, ServiceUnavailable) as error:
                if item.origin is None or not tries.another():
                    raise
                item.ref = item.origin.register_again(error)

    def _lose(self, item: Item) -> None:
        """End a batch whose lookup failed; what the user sees is that failure."""
        try:
            self._leave(item)
        except Exception as exc:
            logger.debug("ref %s could not be released: %s", item.ref, exc)

    def give_up(self, item: Item, reason: Reason) -> None:
        """End a batch that was taken and is not looked up; nobody will send it again."""
        if item.ref is not None:
            self.book.count(reason)
            self._leave(item)

    def _leave(self, item: Item) -> None:
        """End a batch that will have no gradients."""
        try:
            if item.ref is not None:
                self.worker.release(item.ref)
        finally:
            if item.origin is not None:
                item.origin.ended()
