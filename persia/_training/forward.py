"""The forward pipeline of one pass: source, lookups, permits, order, ranks in step.

    source ----------> forward workers --queue--> (ranks agree) ----> the user's loop
    copies batches     permit, then lookup        one step ahead      tensors

Order: batches are taken, given permits and returned in the order of the dataset; lookups run
at the same time. Of the batches that the user gets before one, those without an acknowledged
update had permits when it took its own: with a staleness bound ``s`` its lookup misses at most
``s - 1`` updates. Each batch that overtook one that is looked up already would be one more.

With ``reproducible=True`` lookups run one after another, too, no batch is taken before the user
asked for the ``s - 1`` th before it, and the schedule is fixed: batch ``t`` sees the updates up
to that of ``t - s`` and no others. At staleness 1 lookups and updates alternate strictly.

Ranks in step: with several ranks a batch is returned when all of them have one, which a thread
asks one step ahead of the user. The first round in which a rank has none is the last: what the
others have is dropped and counted. Each rank takes part in every round up to the last one, and
in no other, whatever ends its own pass, so that none waits for another in vain.

Locks: ``_turn`` makes take, permit and number one step (and, in order, the lookup too). It is
held while waiting for input or a permit; no other thread needs it to make progress, and both
waits are woken by ``close``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from persia import env
from persia._rpc.deadlines import within
from persia._rpc.messages import IDFeatures
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._training.inflight import (
    LOST,
    SHORT_S,
    UNREGISTERED,
    InFlightBatch,
    Reason,
    StalenessLimiter,
    State,
    call_again,
)
from persia._training.progress import Progress, Watermark, to_position
from persia._training.queues import BoundedQueue, Closed, Finished, OrderedQueue, join
from persia._training.staleness import PermitController
from persia._training.untrained import MANY, PassOutcome
from persia.errors import ConfigError, InternalError, ServiceError, ServiceTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from persia._rpc.messages import EmbeddingWorker, LookupResult, SlotOutput
    from persia._training.batch import DeviceTransfer, PersiaTrainingBatch
    from persia._training.feature_order import Arranger
    from persia._training.inflight import InFlightTracker
    from persia._training.progress import Plain
    from persia._training.ranks import Ranks
    from persia.embedding.data import PersiaBatch

    Taken = tuple[PersiaTrainingBatch, InFlightBatch]  # a batch and its ids

logger = logging.getLogger(__name__)

# A thread that has not ended by then is inside the user's dataset or a lookup; it is a
# daemon, and is named in a warning.
JOIN_S = 10.0
# Of all batches that are left: a launcher that was stopped waits 2.5 s for its ranks.
_RELEASE_S = 1.0
# Seconds between two log lines that name what the user's loop waits for.
LINE_S = 10.0

# What a rank sends to the others about its next batch.
HAS_BATCH = 1
ENDED = 0  # its data has
LEFT = 2  # its user has left the loop
FAILED = 3  # its data or a lookup has

_NOTHING_RESUMED = (
    "nothing was trained in this pass: the checkpoint was made behind its batch %d, and the "
    "data has no more than that; the next pass begins at the first batch"
)


class Source(ABC):
    """Batches of one pass, in order. ``start`` and ``close`` are the user's thread's."""

    # What ended the data before its time, once ``get`` has raised Finished.
    failure: BaseException | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin."""

    @abstractmethod
    def get(self) -> Taken:
        """Wait for the next batch and take it, unless ``Closed`` or ``Finished``."""

    @abstractmethod
    def position(self) -> Plain | None:
        """Return what is done of the pass; None if nothing is known of it."""

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was read is done, if other ranks need it."""
        return None

    def next_position(self) -> Plain | None:
        """Return where the next pass begins, once this one has ended; None at batch 0."""
        return None

    @abstractmethod
    def describe_wait(self) -> str:
        """Name what ``get`` is waiting for; empty if for nothing."""

    @abstractmethod
    def describe_missing(self) -> str:
        """Say what had no batch, once the pass has ended; empty if all had some."""

    def drop_rest(self, on_drop: Callable[[], None]) -> None:  # noqa: B027
        """Drop what is left, where it is known, and wait for its end; calls for each batch."""

    @abstractmethod
    def close(self) -> list[threading.Thread]:
        """Wake ``get`` and return the threads that are about to end."""


class DatasetSource(Source):
    """Iterates a dataset in a thread of its own, ``capacity`` batches ahead of the lookups.

    Batches that are done already, as ``resumed`` says, are read and left out, or not even read
    where the dataset has ``iter_from``.
    """

    def __init__(
        self,
        dataset: Iterable[PersiaBatch],
        transfer: DeviceTransfer,
        capacity: int,
        resumed: Plain | None = None,
    ) -> None:
        self._dataset = dataset
        self._transfer = transfer
        self.queue: BoundedQueue[Taken] = BoundedQueue(capacity)
        self._lock = threading.Lock()  # guards the watermark
        self._trained = Watermark()
        if resumed is not None:
            self._trained.floor = resumed["floors"]["0"]
            self._trained.above = set(resumed["above"]["0"])
        self._first = self._trained.floor
        self._left_out = frozenset(self._trained.above)
        self._has_yielded = False
        self._thread = threading.Thread(target=self._read, name="persia-dataset", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def get(self) -> Taken:
        """Take the next batch that the thread has read."""
        return self.queue.get()

    def _mark_done(self, place: int) -> None:
        with self._lock:
            self._trained.mark_done(place)

    def position(self) -> Plain | None:
        """Return what is done of the pass."""
        with self._lock:
            return to_position("dataset", 0, {0: self._trained})

    def describe_wait(self) -> str:
        """Name the dataset, while it is being read."""
        if not self._thread.is_alive():
            return ""
        return f"the dataset ({type(self._dataset).__name__}) to yield a batch"

    def describe_missing(self) -> str:
        """Name the dataset, if it yielded nothing."""
        if self._has_yielded:
            return ""
        used_up = ", an iterator, which one pass uses up," * isinstance(self._dataset, Iterator)
        where = "" if (env.get_world_size() or 1) == 1 else f"rank {env.get_rank()}: "
        return f"{where}the dataset ({type(self._dataset).__name__}){used_up} yielded"

    def close(self) -> list[threading.Thread]:
        """Close the queue, where the thread notices it."""
        self.queue.close()
        return [self._thread]

    def _read(self) -> None:
        iterator = None
        try:
            iterator = self._begin()
            for place, batch in enumerate(iterator, self._first):
                self._has_yielded = True
                if place not in self._left_out:
                    copied = self._transfer.copy(batch)
                    ticket = InFlightBatch(
                        features=batch.features,
                        requires_grad=batch.requires_grad,
                        num_samples=batch.batch_size,
                        on_done=partial(self._mark_done, place),
                    )
                    self.queue.put((copied, ticket))
                    # Or this frame keeps a trained batch while the dataset waits for data.
                    del copied, ticket
            self.queue.finish()
        except Closed:
            pass
        except BaseException as exc:
            self.failure = exc
            self.queue.finish(exc)
        if isinstance(iterator, Generator):
            _close_generator(iterator)

    def _begin(self) -> Iterator[Any]:
        if not self._first:
            return iter(self._dataset)
        seek = getattr(self._dataset, "iter_from", None)
        if seek is not None:
            return iter(seek(self._first))
        return itertools.islice(iter(self._dataset), self._first, None)


def _close_generator(generator: Generator[Any, Any, Any]) -> None:
    """Run the ``finally`` blocks of the user's generator now, in its own thread.

    An iterator of another kind is left alone: its ``close`` may be meant for its owner.
    """
    try:
        generator.close()
    except Exception:
        # The loop is over and would not see it.
        logger.exception("the dataset raised while it was closed")


class Lookups:
    """What a context's lookups need to know, shared by its loaders and direct calls.

    ``trains`` is whether batches may have gradients at all. ``before_evaluation`` is called
    before each lookup without; it waits until this rank's updates are acknowledged or failed.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        tracker: InFlightTracker,
        trains: bool,
        before_evaluation: Callable[[], None],
        arranger: Arranger,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.worker = worker
        self.tracker = tracker
        self._arranger = arranger
        self._lookup_time = tracker.timings["forward_client_time_cost_sec"]
        self.trains = trains
        self.before_evaluation = before_evaluation
        self.controller = PermitController()  # goes on from pass to pass
        self.progress = Progress()
        self._rank = rank  # ranks give their batches ids in turn
        self._world_size = world_size
        # Two series, by whether there are gradients: update ids and admission depend on the
        # numbers of training batches, and an evaluation must not shift them.
        self._next_numbers = {False: 0, True: 0}
        self._lock = threading.Lock()  # guards _next_numbers
        # An embedding-worker of this process never loses a batch.
        self._keeps_ids = isinstance(worker, EmbeddingWorkers)

    def number(self, batch: PersiaTrainingBatch, ticket: InFlightBatch) -> None:
        """Give a batch the next number of its kind, and an id if it has none."""
        trains = self.trains and ticket.requires_grad
        if trains and ticket.features:
            self._arranger.note(batch, ticket.features)
        with self._lock:
            ticket.number = self._next_numbers[trains]
            self._next_numbers[trains] += 1
        if trains:
            ticket.on_done = partial(
                self.progress.mark_done, ticket.number, ticket.on_done, batch.batch_size
            )
        if ticket.ref == UNREGISTERED:
            ticket.batch_id = ticket.number * self._world_size + self._rank

    def next_number(self) -> int:
        """Return the next number of training batches, for a lookup that is of no batch."""
        with self._lock:
            number = self._next_numbers[True]
            self._next_numbers[True] += 1
        return number

    def resume(self, next_number: int) -> None:
        """Give the next training batch this number, as if those below had been given out."""
        with self._lock:
            self._next_numbers[True] = next_number

    def has_gradients(self, ticket: InFlightBatch) -> bool:
        """Whether this batch is looked up for training."""
        return self.trains and ticket.requires_grad

    def lookup(
        self,
        batch: PersiaTrainingBatch,
        ticket: InFlightBatch,
        limiter: StalenessLimiter | None = None,
    ) -> tuple[SlotOutput, ...]:
        """Look one batch up; if it has gradients its ticket owns the permit from then on.

        If the embedding-worker raises, the permit is returned.
        """
        trains = self.trains and ticket.requires_grad
        if not trains:
            self.before_evaluation()
        begin = time.perf_counter()
        try:
            result = self._ask(ticket, trains, begin)
            if trains and result.ref is None:
                raise InternalError(f"the lookup of batch {ticket.batch_id} left no ref")
            if result.ref is not None:
                ticket.ref = result.ref
            outputs = self._arranger.arrange(batch, result.outputs, trains)
        except BaseException:
            self.tracker.count_failed_lookup()
            if trains and limiter is not None:
                limiter.return_permit(ticket.place)
            try:
                self._release(ticket)
            except Exception as exc:  # the user sees the failure of the lookup
                logger.debug("ref %s could not be released: %s", ticket.ref, exc)
            raise
        self._lookup_time.add(time.perf_counter() - begin)
        batch.batch_id = ticket.batch_id
        ticket.features = ()
        if result.ref is None or not trains:
            if ticket.on_done is not None:
                ticket.on_done()
            self._release(ticket)
            return outputs
        ticket.limiter = limiter
        self.tracker.open(ticket)
        batch.ticket = ticket
        return outputs

    def _ask(self, ticket: InFlightBatch, trains: bool, begin: float) -> LookupResult:
        if ticket.ref == UNREGISTERED:
            features = IDFeatures(ticket.features, ticket.batch_id, trains)
            if trains and self._keeps_ids:
                worker = self.worker
                ticket.register_again = lambda error: worker.register(features)
            return self.worker.lookup_direct(features)
        try:
            return self.worker.lookup(ticket.ref, trains)
        except LOST as error:
            return call_again(lambda ref: self.worker.lookup(ref, trains), ticket, error, begin)

    def discard(self, ticket: InFlightBatch, reason: Reason) -> None:
        """End a batch that was taken and will not be looked up."""
        if ticket.ref != UNREGISTERED:
            self.tracker.count(reason)
            self._release(ticket)

    def _release(self, ticket: InFlightBatch) -> None:
        """Release the ids of a batch that will have no gradients."""
        try:
            if ticket.ref != UNREGISTERED:
                self.worker.release(ticket.ref)
        finally:
            if ticket.on_end is not None:
                ticket.on_end()


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOptions:
    """How one pass over a dataset runs; what ``DataLoader`` was given."""

    input_capacity: int  # batches read ahead of the lookups
    output_capacity: int  # batches looked up ahead of the user
    num_workers: int  # most lookups at the same time
    reproducible: bool  # look up and update in the dataset's order
    staleness: int | None  # bound on batches in flight
    is_adaptive: bool = False  # as few in flight as cost no time
    timeout_s: float  # how long the user waits for a batch
    keeps_step: bool = True  # hand a batch out only when every rank has one
    allow_untrained: bool = False  # a pass that does nothing is no error


class ForwardPipeline:
    """One pass. ``start``, ``next`` and ``close`` belong to the user's thread.

    ``num_resumed`` batches of the pass were trained before a checkpoint.
    """

    def __init__(
        self,
        source: Source,
        lookups: Lookups,
        transfer: DeviceTransfer,
        options: PassOptions,
        *,
        ranks: Ranks | None = None,
        num_resumed: int = 0,
    ) -> None:
        self._source = source
        self._lookups = lookups
        self._tracker = lookups.tracker
        self._stage_time = self._tracker.timings["forward_client_to_gpu_time_cost_sec"]
        self._transfer = transfer
        self._in_order = options.reproducible
        self._timeout_s = options.timeout_s
        self._limiter = _limiter_of(lookups, options)
        is_timed = options.is_adaptive and lookups.trains and not options.reproducible
        # Where runs are to repeat it is not fed with times, which do not.
        self._controller = lookups.controller if is_timed else None
        if lookups.trains:
            self._tracker.limiter = self._limiter
        capacity = options.output_capacity
        if self._limiter.holds_updates:
            # An update must not wait for a lookup that waits for the loop: it may wait for it.
            capacity = max(capacity, options.staleness or 0)
        self._looked_up: OrderedQueue[PersiaTrainingBatch] = OrderedQueue(capacity)
        # What the user receives: with several ranks, what all have agreed on.
        self._agreed = self._looked_up
        if not options.keeps_step:
            ranks = None
        self._ranks = ranks
        if ranks is not None:
            self._agreed = OrderedQueue(1)
        # Reproducible over ranks: their updates go in the order of the ranks.
        is_lockstep = options.reproducible and (options.staleness == 1 or options.is_adaptive)
        self._takes_turns = ranks is not None and is_lockstep
        self._reason_to_drop = Reason.UNUSED
        self._turn = threading.Lock()  # see the module's docstring; guards the next two
        self._num_taken = 0
        self._num_workers = options.num_workers
        self._lock = threading.Lock()
        self._num_running = 0  # workers not yet ended; guarded by _lock
        # Adding to a set and discarding from it are atomic.
        self._idle: set[int] = set()  # workers that wait for _turn
        self._looking_up: set[int] = set()  # numbers of batches, for messages only
        self._is_agreeing = False  # for messages only
        self._given_at = 0.0  # when the user got it; 0 before the first
        self._last: InFlightBatch | None = None  # of the batch that the user has
        self._last_needs_turn = False  # it will have no update
        self._outcome = PassOutcome(self._tracker, is_checked=not options.allow_untrained)
        self._num_resumed = num_resumed
        self._ended_ranks = ""  # names those that had no batch in the first round
        self._has_begun = False  # the user has received a batch
        self._kept: list[InFlightBatch] = []  # most of them ended since
        self._threads: list[threading.Thread] = []
        self._agreeing: threading.Thread | None = None
        self.is_closed = False

    # --- the user's thread ----------------------------------------------------------------

    def start(self) -> None:
        """Start the source, the first worker and the thread that agrees with other ranks."""
        self._source.start()
        self._start_worker()
        if self._ranks is not None:
            self._agreeing = threading.Thread(
                target=self._keep_step, args=(self._ranks,), name="persia-agree", daemon=True
            )
            self._agreeing.start()

    def next(self) -> PersiaTrainingBatch:
        """Return the next batch; the last one is released if it had no backward.

        Raises:
            Finished: If all batches of the dataset were returned.
            DataError: If there were none, or none of them trained anything.
            Closed: If the pass was closed, by a new one or by leaving the context.
            ServiceTimeout: If none came in time.
            ConfigError: If kept batches hold all permits.
        """
        self._leave_last()
        if self._kept:
            self._check_kept()
        self._outcome.check_trained(MANY)
        self._limiter.request(len(self._kept))
        begin = time.perf_counter()
        batch = self._wait_for_batch()
        now = time.perf_counter()
        waited_s = now - begin
        if waited_s > SHORT_S:
            name = "get_train_batch_time_cost_more_than_1ms_sec"
            self._tracker.timings[name].add(waited_s)
        ticket = batch.ticket
        if self._controller is not None and ticket is not None:
            if self._given_at:
                late_s = ticket.ready_at - begin
                self._controller.note(begin - self._given_at, late_s, ticket.held_s)
            self._given_at = now
        if batch.upload is not None:
            self._transfer.finish(batch)
        self._has_begun = True
        self._last = ticket
        self._last_needs_turn = ticket is None
        return batch

    def _check_kept(self) -> None:
        self._forget_ended()
        staleness = self._limiter.staleness
        if staleness is not None and len(self._kept) >= staleness:
            raise ConfigError(
                f"embedding_staleness={staleness} allows no batch beside the "
                f"{len(self._kept)} that ctx.keep holds: to accumulate gradients over k "
                "batches it must be at least k, here DataLoader(..., embedding_staleness="
                f"{len(self._kept) + 1}) or more"
            )

    def _forget_ended(self) -> None:
        kept, self._kept = self._kept, []
        for ticket in kept:
            if ticket.state is State.KEPT:
                self._kept.append(ticket)
            else:
                self._outcome.note(ticket)

    def _wait_for_batch(self) -> PersiaTrainingBatch:
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return self._agreed.get(min(left, LINE_S))
            except Finished:
                self._note_end()
                raise
            except ServiceError:
                raise  # a lookup's, which may be a timeout of its own
            except TimeoutError as exc:
                if left <= LINE_S:
                    raise ServiceTimeout(
                        f"no batch came within {self._timeout_s:g} s: waited for "
                        f"{self._slow_stage()}",
                        role="nn-worker",
                        method="next batch",
                    ) from exc
            logger.warning("no batch yet: waiting for %s", self._slow_stage())

    def _note_end(self) -> None:
        is_empty = self._num_resumed > 0 and not self._has_begun
        if is_empty:
            logger.warning(_NOTHING_RESUMED, self._num_resumed)
        source = self._source
        self._lookups.progress.end(
            source.position, source.end_position(), source.next_position(), is_empty=is_empty
        )
        if not is_empty:
            self._check_outcome()

    def _check_outcome(self) -> None:
        """Raise DataError if the pass, which has ended, did nothing."""
        who = self._ended_ranks or self._source.describe_missing()
        if who:
            self._outcome.fail_empty(who)
        self._forget_ended()
        if not self._kept:  # they may have a backward yet
            self._outcome.check_trained(1)

    def _leave_last(self) -> None:
        last, self._last = self._last, None
        needs_turn, self._last_needs_turn = self._last_needs_turn, False
        if last is not None:
            # An acknowledged one is the common case, without a lock.
            needs_turn = last.state is not State.ACKNOWLEDGED and self._tracker.release(
                last, Reason.ABANDONED, even_kept=False
            )
            if last.state is State.KEPT:
                self._kept.append(last)
            else:
                self._outcome.note(last)
        if needs_turn and self._takes_turns and self._ranks is not None and not self.is_closed:
            self._ranks.in_turn(lambda: None)  # the others wait for this rank's turn

    def _slow_stage(self) -> str:
        """Name what the pipeline waits for."""
        if self._looking_up:
            return f"{len(self._looking_up)} lookups at the embedding-worker"
        if self._limiter.is_exhausted():
            return (
                f"the update of a batch in flight, as embedding_staleness="
                f"{self._limiter.limit} allows no more of them"
            )
        if self._ranks is not None and len(self._looked_up) == 0 and self._is_agreeing:
            return "the other ranks to have a batch"
        return self._source.describe_wait() or "the forward workers"

    def close(self) -> None:
        """End the pass: release what had no backward, join the threads; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        readers = self._source.close()
        self._limiter.close()
        left = self._looked_up.close()
        if self._agreed is not self._looked_up:
            left += self._agreed.close()
        begin = time.monotonic()
        try:
            # An embedding-worker that has gone answers no release, and a process that is being
            # stopped has seconds.
            with within(_RELEASE_S):
                self._leave_last()
                for item in left:
                    self._drop(item.ticket)
        finally:
            # Nor does it answer lookups.
            is_answered = time.monotonic() - begin < _RELEASE_S
            self._join(readers, JOIN_S if is_answered else _RELEASE_S)

    def _drop(self, ticket: InFlightBatch | None) -> None:
        if ticket is not None:
            self._tracker.release(ticket, self._reason_to_drop)

    def _join(self, readers: list[threading.Thread], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        agreeing = [] if self._agreeing is None else [self._agreeing]
        join(self._threads, timeout_s)  # the last of these may have started another
        threads = [*readers, *self._threads, *agreeing]
        for thread in join(threads, max(deadline - time.monotonic(), 0.0)):
            logger.warning(
                "%s has not ended %g s after the loop did: it is still inside the user's "
                "dataset, a lookup or a round with the other ranks",
                thread.name,
                timeout_s,
            )

    # --- ranks in step ----------------------------------------------------------------------

    def _keep_step(self, ranks: Ranks) -> None:
        """Take part in rounds until one is not complete."""
        try:
            number = 0
            while self._play_round(ranks, number):
                number += 1
        except BaseException as exc:
            # The others are gone, or cannot be reached.
            self._agreed.fail(exc)

    def _play_round(self, ranks: Ranks, number: int) -> bool:
        item: PersiaTrainingBatch | None = None
        failure: BaseException | None = None
        code = HAS_BATCH
        try:
            item = self._looked_up.get(None)
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
                self._drop(item.ticket)  # and the next round says LEFT
            return True
        failure = failure or _early_end(codes)
        if failure is None:
            # The others' data has ended, and with it this rank's.
            self._reason_to_drop = Reason.INCOMPLETE
            if number == 0:
                ended = [str(rank) for rank, one in enumerate(codes) if one == ENDED]
                self._ended_ranks = f"rank {', '.join(ended)} of {len(codes)} had"
        if item is not None:
            if failure is None:
                self._warn_of_rest(codes, number)
            self._drop(item.ticket)
        if failure is None:
            self._source.drop_rest(partial(self._tracker.count, Reason.INCOMPLETE))
        self._agreed.finish(failure)
        return False

    def _warn_of_rest(self, codes: list[int], number: int) -> None:
        """Log, once in a context, that this rank has batches that others have no match for."""
        if self._tracker.stats()[Reason.INCOMPLETE.value]:
            return
        ended = ", ".join(str(rank) for rank, one in enumerate(codes) if one == ENDED)
        logger.warning(
            "rank %s of %d has no batch behind round %d: this pass ends for all ranks, and "
            "what others have is dropped (said once; ctx.stats()['incomplete'] counts); "
            "DataLoader(..., drop_last=False) trains it",
            ended,
            len(codes),
            number,
        )

    # --- forward workers --------------------------------------------------------------------

    def _start_worker(self) -> None:
        name = f"persia-forward-{len(self._threads)}"
        thread = threading.Thread(target=self._forward, name=name, daemon=True)
        with self._lock:
            self._num_running += 1  # before it runs: the last one to end finishes the queue
        # Before it runs, too: it counts the threads to decide whether to start another.
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.remove(thread)
            with self._lock:
                self._num_running -= 1
            raise

    def _forward(self) -> None:
        try:
            while True:
                self._forward_one()
        except Finished:
            self._limiter.end_lookups()
            with self._lock:
                self._num_running -= 1
                is_last = self._num_running == 0
            if is_last:  # all others have queued what they took
                self._looked_up.finish(self._source.failure)
        except Closed:
            pass
        except BaseException as exc:
            self._limiter.end_lookups()
            self._looked_up.fail(exc)

    def _forward_one(self) -> None:
        me = threading.get_ident()
        self._idle.add(me)
        with self._turn:
            self._idle.discard(me)
            batch, ticket = self._source.get()
            needs_permit = self._lookups.has_gradients(ticket)
            begin = time.perf_counter()
            try:
                if not self._idle and len(self._threads) < self._num_workers:
                    self._start_worker()
                num_missed = self._limiter.acquire(needs_permit)
            except BaseException:
                self._lookups.discard(ticket, self._reason_to_drop)
                raise
            if needs_permit:
                ticket.held_s = time.perf_counter() - begin
                self._tracker.missed.add(num_missed)
                self._lookups.progress.begin(self._source.position)
            ticket.place = place = self._num_taken
            self._num_taken += 1
            self._lookups.number(batch, ticket)
            if self._in_order:
                outputs = self._look_up(batch, ticket, place)
                if self._limiter.holds_updates:
                    self._limiter.note_lookup()
        if not self._in_order:
            outputs = self._look_up(batch, ticket, place)
        try:
            begin = time.perf_counter()
            self._transfer.stage(batch, outputs)
            ticket.ready_at = time.perf_counter()
            self._stage_time.add(ticket.ready_at - begin)
            self._looked_up.put(place, batch)
        except BaseException:
            self._drop(batch.ticket)
            raise

    def _look_up(
        self, batch: PersiaTrainingBatch, ticket: InFlightBatch, place: int
    ) -> tuple[SlotOutput, ...]:
        self._looking_up.add(place)
        try:
            ticket.in_order, ticket.in_turn = self._in_order, self._takes_turns
            return self._lookups.lookup(batch, ticket, self._limiter)
        finally:
            self._looking_up.discard(place)


def _limiter_of(lookups: Lookups, options: PassOptions) -> StalenessLimiter:
    """Return what bounds the lookups of a pass."""
    if not lookups.trains:
        # Without updates nothing is stale, and evaluation reads ahead as far as it may.
        return StalenessLimiter(None, on_demand=options.reproducible)
    controller = None
    if options.is_adaptive:
        # A new one stays at one permit: in reproducible mode it is given no times.
        controller = PermitController() if options.reproducible else lookups.controller
    return StalenessLimiter(options.staleness, options.reproducible, controller)


def _early_end(codes: list[int]) -> ServiceError | None:
    """Return an error that names the rank that ended the pass before its data did."""
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
