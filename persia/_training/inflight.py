"""The training batches between lookup and acknowledged update.

A lookup with gradients leaves a ref at the embedding-worker and takes a permit of its loader's
``StalenessLimiter``. Whatever happens to the batch, both end exactly once:

                  +--> KEPT --+
    LOOKED_UP ----+           +--> IN_FLIGHT --> ACKNOWLEDGED, or FAILED
                  +-----------+
    LOOKED_UP or KEPT -----------> RELEASED: abandoned, skipped, unused or incomplete

Every change of state is made under the tracker's lock, so that a batch that one thread submits
while another releases it is counted once.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from persia import env
from persia._core.kernels import pooling
from persia._metrics.timings import SMALL_NUMBERS, Timing, Timings
from persia._rpc.deadlines import Retry
from persia._rpc.messages import SlotGradient
from persia._training.queues import Closed
from persia.errors import DataError, ServiceUnavailable, UnknownRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from persia._core.ids.feature_batch import FeatureBatch
    from persia._rpc.messages import EmbeddingWorker, LearningRate, UpdateReport
    from persia._training.staleness import PermitController
    from persia.errors import ServiceError

logger = logging.getLogger(__name__)

# The ref of a batch whose ids no embedding-worker has yet.
UNREGISTERED = -1
# Shorter waits of the user's thread are not counted in the metrics.
SHORT_S = 0.001
# What an embedding-worker raises that has died, or that was restarted and knows no refs.
LOST = (UnknownRef, ServiceUnavailable)

T = TypeVar("T")


class State(enum.Enum):
    """Where a batch stands; see the diagram above."""

    LOOKED_UP = "waiting for its backward"
    KEPT = "kept for a later backward"
    IN_FLIGHT = "sent already"
    ACKNOWLEDGED = "trained already"
    RELEASED = "released"
    FAILED = "lost in a failed update"


OPEN = (State.LOOKED_UP, State.KEPT)  # a backward can come


class Reason(enum.Enum):
    """Why a ref was released without an update; the value is its key in ``ctx.stats()``."""

    ABANDONED = "abandoned"  # given to the user, who had no backward for it
    UNUSED = "unused"  # looked up ahead, never given to the user
    INCOMPLETE = "incomplete"  # other ranks had no batch for this round
    SKIPPED = "skipped"  # a GradScaler met a non-finite gradient


class StalenessLimiter:
    """Decides when the next batch may be taken, and counts permits.

    ``staleness`` is the most batches between lookup and acknowledged update, None no bound.
    With a ``controller`` there are no more permits than it says, beside those of kept batches.

    With ``on_demand`` batches wait for the user to ask for them, and the schedule repeats:
    batch ``t`` is looked up when all up to ``t - staleness`` have ended, and the update of a
    batch waits for the lookups that are not to see it. Lookups and updates are in order then.
    """

    def __init__(
        self,
        staleness: int | None,
        on_demand: bool,
        controller: PermitController | None = None,
    ) -> None:
        self.staleness = staleness
        self._on_demand = on_demand and staleness is not None
        self._controller = controller
        # Of one permit an update has no later lookup to wait for.
        self.holds_updates = self._on_demand and controller is None and staleness != 1
        self._lock = threading.RLock()  # guards everything below; see ``OrderedQueue``
        self._changed = threading.Condition(self._lock)
        self._looked_up = threading.Condition(self._lock)
        self._num_permits = 0  # held by batches
        self._num_kept = 0  # of these, by batches that the user keeps
        self._open: set[int] = set()  # places of these batches, where updates are held
        self._num_taken = 0
        self._num_requested = 0
        self._num_looked_up = 0
        self._has_ended = False  # no more lookups will come
        self._is_closed = False

    @property
    def limit(self) -> int | None:
        """Permits that there are now; None without a bound."""
        if self._controller is None or self.staleness is None:
            return self.staleness
        return min(self._controller.permits + self._num_kept, self.staleness)

    def _admits(self, needs_permit: bool) -> bool:
        if self._is_closed or self.staleness is None:
            return True
        if needs_permit and self.is_exhausted():
            return False
        if not self._on_demand:
            return True
        controlled = self.staleness if self._controller is None else self._controller.permits
        # One that was abandoned may have ended before older ones.
        if self._open and min(self._open) <= self._num_taken - controlled:
            return False
        return self._num_taken < self._num_requested + controlled - 1

    def acquire(self, needs_permit: bool) -> int:
        """Wait until a batch may be taken, and take a permit for it if it needs one.

        Returns how many batches before it have one: its lookup may miss the update of each.
        """
        with self._lock:
            while not self._admits(needs_permit):
                self._changed.wait()
            if self._is_closed:
                raise Closed
            if needs_permit and self.holds_updates:
                self._open.add(self._num_taken)
            self._num_taken += 1
            self._num_permits += needs_permit
            return self._num_permits - needs_permit

    def take(self) -> None:
        """Take a permit, even beyond the bound: the batch is being looked up already."""
        with self._lock:
            self._num_taken += 1
            self._num_permits += 1

    def request(self, num_kept: int = 0) -> None:
        """Note that the user asks for one more batch, and how many it keeps."""
        with self._lock:
            self._num_requested += 1
            self._num_kept = num_kept
            self._changed.notify()  # one thread at most takes batches at a time

    def widen(self, staleness: int) -> None:
        """Allow more permits, also to a thread that waits for one."""
        with self._lock:
            self.staleness = staleness
            self._changed.notify()

    def return_permit(self, place: int = -1) -> None:
        """Take a permit back, of the batch that was the ``place`` th of the pass, from 0."""
        with self._lock:
            self._num_permits -= 1
            self._open.discard(place)
            self._changed.notify()

    def note_lookup(self) -> None:
        """Note that the next batch in order was looked up."""
        with self._lock:
            self._num_looked_up += 1
            self._looked_up.notify_all()

    def await_lookups(self, place: int) -> None:
        """Wait until all lookups were made that are not to see this batch's update.

        They wait for nothing but the user's loop, which may rest: so there is no deadline, as
        there is none for the next batch to be taken. The end of the pass ends it.
        """
        with self._lock:
            last = place + (self.staleness or 1) - 1
            while self._num_looked_up <= last and not self._has_ended:
                self._looked_up.wait()

    def end_lookups(self) -> None:
        """Note that no more lookups will come, whatever the reason."""
        with self._lock:
            self._has_ended = True
            self._looked_up.notify_all()

    def close(self) -> None:
        """Admit no more batches and wake the threads that wait."""
        with self._lock:
            self._is_closed = self._has_ended = True
            self._changed.notify_all()
            self._looked_up.notify_all()

    def is_exhausted(self) -> bool:
        """Whether all permits are taken."""
        with self._lock:
            return self.limit is not None and self._num_permits >= self.limit


@dataclass(slots=True, eq=False)
class Leaf:
    """The tensor of one feature that receives the gradient, and what it is summed by."""

    name: str
    tensor: torch.Tensor
    index: torch.Tensor | None = None  # i64, one row number per row of the leaf; None if pooled
    num_rows: int = 0  # rows of the sum, the padding row included
    has_padding: bool = False  # row 0 is padding and has no gradient


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """The ids of one batch, from its source on, and its gradients until their update.

    Only its ``InFlightTracker`` changes its state.
    """

    ref: int = UNREGISTERED  # of the ids at the embedding-worker
    # The key of admission draws, from the data-loader or by ``Lookups.number``.
    batch_id: int = -1
    # Running number of the training batches of this context: second half of the update id.
    number: int = -1
    # Until the lookup; empty if a data-loader registered them.
    features: tuple[FeatureBatch, ...] = ()
    requires_grad: bool = True
    num_samples: int = 0
    is_by_id: bool = False  # its "samples" are distinct ids, and their gradients sums
    # Registers the ids once more, given what their embedding-worker raised, and returns the
    # new ref; None if the embedding-worker, being of this process, cannot lose them.
    register_again: Callable[[ServiceError], int] | None = None
    on_done: Callable[[], None] | None = None  # called when a resumed run can do without it
    on_end: Callable[[], None] | None = None  # called when the ids are not needed any more
    limiter: StalenessLimiter | None = None  # whose permit it has
    place: int = -1  # in its pass, from 0
    held_s: float = 0.0  # for how long it was there and had no permit
    ready_at: float = 0.0  # by ``time.perf_counter``; its rows were there then
    in_order: bool = False  # its update waits for those submitted before it
    in_turn: bool = False  # and for those of lower ranks, and then for all ranks
    state: State = State.LOOKED_UP
    owner: int = 0  # id() of the tracker that has opened it, which would keep all rows
    reason: Reason | None = None  # of a released one
    # Of the leaves, in their order; None where the loss did not reach.
    gradients: Sequence[tuple[Leaf, torch.Tensor | None]] = ()
    unreached: tuple[str, ...] = ()  # all its features, if the backward reached none of them
    order: int = -1  # of submission; set by the pipeline, as are the next four
    step: int = 0  # of the user's, from 1
    scale: float = 1.0  # what the loss was multiplied with, times the next
    num_averaged: int = 1  # ranks over which the update is averaged
    rates: tuple[LearningRate, ...] = ()  # as they are when it is submitted
    event: torch.cuda.Event | None = None  # recorded behind the copy to the host
    _flat: torch.Tensor | None = None  # all gradients of a CUDA batch, f32

    def is_open(self) -> bool:
        """Whether the batch can still take a backward."""
        return self.state in OPEN

    def present(self) -> list[torch.Tensor]:
        """Return the gradients that there are."""
        return [gradient for _, gradient in self.gradients if gradient is not None]

    def pack(self) -> None:
        """Sum CUDA gradients per distinct id and put them into one buffer."""
        if not any(gradient is not None and gradient.is_cuda for _, gradient in self.gradients):
            return
        summed: list[tuple[Leaf, torch.Tensor | None]] = []
        for leaf, gradient in self.gradients:
            if gradient is not None and leaf.index is not None:
                zeros = gradient.new_zeros(leaf.num_rows, gradient.shape[1])
                gradient = zeros.index_add_(0, leaf.index, gradient)
            summed.append((leaf, gradient))
        self.gradients = summed
        self._flat = torch.cat([gradient.reshape(-1) for gradient in self.present()])

    def is_finite(self) -> bool:
        """Whether no gradient holds NaN or Inf. Waits for the device."""
        parts = self.present() if self._flat is None else [self._flat]
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def start_copy(self, stream: torch.cuda.Stream) -> None:
        """Start the one copy to the host, beside the dense step."""
        if self._flat is None:
            return
        stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(stream):
            host = torch.empty(self._flat.shape, dtype=self._flat.dtype, pin_memory=True)
            host.copy_(self._flat, non_blocking=True)
            # Blocking: a thread that waits for it leaves its core to the store's threads.
            self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.event.record(stream)
        # The buffer is freed by another thread than the stream that reads it.
        self._flat.record_stream(stream)
        pieces = iter(torch.split(host, [gradient.numel() for gradient in self.present()]))
        self.gradients = [
            (leaf, None if gradient is None else next(pieces).view(gradient.shape))
            for leaf, gradient in self.gradients
        ]
        self._flat = None

    def slots(self) -> tuple[SlotGradient, ...]:
        """Return what the embedding-worker takes; runs in a backward worker."""
        event = self.event
        if event is not None:
            # This thread waits, without the GIL; the device does not. On the event's device:
            # a call on another one would give this process memory there.
            with torch.cuda.device(event.device):
                event.synchronize()
        slots = []
        for leaf, gradient in self.gradients:
            if gradient is None:
                slots.append(SlotGradient(leaf.name, None))
                continue
            if leaf.index is not None and event is None:
                gradient = _sum_per_row(gradient, leaf.index, leaf.num_rows)
            first = 1 if leaf.has_padding else 0
            slots.append(SlotGradient(leaf.name, gradient[first:].contiguous().numpy()))
        return tuple(slots)


def take_gradients(leaves: list[Leaf]) -> list[tuple[Leaf, torch.Tensor | None]]:
    """Take the leaves' gradients, so that no later backward adds to what is being sent."""
    taken: list[tuple[Leaf, torch.Tensor | None]] = []
    for leaf in leaves:
        gradient = leaf.tensor.grad
        if gradient is not None:
            gradient = gradient.detach()
            leaf.tensor.grad = None
        taken.append((leaf, gradient))
    return taken


def _sum_per_row(gradient: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Add the rows of a leaf's gradient per distinct id, in the order of their positions."""
    summed = torch.zeros(num_rows, gradient.shape[1], dtype=torch.float32)
    if len(index):
        pooling.index_add(gradient.float().contiguous().numpy(), index.numpy(), summed.numpy())
    return summed


class InFlightTracker:
    """States and counts of the batches of one training context; any thread may call it."""

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards every count and every batch's state
        self._num_open = 0
        self._counts: Counter[str] = Counter()
        self.timings = Timings(
            "forward_client_time_cost_sec",
            "forward_client_to_gpu_time_cost_sec",
            "backward_client_time_cost_sec",
            "get_train_batch_time_cost_more_than_1ms_sec",
            "update_gradient_batched_time_cost_more_than_1ms_sec",
        )
        # Updates of earlier batches that a lookup may miss, by lookups.
        self.missed = self.timings["persia_missed_updates"] = Timing(SMALL_NUMBERS)
        self.limiter: StalenessLimiter | None = None  # of the last pass that trains
        self._skipped_slots: Counter[str] = Counter()
        self._nan_samples: Counter[str] = Counter()
        self._nan_rows: Counter[str] = Counter()
        # Steps so far whose gradients were all zero; None once one was not.
        self.zero_steps: int | None = 0
        # Filled by finalizers, which run inside any allocation of any thread and so must
        # not take a lock; append and popleft are atomic.
        self.orphans: deque[InFlightBatch] = deque()

    def open(self, batch: InFlightBatch) -> None:
        """Note a lookup that left a ref; the batch now owns the loader's permit."""
        with self._lock:
            batch.owner = id(self)
            self._num_open += 1

    def keep(self, batch: InFlightBatch) -> None:
        """Hold a batch over the next ones."""
        with self._lock:
            if batch.state not in OPEN:
                raise self._not_open(batch, "cannot be kept")
            batch.state = State.KEPT

    def check_open(self, batch: InFlightBatch) -> None:
        """Check that a batch can take a backward, before any work is done for it."""
        with self._lock:
            if batch.state not in OPEN:
                raise self._not_open(batch, "cannot take a backward")

    def submit(self, batch: InFlightBatch) -> None:
        """Claim a batch for its update, unless another backward, or the loader, was faster."""
        with self._lock:
            if batch.state not in OPEN:
                raise self._not_open(batch, "cannot take a backward")
            batch.state = State.IN_FLIGHT

    @staticmethod
    def _not_open(batch: InFlightBatch, problem: str) -> DataError:
        reason = "" if batch.reason is None else f" ({batch.reason.value})"
        return DataError(
            f"batch {batch.batch_id} {problem}: it was {batch.state.value}{reason}; each batch "
            "has one backward before the loader is asked for the next one, or ctx.keep(batch)"
        )

    def release(self, batch: InFlightBatch, reason: Reason, *, even_kept: bool = True) -> bool:
        """End a batch without an update; False if it had ended, been submitted, or is kept."""
        with self._lock:
            if batch.state not in OPEN or (batch.state is State.KEPT and not even_kept):
                return False
            self._end(batch, State.RELEASED, reason)
        self._release_ref(batch, is_done=reason is Reason.ABANDONED)
        return True

    def skip(self, batch: InFlightBatch) -> None:
        """End a submitted batch whose gradients are not to be used."""
        with self._lock:
            self._end(batch, State.RELEASED, Reason.SKIPPED)
        self._release_ref(batch, is_done=True)

    def count(self, reason: Reason) -> None:
        """Count a batch that ended before its lookup."""
        with self._lock:
            self._counts[reason.value] += 1

    def acknowledge(self, batch: InFlightBatch, report: UpdateReport) -> None:
        """End a batch whose update is applied, and add up what the update left out."""
        with self._lock:
            if batch.state is not State.IN_FLIGHT:  # abandoned by a Ctrl-C that came too late
                return
            self._end(batch, State.ACKNOWLEDGED)
            self._counts["batches"] += 1
            self._counts["samples"] += batch.num_samples
            if report.num_missing:
                self._counts["missing"] += report.num_missing
            if report.skipped:
                self._skipped_slots.update(report.skipped)
            if report.nan_samples:
                self._nan_samples.update(report.nan_samples)
            if report.nan_rows:
                self._nan_rows.update(report.nan_rows)
        self._free(batch, is_done=True)

    def fail(self, batch: InFlightBatch) -> None:
        """End a submitted batch whose update raised, or was never sent; once."""
        with self._lock:
            if batch.state is not State.IN_FLIGHT:
                return
            self._end(batch, State.FAILED)
            self._counts["failed"] += 1
        try:
            self._release_ref(batch, is_done=False)
        except Exception as exc:
            # The user sees the failure of the update, from which this one follows.
            logger.debug("ref %d could not be released: %s", batch.ref, exc)

    def _end(self, batch: InFlightBatch, state: State, reason: Reason | None = None) -> None:
        batch.state, batch.reason = state, reason
        self._num_open -= 1
        if reason is not None:
            self._counts[reason.value] += 1

    def _release_ref(self, batch: InFlightBatch, *, is_done: bool) -> None:
        try:
            self._worker.release(batch.ref)
        finally:
            self._free(batch, is_done)

    @staticmethod
    def _free(batch: InFlightBatch, is_done: bool) -> None:
        """Return the permit and let the ids go; outside the lock, as all of it wakes threads.

        That a resumed run does not need the batch is noted before the permit is returned: a
        checkpoint behind the next batch must contain it.
        """
        on_done, batch.on_done = batch.on_done, None
        limiter, batch.limiter = batch.limiter, None
        on_end, batch.on_end = batch.on_end, None
        # Gradients first: a worker that is inside ``slots`` then finds none, not half of them.
        batch.gradients = ()
        batch.register_again = batch.event = batch._flat = None
        if is_done and on_done is not None:
            on_done()
        if limiter is not None:
            limiter.return_permit(batch.place)
        if on_end is not None:
            on_end()

    def release_orphans(self) -> None:
        """Release the batches that the user dropped without a backward."""
        while self.orphans:
            self.release(self.orphans.popleft(), Reason.ABANDONED)

    def count_failed_lookup(self) -> None:
        """Count a lookup that raised."""
        with self._lock:
            self._counts["failed_lookups"] += 1

    def totals(self) -> tuple[int, int]:
        """Return how many samples were trained, and how many lookups raised."""
        with self._lock:
            return self._counts["samples"], self._counts["failed_lookups"]

    def nan_counts(self) -> tuple[int, dict[str, int]]:
        """Return the total of non-finite rows left out so far, and each feature's."""
        with self._lock:
            by_feature = self._nan_samples + self._nan_rows
            return sum(by_feature.values()), dict(by_feature)

    def stats(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return the counts so far; ``staleness`` is the number in flight now."""
        with self._lock:
            return {
                "batches": self._counts["batches"],
                **{reason.value: self._counts[reason.value] for reason in Reason},
                "failed": self._counts["failed"],
                "missing": self._counts["missing"],
                "skipped_slots": dict(self._skipped_slots),
                "nan_samples": dict(self._nan_samples),
                "nan_rows": dict(self._nan_rows),
                "staleness": self._num_open,
            }


def call_again(
    call: Callable[[int], T], batch: InFlightBatch, error: ServiceError, begin: float
) -> T:
    """Register the ids of a batch again and repeat a call that failed, until a deadline.

    The embedding-worker that receives them may be lost, too: as many deaths as there is time
    for cost nothing. The pause is for a server that forgets its refs at once. ``error`` is what
    the first call raised, one of ``LOST``, and ``begin`` when it was made by
    ``time.perf_counter``; what is raised is the last.
    """
    left_s = env.rpc_timeout_s() - (time.perf_counter() - begin)
    # Once: a batch that is given up meanwhile has none any more.
    register_again = batch.register_again
    if register_again is None or left_s <= 0:
        raise error
    for _ in Retry(left_s):
        batch.ref = register_again(error)  # for a release, should the call fail too
        try:
            return call(batch.ref)
        except LOST as exc:
            error = exc
    raise error
