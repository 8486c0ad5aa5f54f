"""The sender's side of one nn-worker's stream: credits, and batches that are not acknowledged.

The user's thread delivers. A thread per rank makes one ``step`` after the other: it opens the
stream, delivers again what a restarted rank lost, announces the end, and polls for credits,
acknowledgements and wanted ids. Ids always arrive in ascending order.

States of a stream:

    NEW     open_stream                          -> OPEN
    OPEN    end_stream, once no data is left     -> ENDED
    OPEN    a call raises UnknownStream          -> LOST      the rank was restarted
    ENDED   a call raises UnknownStream          -> LOST
    LOST    open_stream                          -> OPEN      unacknowledged batches: backlog
    LOST    the rank goes on from a checkpoint   -> StreamRewound, raised where data is sent
    OPEN    a poll says that the rank closed it  -> CLOSED    they are lost
    ENDED   a poll says that the rank closed it  -> CLOSED
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TypeVar

from persia._rpc.messages import (
    IDFeatures,
    NNWorker,
    RemoteRef,
    StreamedBatch,
    StreamNews,
    StreamOpening,
    StreamState,
)
from persia.errors import (
    ConfigError,
    DataError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    StreamRewound,
    UnknownStream,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two lines that say what is waited for.
LINE_S = 10.0
# Seconds between two attempts at a server that refused at once.
AGAIN_S = 0.02
# Below every version of the news, so that the first poll is answered at once.
NOTHING = -1
# The ref of ids that are not registered: the rank has one, or learns that its ref is unknown.
NO_REF = RemoteRef(0, 0)


class RankState(Enum):
    """State of a stream; the table is above."""

    NEW = "new"
    OPEN = "open"
    ENDED = "ended"
    LOST = "lost"
    CLOSED = "closed"


class Action(Enum):
    """What is to be done with the batch that the user sends."""

    DELIVER = "deliver"
    # The rank has it from a process before this one:
    RELOCATE = "relocate"  # and needs a new ref of its ids
    HOLD = "hold"  # and has not acknowledged it
    DROP = "drop"  # and has acknowledged it


class LoaderState:
    """One data-loader's run over its data; seconds as of ``BatchSender``."""

    def __init__(
        self, loader: int, num_loaders: int, num_ranks: int, deadline_s: float, gone_s: float
    ) -> None:
        self.loader, self.num_loaders, self.num_ranks = loader, num_loaders, num_ranks
        self.deadline_s, self.gone_s = deadline_s, gone_s
        self.stream = loader, secrets.randbits(63)
        self.stopping = threading.Event()
        self.changed = threading.Condition()  # guards all below, and the streams
        self.next_id = loader  # of the batch that the user sends next
        self.epoch = 0  # of that batch
        self._sent_epoch: int | None = None  # of the one before, if this process has sent it
        self.is_ending = False  # no more will be sent
        self.status: int | None = None  # of the job, once it has ended
        self.failure: BaseException | None = None  # of a thread
        self.counts: Counter[str] = Counter()
        self.threads: list[threading.Thread] = []

    def __str__(self) -> str:
        return f"data-loader {self.loader} of {self.num_loaders}"

    @property
    def last_epoch(self) -> int:
        """The epoch of the last batch: an ``end_epoch`` with no batch after it ends none."""
        return self.epoch if self._sent_epoch is None else self._sent_epoch

    def count_batch(self) -> None:
        """Note, with the lock held, that the next batch was sent or dropped."""
        self.next_id += self.num_loaders
        self._sent_epoch = self.epoch

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.failure is not None or self.status is not None or self.stopping.is_set()

    def check(self) -> None:
        """Raise what ended this run, if anything did."""
        if self.failure is not None:
            raise self.failure
        if self.status is not None:
            raise job_finished(self.status)
        if self.stopping.is_set():
            raise JobFinished(f"{self} is closed")

    def spawn(self, name: str, function: Callable[[], None]) -> threading.Thread:
        """Start a thread; what ends it is raised in the user's thread."""
        thread = threading.Thread(target=self._guard, args=(function,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def _guard(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as exc:
            with self.changed:
                if not self.is_over:
                    self.failure = exc
                self.changed.notify_all()

    def wait(
        self,
        is_ready: Callable[[], bool],
        describe_peer: Callable[[], str],
        level: int = logging.INFO,
    ) -> None:
        """Wait, with the lock held; a line every few seconds says for what.

        No deadline: a rank takes as long as it likes, and one that is gone fails its thread.
        """
        while not self.changed.wait_for(lambda: is_ready() or self.is_over, LINE_S):
            logger.log(level, "%s waits for %s", self, describe_peer())
        self.check()

    def pause(self) -> None:
        """Wait before the next attempt."""
        self.stopping.wait(AGAIN_S)
        self.check()


def job_finished(status: int) -> JobFinished:
    """Make the error that says that the job has ended."""
    error = JobFinished(f"the job has ended, with exit status {status}")
    error.status = status
    return error


class RankStream:
    """The stream to one rank.

    Args:
        number: The rank.
        rank: Its server.
        feed: What all streams of a data-loader share. Its lock guards what is here.
        register: Registers ids again, at the given embedding-worker last.
    """

    def __init__(
        self,
        number: int,
        rank: NNWorker,
        feed: LoaderState,
        register: Callable[[IDFeatures, int | None], RemoteRef],
    ) -> None:
        self._number, self._rank = number, rank
        self._feed, self._register = feed, register
        self._state = RankState.NEW
        # By batch id: a message has only a ref of its ids.
        self.unacked: dict[int, tuple[IDFeatures, StreamedBatch]] = {}
        self._sent_below = 0  # ids below reached the rank once
        self._backlog: deque[int] = deque()  # unacked, to be delivered after a restart
        self._credits = 0  # since the opening, as is the next
        self._num_delivered = 0
        self._version = NOTHING  # of the news
        # Ids below were delivered by a process before this one. Of these, those still to be
        # read by the user's script again, ...
        self._received_below = 0
        self._wanted_later: set[int] = set()  # ... that the rank wants a new ref of,
        self._unfinished: set[int] = set()  # ... that it has not acknowledged
        self._first_needed = 0  # lowest id that the rank asked for when it was opened
        self._has_turn = False  # a thread delivers, opens or ends
        self._incarnation: int | None = None  # of the rank when the stream was opened
        self._num_forgotten = 0  # times that one and the same process did not know the stream

    def __str__(self) -> str:
        return f"nn-worker {self._number}"

    @property
    def is_open(self) -> bool:
        """Whether the rank knows the stream, or has closed it."""
        return self._state in (RankState.OPEN, RankState.ENDED, RankState.CLOSED)

    @property
    def is_closed(self) -> bool:
        """Whether the rank reads no more."""
        return self._state is RankState.CLOSED

    @property
    def num_credits(self) -> int:
        """How many batches the rank would take now."""
        is_live = self.is_open and not self.is_closed
        return max(0, self._credits - self._num_delivered) if is_live else 0

    @property
    def peer(self) -> tuple[str, int | None]:
        """The rank's address, and which of its processes opened the stream."""
        client = getattr(self._rank, "client", None)
        return getattr(client, "address", ""), self._incarnation

    @property
    def is_done(self) -> bool:
        """Whether the rank needs nothing more."""
        return self.is_closed or (self._state is RankState.ENDED and not self.unacked)

    def describe_pending(self) -> str:
        """Say what the rank has to do until ``is_done``."""
        if self.unacked:
            first = min(self.unacked)
            return f"{self} to acknowledge {len(self.unacked)} batches, the first {first}"
        return f"{self} to take the end of the data"

    # --- the user's thread ------------------------------------------------------------------

    def wait_for_room(self, batch_id: int) -> Action:
        """Wait until it is known what is to be done with a batch, with the lock held."""
        self._wait_until_opened()
        if batch_id < self._received_below and not self.is_closed:
            if batch_id in self._wanted_later:
                return Action.RELOCATE
            return Action.HOLD if batch_id in self._unfinished else Action.DROP
        self._feed.wait(lambda: self._has_room or self.is_closed, lambda: f"a credit of {self}")
        self._check_open()
        return Action.DELIVER

    def find_first_needed(self) -> int | None:
        """Wait, with the lock held, for the first batch it needs; None if it gets none."""
        self._wait_until_opened()
        self._check_open()
        return self._first_needed if self._has_batches else None

    @property
    def _has_batches(self) -> bool:
        """Whether any id of this data-loader is the rank's."""
        feed = self._feed
        period = range(feed.loader, feed.num_loaders * (feed.num_ranks + 1), feed.num_loaders)
        return any(batch_id % feed.num_ranks == self._number for batch_id in period)

    def _wait_until_opened(self) -> None:
        self._feed.wait(
            lambda: self._state is not RankState.NEW, lambda: f"{self} to open a stream"
        )

    def deliver(self, ids: IDFeatures, message: StreamedBatch) -> None:
        """Deliver the next batch, for which there was room."""
        with self._turn(lambda: self.is_closed or self._has_room):
            with self._feed.changed:
                self._check_open()
                self._add_unacked(ids, message)
            self._deliver(message)

    def hold(self, ids: IDFeatures, message: StreamedBatch) -> None:
        """Keep a batch that the rank has from a process before this one."""
        batch_id = message.batch_id
        with self._feed.changed:
            self._check_open()
            is_received = batch_id < self._received_below
            is_wanted = batch_id in self._wanted_later
            if is_received:
                self._sent_below = max(self._sent_below, batch_id + 1)
                self._add_unacked(ids, message)
                self._wanted_later.discard(batch_id)
                if not is_wanted:
                    self._feed.counts["dropped"] += 1
                    if batch_id not in self._unfinished:
                        del self.unacked[batch_id]  # acknowledged meanwhile
                self._unfinished.discard(batch_id)
        if not is_received:  # the rank was restarted after ``wait_for_room``
            self.deliver(ids, message)
        if not (is_received and is_wanted):
            return
        try:
            # The stream's thread may have registered it meanwhile.
            unacked = self.unacked.get(batch_id)
            if unacked is None:
                return  # and seen it acknowledged
            ids, message = unacked
            if message.ids == NO_REF:  # wanted since ``wait_for_room``
                self._register_again(ids, message)
            else:
                self._relocate(message)
        except UnknownStream:
            self._set_state(RankState.LOST)

    def end(self) -> None:
        """Announce the end of the data, if it has ended and the rank can take that now."""
        if not self._can_end:
            return  # a later step announces it
        with self._turn():
            if not self._can_end:
                return
            try:
                self._call(self._ending())
            except UnknownStream:
                self._set_state(RankState.LOST)
            else:
                self._set_state(RankState.ENDED)

    @property
    def _can_end(self) -> bool:
        return self._feed.is_ending and self._state is RankState.OPEN and not self._backlog

    def report_failure(self, failure: str) -> None:
        """Report to a rank, which may be gone, that the loader's script failed."""
        end = self._ending(failure)
        with contextlib.suppress(ServiceError):
            try:
                end()
            except UnknownStream:
                # It failed before the stream was open; opening it twice does no harm.
                self._rank.open_stream(self._opening())
                end()

    def _ending(self, failure: str = "") -> Callable[[], None]:
        feed = self._feed
        return partial(
            self._rank.end_stream, feed.stream, feed.next_id, failure, feed.last_epoch
        )

    def registered(self) -> list[RemoteRef]:
        """Return the refs of what is not acknowledged, with the lock held."""
        return [batch.ids for _, batch in self.unacked.values() if batch.ids != NO_REF]

    def drop_unacked(self) -> None:
        """Count batches that are not acknowledged as lost, with the lock held."""
        if self.unacked:
            self._feed.counts["lost"] += len(self.unacked)
        self.unacked.clear()
        self._backlog.clear()

    def _add_unacked(self, ids: IDFeatures, message: StreamedBatch) -> None:
        self.unacked[message.batch_id] = ids, message
        self._feed.count_batch()

    @property
    def _has_room(self) -> bool:
        return (
            self._state in (RankState.OPEN, RankState.ENDED)
            and not self._backlog
            and self._num_delivered < self._credits
        )

    def _check_open(self) -> None:
        self._feed.check()
        if self.is_closed:
            raise JobFinished(f"{self} reads no more", role="nn-worker", replica=self._number)

    # --- the stream's thread ----------------------------------------------------------------

    def run(self) -> None:
        """Make steps until the rank closes the stream."""
        while not self.is_closed:
            self.step()

    def step(self) -> None:
        """Open the stream, or catch up with one answer of the rank."""
        try:
            if not self.is_open:
                self._open()
            self._redeliver()
            self.end()
            self._apply(self._call(partial(self._rank.poll, self._feed.stream, self._version)))
        except UnknownStream as exc:
            self._check_forgotten(exc)
            self._set_state(RankState.LOST)

    def _set_state(self, state: RankState) -> None:
        with self._feed.changed:
            if self._state is not RankState.CLOSED:
                self._state = state
            self._feed.changed.notify_all()

    def _open(self) -> None:
        feed = self._feed
        with self._turn():
            opening = self._opening()
            state = self._call(partial(self._rank.open_stream, opening))
            with feed.changed:
                self._check_begins(state)
                self._incarnation = self._rank_incarnation()
                # A rank that was restarted lacks what it had not ended, unless it says so.
                self._received_below = max(self._first_unfinished(), state.next_batch_id)
                next_id = state.next_batch_id
                self._first_needed = min((next_id, *state.wanted, *state.unfinished))
                self._backlog = deque(sorted(x for x in self.unacked if x >= next_id))
                self._credits = self._num_delivered = 0
                self._version = NOTHING
                # Before the user's thread can drop one of them as received.
                self._wanted_later = {x for x in state.wanted if x >= feed.next_id}
                self._unfinished = {x for x in state.unfinished if x >= feed.next_id}
                self._set_state(RankState.OPEN)
        self._relocate_all(state.wanted)

    def _check_begins(self, state: StreamState) -> None:
        """Raise, with the lock held, if the rank goes back and this stream cannot.

        The process before it may have ended batches in any order, and untrained as it ended
        itself: what is kept says nothing of those behind a checkpoint.
        """
        if self._state is not RankState.LOST or not (state.is_resumed and self._is_another):
            return
        raise StreamRewound(
            f"{self} was started again and goes on from a checkpoint, at batch "
            f"{state.next_batch_id}: start the data-loader again, and it sends the data again, "
            "as persia-launcher data-loader does by itself",
            role="nn-worker",
            replica=self._number,
        )

    def _opening(self) -> StreamOpening:
        feed = self._feed
        with feed.changed:
            first = min(self.unacked, default=self._next_id())
            # The first time it is 0, whatever other ranks were sent meanwhile: to all ranks a
            # data-loader begins in the same epoch.
            epoch = 0 if self._state is RankState.NEW else feed.epoch
            if first in self.unacked:
                epoch = self.unacked[first][1].epoch
        loader, incarnation = feed.stream
        return StreamOpening(loader, feed.num_loaders, incarnation, first, epoch)

    def _next_id(self) -> int:
        """Return the lowest id that this rank gets from here on, with the lock held."""
        feed = self._feed
        start = max(feed.next_id, self._first_unfinished())
        start += (feed.loader - start) % feed.num_loaders
        ids = range(start, start + feed.num_loaders * feed.num_ranks, feed.num_loaders)
        return next((x for x in ids if x % feed.num_ranks == self._number), start)

    def _first_unfinished(self) -> int:
        """Return the lowest id that a restarted rank lacks; with the lock held."""
        return min(self._unfinished | self._wanted_later, default=self._received_below)

    def _rank_incarnation(self) -> int | None:
        """Return which process answers; None for a rank of this process."""
        return getattr(self._rank, "incarnation", None)

    @property
    def _is_another(self) -> bool:
        """Whether another process answers than the one that opened the stream."""
        now = self._rank_incarnation()
        return now is None or now != self._incarnation

    def _check_forgotten(self, exc: UnknownStream) -> None:
        """Raise if one and the same process does not know the stream twice."""
        if self._is_another:
            logger.warning("%s: %s was restarted", self._feed, self)
            return
        self._num_forgotten += 1
        if self._num_forgotten > 1:
            raise ConfigError(
                f"{self} takes batches from another data-loader {self._feed.loader}: expected "
                f"each REPLICA_INDEX once"
            ) from exc

    def _redeliver(self) -> None:
        """Deliver what a rank lost, as far as there are credits."""
        while self._backlog and self.is_open and self._num_delivered < self._credits:
            with self._turn():
                unacked = self.unacked.get(self._backlog[0])
                if unacked is not None:
                    self._deliver(unacked[1])
                with self._feed.changed:
                    if self.is_open:
                        self._backlog.popleft()
                        self._feed.changed.notify_all()

    def _apply(self, news: StreamNews) -> None:
        with self._feed.changed:
            self._credits = max(self._credits, news.credits)
            for batch_id in news.acknowledged:
                self.unacked.pop(batch_id, None)
                self._unfinished.discard(batch_id)
                self._wanted_later.discard(batch_id)
            if news.is_closed:
                self._set_state(RankState.CLOSED)
                self.drop_unacked()
            self._feed.changed.notify_all()
        if not news.is_closed:
            self._relocate_all(news.wanted)
        self._version = max(self._version, news.version)

    def _relocate_all(self, wanted: Sequence[int]) -> None:
        """Register again ids that the rank cannot look up, and send it the new refs."""
        for batch_id in wanted:
            with self._feed.changed:
                unacked = self.unacked.get(batch_id)
                if unacked is None:
                    self._add_wanted(batch_id)
                    continue
            self._register_again(*unacked)

    def _register_again(self, ids: IDFeatures, message: StreamedBatch) -> None:
        old = message.ids
        ref = self._register(ids, None if old == NO_REF else old.worker)
        message = replace(message, ids=ref)
        with self._feed.changed:
            if message.batch_id in self.unacked:
                self.unacked[message.batch_id] = ids, message
        self._relocate(message)

    def _add_wanted(self, batch_id: int) -> None:
        """Remember, with the lock held, a wanted batch that the script has still to read."""
        if batch_id >= self._feed.next_id:
            self._wanted_later.add(batch_id)
        elif batch_id < self._received_below and batch_id not in self._wanted_later:
            self._feed.counts["lost"] += 1
            raise ServiceError(
                f"batch {batch_id} is lost: {self._feed} sent it before it was restarted, and "
                f"has skipped it since; now its embedding-worker no longer has its ids, "
                f"and {self} waits for them",
                role="nn-worker",
                replica=self._number,
            )
        # Otherwise it was acknowledged after the rank wanted it.

    # --- both -------------------------------------------------------------------------------

    def _deliver(self, message: StreamedBatch) -> None:
        """Deliver one batch, in turn. If the stream is not known, it goes to the backlog."""
        try:
            self._call(partial(self._rank.deliver, self._feed.stream, message))
        except UnknownStream:
            self._set_state(RankState.LOST)
            return
        except DataError:
            with self._feed.changed:
                self.unacked.pop(message.batch_id, None)  # it will not be acknowledged
            raise
        with self._feed.changed:
            self._num_delivered += 1
            was_sent = message.batch_id < self._sent_below
            self._feed.counts["redelivered" if was_sent else "sent"] += 1
            self._sent_below = max(self._sent_below, message.batch_id + 1)

    def _relocate(self, message: StreamedBatch) -> None:
        feed = self._feed
        with feed.changed:
            feed.counts["registered_again"] += 1
        self._call(partial(self._rank.relocate, feed.stream, message.batch_id, message.ids))

    @contextlib.contextmanager
    def _turn(self, is_ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Deliver, open or end in one thread at a time."""
        changed = self._feed.changed
        with changed:
            self._feed.wait(
                lambda: not self._has_turn and is_ready(), lambda: f"a turn at {self}"
            )
            self._has_turn = True
        try:
            yield
        finally:
            with changed:
                self._has_turn = False
                changed.notify_all()

    def _call(self, call: Callable[[], T]) -> T:
        """Call the rank; again until the deadline, if it does not answer."""
        feed = self._feed
        alive_at = time.monotonic()
        while True:
            try:
                return call()
            except ServiceBusy:
                self._check_open()  # a thread of its own may have heard that it closed
                alive_at = time.monotonic()  # a busy rank is alive
            except (ServiceUnavailable, ServiceTimeout) as exc:
                feed.check()
                silent_s = time.monotonic() - alive_at
                is_gone = isinstance(exc, ServiceUnavailable)
                if silent_s >= (feed.gone_s if is_gone else feed.deadline_s):
                    what = "is gone" if is_gone else "does not answer"
                    raise type(exc)(
                        f"{feed}: {self} {what}, for {silent_s:.0f} s: {exc}",
                        role="nn-worker",
                        replica=self._number,
                        address=exc.address,
                        method=exc.method,
                    ) from exc
            feed.pause()
