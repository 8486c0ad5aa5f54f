"""One nn-worker as a data-loader sees it: credits, and batches kept until acknowledged.

A thread of its own opens the stream and polls. The user's thread delivers; after a restart of
the nn-worker, which shows as UnknownStream, the lane's thread opens the stream again and first
delivers what is kept, its ``backlog``, so that ids always arrive in ascending order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from persia._loader.feed import LoaderState
from persia._loader.registrars import Registrars
from persia._rpc.messages import (
    IDFeatures,
    NNWorker,
    RemoteRef,
    StreamedBatch,
    StreamNews,
    StreamOpening,
)
from persia.errors import (
    ConfigError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    UnknownStream,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Below every version of the news, so that the first poll is answered at once.
NOTHING = -1
# The ref of ids that are kept only: the rank has one, or learns that no worker knows this one.
NOWHERE = RemoteRef(0, 0)


@dataclass(slots=True)
class UnackedBatch:
    """A batch that is not acknowledged."""

    ids: IDFeatures
    message: StreamedBatch
    was_sent: bool = False

    def num_bytes(self) -> int:
        """Return the bytes of its arrays."""
        arrays = (*self.message.non_id_type_features, *self.message.labels)
        ids = sum(part.nbytes for one in self.ids.features for part in one.parts())
        return ids + sum(one.array.nbytes for one in arrays)


class RankStream:
    """The way to one rank.

    Args:
        number: The rank.
        rank: Who answers.
        feed: What all lanes of a data-loader share. Its lock guards what is here.
        registrars: Where ids are registered again.
    """

    def __init__(
        self, number: int, rank: NNWorker, feed: LoaderState, registrars: Registrars
    ) -> None:
        self._number = number
        self._rank = rank
        self._feed = feed
        self._registrars = registrars
        self.kept: dict[int, UnackedBatch] = {}  # by batch id
        self._backlog: deque[int] = deque()  # kept, to be delivered after a restart
        self._credits = 0  # since the opening, as is the next
        self._num_delivered = 0
        self._seen = NOTHING  # version of the news
        self._received_below = 0  # ids that the rank had from a loader before this one
        self._wanted_later: set[int] = set()  # of those, wanted, and still to be read
        self._unfinished: set[int] = set()  # of those, not acknowledged, and still to be read
        self._first_needed = 0  # lowest id that the rank asked for when it was opened
        self._is_open = False
        self._was_open = False
        self._is_in_turn = False  # a thread delivers, opens or ends
        self._is_ended = False
        self.is_closed = False
        self._incarnation: int | None = None  # of the rank when the stream was opened
        self._num_forgotten = 0  # times that this very process forgot the stream

    def __str__(self) -> str:
        return f"nn-worker {self._number}"

    @property
    def is_open(self) -> bool:
        """Whether there is a stream, or was one to a rank that reads no more."""
        return self._is_open or self.is_closed

    @property
    def num_credits(self) -> int:
        """How many batches the rank would take now."""
        return max(0, self._credits - self._num_delivered) if self._is_open else 0

    @property
    def is_settled(self) -> bool:
        """Whether the rank needs nothing more."""
        return self.is_closed or (self._is_ended and not self.kept)

    @property
    def awaited(self) -> str:
        """What the rank has to do until it is settled, in words."""
        if self.kept:
            return f"{self} to end {len(self.kept)} batches, the first {min(self.kept)}"
        return f"{self} to take the end of the data"

    # --- the user's thread ------------------------------------------------------------------

    def wait_for_room(self, batch_id: int) -> str:
        """Wait until it is known what is to be done with a batch, with the lock held.

        Returns:
            ``deliver``; or, if the rank has it from a loader before this one, ``relocate``
            where its ids are wanted, ``hold`` while it has not ended, else ``drop``.

        Raises:
            JobFinished: If the rank reads no more, or the job has ended.
        """
        self._feed.wait(
            lambda: self._was_open or self.is_closed, lambda: f"{self} to open a stream"
        )
        if batch_id < self._received_below and not self.is_closed:
            if batch_id in self._wanted_later:
                return "relocate"
            return "hold" if batch_id in self._unfinished else "drop"
        self._feed.wait(lambda: self._has_room or self.is_closed, lambda: f"a credit of {self}")
        self._check_open()
        return "deliver"

    def first_needed(self) -> int | None:
        """Wait, with the lock held, until it is known which batch is the first it needs.

        None if it gets none of this data-loader's.
        """
        feed = self._feed
        feed.wait(lambda: self._was_open or self.is_closed, lambda: f"{self} to open a stream")
        self._check_open()
        period = range(feed.loader, feed.num_loaders * (feed.num_ranks + 1), feed.num_loaders)
        if all(batch_id % feed.num_ranks != self._number for batch_id in period):
            return None
        return self._first_needed

    def deliver(self, kept: UnackedBatch) -> None:
        """Deliver the next batch, for which there was room."""
        feed = self._feed
        with self._turn(lambda: self.is_closed or self._has_room):
            with feed.changed:
                self._check_open()
                self._keep(kept)
            self._deliver(kept)

    def hold(self, kept: UnackedBatch) -> None:
        """Keep a batch as the loader before this one did, from which the rank has it."""
        batch_id = kept.message.batch_id
        with self._feed.changed:
            self._check_open()
            is_received = batch_id < self._received_below
            is_wanted = batch_id in self._wanted_later
            if is_received:
                kept.was_sent = True
                self._keep(kept)
                self._wanted_later.discard(batch_id)
                if not is_wanted:
                    self._feed.counts["dropped"] += 1
                    if batch_id not in self._unfinished:
                        del self.kept[batch_id]  # acknowledged meanwhile
                self._unfinished.discard(batch_id)
        if not is_received:  # the rank was started anew since it was asked what to do
            self.deliver(kept)
        if not (is_received and is_wanted):
            return
        try:
            if kept.message.ids == NOWHERE:  # wanted since it was asked what to do
                self._register_again(kept)
            else:
                self._relocate(kept.message)
        except UnknownStream:
            self._forget()

    def end(self) -> None:
        """Say that the data has ended, if it has and the rank can hear it now."""
        if not self._feed.is_ending or not self._is_open or self._backlog or self._is_ended:
            return  # the thread of the lane comes here again
        with self._turn():
            if self._is_ended or not self._is_open:
                return
            try:
                self._ask(
                    partial(self._rank.end_stream, self._feed.stream, self._feed.next_id, "")
                )
            except UnknownStream:
                self._forget()
                return
            with self._feed.changed:
                self._is_ended = True
                self._feed.changed.notify_all()

    def say_failure(self, failure: str) -> None:
        """Say that the loader's script failed, to a rank that may be gone."""
        end = partial(self._rank.end_stream, self._feed.stream, self._feed.next_id, failure)
        try:
            try:
                end()
            except UnknownStream:
                # It failed before the stream was open; opening it twice does no harm.
                self._rank.open_stream(self._opening())
                end()
        except ServiceError as exc:
            logger.info(
                "%s was not told that the script of %s failed: %s", self, self._feed, exc
            )

    def lose(self) -> None:
        """Count what is kept as lost, with the lock held."""
        if self.kept:
            self._feed.counts["lost"] += len(self.kept)
        self.kept.clear()
        self._backlog.clear()

    def _keep(self, kept: UnackedBatch) -> None:
        self.kept[kept.message.batch_id] = kept
        self._feed.next_id += self._feed.num_loaders

    @property
    def _has_room(self) -> bool:
        return self._is_open and not self._backlog and self._num_delivered < self._credits

    def _check_open(self) -> None:
        self._feed.check()
        if self.is_closed:
            raise JobFinished(f"{self} reads no more", role="nn-worker", replica=self._number)

    # --- the thread of the lane -------------------------------------------------------------

    def follow(self) -> None:
        """Open the stream and keep up with the rank, until it closes."""
        while not self.is_closed:
            try:
                if not self._is_open:
                    self._open()
                self._redeliver()
                self.end()
                news = self._ask(partial(self._rank.poll, self._feed.stream, self._seen))
                self._apply(news)
            except UnknownStream as exc:
                self._note_forgotten(exc)
                self._forget()

    def _open(self) -> None:
        feed = self._feed
        with self._turn():
            state = self._ask(partial(self._rank.open_stream, self._opening()))
            with feed.changed:
                self._incarnation = self._rank_incarnation()
                # Whatever the rank had not ended it has only if it says so.
                self._received_below = max(self._first_unfinished(), state.next_batch_id)
                self._first_needed = min(
                    (state.next_batch_id, *state.wanted, *state.unfinished)
                )
                self._backlog = deque(sorted(x for x in self.kept if x >= state.next_batch_id))
                self._credits = self._num_delivered = 0
                self._seen = NOTHING
                self._is_ended = False
                # Before the user's thread can drop one of them as received.
                self._wanted_later = {x for x in state.wanted if x >= feed.next_id}
                self._unfinished = {x for x in state.unfinished if x >= feed.next_id}
                self._is_open = self._was_open = True
                feed.changed.notify_all()
        self._relocate_all(state.wanted)

    def _opening(self) -> StreamOpening:
        with self._feed.changed:
            first = min(self.kept, default=self._next_id())
        loader, incarnation = self._feed.stream
        return StreamOpening(loader, self._feed.num_loaders, incarnation, first)

    def _next_id(self) -> int:
        """Return the lowest id that this rank gets from here on, with the lock held."""
        feed = self._feed
        start = max(feed.next_id, self._first_unfinished())
        start += (feed.loader - start) % feed.num_loaders
        ids = range(start, start + feed.num_loaders * feed.num_ranks, feed.num_loaders)
        return next((x for x in ids if x % feed.num_ranks == self._number), start)

    def _first_unfinished(self) -> int:
        """Return from which id on a rank that was started anew lacks what is still to be read.

        With the lock held.
        """
        return min(self._unfinished | self._wanted_later, default=self._received_below)

    def _forget(self) -> None:
        with self._feed.changed:
            self._is_open = False

    def _rank_incarnation(self) -> int | None:
        """Return which process answers, if ``rank`` is somewhere else."""
        incarnation: int | None = getattr(self._rank, "incarnation", None)
        return incarnation

    def _note_forgotten(self, exc: UnknownStream) -> None:
        """Give up if one and the same process forgets the stream twice."""
        now = self._rank_incarnation()
        if now is None or now != self._incarnation:
            logger.warning(
                "%s: %s was started anew; what it had is sent again", self._feed, self
            )
            return
        self._num_forgotten += 1
        if self._num_forgotten > 1:
            raise ConfigError(
                f"{self} takes batches from another data-loader {self._feed.loader}: expected "
                f"each REPLICA_INDEX once"
            ) from exc

    def _redeliver(self) -> None:
        """Deliver what a rank lost, as far as there are credits."""
        while self._is_open and self._backlog and self._num_delivered < self._credits:
            with self._turn():
                kept = self.kept.get(self._backlog[0])
                if kept is not None:
                    self._deliver(kept)
                with self._feed.changed:
                    if self._is_open:
                        self._backlog.popleft()
                        self._feed.changed.notify_all()

    def _apply(self, news: StreamNews) -> None:
        with self._feed.changed:
            self._credits = max(self._credits, news.credits)
            for batch_id in news.acknowledged:
                self.kept.pop(batch_id, None)
                self._unfinished.discard(batch_id)
                self._wanted_later.discard(batch_id)
            if news.is_closed:
                self.is_closed = True
                self.lose()
            self._feed.changed.notify_all()
        if not news.is_closed:
            self._relocate_all(news.wanted)
        self._seen = max(self._seen, news.version)

    def _relocate_all(self, wanted: Sequence[int]) -> None:
        """Register again what the rank cannot look up, and say where it is now."""
        for batch_id in wanted:
            with self._feed.changed:
                kept = self.kept.get(batch_id)
                if kept is None:
                    self._note_wanted(batch_id)
                    continue
            self._register_again(kept)

    def _register_again(self, kept: UnackedBatch) -> None:
        old = kept.message.ids
        ref = self._registrars.register(kept.ids, None if old == NOWHERE else old.worker)
        with self._feed.changed:
            kept.message = replace(kept.message, ids=ref)
        self._relocate(kept.message)

    def _note_wanted(self, batch_id: int) -> None:
        """Deal, with the lock held, with a wanted batch that is not kept."""
        if batch_id >= self._feed.next_id:
            self._wanted_later.add(batch_id)
        elif batch_id < self._received_below and batch_id not in self._wanted_later:
            self._feed.counts["lost"] += 1
            raise ServiceError(
                f"batch {batch_id} is lost: {self._feed} sent it before it was restarted, and "
                f"has passed it over since; now its embedding-worker holds its ids no more, "
                f"and {self} waits for them",
                role="nn-worker",
                replica=self._number,
            )
        # Otherwise it was acknowledged meanwhile: old news.

    # --- both -------------------------------------------------------------------------------

    def _deliver(self, kept: UnackedBatch) -> None:
        """Deliver one batch, in turn. If the stream is not known, it goes to the backlog."""
        try:
            self._ask(partial(self._rank.deliver, self._feed.stream, kept.message))
        except UnknownStream:
            self._forget()
            return
        with self._feed.changed:
            self._num_delivered += 1
            self._feed.counts["redelivered" if kept.was_sent else "sent"] += 1
            kept.was_sent = True

    def _relocate(self, message: StreamedBatch) -> None:
        with self._feed.changed:
            self._feed.counts["registered_again"] += 1
        self._ask(
            partial(self._rank.relocate, self._feed.stream, message.batch_id, message.ids)
        )

    @contextlib.contextmanager
    def _turn(self, is_ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Be the only one who delivers, opens or ends."""
        changed = self._feed.changed
        with changed:
            self._feed.wait(
                lambda: not self._is_in_turn and is_ready(), lambda: f"a turn at {self}"
            )
            self._is_in_turn = True
        try:
            yield
        finally:
            with changed:
                self._is_in_turn = False
                changed.notify_all()

    def _ask(self, call: Callable[[], T]) -> T:
        """Call the rank; again until the deadline, if it does not answer.

        Raises:
            UnknownStream: If it does not know the stream.
            ServiceUnavailable: If it is gone for too long; names it.
            ServiceTimeout: If it does not answer for too long; names it.
        """
        feed = self._feed
        alive_at = time.monotonic()
        while True:
            try:
                return call()
            except ServiceBusy:
                feed.check()
                alive_at = time.monotonic()  # it says so
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
