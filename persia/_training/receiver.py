"""What an nn-worker holds of the batches that data-loaders send it.

    data-loader --deliver--> pending --take--> in flight --ended--> acknowledged
                             bounded by        lookup, step,
                             credits           update

Each data-loader has a stream with credits of its own, so that one that stalls leaves the
others their room, and in reproducible order the one whose turn it is can always deliver. A
credit comes back when its batch is taken; the ids stay with the data-loader until the batch
has ended, so that they can be registered anew if an embedding-worker loses them.

Invariants, true between calls:

    I1  A data-loader delivers in ascending order: what is below its stream's
        ``next_batch_id`` has been received, or will not come. A batch is pending until it
        is taken, once, and in flight until it ends.
    I2  What is pending of a stream and its unused credits are ``capacity / num_loaders``
        together, or one if that is less, unless a data-loader sent again what a lost
        nn-worker had.

A pass ends when every data-loader has ended its stream and all it sent was taken. What one
sends after that, in a stream opened anew, is the next pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamNews, StreamState
from persia._rpc.worker_pool import handle_of
from persia._training.incoming import LoaderStream
from persia._training.queues import Closed, Finished
from persia._training.resume import Watermark, of_series
from persia.errors import (
    ConfigError,
    DataError,
    RemoteError,
    ServiceBusy,
    ServiceTimeout,
    UnknownStream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from persia._rpc.messages import StreamOpening
    from persia._training.resume import Plain
    from persia.errors import ServiceError

logger = logging.getLogger(__name__)

ROLE = "nn-worker"
LOADER = "data-loader"

# Seconds that a poll waits for news. Who was not heard for a few of these is gone.
POLL_S = 5.0
SILENT_S = 3 * POLL_S
# Seconds that data-loaders have to hear that nothing more is read.
FAREWELL_S = 2.0


def failure_of_loader(loader: int, text: str) -> RemoteError:
    """Return what is raised here of a data-loader that failed; the text is its traceback."""
    return RemoteError(
        f"{LOADER} {loader} failed; over there:\n{text.rstrip()}", role=LOADER, replica=loader
    )


class StreamedIds:
    """A batch that was taken; implements ``lookups.Origin``."""

    def __init__(
        self, inbox: BatchReceiver, stream: LoaderStream, batch: StreamedBatch
    ) -> None:
        self._inbox = inbox
        self._stream = stream
        self.batch = batch

    @property
    def ref(self) -> int:
        """Where its ids are."""
        return handle_of(self.batch.ids)

    def register_again(self, why: ServiceError) -> int:
        """Have the data-loader register the ids of this batch once more; returns the new ref.

        Raises:
            ServiceTimeout: If it does not in time: the batch is lost.
            Closed: If the inbox is closed.
        """
        ids = self._inbox.register_again(self._stream, self.batch.batch_id, why)
        return handle_of(ids)

    def done(self) -> None:
        """A run that is resumed from here does not need the batch."""
        self._inbox.done(self._stream, self.batch.batch_id)

    def ended(self) -> None:
        """Nobody needs the ids any more."""
        self._inbox.ended(self._stream, self.batch.batch_id)


class BatchReceiver:
    """Implements ``messages.NNWorker``; ``take`` and the rest are the trainer's.

    Args:
        rank: This nn-worker's.
        world_size: Number of ranks.
        capacity: Batches pending, of all data-loaders; each may have one whatever it is.
        patience_s: How long a data-loader may take to register ids again.
        clock: Monotonic seconds.
        resumed: What a run before this one has trained of the first pass.
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
        self._capacity = capacity
        self._patience_s = patience_s
        self._clock = clock
        # One lock guards all below. Data-loaders that poll wait for news of their own stream,
        # everybody else for any change: of many data-loaders a batch wakes one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._resumed = resumed  # None once the first pass is over
        self._num_loaders: int | None = None  # told by the first that opens a stream
        self._streams: dict[int, LoaderStream] = {}  # of this pass, by data-loader
        # Of passes before; some of their batches may not have ended.
        self._past: dict[int, LoaderStream] = {}
        self._arrived: deque[tuple[int, int]] = deque()  # (loader, batch id), pending
        self._expected: int | None = None  # next id in order; None before the first
        self._is_passing = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._counts: Counter[str] = Counter()

    # --- asked by data-loaders --------------------------------------------------------------

    def open_stream(self, opening: StreamOpening) -> StreamState:
        """Begin a stream, or go on with the one of a data-loader that was started anew.

        Raises:
            ConfigError: If the data-loaders do not agree on how many they are.
            ServiceBusy: If this data-loader has ended its stream and the pass goes on, unless
                it may register ids of it again; or the inbox is closed.
        """
        if not 0 <= opening.loader < opening.num_loaders:
            raise ConfigError(
                f"{LOADER}: expected a number below REPLICA_SIZE {opening.num_loaders}, got "
                f"{opening.loader}"
            )
        with self._changed:
            if self._is_closed:
                raise ServiceBusy(
                    "this nn-worker reads no more, until another context of it does",
                    role=ROLE,
                    replica=self.replica_index,
                    method="open_stream",
                )
            if self._num_loaders not in (None, opening.num_loaders):
                raise ConfigError(
                    f"{LOADER} {opening.loader} says that there are {opening.num_loaders} of "
                    f"them, others said {self._num_loaders}: REPLICA_SIZE must be the same"
                )
            self._check_resumed(opening.num_loaders)
            stream = self._known_to(opening) or self._new(opening)
            stream.heard_at = self._clock()
            self._changed.notify_all()
            return StreamState(
                stream.next_batch_id or 0,
                tuple(sorted(stream.wanted)),
                tuple(sorted((*stream.pending, *stream.in_flight))),
            )

    def _new(self, opening: StreamOpening) -> LoaderStream:
        self._num_loaders = opening.num_loaders
        stream = self._streams[opening.loader] = LoaderStream(
            opening,
            self.replica_index,
            self.replica_size,
            *self._resumed_at(opening.loader),
            news=threading.Condition(self._lock),
        )
        stream.was_read = self._is_passing
        stream.credits = self._window(opening.num_loaders)
        return stream

    def _known_to(self, opening: StreamOpening) -> LoaderStream | None:
        """Return the stream that a data-loader goes on with; None if it begins one.

        Whoever ended its stream may have been killed before all of it was trained. Its
        successor is not asked for, and is taken for the next pass's, until ids are wanted:
        these nobody else can register. Of several ranks each knows its own pass only: were it
        let in here, another might take it for the next pass's.
        """
        past, now = self._past.get(opening.loader), self._streams.get(opening.loader)
        for stream in (past, now):
            if stream is not None and stream.incarnation == opening.incarnation:
                # Perhaps after it was answered, and batches came: they have used their credits.
                return stream
        is_only_rank = self.replica_size == 1
        if past is not None and past.wanted and is_only_rank:
            return self._take_over(past, opening)
        if now is None:
            return None
        is_wanted = bool(now.wanted) and is_only_rank
        if now.ended_at is not None and not (now.failure or is_wanted):
            raise ServiceBusy(
                f"{LOADER} {opening.loader} has ended its stream and this pass over the "
                "data goes on; the next one begins after it",
                role=ROLE,
                replica=self.replica_index,
                method="open_stream",
            )
        return self._take_over(now, opening)

    def _take_over(self, stream: LoaderStream, opening: StreamOpening) -> LoaderStream:
        """Let a data-loader that was started anew go on with a stream."""
        if stream.failure:
            # Whoever failed and is there again has ended nothing.
            stream.ended_at, stream.failure = None, ""
        logger.warning(
            "%s %d was started anew; it goes on at batch %s",
            LOADER,
            opening.loader,
            stream.next_batch_id,
        )
        self._counts["loader_restarts"] += 1
        stream.incarnation = opening.incarnation
        stream.acknowledged.clear()
        stream.version = 0
        stream.knows_end = False
        stream.credits = self._window(opening.num_loaders) - len(stream.pending)
        stream.was_read |= self._is_passing
        stream.news.notify_all()  # a poll of the process before
        return stream

    def _check_resumed(self, num_loaders: int) -> None:
        before = None if self._resumed is None else self._resumed["num_loaders"]
        if before in (None, num_loaders):
            return
        error = ConfigError(
            f"the checkpoint was made with {before} {LOADER}s, now there are {num_loaders}: "
            f"which batches were trained is known of those only; expected REPLICA_SIZE {before}"
        )
        self._failure = error  # the trainer's script has to end, too
        self._changed.notify_all()
        raise error

    def _resumed_at(self, loader: int) -> tuple[int, Sequence[int]]:
        if self._resumed is None:
            return 0, ()
        name = str(loader)
        return self._resumed["floors"].get(name, 0), self._resumed["above"].get(name, ())

    def position(self) -> Plain | None:
        """Return which batches of this rank's are done in this pass; None before it began."""
        with self._changed:
            if self._num_loaders is None:
                return self._resumed
            series = {
                loader: stream.trained
                for loader, stream in sorted(self._streams.items())
                if stream.next_batch_id is not None
            }
            return of_series("stream", self._num_loaders, series)

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was received is done."""
        with self._changed:
            if self._num_loaders is None:
                return self._resumed
            series = {
                loader: Watermark(stream.next_batch_id, stream.step)
                for loader, stream in sorted(self._streams.items())
                if stream.next_batch_id is not None
            }
            return of_series("stream", self._num_loaders, series)

    def _window(self, num_loaders: int) -> int:
        return max(1, self._capacity // num_loaders)

    def _stream(self, stream: tuple[int, int], method: str) -> LoaderStream:
        loader, incarnation = stream
        for found in (self._streams.get(loader), self._past.get(loader)):
            if found is not None and found.incarnation == incarnation:
                break
        else:
            raise self._unknown(stream, method)
        found.heard_at = self._clock()
        return found

    def _is_known(self, stream: LoaderStream) -> bool:
        return stream in (self._streams.get(stream.loader), self._past.get(stream.loader))

    def _unknown(self, stream: tuple[int, int], method: str) -> UnknownStream:
        return UnknownStream(
            f"{LOADER} {stream[0]} has no such stream here: this nn-worker or the {LOADER} was "
            "started anew",
            role=ROLE,
            replica=self.replica_index,
            method=method,
        )

    def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
        """Take one batch; the same one again is dropped and counted.

        Raises:
            UnknownStream: If the stream is not open here.
            DataError: If the batch is not one of this stream's.
        """
        with self._changed:
            found = self._stream(stream, "deliver")
            batch_id = batch.batch_id
            if found.at_or_after(batch_id) != batch_id:
                raise DataError(
                    f"batch {batch_id} of {LOADER} {stream[0]} is not rank "
                    f"{self.replica_index}'s of {self.replica_size}"
                )
            if not found.is_new(batch_id):
                self._counts["delivered_again"] += 1
                return
            if found.ended_at is not None and batch_id >= found.ended_at:
                raise DataError(
                    f"batch {batch_id} of {LOADER} {stream[0]} came after the end at "
                    f"{found.ended_at}"
                )
            found.note(batch_id)
            self._counts["delivered"] += 1
            if found.on_drop is not None:
                self._drop(found, batch_id, found.on_drop)
                return
            if batch_id in found.left_out:
                found.trained.done(batch_id)
                self._counts["left_out"] += 1
                self._drop(found, batch_id, lambda: None)
                return
            found.pending[batch_id] = batch
            self._arrived.append((found.loader, batch_id))
            self._changed.notify_all()

    def relocate(self, stream: tuple[int, int], batch_id: int, ids: RemoteRef) -> None:
        """Note where the ids of a batch in flight are now."""
        with self._changed:
            found = self._stream(stream, "relocate")
            found.wanted.discard(batch_id)
            if batch_id in found.in_flight:
                found.in_flight[batch_id] = ids
                self._counts["relocated"] += 1
            self._news(found)

    def end_stream(self, stream: tuple[int, int], next_batch_id: int, failure: str) -> None:
        """Note that no batch from ``next_batch_id`` on will come."""
        with self._changed:
            found = self._stream(stream, "end_stream")
            if found.ended_at is None:
                found.ended_at = next_batch_id
                found.failure = failure
            if failure:
                found.knows_end = True  # it asks no more
            self._changed.notify_all()

    def poll(self, stream: tuple[int, int], seen: int) -> StreamNews:
        """Return what is new, as soon as there is something, or after some seconds."""
        with self._changed:
            found = self._stream(stream, "poll")
            while found.acknowledged and found.acknowledged[0][0] <= seen:
                found.acknowledged.popleft()
            found.news.wait_for(
                lambda: (
                    self._is_closed
                    or found.version > seen
                    or found.incarnation != stream[1]
                    or not self._is_known(found)
                ),
                POLL_S,
            )
            if found.incarnation == stream[1]:
                found.heard_at = self._clock()
                if self._is_closed and not found.was_read:
                    # Meant for a pass that is to come, in another context of this process.
                    raise self._unknown(stream, "poll")
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

    def _news(self, stream: LoaderStream) -> None:
        stream.version += 1
        stream.news.notify_all()
        self._changed.notify_all()

    # --- asked by the trainer ---------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin to take batches.

        Raises:
            ConfigError: If another pass is under way.
        """
        with self._changed:
            if self._is_passing:
                raise ConfigError(
                    "the batches that data-loaders send are being read already: iterate one "
                    "DataLoader over a StreamingDataset at a time"
                )
            self._is_passing = True
            self._failure = None  # of a pass before
            for stream in self._streams.values():
                stream.was_read = True

    def end_pass(self) -> None:
        """Stop to take; what is pending stays for the next pass, unless this one is over."""
        with self._changed:
            self._is_passing = False
            is_dropped = any(stream.on_drop for stream in self._streams.values())
            if is_dropped or self._is_over():
                before = [*self._past.values()]
                self._past.update(self._streams)
                for stream in before:
                    stream.news.notify_all()  # later on nobody would wake a poll of these
                self._streams.clear()
                self._num_loaders = None
                self._resumed = None
            self._expected = None
            self._changed.notify_all()

    def drop_rest(self, on_drop: Callable[[], None], timeout_s: float) -> bool:
        """Acknowledge what is pending, and what comes until every data-loader has ended.

        Args:
            on_drop: Called for each batch; must return soon.
            timeout_s: Seconds to wait for the data-loaders to end.

        Returns:
            Whether they have.
        """
        with self._changed:
            for stream in self._streams.values():
                stream.on_drop = on_drop
                for batch_id in sorted(stream.pending):
                    self._drop(stream, batch_id, on_drop)
                stream.pending.clear()
            self._arrived.clear()
            return self._changed.wait_for(lambda: self._is_closed or self._is_over(), timeout_s)

    def _drop(self, stream: LoaderStream, batch_id: int, on_drop: Callable[[], None]) -> None:
        on_drop()
        stream.credits += 1
        stream.acknowledged.append((stream.version + 1, batch_id))
        self._news(stream)

    def take(self, in_order: bool, is_closed: Callable[[], bool]) -> StreamedIds:
        """Wait for a batch and take it.

        Args:
            in_order: By batch id, over all data-loaders; otherwise as they arrived.
            is_closed: Asked whenever ``wake`` was called.

        Raises:
            Closed: If ``is_closed()``, or the inbox was closed.
            Finished: If every data-loader has ended.
            RemoteError: If a data-loader has failed, and what it sent was taken; once.
            BaseException: What ``fail`` was given.
        """
        with self._changed:
            while True:
                if self._is_closed or is_closed():
                    raise Closed
                self._raise_failure_of_loader()
                chosen = self._next_in_order() if in_order else self._next_arrived()
                if chosen is not None:
                    return self._hand_out(*chosen)
                if self._failure is not None:
                    raise self._failure
                if self._is_over():
                    raise Finished
                self._changed.wait()

    def _next_arrived(self) -> tuple[LoaderStream, int] | None:
        if not self._arrived:
            return None
        loader, batch_id = self._arrived[0]
        return self._streams[loader], batch_id

    def _next_in_order(self) -> tuple[LoaderStream, int] | None:
        if self._num_loaders is None or len(self._streams) < self._num_loaders:
            return None  # whoever is missing may have the first batch
        if self._expected is None:
            firsts = [
                min(stream.pending, default=stream.next_batch_id)
                for stream in self._streams.values()
            ]
            self._expected = min((one for one in firsts if one is not None), default=None)
        while self._expected is not None:
            stream = self._streams[self._expected % self._num_loaders]
            if self._expected in stream.pending:
                return stream, self._expected
            next_id = stream.next_batch_id
            has_passed = next_id is not None and self._expected < next_id
            if not has_passed and (stream.ended_at is None or self._expected < stream.ended_at):
                return None
            if self._is_over():
                return None
            self._expected += self.replica_size
        return None

    def _hand_out(self, stream: LoaderStream, batch_id: int) -> StreamedIds:
        batch = stream.pending.pop(batch_id)
        self._arrived.remove((stream.loader, batch_id))
        stream.in_flight[batch_id] = batch.ids
        stream.credits += 1
        if self._expected is not None:
            self._expected = batch_id + self.replica_size
        self._news(stream)
        return StreamedIds(self, stream, batch)

    def _raise_failure_of_loader(self) -> None:
        for stream in self._streams.values():
            if stream.failure and stream.is_over():
                failure, stream.failure = stream.failure, ""
                raise failure_of_loader(stream.loader, failure)

    def _is_over(self) -> bool:
        return (
            self._num_loaders is not None
            and len(self._streams) == self._num_loaders
            and all(stream.is_over() for stream in self._streams.values())
        )

    def wake(self) -> None:
        """Let ``take`` ask ``is_closed`` again."""
        with self._changed:
            self._changed.notify_all()

    def is_waiting(self) -> bool:
        """Whether batches are owed: a pass goes on and not every data-loader has ended."""
        with self._changed:
            ended = self._num_loaders is not None and all(
                stream.ended_at is not None for stream in self._streams.values()
            )
            return self._is_passing and not (ended and self._streams)

    def has_streams(self) -> bool:
        """Whether a data-loader has opened a stream of this pass."""
        with self._changed:
            return bool(self._streams)

    def fail(self, failure: BaseException) -> None:
        """Raise this in ``take``, once what is pending was taken."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def done(self, stream: LoaderStream, batch_id: int) -> None:
        """Note that a batch was trained, or had no gradients to train with."""
        with self._changed:
            stream.trained.done(batch_id)

    def ended(self, stream: LoaderStream, batch_id: int) -> None:
        """Note that nobody needs the ids of a batch any more."""
        with self._changed:
            if stream.in_flight.pop(batch_id, None) is None:
                return
            stream.wanted.discard(batch_id)
            stream.acknowledged.append((stream.version + 1, batch_id))
            self._news(stream)

    def register_again(
        self, stream: LoaderStream, batch_id: int, why: ServiceError
    ) -> RemoteRef:
        """Ask the data-loader to register the ids of a batch in flight once more, and wait."""
        logger.warning("batch %d is registered again: %s", batch_id, why)
        with self._changed:
            stream.wanted.add(batch_id)
            self._counts["asked_again"] += 1
            self._news(stream)
            came = self._changed.wait_for(
                lambda: self._is_closed or batch_id not in stream.wanted, self._patience_s
            )
            if came and not self._is_closed:
                return stream.in_flight[batch_id]
            stream.wanted.discard(batch_id)
            self._counts["lost"] += 1
            if self._is_closed:
                raise Closed
            raise ServiceTimeout(
                f"batch {batch_id} is lost: {why}; and {self._describe(stream)} did not "
                f"register its ids again within {self._patience_s:g} s",
                role=LOADER,
                replica=stream.loader,
                method="poll",
            )

    def describe_wait(self) -> str:
        """Say whom ``take`` is waiting for."""
        with self._changed:
            if self._num_loaders is None:
                return f"a {LOADER} to connect; none has"
            missing = sorted(set(range(self._num_loaders)) - self._streams.keys())
            if missing:
                names = ", ".join(map(str, missing))
                return f"{LOADER} {names} of {self._num_loaders} to connect"
            late = [
                self._describe(stream)
                for stream in self._streams.values()
                if stream.ended_at is None and not stream.pending
            ]
            return " and ".join(late) or f"the {LOADER}s"

    def _describe(self, stream: LoaderStream) -> str:
        silent_s = self._clock() - stream.heard_at
        name = f"{LOADER} {stream.loader} of {stream.num_loaders}"
        if silent_s > SILENT_S:
            return f"{name}, which has not been heard for {silent_s:.0f} s,"
        return name

    def num_bytes(self) -> int:
        """Return the bytes of dense data and labels of the batches that wait."""
        with self._changed:
            streams = {*self._streams.values(), *self._past.values()}
            waiting = [batch for stream in streams for batch in stream.pending.values()]
        return sum(
            item.array.nbytes
            for batch in waiting
            for item in (*batch.non_id_type_features, *batch.labels)
        )

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and ``pending`` and ``in_flight`` now."""
        with self._changed:
            streams = {*self._streams.values(), *self._past.values()}
            return {
                **self._counts,
                "pending": sum(len(stream.pending) for stream in streams),
                "in_flight": sum(len(stream.in_flight) for stream in streams),
            }

    def close(self) -> None:
        """Tell data-loaders and whoever waits that nothing more is read.

        Returns when those data-loaders that were heard lately have heard it: one that found
        nobody here would take that for a trainer that was killed and comes back.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            left = sum(len(stream.pending) for stream in self._streams.values())
            if left:
                self._counts["unread"] += left
                logger.info("%d batches that data-loaders had sent were not read", left)
            for stream in (*self._streams.values(), *self._past.values()):
                stream.news.notify_all()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._awaited(), FAREWELL_S)

    def _awaited(self) -> list[LoaderStream]:
        """Streams whose data-loader will still ask, and does not know that it need not."""
        now = self._clock()
        return [
            stream
            for stream in (*self._streams.values(), *self._past.values())
            if stream.was_read
            and not (stream.knows_end or stream.is_settled())
            and now - stream.heard_at < SILENT_S
        ]
