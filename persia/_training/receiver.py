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
        together, or one if that is less, unless a data-loader sent again what a lost
        nn-worker had.

A pass ends when every data-loader has ended its stream and all it sent was taken. What one
sends after that, in a stream that it opens again, is the next pass.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._process_exit import RUN, first_failure
from persia._rpc.messages import RemoteRef, StreamedBatch, StreamNews, StreamState
from persia._rpc.methods import embedding_worker, nn_worker
from persia._rpc.server import ServerLimits, serve
from persia._rpc.worker_pool import handle_of
from persia._rpc.zmq_transport import ZmqTransport
from persia._training.forward import Source
from persia._training.inflight import InFlightBatch
from persia._training.progress import Watermark, to_position
from persia._training.queues import Closed, Finished
from persia.errors import (
    ConfigError,
    DataError,
    RemoteError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    UnknownStream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from persia._rpc.messages import EmbeddingWorker, StreamOpening
    from persia._training.batch import DeviceTransfer, PersiaTrainingBatch
    from persia._training.progress import Plain

logger = logging.getLogger(__name__)

ROLE = "nn-worker"
LOADER = "data-loader"

# Seconds that a poll waits for news. A data-loader silent for a few of these is gone.
POLL_S = 5.0
SILENT_S = 3 * POLL_S
# Seconds that data-loaders have to learn that nothing more is read.
FAREWELL_S = 2.0
# A poll waits in a thread of the server: one for each data-loader, and some for the rest.
_SERVING = ServerLimits(num_threads=256)
# Seconds until a child has to be gone that knows that nothing more is read.
_CHILD_LEAVES_S = 5.0
_STOP_S = 5.0
# Seconds that data-loaders may take to send what no rank will train any more.
DROP_S = 60.0


def failure_of_loader(loader: int, text: str) -> RemoteError:
    """Return the error of a data-loader that failed; the text is its traceback."""
    return RemoteError(
        f"{LOADER} {loader} failed; over there:\n{text.rstrip()}", role=LOADER, replica=loader
    )


class LoaderStream:
    """One data-loader's stream to this rank; guarded by the receiver's lock.

    The ids of its batches are every ``lcm(num_loaders, world_size)``-th: those that are this
    data-loader's and this rank's. Some pairs of the two have none in common. ``resumed`` is
    the lowest one that the run before left to be trained, and those above that it did train.
    """

    def __init__(
        self,
        opening: StreamOpening,
        rank: int,
        world_size: int,
        resumed: tuple[int, Sequence[int]] = (0, ()),
        lock: threading.RLock | None = None,
    ) -> None:
        # Of what its data-loader does not know yet.
        self.news = threading.Condition(lock)
        self.loader = opening.loader
        self.num_loaders = opening.num_loaders
        self.incarnation = opening.incarnation
        self.step = math.lcm(opening.num_loaders, world_size)
        ids = range(opening.loader, self.step, opening.num_loaders)
        self._offset = next((x for x in ids if x % world_size == rank), None)
        floor, above = resumed
        self.next_batch_id = self.at_or_after(max(opening.first_batch_id, floor))
        # Of this rank's batches, those done; in a resumed run some above its beginning are.
        self.left_out = frozenset(place for place in above if self.is_mine(place))
        self.trained = Watermark(self.next_batch_id or 0, self.step, set(self.left_out))
        self.pending: dict[int, StreamedBatch] = {}
        self.taken: dict[int, RemoteRef] = {}  # and not ended
        self.wanted: set[int] = set()  # taken, to be registered again
        self.acknowledged: deque[tuple[int, int]] = deque()  # (version, batch id)
        self.version = 0
        self.credits = 0
        self.ended_at: int | None = None  # no batch from this id on
        self.failure = ""
        # Called for each batch that comes although the pass has ended; None in a pass.
        self.on_drop: Callable[[], None] | None = None
        self.was_read = False  # a pass was under way while it was open
        self.knows_end = False  # its data-loader knows that the receiver is closed
        self.heard_at = 0.0

    def at_or_after(self, batch_id: int) -> int | None:
        """The first id of this stream that is not below ``batch_id``; None if it has none."""
        if self._offset is None:
            return None
        return self._offset + -(-max(batch_id - self._offset, 0) // self.step) * self.step

    def is_mine(self, batch_id: int) -> bool:
        """Whether this data-loader sends a batch to this rank."""
        return self.at_or_after(batch_id) == batch_id

    def mark_received(self, batch_id: int) -> None:
        """Note a batch; after a restart of this rank those that are left out were trained."""
        for left_out in range(self.next_batch_id or 0, batch_id, self.step):
            self.trained.mark_done(left_out)
        self.next_batch_id = batch_id + self.step

    def is_over(self) -> bool:
        """Whether it has ended and everything that it sent was taken."""
        return self._offset is None or (self.ended_at is not None and not self.pending)

    def is_settled(self) -> bool:
        """Whether the data-loader knows that all it sent has ended, and polls no more."""
        return (
            self.ended_at is not None
            and not self.pending
            and not self.taken
            and not self.acknowledged
        )


class PassOrder:
    """The streams of one pass, and the order in which their batches are taken. No lock.

    A rank's ids are ``world_size`` apart.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.num_loaders: int | None = None  # from the first that opens a stream
        self.streams: dict[int, LoaderStream] = {}  # by data-loader
        self._arrived: deque[tuple[LoaderStream, int]] = deque()  # pending batches
        self.expected: int | None = None  # next id in order; None before the first

    def add(self, stream: LoaderStream, batch: StreamedBatch) -> None:
        """Make a batch pending."""
        stream.pending[batch.batch_id] = batch
        self._arrived.append((stream, batch.batch_id))

    def take(self, in_order: bool) -> tuple[LoaderStream, StreamedBatch] | None:
        """Take the next pending batch, and grant its credit again; None if it is not here."""
        if in_order:
            stream = self._stream_in_order()
            if stream is None or self.expected is None:
                return None
            batch_id = self.expected
            self._arrived.remove((stream, batch_id))
        elif self._arrived:
            stream, batch_id = self._arrived.popleft()
        else:
            return None
        if self.expected is not None:
            self.expected = batch_id + self._world_size
        batch = stream.pending.pop(batch_id)
        stream.taken[batch_id] = batch.ids
        stream.credits += 1
        return stream, batch

    def _stream_in_order(self) -> LoaderStream | None:
        """Return the stream where the expected batch is pending; skips ids that do not come."""
        if self.num_loaders is None or len(self.streams) < self.num_loaders:
            return None  # one that has not connected may have the first batch
        if self.expected is None:
            firsts = [
                min(stream.pending, default=stream.next_batch_id)
                for stream in self.streams.values()
            ]
            self.expected = min((one for one in firsts if one is not None), default=None)
        while self.expected is not None:
            stream = self.streams[self.expected % self.num_loaders]
            if self.expected in stream.pending:
                return stream
            next_id = stream.next_batch_id
            has_passed = next_id is not None and self.expected < next_id
            if not has_passed and (stream.ended_at is None or self.expected < stream.ended_at):
                return None
            if self.is_over():
                return None
            self.expected += self._world_size
        return None

    def drop_pending(self) -> list[tuple[LoaderStream, int]]:
        """Remove all pending batches and return their ids."""
        dropped = []
        for stream in self.streams.values():
            dropped += [(stream, batch_id) for batch_id in sorted(stream.pending)]
            stream.pending.clear()
        self._arrived.clear()
        return dropped

    def is_over(self) -> bool:
        """Whether every data-loader has ended and everything was taken."""
        return (
            self.num_loaders is not None
            and len(self.streams) == self.num_loaders
            and all(stream.is_over() for stream in self.streams.values())
        )

    def take_failure(self) -> RemoteError | None:
        """Return the error of a data-loader that failed and whose batches were taken, once."""
        for stream in self.streams.values():
            if stream.failure and stream.is_over():
                failure, stream.failure = stream.failure, ""
                return failure_of_loader(stream.loader, failure)
        return None


class LoaderStreams:
    """The streams of this pass and of those before; called under the receiver's lock."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        capacity: int,
        lock: threading.RLock,
        clock: Callable[[], float],
        resumed: Plain | None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._capacity = capacity
        self._lock = lock
        self._clock = clock
        self._resumed = resumed  # None once the first pass is over
        self.order = PassOrder(world_size)  # of this pass
        self._past: dict[int, LoaderStream] = {}  # some of their batches may not have ended
        self.is_passing = False
        self.counts: Counter[str] = Counter()  # the receiver's

    def all(self) -> list[LoaderStream]:
        """Return the streams of this pass, then those before."""
        return [*self.order.streams.values(), *self._past.values()]

    def check_resumed(self, num_loaders: int) -> ConfigError | None:
        """Return an error if the run before had another number of data-loaders."""
        before = None if self._resumed is None else self._resumed["num_loaders"]
        if self.order.num_loaders is not None or before in (None, num_loaders):
            return None
        return ConfigError(
            f"the checkpoint was made with {before} {LOADER}s, now there are {num_loaders}: "
            f"its position in the data is theirs; expected REPLICA_SIZE {before}"
        )

    def open(self, opening: StreamOpening) -> LoaderStream:
        """Return the stream that a data-loader begins or continues."""
        count = opening.num_loaders
        if self.order.num_loaders not in (None, count):
            raise ConfigError(
                f"{LOADER} {opening.loader} says that there are {count} of them, others said "
                f"{self.order.num_loaders}: REPLICA_SIZE must be the same"
            )
        stream = self._find_for(opening) or self._create(opening)
        stream.heard_at = self._clock()
        return stream

    def _find_for(self, opening: StreamOpening) -> LoaderStream | None:
        """Return the stream that a data-loader continues; None if it begins one.

        A data-loader that ended its stream may have been killed before all of it was trained.
        Its successor is taken for the next pass's until ids are wanted, which no other process
        can register. Of several ranks each knows its own pass only: were it admitted here,
        another rank might take it for the next pass's.
        """
        past, now = self._past.get(opening.loader), self.order.streams.get(opening.loader)
        for stream in (past, now):
            if stream is not None and stream.incarnation == opening.incarnation:
                # Perhaps after it was answered, and batches came: they have used their credits.
                return stream
        is_only_rank = self._world_size == 1
        if past is not None and past.wanted and is_only_rank:
            return self._take_over(past, opening)
        if now is None:
            return None
        is_wanted = bool(now.wanted) and is_only_rank
        if now.ended_at is not None and not (now.failure or is_wanted):
            raise self.busy(
                f"{LOADER} {opening.loader} has ended its stream and this pass over the "
                "data is still under way; the next one begins after it"
            )
        return self._take_over(now, opening)

    def _create(self, opening: StreamOpening) -> LoaderStream:
        self.order.num_loaders = opening.num_loaders
        name, resumed = str(opening.loader), self._resumed or {"floors": {}, "above": {}}
        stream = self.order.streams[opening.loader] = LoaderStream(
            opening,
            self._rank,
            self._world_size,
            (resumed["floors"].get(name, 0), resumed["above"].get(name, ())),
            self._lock,
        )
        stream.was_read = self.is_passing
        stream.credits = self._window(opening.num_loaders)
        return stream

    def _take_over(self, stream: LoaderStream, opening: StreamOpening) -> LoaderStream:
        """Let a data-loader that was restarted continue a stream."""
        if stream.failure:
            # One that failed and is there again has ended nothing.
            stream.ended_at, stream.failure = None, ""
        logger.warning(
            "%s %d was restarted; it continues at batch %s",
            LOADER,
            opening.loader,
            stream.next_batch_id,
        )
        self.counts["loader_restarts"] += 1
        stream.incarnation = opening.incarnation
        stream.acknowledged.clear()
        stream.version = 0
        stream.knows_end = False
        stream.credits = self._window(opening.num_loaders) - len(stream.pending)
        stream.was_read |= self.is_passing
        stream.news.notify_all()  # a poll of the process before
        return stream

    def _window(self, num_loaders: int) -> int:
        return max(1, self._capacity // num_loaders)

    def find(self, stream: tuple[int, int], method: str) -> LoaderStream:
        """Return an open stream by data-loader and incarnation; note that it was heard."""
        loader, incarnation = stream
        for found in (self.order.streams.get(loader), self._past.get(loader)):
            if found is not None and found.incarnation == incarnation:
                found.heard_at = self._clock()
                return found
        raise self.unknown(stream, method)

    def unknown(self, stream: tuple[int, int], method: str) -> UnknownStream:
        """Return the error for a stream that is not open here."""
        return UnknownStream(
            f"{LOADER} {stream[0]} has no such stream here: this nn-worker or the {LOADER} was "
            "restarted",
            role=ROLE,
            replica=self._rank,
            method=method,
        )

    def busy(self, message: str) -> ServiceBusy:
        """Return the error for a stream that cannot be opened now."""
        return ServiceBusy(message, role=ROLE, replica=self._rank, method="open_stream")

    def end_pass(self) -> None:
        """End the pass; what is pending stays for the next one, unless this one is over."""
        self.is_passing = False
        is_dropped = any(stream.on_drop for stream in self.order.streams.values())
        if is_dropped or self.order.is_over():
            before = [*self._past.values()]
            self._past.update(self.order.streams)
            for stream in before:
                stream.news.notify_all()  # nothing would wake a poll of these later
            self.order = PassOrder(self._world_size)
            self._resumed = None
        self.order.expected = None  # a pass over the same streams begins at what is pending

    def position(self, at_end: bool) -> Plain | None:
        """Return what is trained of this pass, or will be at its end, for a file."""
        if self.order.num_loaders is None:
            return self._resumed
        series = {}
        for loader, stream in sorted(self.order.streams.items()):
            first = stream.next_batch_id
            if first is not None:
                series[loader] = Watermark(first, stream.step) if at_end else stream.trained
        return to_position("stream", self.order.num_loaders, series)

    def describe_wait(self) -> str:
        """Name the data-loaders whose batch is missing."""
        num_loaders, streams = self.order.num_loaders, self.order.streams
        if num_loaders is None:
            return f"a {LOADER} to connect; none has"
        missing = sorted(set(range(num_loaders)) - streams.keys())
        if missing:
            names = ", ".join(map(str, missing))
            return f"{LOADER} {names} of {num_loaders} to connect"
        late = [
            self.describe(stream)
            for stream in streams.values()
            if stream.ended_at is None and not stream.pending
        ]
        return " and ".join(late) or f"the {LOADER}s"

    def describe(self, stream: LoaderStream) -> str:
        """Name a data-loader, and say so if it is silent."""
        silent_s = self._clock() - stream.heard_at
        name = f"{LOADER} {stream.loader} of {stream.num_loaders}"
        if silent_s > SILENT_S:
            return f"{name}, which has not been heard for {silent_s:.0f} s,"
        return name


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
            self._changed.notify_all()
            return StreamState(
                stream.next_batch_id or 0,
                tuple(sorted(stream.wanted)),
                tuple(sorted((*stream.pending, *stream.taken))),
            )

    def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
        """Take one batch; the same one again is dropped and counted.

        Raises:
            DataError: If the batch is not one of this stream's.
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
            found.mark_received(batch_id)
            self._counts["delivered"] += 1
            if found.on_drop is not None:
                found.on_drop()
                self._drop(found, batch_id)
            elif batch_id in found.left_out:
                found.trained.mark_done(batch_id)
                self._counts["left_out"] += 1
                self._drop(found, batch_id)
            else:
                self._streams.order.add(found, batch)
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

    def end_stream(self, stream: tuple[int, int], next_batch_id: int, failure: str) -> None:
        """Note that no batch from ``next_batch_id`` on will come."""
        with self._lock:
            found = self._streams.find(stream, "end_stream")
            if found.ended_at is None:
                found.ended_at = next_batch_id
                found.failure = failure
            if failure:
                found.knows_end = True  # it polls no more
            self._changed.notify_all()

    def poll(self, stream: tuple[int, int], seen: int) -> StreamNews:
        """Return what is new, as soon as there is something, or after some seconds."""
        with self._lock:
            found = self._streams.find(stream, "poll")
            while found.acknowledged and found.acknowledged[0][0] <= seen:
                found.acknowledged.popleft()
            found.news.wait_for(
                lambda: (
                    self._is_closed
                    or found.version > seen
                    or found.incarnation != stream[1]
                    or found not in self._streams.all()
                ),
                POLL_S,
            )
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
            self._streams.is_passing = True
            self._failure = None  # of a pass before
            for stream in self._streams.order.streams.values():
                stream.was_read = True

    def end_pass(self) -> None:
        """Stop taking; what is pending stays for the next pass, unless this one is over."""
        with self._lock:
            self._streams.end_pass()
            self._changed.notify_all()

    def drop_rest(self, on_drop: Callable[[], None], timeout_s: float) -> bool:
        """Acknowledge what is pending, and what comes until every data-loader has ended.

        Calls for each batch; returns whether they have ended in time.
        """
        with self._lock:
            for stream in self._streams.order.streams.values():
                stream.on_drop = on_drop
            for stream, batch_id in self._streams.order.drop_pending():
                on_drop()
                self._drop(stream, batch_id)
            return self._changed.wait_for(
                lambda: self._is_closed or self._streams.order.is_over(), timeout_s
            )

    def _drop(self, stream: LoaderStream, batch_id: int) -> None:
        stream.credits += 1
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
            is_closed: Called again after each ``wake``.

        Raises:
            Closed: If ``is_closed()``, or the receiver was closed.
            Finished: If every data-loader has ended.
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
                    self._notify(taken[0])
                    return taken
                if self._failure is not None:
                    raise self._failure
                if self._streams.order.is_over():
                    raise Finished
                self._changed.wait()

    def wake(self) -> None:
        """Let ``take`` call ``is_closed`` again."""
        with self._lock:
            self._changed.notify_all()

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

    def describe_wait(self) -> str:
        """Name the data-loaders that ``take`` is waiting for."""
        with self._lock:
            return self._streams.describe_wait()

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

    def close(self) -> None:
        """Announce that nothing more is read; returns when data-loaders heard lately know it.

        One that found no nn-worker here would wait for it to be restarted.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left = sum(len(stream.pending) for stream in self._streams.order.streams.values())
            if left:
                self._counts["unread"] += left
                logger.info("%d batches that data-loaders had sent were not read", left)
            for stream in self._streams.all():
                stream.news.notify_all()
            self._changed.notify_all()
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


def check_room(
    worker: EmbeddingWorker, world_size: int, buffer_size: int, num_in_flight: int
) -> None:
    """Raise ConfigError if embedding-workers cannot hold what ranks let data-loaders send.

    With less, batches that no rank can train yet may keep out the one that all wait for.
    ``num_in_flight`` batches of a rank may be between lookup and update.
    """
    stats = worker.stats()
    needed = world_size * (buffer_size + num_in_flight)
    room = stats.get("forward_buffer_size", needed)
    if room < needed and not stats.get("unanswered"):
        raise ConfigError(
            f"embedding_worker_config.forward_buffer_size: the embedding-workers have room for "
            f"{room} batches together, expected at least {needed}, which is {world_size} "
            f"rank(s) times (StreamingDataset's buffer_size {buffer_size} + {num_in_flight} "
            "between lookup and update)"
        )


class Stream:
    """A receiver, served at an address where data-loaders find it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        capacity: int,
        address: str,
        resumed: Plain | None = None,
    ) -> None:
        self.receiver = BatchReceiver(
            rank, world_size, capacity, env.rpc_timeout_s(), resumed=resumed
        )
        self._transport = ZmqTransport()
        try:
            self.server = serve(
                self._transport, address, nn_worker(), self.receiver, settings=_SERVING
            )
        except BaseException:
            self._transport.close()
            raise
        self.address = self.server.address  # with the true port
        logger.info("nn-worker %d of %d: listens at %s", rank, world_size, self.address)

    def begin_pass(self) -> None:
        """Begin to take batches; ConfigError if another pass is under way."""
        self.receiver.begin_pass()

    def close(self) -> None:
        """Announce to data-loaders that nothing more is read, and stop."""
        self.receiver.close()
        self.server.stop(_STOP_S)
        self._transport.close()


class ChildStream(Stream):
    """A stream from a script that runs as a child process, once for each pass; embedded mode.

    The script's DataCtx finds the embedding-worker of this process, and its receiver, at two
    sockets in a directory that no other user can enter.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        capacity: int,
        script: Path,
        resumed: Plain | None = None,
    ) -> None:
        self._script = script
        self._directory = tempfile.mkdtemp(prefix="persia-")
        self._lock = threading.Lock()  # guards the next three
        self._child: subprocess.Popen[bytes] | None = None  # started last; None once closed
        self._watcher: threading.Thread | None = None
        self._is_requested = False  # a pass began while the child of the last one still ran
        try:
            super().__init__(0, 1, capacity, f"ipc://{self._directory}/nn-worker", resumed)
            self._worker_server = serve(
                self._transport,
                f"ipc://{self._directory}/embedding-worker",
                embedding_worker(),
                worker,
            )
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def begin_pass(self) -> None:
        """Start the script, unless it runs still and may open another stream."""
        with self._lock:
            super().begin_pass()
            if self._child is not None and self._child.poll() is None:
                self._is_requested = True
                return
            try:
                self._run()
            except BaseException:
                self.receiver.end_pass()
                raise

    def _run(self) -> None:
        self._is_requested = False
        notes = Path(tempfile.mkdtemp(prefix="end-", dir=self._directory))
        environment = env.of_child(
            **{
                env.is_launched.name: 1,
                env.launcher_pid.name: os.getpid(),
                env.run_directory.name: notes,
                env.feeds_parent.name: 1,
                env.nn_worker_addresses.name: self.address,
                env.embedding_worker_addresses.name: self._worker_server.address,
                "REPLICA_INDEX": 0,
                "REPLICA_SIZE": 1,
            },
            # Embedded mode has one rank; a data-loader has none.
            **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        )
        logger.info(
            "embedded mode: %s is the data-loader, in a process of its own", self._script
        )
        command = [sys.executable, "-m", RUN, "script", str(self._script)]
        self._child = subprocess.Popen(command, env=environment)
        self._watcher = threading.Thread(
            target=self._watch,
            args=(self._child, notes),
            name="persia-data-loader",
            daemon=True,
        )
        self._watcher.start()

    def _watch(self, child: subprocess.Popen[bytes], notes: Path) -> None:
        status = child.wait()
        try:
            with self._lock:
                if child is not self._child or not self.receiver.is_waiting():
                    return
                if self._is_requested and not self.receiver.has_streams():
                    self._run()  # it had nothing for the pass that began meanwhile
                    return
        except BaseException as exc:
            self.receiver.fail(exc)
            return
        failure = first_failure(notes)
        if failure is not None and failure.text:
            self.receiver.fail(failure_of_loader(0, failure.text))
            return
        how = f"ended with status {status}" if status >= 0 else f"died of signal {-status}"
        self.receiver.fail(
            ServiceError(
                f"the {LOADER} {self._script} {how} before it had ended its stream: it sends "
                "its batches inside `with DataCtx() as ctx:` by ctx.send_data",
                role=LOADER,
                replica=0,
            )
        )

    def close(self) -> None:
        """Stop, and end the child if it does not end by itself."""
        with self._lock:
            child, self._child = self._child, None
        try:
            self.receiver.close()
            if child is not None:
                self._end(child)
            self._worker_server.stop(_STOP_S)
            super().close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        for stop in (child.terminate, child.kill):
            try:
                child.wait(_CHILD_LEAVES_S)
                break
            except subprocess.TimeoutExpired:
                logger.warning("the %s %s is being stopped", LOADER, self._script)
                stop()
        else:
            child.wait()
        if self._watcher is not None:
            self._watcher.join()


class StreamSource(Source):
    """Takes what data-loaders deliver, by batch id if it is ``in_order``."""

    def __init__(self, stream: Stream, transfer: DeviceTransfer, in_order: bool) -> None:
        self._stream = stream
        self._receiver = stream.receiver
        self._transfer = transfer
        self._in_order = in_order
        self._is_closed = False
        self._has_begun = False

    def start(self) -> None:
        """Begin a pass; ConfigError if another one is under way."""
        self._stream.begin_pass()
        self._has_begun = True

    def get(self) -> tuple[PersiaTrainingBatch, InFlightBatch]:
        """Take the next batch."""
        if self.failure is not None:
            raise Finished
        receiver = self._receiver
        try:
            stream, batch = receiver.take(self._in_order, lambda: self._is_closed)
        except (Closed, Finished):
            raise
        except BaseException as exc:
            self.failure = exc
            raise Finished from exc
        batch_id = batch.batch_id
        try:
            copied = self._transfer.copy_streamed(batch)
        except BaseException:
            receiver.end(stream, batch_id)
            raise
        return copied, InFlightBatch(
            handle_of(batch.ids),
            batch_id,
            requires_grad=batch.requires_grad,
            num_samples=batch.batch_size,
            register_again=partial(receiver.register_again, stream, batch_id),
            on_done=partial(receiver.mark_done, stream, batch_id),
            on_end=partial(receiver.end, stream, batch_id),
        )

    def position(self) -> Plain | None:
        """Return what is done of every data-loader's batches that are this rank's."""
        return self._receiver.position()

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was received is done."""
        return self._receiver.position(at_end=True)

    def describe_wait(self) -> str:
        """Name the data-loaders whose batch is missing."""
        return f"{self._receiver.describe_wait()} (this nn-worker is at {self._stream.address})"

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Have the receiver acknowledge what comes until the data-loaders have ended."""
        if not self._receiver.drop_rest(on_drop, DROP_S):
            logger.warning(
                "another rank has no batch, and the rest of this one's did not come within "
                "%g s: waited for %s",
                DROP_S,
                self._receiver.describe_wait(),
            )

    def close(self) -> list[threading.Thread]:
        """End the pass; what is pending stays for the next one."""
        self._is_closed = True
        self._receiver.wake()
        if self._has_begun:
            self._has_begun = False
            self._receiver.end_pass()
        return []
