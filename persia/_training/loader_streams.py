"""The streams of data-loaders to one rank, pass by pass; all without a lock of their own.

    LoaderStreams    of this pass and of those before
        PassOrder        those of one pass, and the order in which their batches are taken
            LoaderStream     of one data-loader: what came, and what may come

``BatchReceiver`` calls them under its lock; its invariants are theirs.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import Counter, deque
from operator import itemgetter
from typing import TYPE_CHECKING

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening
from persia._training.progress import Watermark, to_position
from persia.errors import ConfigError, DataError, RemoteError, ServiceBusy, UnknownStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from persia._training.progress import Plain

logger = logging.getLogger(__name__)

ROLE = "nn-worker"
LOADER = "data-loader"

# Seconds after which a data-loader is silent: it polls more often.
SILENT_S = 15.0
_MOST_NAMED = 16  # data-loaders in one message
# Most batches that a delivery may leave out. After a restart of this rank those are left out
# that were trained while an earlier one was not; each is noted, under the lock.
MOST_LEFT_OUT = 1 << 20


def failure_of_loader(loader: int, text: str) -> RemoteError:
    """Return the error of a data-loader that failed; the text is its traceback."""
    return RemoteError(
        f"{LOADER} {loader} failed; over there:\n{text.rstrip()}", role=LOADER, replica=loader
    )


class LoaderStream:
    """One data-loader's stream to this rank; guarded by the receiver's lock.

    The ids of its batches are every ``lcm(num_loaders, world_size)``-th: those that are this
    data-loader's and this rank's. Some pairs of the two have none in common. ``resumed`` is
    the lowest one that the run before left to be trained, and those above that it did train;
    None where no run is continued.
    """

    def __init__(
        self,
        opening: StreamOpening,
        rank: int,
        world_size: int,
        resumed: tuple[int, Sequence[int]] | None = None,
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
        # Where a run goes on its position decides, and not what its data-loader still has: that
        # may have been acknowledged by a process that was killed before its next checkpoint.
        self._is_resumed = resumed is not None
        floor, above = resumed or (opening.first_batch_id, ())
        self.next_batch_id = self.at_or_after(floor)
        # Of this rank's batches, those done; in a resumed run some above its beginning are.
        self.left_out = frozenset(place for place in above if self.is_mine(place))
        self.trained = Watermark(self.next_batch_id or 0, self.step, set(self.left_out))
        self.pending: dict[int, StreamedBatch] = {}
        self.taken: dict[int, RemoteRef] = {}  # and not ended
        self.wanted: set[int] = set()  # taken, to be registered again
        self.acknowledged: deque[tuple[int, int]] = deque()  # (version, batch id)
        self.version = 0
        self.credits = 0  # granted since the opening
        self.num_received = 0  # since the opening: credits that are used
        self.epoch = opening.epoch  # of the batch that was received last
        self.epochs: set[int] = set()  # of batches to this rank, of all its processes
        # The lowest epoch of which no batch came to a process before this one.
        self.first_whole = opening.epoch + (opening.first_batch_id > opening.loader)
        self.begin: int | None = None  # first id of this epoch; None: the first of all
        self.ended_at: int | None = None  # no batch from this id on
        self.end_epoch = 0  # of the last batch for any rank, once it has ended
        self.failure = ""
        # As its ``PassOrder`` has them.
        self.on_drop: Callable[[], None] | None = None
        self.drops_to = -1
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

    def mark_received(self, batch_id: int, epoch: int) -> None:
        """Note a batch; after a restart of this rank those that are left out were trained.

        Not where it goes on from a checkpoint: there it is known which were, and each comes.
        """
        if epoch < self.epoch:
            raise DataError(
                f"batch {batch_id} of {LOADER} {self.loader} is of epoch {epoch}, but those "
                f"before it were of epoch {self.epoch} already: a script that leaves batches "
                "out by ctx.seek calls ctx.end_epoch() for each epoch that it leaves out, as "
                "reader.send does"
            )
        left_out = range(self.next_batch_id or 0, batch_id, self.step)
        if left_out and self._is_resumed:
            raise DataError(
                f"batch {batch_id} of {LOADER} {self.loader}: expected {left_out[0]}, as this "
                "run goes on from a checkpoint, behind which none may be left out"
            )
        if len(left_out) > MOST_LEFT_OUT:
            raise DataError(
                f"batch {batch_id} of {LOADER} {self.loader}: expected at most "
                f"{left_out[MOST_LEFT_OUT]}, as the one before it was "
                f"{left_out[0] - self.step}"
            )
        for place in left_out:
            self.trained.mark_done(place)
        self.next_batch_id = batch_id + self.step
        self.num_received += 1
        self.epoch = epoch
        self.epochs.add(epoch)

    def first_to_take(self, epoch: int) -> int | None:
        """The lowest id that is pending or may come up to this epoch; None if there is none."""
        if self.is_over(epoch):
            return None
        return next(iter(self.pending), self.next_batch_id)

    def first_behind(self, epoch: int) -> int | None:
        """The lowest id that is pending or may come behind this epoch, which is over."""
        later = (place for place, batch in self.pending.items() if batch.epoch > epoch)
        return next(later, self.next_batch_id)

    def is_over(self, epoch: int) -> bool:
        """Whether everything up to this epoch was taken, and no more of it will come."""
        if self.pending:
            return next(iter(self.pending.values())).epoch > epoch
        return self._offset is None or self.ended_at is not None

    def is_finished(self, epoch: int) -> bool:
        """Whether this epoch is over and no rank gets a batch of a later one."""
        return max(self.epoch, self.end_epoch) <= epoch and self.is_over(epoch)

    def is_empty(self, epoch: int, is_only_rank: bool) -> bool:
        """Whether its data-loader is known to have sent no rank a batch of this epoch."""
        if self.ended_at == self.loader:
            return True
        if is_only_rank and self.first_whole <= epoch:
            return epoch not in self.epochs
        return self.ended_at is not None and self.end_epoch < epoch

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

    Where streams go on in another epoch they are the next pass's, too.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch  # whose batches are taken
        self.is_first = True  # no pass over these streams has ended
        self.was_read = False  # the pass has begun
        self.num_loaders: int | None = None  # from the first that opens a stream
        # Called for each batch that comes although the pass of its epoch, or a later one, has
        # ended.
        self.on_drop: Callable[[], None] | None = None
        self.drops_to = -1  # the last such epoch
        self.streams: dict[int, LoaderStream] = {}  # by data-loader
        self._arrived: deque[tuple[LoaderStream, int]] = deque()  # pending batches

    def add(self, stream: LoaderStream, batch: StreamedBatch) -> None:
        """Make a batch pending."""
        stream.pending[batch.batch_id] = batch
        self._arrived.append((stream, batch.batch_id))

    def take(self, in_order: bool) -> tuple[LoaderStream, StreamedBatch] | None:
        """Take the next pending batch; None if it is not here."""
        found = self._first() if in_order else next(self._arrived_now(), None)
        if found is None:
            return None
        self._arrived.remove(found)
        stream, batch_id = found
        batch = stream.pending.pop(batch_id)
        stream.taken[batch_id] = batch.ids
        return stream, batch

    def _first(self) -> tuple[LoaderStream, int] | None:
        """Return the batch with the lowest id that may still come; None if it is not here."""
        if self.num_loaders is None or len(self.streams) < self.num_loaders:
            return None  # one that has not connected may have it
        firsts = [(one.first_to_take(self.epoch), one) for one in self.streams.values()]
        coming = [(first, stream) for first, stream in firsts if first is not None]
        if not coming:
            return None
        batch_id, stream = min(coming, key=itemgetter(0))
        return (stream, batch_id) if batch_id in stream.pending else None

    def _arrived_now(self) -> Iterator[tuple[LoaderStream, int]]:
        """Yield what is pending of this epoch, as it arrived."""
        return (
            (stream, batch_id)
            for stream, batch_id in self._arrived
            if stream.pending[batch_id].epoch <= self.epoch
        )

    def drop_rest(self, on_drop: Callable[[], None]) -> list[tuple[LoaderStream, int]]:
        """Drop what comes of this epoch; return the ids of what was pending of it."""
        self.on_drop, self.drops_to = on_drop, self.epoch
        for stream in self.streams.values():
            stream.on_drop, stream.drops_to = on_drop, self.epoch
        dropped = [*self._arrived_now()]
        for stream, batch_id in dropped:
            self._arrived.remove((stream, batch_id))
            del stream.pending[batch_id]
        return dropped

    def is_over(self) -> bool:
        """Whether every data-loader has ended this epoch and all of it was taken."""
        return (
            self.num_loaders is not None
            and len(self.streams) == self.num_loaders
            and all(stream.is_over(self.epoch) for stream in self.streams.values())
        )

    def is_finished(self, epoch: int) -> bool:
        """Whether no data-loader that has connected has more than this epoch."""
        return all(stream.is_finished(epoch) for stream in self.streams.values())

    def begin_next(self) -> None:
        """Go on to the next epoch."""
        for stream in self.streams.values():
            stream.begin = begin = stream.first_behind(self.epoch)
            if begin is not None:  # what was dropped before it will not be trained
                stream.trained = Watermark(begin, stream.step)
        self.epoch += 1
        self.is_first = self.was_read = False

    def take_failure(self) -> RemoteError | None:
        """Return the error of a data-loader that failed and whose batches were taken, once."""
        for stream in self.streams.values():
            if stream.failure and not stream.pending:
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
        self.order = PassOrder((resumed or {}).get("epoch", 0))  # of this pass
        self._past: dict[int, LoaderStream] = {}  # some of their batches may not have ended
        self.is_passing = False
        self.counts: Counter[str] = Counter()  # the receiver's

    @property
    def is_resumed(self) -> bool:
        """Whether this pass goes on where a run before this one left it."""
        return self._resumed is not None

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
        order = self.order
        order.num_loaders = opening.num_loaders
        if self._resumed is None and order.is_first:
            # A rank that was restarted alone has no epoch before that of its data-loaders.
            lowest = min((one.epoch for one in order.streams.values()), default=opening.epoch)
            order.epoch = min(lowest, opening.epoch)
        stream = order.streams[opening.loader] = self._make(opening)
        stream.on_drop, stream.drops_to = order.on_drop, order.drops_to
        stream.was_read = self.is_passing
        return stream

    def _make(self, opening: StreamOpening) -> LoaderStream:
        """Return a stream that begins where the run before left it."""
        name, resumed = str(opening.loader), self._resumed
        if resumed is None:
            return LoaderStream(opening, self._rank, self._world_size, None, self._lock)
        trained = resumed["floors"].get(name, 0), resumed["above"].get(name, ())
        stream = LoaderStream(opening, self._rank, self._world_size, trained, self._lock)
        stream.epoch, stream.begin = self.order.epoch, resumed.get("begins", {}).get(name)
        stream.first_whole = stream.epoch + 1
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
        stream.credits = stream.num_received = 0
        stream.news.notify_all()  # a poll of the process before
        return stream

    def grant(self) -> list[LoaderStream]:
        """Grant the credits that there are now; return the streams that got some.

        Each data-loader has an equal part of the room, at least one batch. Where ranks go in
        step, those whose epoch is over leave their parts to the others: of each of them this
        rank may have had one batch more than another rank. It is that far behind with what
        the others send, and keeps it while the other rank waits for what comes after it.
        """
        order, num_over = self.order, 0
        if order.num_loaders is None:
            return []
        if self._world_size > 1:
            num_over = sum(one.is_over(order.epoch) for one in order.streams.values())
        room, granted = max(self._capacity, order.num_loaders), []
        for stream in order.streams.values():
            num_left = 0 if stream.is_over(order.epoch) else num_over
            share = room // (order.num_loaders - num_left)
            credits = stream.num_received + share - len(stream.pending)
            if credits > stream.credits:
                stream.credits = credits
                granted.append(stream)
        return granted

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

    def busy(self, message: str, method: str = "open_stream") -> ServiceBusy:
        """Return the error for what cannot be done now."""
        return ServiceBusy(message, role=ROLE, replica=self._rank, method=method)

    def end_pass(self) -> None:
        """End the pass; what is pending stays for the next one, unless this one is over."""
        self.is_passing = False
        order = self.order
        if order.drops_to == order.epoch or order.is_over():
            order.begin_next()
            self._resumed = None
            self.leave_finished()

    def leave_finished(self) -> None:
        """Let the streams be past ones, if a pass over them has ended and was their last."""
        if self.order.is_first or not self.order.is_finished(self.order.epoch - 1):
            return
        before = [*self._past.values()]
        self._past.update(self.order.streams)
        for stream in before:
            stream.news.notify_all()  # nothing would wake a poll of these later
        self.order = PassOrder()

    def position(self, at_end: bool) -> Plain | None:
        """Return what is trained of this pass, or will be at its end, for a file."""
        order = self.order
        if order.num_loaders is None:
            resumed = self._resumed
            return None if resumed is None or resumed["num_loaders"] is None else resumed
        series, begins = {}, {}
        for loader in range(order.num_loaders):
            # One that has not connected is where the run before left it.
            opening = StreamOpening(loader, order.num_loaders, 0, loader)
            stream = order.streams.get(loader) or self._make(opening)
            first = stream.first_behind(order.epoch) if at_end else stream.next_batch_id
            if first is not None:
                series[loader] = Watermark(first, stream.step) if at_end else stream.trained
            if stream.begin is not None:
                begins[str(loader)] = stream.begin
        return to_position("stream", order.num_loaders, series, order.epoch, begins)

    def next_position(self) -> Plain | None:
        """Return where the next pass begins, once this one is over; None at new streams."""
        end, epoch = self.position(at_end=True), self.order.epoch
        if end is None or self.order.is_finished(epoch):
            return None
        return {**end, "epoch": epoch + 1, "begins": dict(end["floors"])}

    def describe_wait(self) -> str:
        """Name the data-loaders whose batch is missing."""
        num_loaders, streams = self.order.num_loaders, self.order.streams
        if num_loaders is None:
            return self._describe_end() or f"a {LOADER} to connect; none has"
        missing = itertools.islice(
            (loader for loader in range(num_loaders) if loader not in streams), _MOST_NAMED
        )
        names = ", ".join(map(str, missing))
        if names:
            return f"{LOADER} {names} of {num_loaders} to connect"
        late = [
            self.describe(stream)
            for stream in streams.values()
            if not stream.pending and not stream.is_over(self.order.epoch)
        ]
        return " and ".join(late) or f"the {LOADER}s"

    def _describe_end(self) -> str:
        """Say which data-loaders have ended before this pass; "" if none has."""
        ended = [one for one in self._past.values() if one.ended_at is not None]
        if not ended:
            return ""
        names = ", ".join(str(one.loader) for one in ended[:_MOST_NAMED])
        count = 1 + max(one.end_epoch for one in ended)
        return (
            f"a {LOADER} to connect again: {LOADER} {names} of {ended[0].num_loaders} ended "
            f"after {count} epoch{'s' * (count > 1)}, and each loop over the DataLoader reads "
            "one: a script that sends several calls ctx.end_epoch() after each"
        )

    def describe_missing(self) -> str:
        """Name data-loaders without a batch of this epoch for any rank, or this rank."""
        epoch, streams = self.order.epoch, self.order.streams
        is_only_rank = self._world_size == 1
        empty = [one.loader for one in streams.values() if one.is_empty(epoch, is_only_rank)]
        if empty:
            names = ", ".join(map(str, sorted(empty)[:_MOST_NAMED]))
            return f"{LOADER} {names} of {self.order.num_loaders} sent"
        if any(epoch in stream.epochs for stream in streams.values()):
            return ""
        return f"rank {self._rank} of {self._world_size} had"

    def describe(self, stream: LoaderStream) -> str:
        """Name a data-loader, and say so if it is silent."""
        silent_s = self._clock() - stream.heard_at
        name = f"{LOADER} {stream.loader} of {stream.num_loaders}"
        if silent_s > SILENT_S:
            return f"{name}, which has not been heard for {silent_s:.0f} s,"
        return name
