"""Receives the batches that data-loaders send to an nn-worker.

    data-loader --deliver--> pending --take--> taken --end--> acknowledged
                             bounded by        lookup, step,
                             credits           update

Each data-loader has a stream with credits of its own, so that one that stalls leaves the
others their room, and in reproducible order the one whose turn it is can always deliver. A
credit comes back when its batch is taken; the ids stay with the data-loader until the batch
has ended, so that they can be registered again if an embedding-worker loses them.

Invariants, true between calls:

    I1  A data-loader delivers in ascending order: what is below its stream's
        ``next_batch_id`` has been received, or will not come. A batch is pending until it
        is taken, once, and counts as taken until it ends.
    I2  What is pending of a stream and its unused credits are ``capacity / num_loaders``
        together, or one if that is less: a delivery without a credit is refused. With
        several ranks they may be more at the end of an epoch, as ``LoaderStreams.grant`` says.

A pass takes the batches of one epoch. It ends when every data-loader has ended its stream, or
sent a batch of a later epoch, and all before that was taken. A stream that goes on is the next
pass's, too; one that ended is the next pass's if it is opened again. Credits are shared by the
epochs of a stream: one that is ahead waits with what it sent, and takes no other one's room.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from persia._rpc.deadlines import caller_deadline
from persia._rpc.messages import (
    RemoteRef,
    StreamedBatch,
    StreamNews,
    StreamOpening,
    StreamState,
)
from persia._rpc.worker_pool import handle_of
from persia._training.loader_streams import LOADER, SILENT_S, LoaderStream, LoaderStreams
from persia._training.queues import Closed, Finished
from persia.errors import ConfigError, DataError, ServiceError, ServiceTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from persia._training.progress import Plain

logger = logging.getLogger(__name__)

# Seconds that a poll waits for news; silent is a data-loader that has left some of them out.
POLL_S = SILENT_S / 3
# Seconds that data-loaders have to learn that nothing more is read.
FAREWELL_S = 2.0
_NEVER_READ = (
    "data-loaders sent batches of epoch %d, which no loop over the DataLoader has read: each "
    "loop reads one epoch, up to ctx.end_epoch(); for all of reader.send(ctx, epochs=3, "
    "epoch_ends=True), write `for epoch in range(3): for batch in loader: ...`"
)


class BatchReceiver:
    """Implements ``messages.NNWorker``; ``take`` and the rest are the trainer's.

    ``capacity`` is the number of pending batches, of all data-loaders. One of them may take
    ``patience_s`` to register ids again. A run before this one has trained what ``resumed``
    says of the first pass.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        capacity: int,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        resumed: Plain | None = None,
    ) -> None:
        self.replica_index = rank
        self.replica_size = world_size
        self._patience_s = patience_s
        self._clock = clock
        # One lock guards all below. Data-loaders that poll wait for news of their own stream,
        # all other threads for any change: of many data-loaders a batch wakes one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._streams = LoaderStreams(rank, world_size, capacity, self._lock, clock, resumed)
        self._is_closed = False
        self._is_back = False  # closed, but to be started again
        self._failure: BaseException | None = None
        self._counts = self._streams.counts

    # --- called by data-loaders -------------------------------------------------------------

    def open_stream(self, opening: StreamOpening) -> StreamState:
        """Begin a stream, or continue the one of a data-loader that was restarted.

        Raises:
            ConfigError: If the data-loaders do not agree on how many they are.
            ServiceBusy: If it is to be asked again in the next pass, or context.
        """
        if not 0 <= opening.loader < opening.num_loaders:
            raise ConfigError(
                f"{LOADER}: expected a number below REPLICA_SIZE {opening.num_loaders}, got "
                f"{opening.loader}"
            )
        with self._lock:
            if self._is_closed:
                raise self._streams.busy(
                    "this nn-worker reads no more, until another context of it does"
                )
            failure = self._streams.check_resumed(opening.num_loaders)
            if failure is not None:
                self._failure = failure  # the trainer's script has to end, too
                self._changed.notify_all()
                raise failure
            stream = self._streams.open(opening)
            self._grant(stream)
            self._changed.notify_all()
            return StreamState(
                stream.next_batch_id or 0,
                tuple(sorted(stream.wanted)),
                tuple(sorted((*stream.pending, *stream.taken))),
                self._streams.is_resumed,
            )

    def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
        """Take one batch; the same one again is dropped and counted.

        Raises:
            DataError: If the batch is not one of this stream's, or of an epoch before.
            ServiceBusy: If the stream has no credit for it.
        """
        with self._lock:
            found = self._streams.find(stream, "deliver")
            batch_id = batch.batch_id
            if not found.is_mine(batch_id):
                raise DataError(
                    f"batch {batch_id} of {LOADER} {stream[0]} is not rank "
                    f"{self.replica_index}'s of {self.replica_size}"
                )
            if batch_id < (found.next_batch_id or 0):
                self._counts["delivered_again"] += 1
                return
            if found.ended_at is not None and batch_id >= found.ended_at:
                raise DataError(
                    f"batch {batch_id} of {LOADER} {stream[0]} came after the end at "
                    f"{found.ended_at}"
                )
            if found.num_received >= found.credits:
                self._counts["refused"] += 1
                raise self._streams.busy(
                    f"batch {batch_id} of {LOADER} {stream[0]}: all {found.credits} credits "
                    "are used; one more is granted when a batch is taken",
                    "deliver",
                )
            found.mark_received(batch_id, batch.epoch)
            self._counts["delivered"] += 1
            if found.on_drop is not None and batch.epoch <= found.drops_to:
                found.on_drop()
                if batch.epoch < self._streams.order.epoch:
                    # The next pass has begun there, and waits for no batch of this one.
                    found.trained.mark_done(batch_id)
                self._drop(found, batch_id)
            elif batch_id in found.left_out:
                self._counts["left_out"] += 1
                self._drop(found, batch_id)
            else:
                self._streams.order.add(found, batch)
                self._grant()
                self._changed.notify_all()

    def relocate(self, stream: tuple[int, int], batch_id: int, ids: RemoteRef) -> None:
        """Note where the ids of a batch that was taken are now."""
        with self._lock:
            found = self._streams.find(stream, "relocate")
            found.wanted.discard(batch_id)
            if batch_id in found.taken:
                found.taken[batch_id] = ids
                self._counts["relocated"] += 1
            self._notify(found)

    def end_stream(
        self, stream: tuple[int, int], next_batch_id: int, failure: str, epoch: int
    ) -> None:
        """Note that no batch from ``next_batch_id`` on will come; the last was of ``epoch``."""
        with self._lock:
            found = self._streams.find(stream, "end_stream")
            if found.ended_at is None:
                found.ended_at = next_batch_id
                found.end_epoch = epoch
                found.failure = failure
                self._streams.leave_finished()  # of one that outlasted its pass
            if failure:
                found.knows_end = True  # it polls no more
            self._grant()
            self._changed.notify_all()

    def poll(self, stream: tuple[int, int], seen: int) -> StreamNews:
        """Return what is new, as soon as there is something, or while its caller waits."""
        with self._lock:
            found = self._streams.find(stream, "poll")
            while found.acknowledged and found.acknowledged[0][0] <= seen:
                found.acknowledged.popleft()
            # Half of what its caller has left is for the way back.
            left_s = caller_deadline.get() - time.monotonic()
            found.news.wait_for(
                lambda: (
                    self._is_closed
                    or found.version > seen
                    or found.incarnation != stream[1]
                    or found not in self._streams.all()
                ),
                min(POLL_S, left_s / 2),
            )
            if self._is_closed and self._is_back:
                raise self._streams.busy("this nn-worker is being started again", "poll")
            if found.incarnation == stream[1]:
                found.heard_at = self._clock()
                if self._is_closed and not found.was_read:
                    # Meant for a pass that is to come, in another context of this process.
                    raise self._streams.unknown(stream, "poll")
                if self._is_closed:
                    found.knows_end = True
                    self._changed.notify_all()
            return StreamNews(
                found.version,
                found.credits,
                tuple(batch_id for _, batch_id in found.acknowledged),
                tuple(sorted(found.wanted)),
                self._is_closed,
            )

    def _grant(self, known_to: LoaderStream | None = None) -> None:
        """Grant credits, and let data-loaders know, but one that learns them anyway."""
        for stream in self._streams.grant():
            if stream is not known_to:
                self._notify(stream)

    def _notify(self, stream: LoaderStream) -> None:
        stream.version += 1
        stream.news.notify_all()
        self._changed.notify_all()

    # --- called by the trainer --------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin to take batches; ConfigError if another pass is under way."""
        with self._lock:
            if self._streams.is_passing:
                raise ConfigError(
                    "the batches that data-loaders send are being read already: iterate one "
                    "DataLoader over a StreamingDataset at a time"
                )
            self._streams.is_passing = self._streams.order.was_read = True
            for stream in self._streams.order.streams.values():
                stream.was_read = True

    def end_pass(self) -> None:
        """Stop taking; what is pending stays for the next pass, unless this one is over."""
        with self._lock:
            self._streams.end_pass()
            self._failure = None  # of this pass
            self._changed.notify_all()

    def drop_rest(
        self,
        on_drop: Callable[[], None],
        timeout_s: float,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Acknowledge what is pending, and what comes until all have ended this epoch.

        Calls for each batch; returns whether they have ended it in time, or the pass was
        closed, as ``take`` asks.
        """
        with self._lock:
            for stream, batch_id in self._streams.order.drop_rest(on_drop):
                on_drop()
                self._drop(stream, batch_id)
            return self._changed.wait_for(
                lambda: self._is_closed or is_closed() or self._streams.order.is_over(),
                timeout_s,
            )

    def _drop(self, stream: LoaderStream, batch_id: int) -> None:
        self._grant(stream)
        self._acknowledge(stream, batch_id)

    def _acknowledge(self, stream: LoaderStream, batch_id: int) -> None:
        """Let the data-loader drop the ids of a batch."""
        stream.acknowledged.append((stream.version + 1, batch_id))
        self._notify(stream)

    def take(
        self, in_order: bool, is_closed: Callable[[], bool]
    ) -> tuple[LoaderStream, StreamedBatch]:
        """Wait for a batch and take it.

        Args:
            in_order: By batch id, over all data-loaders; otherwise as they arrived.
            is_closed: Called again when the pass ends.

        Raises:
            Closed: If ``is_closed()``, or the receiver was closed.
            Finished: If every data-loader has ended this epoch.
            BaseException: Of a data-loader that failed, once, after what it sent; or what
                ``fail`` was given.
        """
        with self._lock:
            while True:
                if self._is_closed or is_closed():
                    raise Closed
                failure = self._streams.order.take_failure()
                if failure is not None:
                    raise failure
                taken = self._streams.order.take(in_order)
                if taken is not None:
                    self._grant()
                    return taken
                if self._failure is not None:
                    raise self._failure
                if self._streams.order.is_over():
                    raise Finished
                self._changed.wait()

    def is_waiting(self) -> bool:
        """Whether batches are missing: a pass is under way and not all streams have ended."""
        with self._lock:
            streams = self._streams.order.streams.values()
            has_ended = streams and all(stream.ended_at is not None for stream in streams)
            return self._streams.is_passing and not has_ended

    def has_streams(self) -> bool:
        """Whether a data-loader has opened a stream of this pass."""
        with self._lock:
            return bool(self._streams.order.streams)

    def fail(self, failure: BaseException) -> None:
        """Raise this in ``take``, once what is pending was taken."""
        with self._lock:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def mark_done(self, stream: LoaderStream, batch_id: int) -> None:
        """Note that a batch was trained, or had no gradients to train with."""
        with self._lock:
            stream.trained.mark_done(batch_id)

    def end(self, stream: LoaderStream, batch_id: int) -> None:
        """Note that the ids of a batch are not needed any more."""
        with self._lock:
            if stream.taken.pop(batch_id, None) is None:
                return
            stream.wanted.discard(batch_id)
            self._acknowledge(stream, batch_id)

    def register_again(self, stream: LoaderStream, batch_id: int, why: ServiceError) -> int:
        """Have the data-loader register the ids of a batch again; returns the ref."""
        logger.warning("the data-loader registers batch %d again: %s", batch_id, why)
        with self._lock:
            stream.wanted.add(batch_id)
            self._counts["asked_again"] += 1
            self._notify(stream)
            is_over = self._changed.wait_for(
                lambda: self._is_closed or batch_id not in stream.wanted, self._patience_s
            )
            if is_over and not self._is_closed:
                if batch_id not in stream.taken:
                    raise why  # it was given up meanwhile
                return handle_of(stream.taken[batch_id])
            stream.wanted.discard(batch_id)
            self._counts["lost"] += 1
            if self._is_closed:
                raise Closed
            loader = self._streams.describe(stream)
            raise ServiceTimeout(
                f"batch {batch_id} is lost: {why}; and {loader} did not "
                f"register its ids again within {self._patience_s:g} s",
                role=LOADER,
                replica=stream.loader,
                method="poll",
            )

    def position(self, *, at_end: bool = False) -> Plain | None:
        """Return which batches of this rank's are done in this pass; None before it began.

        With ``at_end``, which ones will be when all that was received is done.
        """
        with self._lock:
            return self._streams.position(at_end)

    def next_position(self) -> Plain | None:
        """Return where the next pass begins, once this one is over; None at batch 0."""
        with self._lock:
            return self._streams.next_position()

    def describe_wait(self) -> str:
        """Name the data-loaders that ``take`` is waiting for."""
        with self._lock:
            return self._streams.describe_wait()

    def describe_missing(self) -> str:
        """Name what was without a batch in this pass, which has ended; empty if nothing."""
        with self._lock:
            return self._streams.describe_missing()

    def num_bytes(self) -> int:
        """Return the bytes of dense data and labels of the batches that wait."""
        with self._lock:
            waiting = [one for stream in self._streams.all() for one in stream.pending.values()]
        return sum(
            item.array.nbytes
            for batch in waiting
            for item in (*batch.non_id_type_features, *batch.labels)
        )

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and ``pending`` and ``taken`` now."""
        with self._lock:
            streams = self._streams.all()
            return {
                **self._counts,
                "pending": sum(len(stream.pending) for stream in streams),
                "taken": sum(len(stream.taken) for stream in streams),
            }

    def close(self, *, is_back: bool = False) -> None:
        """Announce that nothing more is read; returns when data-loaders heard lately know it.

        One that found no nn-worker here would wait for it to be restarted: as they shall where
        it ``is_back`` soon, which is not announced.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._is_back = True, is_back
            left = sum(len(stream.pending) for stream in self._streams.order.streams.values())
            if left:
                self._counts["unread"] += left
                logger.info("%d batches that data-loaders had sent were not read", left)
            order = self._streams.order
            if left and not order.is_first and not order.was_read:
                logger.warning(_NEVER_READ, order.epoch)
            for stream in self._streams.all():
                stream.news.notify_all()
            self._changed.notify_all()
            if not is_back:
                self._changed.wait_for(self._is_known_to_be_closed, FAREWELL_S)

    def _is_known_to_be_closed(self) -> bool:
        """Whether no data-loader that is there will poll again."""
        now = self._clock()
        return not any(
            stream.was_read
            and not (stream.knows_end or stream.is_settled())
            and now - stream.heard_at < SILENT_S
            for stream in self._streams.all()
        )
