"""The backward pipeline: leaf gradients to the embedding-worker, in threads of its own.

    ctx.backward --queue--> backward workers --update--> embedding-worker
    takes the leaves'       sum per distinct id,         steps the rows
    gradients               wait for the copy

The user's thread only takes references (on CUDA it packs them into one buffer and starts one
copy to pinned memory). A worker starts when an update is queued and none is idle. What an
update raises is raised at the user's next ``backward``, flush or exit.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from persia._core.kernels.optim import checked
from persia._rpc.messages import BatchGradients, LearningRate
from persia._training.inflight import (
    LOST,
    SHORT_S,
    Reason,
    State,
    call_again,
    take_gradients,
)
from persia._training.queues import BoundedQueue, Closed, Finished, join
from persia.errors import ConfigError, ServiceTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persia._rpc.messages import EmbeddingWorker, UpdateReport
    from persia._training.batch import PersiaTrainingBatch
    from persia._training.inflight import InFlightBatch, InFlightTracker
    from persia._training.ranks import Ranks

    Rate = tuple[str | None, float]  # of a group, or of all that have none of their own

logger = logging.getLogger(__name__)

# Longest wait of the user's thread for the embedding-worker.
WAIT_S = 300.0
# A backward worker that has not ended by then is inside an update that hangs.
JOIN_S = 10.0
# Seconds between two checks whether a pass has ended.
_CHECK_S = 0.05


class LearningRates:
    """Rates by table, as every update from then on carries them. For the user's thread.

    A rate belongs to the gradients that were computed under it and travels with them: so an
    update that is late, repeated, or sent to a restarted server still steps at its own.
    """

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker
        self._tables: dict[str | None, tuple[int, ...]] = {}  # by group, once requested
        self._by_group: dict[str | None, float] = {}
        self.current: tuple[LearningRate, ...] = ()  # what the next update carries

    def set(self, lr: float, group: str | None) -> None:
        """Set the rate of one group, or of all that have none of their own."""
        rate = float(checked("set_lr", "lr", lr, 0.0))
        if self._by_group.get(group) == rate:
            return
        if group not in self._tables:
            self._tables[group] = self._worker.tables_at_rate(group)
        self._by_group[group] = rate
        rates = dict.fromkeys(self._tables.get(None, ()), self._by_group.get(None, 0.0))
        for name, own in self._by_group.items():
            if name is not None:
                rates.update(dict.fromkeys(self._tables[name], own))
        self.current = tuple(LearningRate(*rate) for rate in sorted(rates.items()))

    def state(self) -> list[Rate]:
        """Return the rates that were set, for a file."""
        return list(self._by_group.items())

    def restore(self, rates: Sequence[Rate]) -> None:
        """Set the rates of a file, and no others.

        One whose group has no optimizer any more is left out.
        """
        known = {group for group, _ in rates}
        for group in self._by_group.keys() - known:
            what = "all groups" if group is None else group
            logger.warning(
                "the learning rate of %s is the optimizer's again, as in the checkpoint: "
                "set_lr comes behind load_checkpoint",
                what,
            )
        self.forget()
        for group, lr in rates:
            what = "all groups without a rate of their own" if group is None else group
            try:
                self.set(lr, group)
            except ConfigError as exc:
                logger.warning("the learning rate %g of %s is not restored: %s", lr, what, exc)
            else:
                logger.info("the learning rate of %s is the checkpoint's, %g", what, lr)

    def forget(self) -> None:
        """Let the registered optimizer's rates hold again."""
        self._by_group.clear()
        self.current = ()


class BackwardPipeline:
    """Sends updates from a queue of ``capacity``, at most ``num_workers`` at the same time.

    ``client`` is the first half of the update ids, new each time that a rank is entered or
    resumes from a checkpoint: numbers start again then, and no update is taken for another.
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
        self.client = client
        # Updates that no worker has taken yet.
        self.queue: BoundedQueue[InFlightBatch] = BoundedQueue(capacity)
        self._lock = threading.RLock()  # guards the six below; see ``OrderedQueue``
        self._changed = threading.Condition(self._lock)
        self._pending: dict[int, int] = {}  # submitted and not yet ended: number -> step
        self._next_number = 0
        self._failure: BaseException | None = None
        self.steps = 0  # of the user's, whose updates are all submitted
        self._held_after: int | None = None  # updates of later steps wait
        self._is_closed = False
        self.is_between_passes: Callable[[], bool] = lambda: False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = _new_stream(device)
        self._warned: set[tuple[str, ...]] = set()
        self._has_warned = False  # of a kept batch
        self._num_workers = num_workers
        self._idle: set[int] = set()  # workers that wait for an update; atomic as sets are
        self._threads: list[threading.Thread] = []  # started by the user's thread only

    # --- the user's thread ----------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what an update raised since the last call, once, with its traceback."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def collect(
        self, batches: Sequence[PersiaTrainingBatch], current: PersiaTrainingBatch
    ) -> list[InFlightBatch]:
        """Take the gradients of the batches that one backward reached.

        A batch other than the current one that got no gradient took no part in the loss: it
        is released as abandoned, and if it was kept a warning names it.

        Raises:
            DataError: If the current batch has ended or is submitted already.
        """
        updates: list[InFlightBatch] = []
        try:
            for batch in batches:
                ticket = batch.ticket
                if ticket is None or (batch is not current and not ticket.is_open()):
                    continue
                gradients = take_gradients(batch.leaves)
                missing = [leaf.name for leaf, gradient in gradients if gradient is None]
                if batch is not current and len(missing) == len(gradients):
                    self._abandon(ticket, batch.batch_id)
                    continue
                self._tracker.submit(ticket)
                ticket.gradients = gradients
                if len(missing) == len(gradients):
                    ticket.unreached = tuple(missing)
                updates.append(ticket)
                if missing:
                    self._warn_of_missing(tuple(missing))
                if self._stream is not None:
                    ticket.pack()
            if self._tracker.zero_steps is not None:
                self._note_zero(updates)
        except BaseException:
            self.discard(updates)
            raise
        return updates

    def _note_zero(self, updates: list[InFlightBatch]) -> None:
        """Count a step whose gradients are all zero; waits for the device."""
        present = [gradient for update in updates for gradient in update.present()]
        if any(bool(gradient.any()) for gradient in present):
            self._tracker.zero_steps = None
        elif present and self._tracker.zero_steps is not None:
            self._tracker.zero_steps += 1

    def _abandon(self, ticket: InFlightBatch, batch_id: int) -> None:
        was_kept = ticket.state is State.KEPT
        was_open = self._tracker.release(ticket, Reason.ABANDONED)
        if was_open and was_kept and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "batch %d was held by ctx.keep and the loss did not reach it: it is released "
                "without an update (said once; ctx.stats()['abandoned'] counts)",
                batch_id,
            )

    def _warn_of_missing(self, names: tuple[str, ...]) -> None:
        if names not in self._warned:
            self._warned.add(names)
            logger.warning(
                "the loss did not reach these id features, which are skipped and counted "
                "from now on: %s",
                ", ".join(names),
            )

    def submit(
        self, updates: Sequence[InFlightBatch], scale: float, num_averaged: int = 1
    ) -> None:
        """Queue updates; waits while the queue is full, but not for more than minutes.

        The embedding-worker divides by ``scale``, which the loss was multiplied with, and by
        the number of ranks over which updates are averaged.
        """
        for place, update in enumerate(updates):
            update.scale, update.num_averaged = scale * num_averaged, num_averaged
            try:
                self._submit_one(update)
            except BaseException:  # Ctrl-C while it waits, too
                self.discard(updates[place:])
                raise

    def _submit_one(self, update: InFlightBatch) -> None:
        if self._stream is not None:
            update.start_copy(self._stream)
        # One that brings its own rates, of an optimizer per table, keeps them.
        update.rates = update.rates or self.learning_rates.current
        with self._lock:
            update.order = self._next_number
            update.step = self.steps + 1
            self._next_number += 1
            self._pending[update.order] = update.step
        is_queued = False
        begin = time.perf_counter()
        try:
            if len(self.queue) >= len(self._idle) and len(self._threads) < self._num_workers:
                self._start_worker()
            is_queued = self.queue.put(update, WAIT_S)
        finally:
            if not is_queued:
                self._remove_pending(update.order)
        waited_s = time.perf_counter() - begin
        if waited_s > SHORT_S:
            name = "update_gradient_batched_time_cost_more_than_1ms_sec"
            self._tracker.timings[name].add(waited_s)
        if not is_queued:
            raise ServiceTimeout(
                f"waited {WAIT_S:g} s for the embedding-worker to take one of "
                f"{len(self.queue)} queued updates",
                role="embedding-worker",
                method="update",
            )

    def pack(self, update: InFlightBatch) -> None:
        """Start the copy of CUDA gradients of an update that ``collect`` has not made."""
        device = next((one.device for one in update.present() if one.is_cuda), None)
        if device is not None:
            if self._stream is None or self._stream.device != device:
                self._stream = _new_stream(device)  # a copy has to be on its own device's
            update.pack()
            update.start_copy(self._stream)

    def _start_worker(self) -> None:
        name = f"persia-backward-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def discard(self, updates: Sequence[InFlightBatch]) -> None:
        """End collected batches that will not be sent: refs and permits come back."""
        for update in updates:
            self._tracker.fail(update)

    def skip(self, updates: Sequence[InFlightBatch]) -> None:
        """Release the batches of these updates instead of sending them."""
        for update in updates:
            self._tracker.skip(update)

    def flush(self) -> None:
        """Wait until every update submitted so far is acknowledged, or raise what one did."""
        self.wait()
        self.raise_failure()

    def wait(self) -> None:
        """Wait until every update submitted so far is acknowledged, or has failed.

        What one raised stays for the user's thread.
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
        waiting = self.queue.items()
        return len(waiting), sum(x.nbytes for update in waiting for x in update.present())

    def why_not_healthy(self) -> str:
        """Name the threads that have ended before their time; "" if none has."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        return f"ended: {', '.join(dead)}" if dead and not self._is_closed else ""

    # --- checkpoints ------------------------------------------------------------------------

    def end_step(self, number: int) -> None:
        """Note that all updates of the user's step with this number are submitted."""
        with self._lock:
            self.steps = number
            self._changed.notify_all()

    def hold(self, step: int, timeout_s: float) -> bool:
        """Hold updates of later steps; wait until this one's and those before are applied.

        If they are not in time, nothing is held; returns whether they are.
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
        has_ended = self.steps >= step or self._is_closed or self.is_between_passes()
        return has_ended and all(of > step for of in self._pending.values())

    def resume(self) -> None:
        """Send held updates."""
        with self._lock:
            self._held_after = None
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued, end the workers, and raise what no call has raised yet."""
        try:
            self.flush()
        finally:
            self.queue.finish()
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
            update = self.queue.get()
        except (Closed, Finished):
            return False
        finally:
            self._idle.discard(me)
        try:
            self._send(update)
        except BaseException as exc:
            with self._lock:
                self._failure = self._failure or exc
            self._tracker.fail(update)
        finally:
            self._remove_pending(update.order)
        return True

    def _send(self, update: InFlightBatch) -> None:
        with self._lock:
            while self._held_after is not None and update.step > self._held_after:
                self._changed.wait()
        gradients = BatchGradients(
            update.ref,
            (self.client, update.number),
            update.slots(),
            update.scale,
            update.rates,
            update.num_averaged,
            update.is_by_id,
        )
        if update.in_order:
            # Those before it were taken from the queue before it, so they end without it.
            with self._lock:
                while min(self._pending) != update.order:
                    self._changed.wait()
            if update.limiter is not None and update.limiter.holds_updates:
                update.limiter.await_lookups(update.place)
        begin = time.perf_counter()
        if update.in_turn and self._ranks is not None:
            # Acknowledged only when all ranks have met: the permit lets the next lookup go.
            report = self._ranks.in_turn(lambda: self._update(update, gradients))
        else:
            report = self._update(update, gradients)
        self._update_time.add(time.perf_counter() - begin)
        self._tracker.acknowledge(update, report)

    def _update(self, ticket: InFlightBatch, gradients: BatchGradients) -> UpdateReport:
        """Update, if need be by another embedding-worker than the one that looked it up.

        The id stays the same, so that servers which applied it already do not do so again.
        """
        begin = time.perf_counter()  # after the wait for this rank's turn, which may be long

        def update_moved(ref: int) -> UpdateReport:
            self._worker.lookup(ref, True)  # an update needs the plan that a lookup makes
            return self._worker.update(replace(gradients, ref=ref))

        try:
            return self._worker.update(gradients)
        except LOST as error:
            return call_again(update_moved, ticket, error, begin)

    def _remove_pending(self, order: int) -> None:
        with self._lock:
            self._pending.pop(order, None)
            self._changed.notify_all()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream for copies to the host; made once."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
