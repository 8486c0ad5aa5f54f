"""The forward pipeline of one epoch: source, lookups, permits, order, ranks in step.

    source ----------> forward workers --Delivery--> (ranks agree) ----> the user's loop
    copies batches     permit, then lookup           one step ahead      tensors

A permit is acquired before the lookup, in the order of the batches, and belongs to the batch
from then on (``flight``); it comes back when the update is acknowledged, the lookup fails, or
the batch is released.

Order (``reproducible=True``): batches are taken, numbered, looked up and handed out in the
order of the dataset. With a staleness bound ``s`` no batch is taken before the user asked
for the ``s - 1`` th before it. At staleness 1, then, lookups and updates alternate strictly,
and a loop that is left early has looked up exactly what it was given.

Ranks in step: with several ranks a batch is handed out when all of them have one. A thread
asks that one step ahead of the user. The first round in which a rank has none is the last: what
the others have is dropped and counted. Each rank takes part in every round up to the last one,
and in no other, whatever ends its own pass, so that none waits for another in vain.

Threads and locks: ``_turn`` makes take, permit and number one step (and, in order, the
lookup too). It is held while waiting for input or a permit; nobody needs it to make progress
elsewhere, and both waits are woken by ``close``.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

from persia._rpc.deadlines import within
from persia._training.backward import SHORT_S, TakesTurns
from persia._training.inflight import Reason, State
from persia._training.queues import Closed, Finished, OrderedQueue, join
from persia._training.transfer import StagedBatch
from persia.errors import ConfigError, ServiceError, ServiceTimeout

if TYPE_CHECKING:
    from persia._rpc.messages import LookupResult
    from persia._training.inflight import InFlightBatch
    from persia._training.lookups import Item, Lookups
    from persia._training.sources import Source
    from persia._training.transfer import DeviceTransfer, PersiaTrainingBatch

logger = logging.getLogger(__name__)

# A thread that has not ended by then is inside the user's dataset or a lookup; it is a
# daemon, and is named in a warning.
JOIN_S = 10.0
# Of all batches that are left: a launcher that was stopped waits 2.5 s for its ranks.
_RELEASE_S = 1.0
# Seconds between two lines that say whom the user's loop is waiting for.
LINE_S = 10.0
_MANY = 100  # batches without a backward, after which that is said

# What a rank tells the others about its next batch.
HAS_BATCH = 1
ENDED = 0  # its data has
LEFT = 2  # its user has left the loop
FAILED = 3  # its data or a lookup has


class Agrees(TakesTurns, Protocol):
    """The ranks; ``persia._training.ranks`` implements it."""

    def agree(self, code: int) -> list[int]:
        """Tell all ranks a number and return everyone's, by rank."""


class StalenessLimiter:
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


class ForwardPipeline:
    """One epoch. ``start``, ``next`` and ``close`` belong to the user's thread.

    Args:
        source: Of one pass.
        lookups: The context's.
        converter: Of the context's device.
        output_capacity: Batches looked up ahead of the user.
        num_workers: Lookups at the same time.
        reproducible: Keep the dataset's order.
        staleness: Bound on batches in flight, or None.
        timeout_s: How long ``next`` waits.
        ranks: To keep in step with; None where there is one, or none needs to wait.
        num_resumed: Batches of the pass that were trained before a checkpoint.
    """

    def __init__(
        self,
        source: Source,
        lookups: Lookups,
        converter: DeviceTransfer,
        *,
        output_capacity: int,
        num_workers: int,
        reproducible: bool,
        staleness: int | None,
        timeout_s: float,
        ranks: Agrees | None = None,
        num_resumed: int = 0,
    ) -> None:
        self._source = source
        self._lookups = lookups
        self._converter = converter
        self._in_order = reproducible
        self._timeout_s = timeout_s
        # Without updates nothing is stale, and evaluation reads ahead as far as it may.
        self._gate = StalenessLimiter(
            staleness if lookups.trains else None, on_demand=reproducible
        )
        self._delivery: OrderedQueue[StagedBatch | PersiaTrainingBatch] = OrderedQueue(
            output_capacity, reproducible
        )
        # What is handed out: with several ranks, what all have agreed on.
        self._agreed = self._delivery
        self._ranks = ranks
        if ranks is not None:
            self._agreed = OrderedQueue(1, ordered=True)
        # Reproducible over ranks: their updates go in the order of the ranks.
        self._takes_turns = ranks is not None and reproducible and staleness == 1
        self._reason_to_drop = Reason.UNUSED
        self._turn = threading.Lock()  # see the module's docstring
        self._num_taken = 0  # guarded by _turn
        self._counting = threading.Lock()
        self._num_running = num_workers  # workers not yet ended; guarded by _counting
        self._num_looking_up = 0  # for messages only; guarded by _counting
        self._is_agreeing = False  # for messages only
        self._last: InFlightBatch | None = None  # handed out last
        self._owes_turn = False  # what was handed out last will have no update
        self._num_trained = self._num_abandoned = 0  # batches with and without a backward
        self._num_resumed = num_resumed
        self._has_begun = False  # something was handed out
        self._kept: list[InFlightBatch] = []  # handed out and kept, most of them ended since
        self._threads = [
            threading.Thread(target=self._forward, name=f"persia-forward-{number}", daemon=True)
            for number in range(num_workers)
        ]
        self._agreeing: threading.Thread | None = None
        if ranks is not None:
            self._agreeing = threading.Thread(
                target=self._keep_step, args=(ranks,), name="persia-agree", daemon=True
            )
            self._threads.append(self._agreeing)
        self._closed = False

    # --- the user's thread ----------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the pass has ended."""
        return self._closed

    def start(self) -> None:
        """Start the source and the threads."""
        self._source.start()
        for thread in self._threads:
            thread.start()

    @property
    def data_failure(self) -> BaseException | None:
        """What ended the data before its time, as ``next`` has raised it."""
        return self._source.failure

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
        begin = time.perf_counter()
        item = self._wait_for_one()
        waited_s = time.perf_counter() - begin
        if waited_s > SHORT_S:
            timings = self._lookups.book.timings
            timings["get_train_batch_time_cost_more_than_1ms_sec"].add(waited_s)
        batch = self._converter.finish(item) if isinstance(item, StagedBatch) else item
        self._has_begun = True
        self._last = batch.ticket
        self._owes_turn = batch.ticket is None
        return batch

    def _wait_for_one(self) -> StagedBatch | PersiaTrainingBatch:
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return self._agreed.get(min(left, LINE_S))
            except Finished:
                if self._num_abandoned and not self._num_trained:
                    logger.warning(
                        "none of the %d batches of this pass had a backward, so no embedding "
                        "was trained; call ctx.backward(loss) for each, or use eval_ctx",
                        self._num_abandoned,
                    )
                had_no_more = self._num_resumed > 0 and not self._has_begun
                if had_no_more:
                    logger.warning(
                        "nothing was trained in this pass: the checkpoint was made behind its "
                        "batch %d, and the data has no more than that; the next pass begins at "
                        "the first batch. To go on with other data, load the checkpoint with "
                        "features=[...] of all features, which leaves the position out",
                        self._num_resumed,
                    )
                self._lookups.progress.end(
                    self._source, self._source.end_position(), had_no_more=had_no_more
                )
                raise
            except ServiceError:
                raise  # a lookup's, which may be a timeout of its own
            except TimeoutError as exc:
                if left <= LINE_S:
                    raise ServiceTimeout(
                        f"no batch came within {self._timeout_s:g} s: waited for "
                        f"{self._culprit()}",
                        role="nn-worker",
                        method="next batch",
                    ) from exc
            logger.warning("waiting for a batch: for %s", self._culprit())

    def _leave_last(self) -> None:
        last, self._last = self._last, None
        owes_turn, self._owes_turn = self._owes_turn, False
        if last is not None:
            owes_turn = self._lookups.book.release(last, Reason.ABANDONED, even_kept=False)
            self._num_trained += not owes_turn
            self._num_abandoned += owes_turn
            if self._num_abandoned == _MANY and not self._num_trained:
                logger.warning(
                    "none of the first %d batches had a backward, so no embedding is trained; "
                    "call ctx.backward(loss) for each, or use eval_ctx",
                    _MANY,
                )
        if owes_turn and self._takes_turns and self._ranks is not None and not self._closed:
            self._ranks.in_turn(lambda: None)  # the others wait for this rank's turn
        if last is not None and last.state is State.KEPT:
            self._kept.append(last)

    def _culprit(self) -> str:
        if self._num_looking_up:
            return f"{self._num_looking_up} lookups at the embedding-worker"
        if self._gate.is_exhausted():
            return (
                f"the update of a batch in flight, as embedding_staleness="
                f"{self._gate.staleness} allows no more of them"
            )
        if self._ranks is not None and len(self._delivery) == 0 and self._is_agreeing:
            return "the other ranks to have a batch"
        return self._source.waits_for() or "the forward workers"

    def close(self) -> None:
        """End the epoch: release what is not handed out, join the threads.

        The batch handed out last is released if it had no backward. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        threads = [*self._source.close(), *self._threads]
        self._gate.close()
        left = self._delivery.close()
        if self._agreed is not self._delivery:
            left += self._agreed.close()
        begun_at = time.monotonic()
        try:
            # A worker that has gone cannot be told, and whoever is stopped has seconds.
            with within(_RELEASE_S):
                self._leave_last()
                for item in left:
                    self._drop(item.ticket)
        finally:
            # Nor does it answer lookups.
            is_answered = time.monotonic() - begun_at < _RELEASE_S
            self._join(threads, JOIN_S if is_answered else _RELEASE_S)

    def _drop(self, ticket: InFlightBatch | None) -> None:
        if ticket is not None:
            self._lookups.book.release(ticket, self._reason_to_drop)

    def _join(self, threads: list[threading.Thread], timeout_s: float) -> None:
        for thread in join(threads, timeout_s):
            if thread is self._agreeing:
                where = "a round with the other ranks"
            else:
                where = "a lookup" if thread in self._threads else "the user's dataset"
            logger.warning(
                "%s has not ended %g s after the loop did: it is still inside %s",
                thread.name,
                timeout_s,
                where,
            )

    # --- ranks in step ----------------------------------------------------------------------

    def _keep_step(self, ranks: Agrees) -> None:
        """Take part in rounds until one is not complete."""
        try:
            number = 0
            while self._one_round(ranks, number):
                number += 1
        except BaseException as exc:
            # The others are gone, or cannot be heard.
            self._agreed.fail(exc)

    def _one_round(self, ranks: Agrees, number: int) -> bool:
        item: StagedBatch | PersiaTrainingBatch | None = None
        failure: BaseException | None = None
        code = HAS_BATCH
        try:
            item = self._delivery.get(None)
        except Finished:
            code = ENDED
        except Closed:
            code = LEFT
        except BaseException as exc:
            code, failure = FAILED, exc
        self._is_agreeing = True
        try:
            codes = ranks.agree(code)
        except BaseException:
            if item is not None:
                self._drop(item.ticket)
            raise
        finally:
            self._is_agreeing = False
        if item is not None and all(one == HAS_BATCH for one in codes):
            try:
                self._agreed.put(number, item)
            except Closed:
                self._drop(item.ticket)  # and tell the others in the next round
            return True
        if failure is None:
            failure = _why_not(codes)
        if failure is None:
            # The others' data has ended, and with it this rank's.
            self._reason_to_drop = Reason.INCOMPLETE
        if item is not None:
            self._drop(item.ticket)
        if failure is None:
            self._source.drop_rest(lambda: self._lookups.book.count(Reason.INCOMPLETE))
        self._agreed.finish(failure)
        return False

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
                self._delivery.finish(self._source.failure)
        except Closed:
            pass
        except BaseException as exc:
            self._delivery.fail(exc)

    def _forward_one(self) -> None:
        with self._turn:
            item = self._source.get()
            needs_permit = self._lookups.has_gradients(item.host)
            try:
                self._gate.enter(needs_permit)
            except Closed:
                self._lookups.give_up(item, self._reason_to_drop)
                raise
            if needs_permit:
                self._lookups.progress.begin(self._source)
            place = self._num_taken
            self._num_taken += 1
            self._lookups.number(item)
            if self._in_order:
                result, ticket = self._look_up(item)
        if not self._in_order:
            result, ticket = self._look_up(item)
        try:
            ready: StagedBatch | PersiaTrainingBatch
            begin = time.perf_counter()
            ready = staged = self._converter.stage(item.host, result, item.batch_id, ticket)
            if staged.event is None:
                ready = self._converter.finish(staged)
            took_s = time.perf_counter() - begin
            self._lookups.book.timings["forward_client_to_gpu_time_cost_sec"].add(took_s)
            self._delivery.put(place, ready)
        except BaseException:
            self._drop(ticket)
            raise

    def _look_up(self, item: Item) -> tuple[LookupResult, InFlightBatch | None]:
        with self._counting:
            self._num_looking_up += 1
        try:
            return self._lookups.lookup(
                item, self._gate, self._in_order, in_turn=self._takes_turns
            )
        finally:
            with self._counting:
                self._num_looking_up -= 1


def _why_not(codes: list[int]) -> ServiceError | None:
    """Say which rank ended the pass before its data did; None if none did."""
    for rank, code in enumerate(codes):
        if code in (LEFT, FAILED):
            what = "left its loop over the DataLoader" if code == LEFT else "failed"
            return ServiceError(
                f"rank {rank} {what}, so that there is no next batch for all ranks",
                role="nn-worker",
                replica=rank,
                method="next batch",
            )
    return None
