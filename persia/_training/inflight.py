"""The training batches between lookup and acknowledged update, and what became of each.

A lookup with gradients leaves a ref at the embedding-worker. Whatever happens to the batch,
that ref ends exactly once, and with it the permit that its loader acquired:

                 +--> KEPT ---+
    READY -------+            +--> SUBMITTED ----> acknowledged, or failed
                 +------------+
    READY or KEPT ---------------> released: abandoned, skipped, or never used

Every change of state is made under the book's lock, so that a batch that is submitted by one
thread and given up by another is counted once.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from persia._metrics.timings import Timings
from persia.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from persia._rpc.messages import EmbeddingWorker, UpdateReport
    from persia._training.lookups import IdSource

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where a batch stands; see the picture above."""

    READY = "waiting for its backward"
    KEPT = "kept for a later backward"
    SUBMITTED = "on its way to the embedding-worker"
    ENDED = "ended"


class Reason(enum.Enum):
    """Why a ref was released without an update; the value is its key in ``ctx.stats()``."""

    ABANDONED = "abandoned"  # handed to the user, who had no backward for it
    UNUSED = "unused"  # looked up ahead, never handed out
    INCOMPLETE = "incomplete"  # other ranks had no batch for this round
    SKIPPED = "skipped"  # a GradScaler met a non-finite gradient


class ReturnsPermit(Protocol):
    """What lent a permit to a batch: the gate of its loader."""

    def give_back(self) -> None:
        """Take the permit back; called exactly once for each."""


class InFlightBatch:
    """One ref in flight. Only its ``InFlightTracker`` changes it."""

    __slots__ = (
        "__weakref__",
        "batch_id",
        "done",
        "ended_as",
        "gate",
        "in_order",
        "in_turn",
        "num_samples",
        "number",
        "origin",
        "ref",
        "state",
    )

    def __init__(
        self,
        ref: int,
        batch_id: int,
        gate: ReturnsPermit | None,
        in_order: bool,
        in_turn: bool,
        number: int,
        origin: IdSource | None,
        done: Callable[[], None] | None = None,
        num_samples: int = 0,
    ) -> None:
        self.ref = ref
        self.num_samples = num_samples
        self.batch_id = batch_id
        self.number = number  # second half of the update id
        self.origin = origin  # knows the ids if the embedding-worker no longer does
        self.done = done  # called when no run that is resumed needs the batch
        self.gate = gate  # None for a batch without staleness control
        self.in_order = in_order  # its update waits for those submitted before it
        self.in_turn = in_turn  # and for those of lower ranks, and then for all ranks
        self.state = State.READY
        self.ended_as = ""  # for messages: why nothing more can be done with the batch

    def is_open(self) -> bool:
        """Whether the batch can still take a backward."""
        return self.state in (State.READY, State.KEPT)


class InFlightTracker:
    """Tickets and counts of one training context.

    Args:
        worker: Where refs are released.
    """

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards every count and every ticket's state
        self._open = 0
        self._counts: Counter[str] = Counter()
        self._num_samples = 0
        self._num_forward_errors = 0
        self.timings = Timings(
            "forward_client_time_cost_sec",
            "forward_client_to_gpu_time_cost_sec",
            "backward_client_time_cost_sec",
            "get_train_batch_time_cost_more_than_1ms_sec",
            "update_gradient_batched_time_cost_more_than_1ms_sec",
        )
        self._skipped_slots: Counter[str] = Counter()
        self._nan_samples: Counter[str] = Counter()
        self._nan_rows: Counter[str] = Counter()
        # Filled by finalizers, which run inside any allocation of any thread and so must
        # not take a lock; append and popleft are atomic.
        self.orphans: deque[InFlightBatch] = deque()

    def open(
        self,
        ref: int,
        batch_id: int,
        gate: ReturnsPermit | None,
        in_order: bool = False,
        *,
        in_turn: bool = False,
        number: int,
        origin: IdSource | None = None,
        done: Callable[[], None] | None = None,
        num_samples: int = 0,
    ) -> InFlightBatch:
        """Note a lookup that left a ref; the ticket now owns the loader's permit."""
        ticket = InFlightBatch(
            ref, batch_id, gate, in_order, in_turn, number, origin, done, num_samples
        )
        with self._lock:
            self._open += 1
        return ticket

    def keep(self, ticket: InFlightBatch) -> None:
        """Hold a batch over the next ones.

        Raises:
            DataError: If it has ended or is submitted already.
        """
        with self._lock:
            if not ticket.is_open():
                raise DataError(self._explain(ticket, "cannot be kept"))
            ticket.state = State.KEPT

    def check_open(self, ticket: InFlightBatch) -> None:
        """Check that a batch can take a backward, before anything of it is done.

        Raises:
            DataError: If it has ended or is submitted already.
        """
        with self._lock:
            if not ticket.is_open():
                raise DataError(self._explain(ticket, "cannot take a backward"))

    def submit(self, ticket: InFlightBatch) -> None:
        """Claim a batch for its update.

        Raises:
            DataError: If another backward, or the loader, was faster.
        """
        with self._lock:
            if not ticket.is_open():
                raise DataError(self._explain(ticket, "cannot take a backward"))
            ticket.state = State.SUBMITTED

    @staticmethod
    def _explain(ticket: InFlightBatch, what: str) -> str:
        if ticket.state is State.SUBMITTED:
            return f"batch {ticket.batch_id} {what}: its gradients are sent already"
        return (
            f"batch {ticket.batch_id} {what}: it was {ticket.ended_as}; each batch has one "
            "backward before the loader is asked for the next one, or ctx.keep(batch)"
        )

    def release(self, ticket: InFlightBatch, reason: Reason, *, even_kept: bool = True) -> bool:
        """End a batch without an update; False if it had ended or been submitted.

        Args:
            ticket: The batch.
            reason: What to count it as.
            even_kept: Whether a kept batch goes, too.
        """
        with self._lock:
            if ticket.state is not State.READY and not (
                ticket.state is State.KEPT and even_kept
            ):
                return False
            self._end(ticket, f"released ({reason.value})")
            self._counts[reason.value] += 1
        if reason is Reason.ABANDONED:
            self._is_done(ticket)
        try:
            self._worker.release(ticket.ref)
        finally:
            self._give_back(ticket)
        return True

    def count(self, reason: Reason) -> None:
        """Count a batch that ended before it had a ticket."""
        with self._lock:
            self._counts[reason.value] += 1

    def skip(self, ticket: InFlightBatch) -> None:
        """End a submitted batch whose gradients are not to be used."""
        with self._lock:
            self._end(ticket, f"released ({Reason.SKIPPED.value})")
            self._counts[Reason.SKIPPED.value] += 1
        self._is_done(ticket)
        try:
            self._worker.release(ticket.ref)
        finally:
            self._give_back(ticket)

    def acknowledge(self, ticket: InFlightBatch, report: UpdateReport) -> None:
        """End a batch whose update is applied, and add up what it left out."""
        with self._lock:
            if ticket.state is State.ENDED:  # given up by a Ctrl-C that came too late
                return
            self._end(ticket, "trained already")
            self._counts["batches"] += 1
            self._num_samples += ticket.num_samples
            self._counts["missing"] += report.num_missing
            self._skipped_slots.update(report.skipped)
            self._nan_samples.update(report.nan_samples)
            self._nan_rows.update(report.nan_rows)
        self._is_done(ticket)
        self._give_back(ticket)

    def fail(self, ticket: InFlightBatch) -> None:
        """End a submitted batch whose update raised, or was never sent; once."""
        with self._lock:
            if ticket.state is not State.SUBMITTED:
                return
            self._end(ticket, "lost in a failed update")
            self._counts["failed"] += 1
        try:
            self._worker.release(ticket.ref)
        except Exception as exc:
            # What the user will see is the failure of the update; this one follows from it.
            logger.debug("ref %d could not be released: %s", ticket.ref, exc)
        finally:
            self._give_back(ticket)

    def _end(self, ticket: InFlightBatch, how: str) -> None:
        ticket.state = State.ENDED
        ticket.ended_as = how
        self._open -= 1

    @staticmethod
    def _is_done(ticket: InFlightBatch) -> None:
        done, ticket.done = ticket.done, None
        if done is not None:
            done()

    @staticmethod
    def _give_back(ticket: InFlightBatch) -> None:
        gate, ticket.gate = ticket.gate, None
        origin, ticket.origin = ticket.origin, None
        if gate is not None:
            gate.give_back()
        if origin is not None:
            origin.ended()

    def release_orphans(self) -> None:
        """Release the batches that the user dropped without a backward."""
        while self.orphans:
            self.release(self.orphans.popleft(), Reason.ABANDONED)

    def fail_lookup(self) -> None:
        """Count a lookup that raised."""
        with self._lock:
            self._num_forward_errors += 1

    def totals(self) -> tuple[int, int]:
        """Return how many samples were trained, and how many lookups raised."""
        with self._lock:
            return self._num_samples, self._num_forward_errors

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
                "abandoned": self._counts[Reason.ABANDONED.value],
                "unused": self._counts[Reason.UNUSED.value],
                "incomplete": self._counts[Reason.INCOMPLETE.value],
                "skipped": self._counts[Reason.SKIPPED.value],
                "failed": self._counts["failed"],
                "missing": self._counts["missing"],
                "skipped_slots": dict(self._skipped_slots),
                "nan_samples": dict(self._nan_samples),
                "nan_rows": dict(self._nan_rows),
                "staleness": self._open,
            }
