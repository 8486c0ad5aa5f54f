"""The backward pipeline: leaf gradients to the embedding-worker, in threads of its own.

    ctx.backward --queue--> backward workers --update--> embedding-worker
    takes the leaves'       sum per distinct id,         steps the rows
    gradients               wait for the copy

The user's thread only takes references (on CUDA it packs them into one buffer and starts one
copy to pinned memory); summing and sending happen in the workers, which start when an update
is queued and none is idle. What an update raises is raised at the user's next ``backward``,
flush or exit.

Reads see own writes: ``flush`` waits for every update submitted before it was called.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from persia import env
from persia._core.kernels import pooling
from persia._rpc.messages import BatchGradients, SlotGradient
from persia._training.inflight import LOST, SHORT_S, Reason, call_again
from persia._training.learning_rates import LearningRates
from persia._training.queues import BoundedQueue, Closed, Finished, join
from persia.errors import ServiceTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persia._rpc.messages import EmbeddingWorker, LearningRate, UpdateReport
    from persia._training.batch import Leaf, PersiaTrainingBatch
    from persia._training.inflight import InFlightBatch, InFlightTracker
    from persia._training.ranks import Ranks

logger = logging.getLogger(__name__)

# Longest wait of the user's thread for the embedding-worker.
WAIT_S = 300.0
# A backward worker that has not ended by then is inside an update that hangs.
JOIN_S = 10.0
# Seconds between two checks whether a pass has ended.
_CHECK_S = 0.05


class GradientBatch:
    """The gradients of one batch on their way to the embedding-worker.

    ``gradients`` are parallel to ``leaves``; None where the loss did not reach. The leaves'
    own ``grad`` is taken away, so that no later backward adds to a buffer that is being sent.
    """

    __slots__ = (
        *("_flat", "event", "gradients", "leaves", "missing", "number", "rates", "scale"),
        *("step", "ticket"),
    )

    def __init__(self, ticket: InFlightBatch, leaves: list[Leaf]) -> None:
        self.ticket = ticket
        self.leaves = leaves
        self.number = -1  # place in the order of submission; set by the pipeline, as is step
        self.step = 0  # of the user's, from 1
        self.scale = 1.0  # what the loss was multiplied with
        self.rates: tuple[LearningRate, ...] = ()  # as they are when it is submitted
        self.gradients: list[torch.Tensor | None] = []
        self.missing: list[str] = []  # features that the loss did not reach
        for leaf in leaves:
            gradient = leaf.tensor.grad
            if gradient is None:
                self.missing.append(leaf.name)
            else:
                gradient = gradient.detach()
                leaf.tensor.grad = None
            self.gradients.append(gradient)
        self.event: torch.cuda.Event | None = None  # recorded behind the copy to the host
        self._flat: torch.Tensor | None = None  # all gradients of a CUDA batch, f32

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
        tracker: Where the outcome of each batch is noted.
        client: See ``client``.
        num_workers: Most updates sent at the same time.
        capacity: Updates that wait before ``submit`` does.
        device: Where the gradients are.
        ranks: To take turns with, for batches that ask for it.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        tracker: InFlightTracker,
        *,
        client: int,
        num_workers: int,
        capacity: int,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._worker = worker
        self.learning_rates = LearningRates(worker)
        self._ranks = ranks
        self._tracker = tracker
        self._update_time = tracker.timings["backward_client_time_cost_sec"]
        # First half of the update ids, new for each time that a rank is entered or resumes from
        # a checkpoint: numbers start again then, and no update is taken for a repetition.
        self.client = client
        self._queue: BoundedQueue[GradientBatch] = BoundedQueue(capacity)
        self._lock = threading.RLock()  # guards the six below; see ``OrderedQueue``
        self._changed = threading.Condition(self._lock)
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
        self._num_workers = num_workers
        self._idle: set[int] = set()  # workers that wait for an update; atomic as sets are
        self._threads: list[threading.Thread] = []  # started by the user's thread only

    @property
    def queue(self) -> BoundedQueue[GradientBatch]:
        """Updates that no worker has taken yet."""
        return self._queue

    # --- the user's thread ----------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what an update raised since the last call, once.

        Raises:
            BaseException: The exception itself, with its worker's traceback.
        """
        with self._lock:
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
                if batch is not current and len(update.missing) == len(update.leaves):
                    self._tracker.release(ticket, Reason.ABANDONED, even_kept=False)
                    continue
                self._tracker.submit(ticket)
                updates.append(update)
                if update.missing:
                    self._warn_of_missing(update)
                update.pack()
        except BaseException:
            self.discard(updates)
            raise
        return updates

    def _warn_of_missing(self, update: GradientBatch) -> None:
        names = tuple(update.missing)
        if names not in self._warned:
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
            update.scale = scale
            try:
                self._submit_one(update)
            except BaseException:  # Ctrl-C while it waits, too
                self.discard(updates[place:])
                raise

    def _submit_one(self, update: GradientBatch) -> None:
        if self._stream is not None:
            update.start_copy(self._stream)
        update.rates = self.learning_rates.current
        with self._lock:
            update.number = self._next_number
            update.step = self._steps + 1
            self._next_number += 1
            self._pending[update.number] = update.step
        is_queued = False
        begin = time.perf_counter()
        try:
            if len(self._queue) >= len(self._idle) and len(self._threads) < self._num_workers:
                self._start_worker()
            is_queued = self._queue.put(update, WAIT_S)
        finally:
            if not is_queued:
                self._remove_pending(update.number)
        waited_s = time.perf_counter() - begin
        if waited_s > SHORT_S:
            name = "update_gradient_batched_time_cost_more_than_1ms_sec"
            self._tracker.timings[name].add(waited_s)
        if not is_queued:
            raise ServiceTimeout(
                f"waited {WAIT_S:g} s for the embedding-worker to take one of "
                f"{len(self._queue)} queued updates",
                role="embedding-worker",
                method="update",
            )

    def _start_worker(self) -> None:
        name = f"persia-backward-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def discard(self, updates: Sequence[GradientBatch]) -> None:
        """End collected batches that will not be sent: refs and permits come back."""
        for update in updates:
            self._tracker.fail(update.ticket)

    def skip(self, updates: Sequence[GradientBatch]) -> None:
        """Release the batches of these updates instead of sending them."""
        for update in updates:
            self._tracker.skip(update.ticket)

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
        with self._lock:
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
        return len(waiting), sum(update.num_bytes() for update in waiting)

    def why_not_healthy(self) -> str:
        """Name the threads that have ended before their time; "" if none has."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        return f"ended: {', '.join(dead)}" if dead and not self._is_closed else ""

    # --- checkpoints ------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of the user's last step whose updates are all submitted."""
        return self._steps

    def end_step(self, number: int) -> None:
        """Note that all updates of the user's step with this number are submitted."""
        with self._lock:
            self._steps = number
            self._changed.notify_all()

    def hold(self, step: int, timeout_s: float) -> bool:
        """Hold updates of later steps; wait until this one's and those before are applied.

        Returns:
            Whether they are; if not in time, nothing is held.
        """
        deadline = time.monotonic() + timeout_s
        is_applied = False
        with self._lock:
            self._held_after = step
            while not is_applied and time.monotonic() < deadline:
                # The end of a pass notifies no condition. A rank makes no more steps after it,
                # though others may, with drop_last=False.
                is_applied = self._changed.wait_for(lambda: self._is_applied(step), _CHECK_S)
        if not is_applied:
            self.resume()
        return is_applied

    def _is_applied(self, step: int) -> bool:
        has_ended = self._steps >= step or self._is_closed or self.is_between_passes()
        return has_ended and all(of > step for of in self._pending.values())

    def resume(self) -> None:
        """Send held updates."""
        with self._lock:
            self._held_after = None
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued, then end and join the workers.

        Raises:
            BaseException: What an update raised and no call has raised yet.
        """
        try:
            self.flush()
        finally:
            self._queue.finish()
            for thread in join(self._threads, JOIN_S):
                logger.warning("%s is still inside an update", thread.name)
            with self._lock:
                self._is_closed = True
                self._changed.notify_all()
        self.raise_failure()

    # --- backward workers -------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """Send one update; a function of its own, so that its locals are freed."""
        me = threading.get_ident()
        self._idle.add(me)
        try:
            update = self._queue.get()
        except (Closed, Finished):
            return False
        finally:
            self._idle.discard(me)
        try:
            self._send(update)
        except BaseException as exc:
            with self._lock:
                self._failure = self._failure or exc
            self._tracker.fail(update.ticket)
        finally:
            self._remove_pending(update.number)
        return True

    def _send(self, update: GradientBatch) -> None:
        ticket = update.ticket
        with self._lock:
            while self._held_after is not None and update.step > self._held_after:
                self._changed.wait()
        gradients = BatchGradients(
            ticket.ref,
            (self.client, ticket.number),
            update.slots(),
            update.scale,
            update.rates,
        )
        if ticket.in_order:
            # Those before it were taken from the queue before it, so they end without it.
            with self._lock:
                while min(self._pending) != update.number:
                    self._changed.wait()
        begin = time.perf_counter()
        if ticket.in_turn and self._ranks is not None:
            # Acknowledged only when all ranks have met: the permit lets the next lookup go.
            report = self._ranks.in_turn(lambda: self._update(ticket, gradients))
        else:
            report = self._update(ticket, gradients)
        self._update_time.add(time.perf_counter() - begin)
        self._tracker.acknowledge(ticket, report)

    def _update(self, ticket: InFlightBatch, gradients: BatchGradients) -> UpdateReport:
        """Update, if need be by another embedding-worker than the one that looked it up.

        The id stays the same, so that servers which applied it already do not do so again.
        """
        begin = time.perf_counter()  # after the wait for this rank's turn, which may be long
        try:
            return self._worker.update(gradients)
        except LOST as error:
            if ticket.register_again is None:
                raise
            left_s = env.rpc_timeout_s() - (time.perf_counter() - begin)
            return call_again(
                lambda ref: self._update_moved(ticket, gradients, ref),
                ticket.register_again,
                error,
                left_s,
            )

    def _update_moved(
        self, ticket: InFlightBatch, gradients: BatchGradients, ref: int
    ) -> UpdateReport:
        ticket.ref = ref  # for a release, should this fail too
        self._worker.lookup(ref, True)  # an update needs the plan that a lookup makes
        return self._worker.update(replace(gradients, ref=ref))

    def _remove_pending(self, number: int) -> None:
        with self._lock:
            self._pending.pop(number, None)
            self._changed.notify_all()
