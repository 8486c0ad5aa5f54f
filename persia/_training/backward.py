"""The backward pipeline: leaf gradients to the embedding-worker, in threads of its own.

    ctx.backward --Channel--> backward workers --update--> embedding-worker
    takes the leaves'         sum per distinct id,         steps the rows
    gradients                 wait for the copy

The user's thread only takes references (on CUDA it packs them into one buffer and starts one
copy to pinned memory); summing and sending happen in the workers. An update that raises is
kept and raised at the user's next ``backward``, flush or exit.

Reads see own writes: ``flush`` waits for every update submitted before it was called.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from persia import env
from persia._core.kernels import pooling
from persia._rpc.deadlines import Tries
from persia._rpc.messages import BatchGradients, SlotGradient
from persia._training.inflight import Reason
from persia._training.learning_rates import LearningRates
from persia._training.queues import BoundedQueue, Closed, Finished, join
from persia.errors import ServiceTimeout, ServiceUnavailable, UnknownRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persia._rpc.messages import EmbeddingWorker, LearningRate, UpdateReport
    from persia._training.inflight import InFlightBatch, InFlightTracker
    from persia._training.transfer import Leaf, PersiaTrainingBatch

logger = logging.getLogger(__name__)

# How long the user's thread waits for the embedding-worker before it says so.
WAIT_S = 300.0
# A backward worker that has not ended by then is inside an update that hangs.
JOIN_S = 10.0


# Waits of the user's thread up to so many seconds are none, for the metrics.
SHORT_S = 0.001
# Seconds between two looks whether a pass has ended.
_LOOK_S = 0.05

T = TypeVar("T")


class TakesTurns(Protocol):
    """The ranks; ``persia._training.ranks`` implements it."""

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run ``action`` when all lower ranks have, and return when all ranks have."""


class GradientBatch:
    """The gradients of one batch on their way.

    ``gradients`` are parallel to ``leaves``; None where the loss did not reach. The leaves'
    own ``grad`` is taken away, so that nobody adds to a buffer that is being sent.
    """

    __slots__ = ("_flat", "event", "gradients", "leaves", "number", "rates", "step", "ticket")

    def __init__(self, ticket: InFlightBatch, leaves: list[Leaf]) -> None:
        self.ticket = ticket
        self.leaves = leaves
        self.number = -1  # place in the order of submission; set by the engine
        self.step = 0  # of the user's, from 1; set by the engine
        self.rates: tuple[LearningRate, ...] = ()  # as they are when it is submitted
        self.gradients: list[torch.Tensor | None] = []
        for leaf in leaves:
            gradient = leaf.tensor.grad
            if gradient is not None:
                gradient = gradient.detach()
                leaf.tensor.grad = None
            self.gradients.append(gradient)
        self.event: torch.cuda.Event | None = None  # recorded behind the copy to the host
        self._flat: torch.Tensor | None = None  # all gradients of a CUDA batch, f32

    def is_empty(self) -> bool:
        """Whether the loss reached no feature at all."""
        return all(gradient is None for gradient in self.gradients)

    def names_without_gradient(self) -> tuple[str, ...]:
        """Return the features that the loss did not reach."""
        return tuple(
            leaf.name
            for leaf, gradient in zip(self.leaves, self.gradients, strict=True)
            if gradient is None
        )

    def pack(self) -> None:
        """Sum CUDA gradients per distinct id and put them into one buffer."""
        present = [gradient for gradient in self.gradients if gradient is not None]
        if not present or present[0].device.type != "cuda":
            return
        for place, leaf in enumerate(self.leaves):
            gradient = self.gradients[place]
            if gradient is not None and leaf.index is not None:
                summed = gradient.new_zeros(leaf.num_rows, gradient.shape[1])
                self.gradients[place] = summed.index_add_(0, leaf.index, gradient)
        self._flat = torch.cat(
            [gradient.reshape(-1) for gradient in self.gradients if gradient is not None]
        )

    def num_bytes(self) -> int:
        """Return the bytes of its gradients."""
        return sum(x.numel() * x.element_size() for x in self.gradients if x is not None)

    def is_finite(self) -> bool:
        """Whether no gradient holds NaN or Inf. Waits for the device."""
        if self._flat is not None:
            return bool(torch.isfinite(self._flat).all())
        return all(
            bool(torch.isfinite(gradient).all())
            for gradient in self.gradients
            if gradient is not None
        )

    def start_copy(self, stream: torch.cuda.Stream) -> None:
        """Start the one copy to the host, beside the dense step."""
        if self._flat is None:
            return
        stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(stream):
            host = torch.empty(self._flat.shape, dtype=self._flat.dtype, pin_memory=True)
            host.copy_(self._flat, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(stream)
        # The buffer is freed by another thread than the stream that reads it.
        self._flat.record_stream(stream)
        sizes = [gradient.numel() for gradient in self.gradients if gradient is not None]
        pieces = iter(torch.split(host, sizes))
        self.gradients = [
            None if gradient is None else next(pieces).view(gradient.shape)
            for gradient in self.gradients
        ]
        self._flat = None

    def slots(self) -> tuple[SlotGradient, ...]:
        """Return what the embedding-worker takes; runs in a backward worker."""
        was_packed = self.event is not None
        if self.event is not None:
            self.event.synchronize()  # this thread waits, without the GIL; the device does not
        slots = []
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            if gradient is None:
                slots.append(SlotGradient(leaf.name, None))
                continue
            if leaf.index is not None and not was_packed:
                gradient = _sum_per_row(gradient, leaf)
            first = 1 if leaf.has_padding else 0
            slots.append(SlotGradient(leaf.name, gradient[first:].contiguous().numpy()))
        return tuple(slots)


def _sum_per_row(gradient: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """Add the rows of a leaf's gradient per distinct id, in the order of their positions."""
    index = leaf.index
    summed = torch.zeros(leaf.num_rows, gradient.shape[1])
    if index is not None and len(index):
        pooling.index_add(gradient.float().contiguous().numpy(), index.numpy(), summed.numpy())
    return summed


class BackwardPipeline:
    """Sends updates from a bounded queue.

    Args:
        worker: The embedding-worker.
        book: Where the outcome of each batch is noted.
        client: See ``client``.
        num_workers: Updates sent at the same time.
        capacity: Updates that wait before ``submit`` does.
        device: Where the gradients are.
        ranks: To take turns with, for tickets that ask for it.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        book: InFlightTracker,
        *,
        client: int,
        num_workers: int,
        capacity: int,
        device: torch.device,
        ranks: TakesTurns | None = None,
    ) -> None:
        self._worker = worker
        self.learning_rates = LearningRates(worker)
        self._ranks = ranks
        self._book = book
        # First half of the update ids: one rank, entered once, or gone back once to a
        # checkpoint: then numbers come again, and none of them is a repetition.
        self.client = client
        self._queue: BoundedQueue[tuple[GradientBatch, float]] = BoundedQueue(capacity)
        self._changed = threading.Condition()  # guards the six below
        self._pending: dict[int, int] = {}  # submitted and not yet ended: number -> step
        self._next_number = 0
        self._failure: BaseException | None = None
        self._steps = 0  # of the user's that have ended
        self._held_after: int | None = None  # updates of later steps wait
        self._is_closed = False
        self.is_between_passes: Callable[[], bool] = lambda: False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._warned: set[tuple[str, ...]] = set()
        self._threads = [
            threading.Thread(target=self._run, name=f"persia-backward-{number}", daemon=True)
            for number in range(num_workers)
        ]

    @property
    def queue(self) -> BoundedQueue[tuple[GradientBatch, float]]:
        """Updates that no worker has taken yet."""
        return self._queue

    def start(self) -> None:
        """Start the workers, all or none."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._queue.close()
            join(self._threads, JOIN_S)
            raise

    # --- the user's thread ----------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what an update raised since the last call, once.

        Raises:
            BaseException: The exception itself, with its worker's traceback.
        """
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def collect(
        self, batches: Sequence[PersiaTrainingBatch], current: PersiaTrainingBatch
    ) -> list[GradientBatch]:
        """Take the gradients of the batches that one backward reached.

        A batch other than the current one that got no gradient took no part in the loss: it
        stays if it is kept, and is released as abandoned otherwise.

        Raises:
            DataError: If the current batch has ended or is submitted already.
        """
        updates: list[GradientBatch] = []
        try:
            for batch in batches:
                ticket = batch.ticket
                if ticket is None or (batch is not current and not ticket.is_open()):
                    continue
                update = GradientBatch(ticket, batch.leaves)
                if batch is not current and update.is_empty():
                    self._book.release(ticket, Reason.ABANDONED, even_kept=False)
                    continue
                self._book.submit(ticket)
                updates.append(update)
                self._warn_of_missing(update)
                update.pack()
        except BaseException:
            self.give_up(updates)
            raise
        return updates

    def _warn_of_missing(self, update: GradientBatch) -> None:
        names = update.names_without_gradient()
        if names and names not in self._warned:
            self._warned.add(names)
            logger.warning(
                "the loss did not reach these id features, which are skipped and counted "
                "from now on: %s",
                ", ".join(names),
            )

    def submit(self, updates: Sequence[GradientBatch], scale: float) -> None:
        """Queue updates; waits while the queue is full.

        Args:
            updates: What ``collect`` returned.
            scale: What the loss was multiplied with; the embedding-worker divides by it.

        Raises:
            ServiceTimeout: If the embedding-worker takes nothing for minutes.
        """
        for place, update in enumerate(updates):
            try:
                self._submit_one(update, scale)
            except BaseException:  # Ctrl-C while it waits, too
                self.give_up(updates[place:])
                raise

    def _submit_one(self, update: GradientBatch, scale: float) -> None:
        if self._stream is not None:
            update.start_copy(self._stream)
        update.rates = self.learning_rates.current
        with self._changed:
            update.number = self._next_number
            update.step = self._steps + 1
            self._next_number += 1
            self._pending[update.number] = update.step
        is_queued = False
        begin = time.perf_counter()
        try:
            is_queued = self._queue.put((update, scale), WAIT_S)
        finally:
            if not is_queued:
                self._ended(update.number)
        waited_s = time.perf_counter() - begin
        if waited_s > SHORT_S:
            name = "update_gradient_batched_time_cost_more_than_1ms_sec"
            self._book.timings[name].add(waited_s)
        if not is_queued:
            raise ServiceTimeout(
                f"waited {WAIT_S:g} s for the embedding-worker to take one of "
                f"{len(self._queue)} queued updates",
                role="embedding-worker",
                method="update",
            )

    def give_up(self, updates: Sequence[GradientBatch]) -> None:
        """End collected batches that will not be sent: refs and permits come back."""
        for update in updates:
            self._book.fail(update.ticket)

    def skip(self, updates: Sequence[GradientBatch]) -> None:
        """Release the batches of these updates instead of sending them."""
        for update in updates:
            self._book.skip(update.ticket)

    def flush(self) -> None:
        """Wait until every update submitted so far is acknowledged.

        Raises:
            ServiceTimeout: If that takes minutes.
            BaseException: What one of the updates raised.
        """
        self.wait()
        self.raise_failure()

    def wait(self) -> None:
        """Wait until every update submitted so far is acknowledged, or has failed.

        What one raised stays for the user's thread.

        Raises:
            ServiceTimeout: If that takes minutes.
        """
        with self._changed:
            last = self._next_number
            if not self._changed.wait_for(
                lambda: all(number >= last for number in self._pending), WAIT_S
            ):
                raise ServiceTimeout(
                    f"waited {WAIT_S:g} s for the embedding-worker to acknowledge "
                    f"{len(self._pending)} updates",
                    role="embedding-worker",
                    method="update",
                )

    def measure(self) -> tuple[int, int]:
        """Return how many updates wait to be sent, and the bytes of their gradients."""
        waiting = self._queue.items()
        return len(waiting), sum(update.num_bytes() for update, _ in waiting)

    def why_not_healthy(self) -> str:
        """Name the threads that have ended before their time; "" if none has."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        return f"ended: {', '.join(dead)}" if dead and not self._is_closed else ""

    # --- checkpoints ------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of the user's last step that has submitted all it had."""
        return self._steps

    def end_step(self, number: int) -> None:
        """Note that the user's step with this number has submitted all it had."""
        with self._changed:
            self._steps = number
            self._changed.notify_all()

    def hold(self, step: int, timeout_s: float) -> bool:
        """Keep updates of later steps back; wait until this one and those before are in.

        Returns:
            Whether they are; if not in time, nothing is kept back.
        """
        deadline = time.monotonic() + timeout_s
        are_in = False
        with self._changed:
            self._held_after = step
            while not are_in and time.monotonic() < deadline:
                # Nobody notifies of the end of a pass, after which a rank makes no more steps
                # though others may, with drop_last=False.
                are_in = self._changed.wait_for(lambda: self._are_in(step), _LOOK_S)
        if not are_in:
            self.go_on()
        return are_in

    def _are_in(self, step: int) -> bool:
        has_come = self._steps >= step or self._is_closed or self.is_between_passes()
        return has_come and all(of > step for of in self._pending.values())

    def go_on(self) -> None:
        """Let updates go again."""
        with self._changed:
            self._held_after = None
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued, then end and join the workers.

        Raises:
            BaseException: What an update raised and nobody has seen yet.
        """
        try:
            self.flush()
        finally:
            self._queue.finish()
            for thread in join(self._threads, JOIN_S):
                logger.warning("%s is still inside an update", thread.name)
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
        self.raise_failure()

    # --- backward workers -------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """Send one update; a function of its own, so that nothing of it outlives it."""
        try:
            update, scale = self._queue.get()
        except (Closed, Finished):
            return False
        try:
            self._send(update, scale)
        except BaseException as exc:
            with self._changed:
                self._failure = self._failure or exc
            self._book.fail(update.ticket)
        finally:
            self._ended(update.number)
        return True

    def _send(self, update: GradientBatch, scale: float) -> None:
        ticket = update.ticket
        with self._changed:
            self._changed.wait_for(
                lambda: self._held_after is None or update.step <= self._held_after
            )
        gradients = BatchGradients(
            ticket.ref, (self.client, ticket.number), update.slots(), scale, update.rates
        )
        if ticket.in_order:
            # Those before it were taken from the queue before it, so they end without it.
            with self._changed:
                self._changed.wait_for(lambda: min(self._pending) == update.number)
        begin = time.perf_counter()
        if ticket.in_turn and self._ranks is not None:
            # Acknowledged only when all ranks have met: the permit lets the next lookup go.
            report = self._ranks.in_turn(lambda: self._update(ticket, gradients))
        else:
            report = self._update(ticket, gradients)
        took_s = time.perf_counter() - begin
        self._book.timings["backward_client_time_cost_sec"].add(took_s)
        self._book.acknowledge(ticket, report)

    def _update(self, ticket: InFlightBatch, gradients: BatchGradients) -> UpdateReport:
        """Update, if need be by another embedding-worker than the one that looked it up.

        The id stays the same, so that servers which applied it already do not do so again.
        """
        tries = Tries(env.rpc_timeout_s())
        is_known = True
        while True:
            try:
                if not is_known:
                    self._worker.lookup(ticket.ref, True)
                return self._worker.update(replace(gradients, ref=ticket.ref))
            except (UnknownRef, ServiceUnavailable) as error:
                if ticket.origin is None or not tries.another():
                    raise
                ticket.ref = ticket.origin.register_again(error)
                is_known = False

    def _ended(self, number: int) -> None:
        with self._changed:
            self._pending.pop(number, None)
            self._changed.notify_all()
