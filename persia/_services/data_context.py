"""The data-loader's side of the streams: ids to embedding-workers, the rest to the ranks.

    user's thread      send: waits for a credit of the batch's rank, registers the ids,
                       delivers.  finish: ends the streams, waits for acknowledgements
    thread per rank    opens the stream; polls for credits, acknowledgements and wanted ids;
                       after a restart of the rank opens it again and delivers what it keeps
    watcher            asks an embedding-worker time and again whether the job has ended

A batch is kept, ids and all, until its rank acknowledges it. Batches reach a rank one at a time
in ascending order, after its restart too: an id that is left out will not come.

Who waits for whom:

    user's thread --(credit, opening)--> thread of the rank --(turn: one call)--> user's thread
          |                                     |                                      |
          +-----------> embedding-worker <------+-------------> nn-worker <------------+
                         (a ref is free)                     (answers each call)

A turn is held for one call at a rank that is there, never while waiting for anything else, so the
upper row ends at the nn-worker. That answers every call without waiting for a loader. An
embedding-worker has a free ref once nn-workers have looked up and updated; they can, as long as
its ``forward_buffer_size`` holds the batches that credits and staleness allow. No lock is held
across a call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from persia import env
from persia._core.feature_batch import FeatureBatch
from persia._rpc.messages import (
    IDFeatures,
    NamedArray,
    NNWorker,
    RemoteRef,
    StreamedBatch,
    StreamNews,
    StreamOpening,
)
from persia._rpc.remote import RemoteEmbeddingWorker, RemoteNNWorker
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

# Seconds between two questions whether the job has ended, and until one is given up.
WATCH_S = 0.25
ASK_S = 2.0
# Seconds of the first try at an embedding-worker, doubled in each round; and how long one that
# did not answer is asked last.
TRY_S = 1.0
AVOID_S = 5.0
# Seconds between two tries at a server that refused at once.
AGAIN_S = 0.02
# Seconds between two lines that say who is waited for.
LINE_S = 10.0
# Seconds for the word that the script failed, and for threads to end.
FAREWELL_S = 5.0
# Of the child of a trainer in embedded mode: seconds without its parent, and of one call; a
# poll may take half of that without news.
ORPHAN_S = 5.0
CHILD_CALL_S = 10.0
# Characters of a traceback; a frame's header holds far more.
MAX_FAILURE = 16_384


class Registrar(Protocol):
    """What a data-loader asks of an embedding-worker; ``RemoteEmbeddingWorker`` is one."""

    def register(self, features: IDFeatures, timeout_s: float | None = None) -> int: ...
    def job_status(self, watcher: str, timeout_s: float | None = None) -> int | None: ...


@dataclass(slots=True)
class _Kept:
    """A batch that is not acknowledged."""

    ids: IDFeatures
    message: StreamedBatch
    was_sent: bool = False


class _Lane:
    """A rank, and what it has not acknowledged. Guarded by the lock of the ``Feeder``."""

    def __init__(self, number: int, rank: NNWorker) -> None:
        self.number = number
        self.rank = rank
        self.kept: dict[int, _Kept] = {}  # by batch id
        self.backlog: deque[int] = deque()  # kept, to be delivered after a restart
        self.credits = 0  # since the opening, as is the next
        self.delivered = 0
        self.seen = 0  # version of the news
        self.skip_below = 0  # what a loader before this one has delivered
        self.wanted_later: set[int] = set()  # wanted, and not read from the data yet
        self.is_open = False
        self.was_open = False
        self.is_in_turn = False  # a thread delivers, opens or ends
        self.is_ended = False
        self.is_closed = False
        self.incarnation: int | None = None  # of the rank, when it was opened
        self.num_forgotten = 0  # times that this very process forgot the stream

    def __str__(self) -> str:
        return f"nn-worker {self.number}"

    @property
    def has_room(self) -> bool:
        return self.is_open and not self.backlog and self.delivered < self.credits

    @property
    def is_settled(self) -> bool:
        return self.is_closed or (self.is_ended and not self.kept)


class Feeder:
    """Sends the batches of one data-loader to all ranks.

    Args:
        workers: All embedding-workers, by replica number.
        ranks: All nn-workers, by rank.
        loader: Number of this data-loader.
        num_loaders: How many there are.
        disconnect: Ends every call in flight, at once; called once, by any thread.
        deadline_s: Seconds to wait for a server that does not answer.
        gone_s: Seconds to wait for an nn-worker to which there is no connection;
            ``deadline_s`` if not given.
    """

    def __init__(
        self,
        workers: Sequence[Registrar],
        ranks: Sequence[NNWorker],
        *,
        loader: int = 0,
        num_loaders: int = 1,
        disconnect: Callable[[], None] = lambda: None,
        deadline_s: float | None = None,
        gone_s: float | None = None,
    ) -> None:
        self._workers = workers
        self._loader = loader
        self._num_loaders = num_loaders
        self._disconnect = disconnect
        self._deadline_s = env.rpc_timeout_s() if deadline_s is None else deadline_s
        self._gone_s = self._deadline_s if gone_s is None else gone_s
        self._stream = loader, secrets.randbits(63)
        self._stopping = threading.Event()
        self._sending = threading.Lock()  # the thread in ``send``; nobody waits for it
        self._changed = threading.Condition()  # guards all below, and the lanes
        self._lanes = [_Lane(number, rank) for number, rank in enumerate(ranks)]
        self._next_id = loader
        self._turn_of_worker = loader
        self._avoided: dict[int, float] = {}  # worker -> monotonic seconds until then
        self._is_ending = False
        self._status: int | None = None
        self._failure: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []

    def __str__(self) -> str:
        return f"data-loader {self._loader} of {self._num_loaders}"

    @property
    def job_status(self) -> int | None:
        """The exit status of the job; None while it goes on."""
        return self._status

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start; those that are zero are absent.

        ``sent`` batches were delivered, ``redelivered`` once more, to a rank that was started
        anew. ``registered_again`` had ids that an embedding-worker no longer held.
        ``dropped`` had been received from this loader before it was restarted. ``kept`` are
        not acknowledged now, ``lost`` were not when this loader ended. ``skipped`` calls went
        to another embedding-worker, as the one whose turn it was was down or busy.
        """
        with self._changed:
            kept = sum(len(lane.kept) for lane in self._lanes)
            return dict(self._counts, **({"kept": kept} if kept else {}))

    # --- the user's thread ------------------------------------------------------------------

    def start(self) -> None:
        """Begin to open the streams."""
        for lane in self._lanes:
            self._spawn(f"persia-feed {lane}", partial(self._follow, lane))
        self._spawn("persia-watch job", self._watch)

    def send(
        self,
        features: tuple[FeatureBatch, ...],
        dense: tuple[NamedArray, ...],
        labels: tuple[NamedArray, ...],
        *,
        batch_size: int,
        requires_grad: bool,
        meta: bytes | None = None,
    ) -> None:
        """Send one batch, once its rank has room for it. The arrays are kept, not copied.

        Raises:
            DataError: If an embedding-worker refuses the ids; the batch is not sent.
            JobFinished: If the job has ended, or the rank reads no more.
            ServiceUnavailable: If a rank, or every embedding-worker, is gone for too long.
            ServiceTimeout: If one does not answer for too long.
        """
        if not self._sending.acquire(blocking=False):
            raise ConfigError("send_data is called by two threads at a time")
        try:
            with self._changed:
                batch_id = self._next_id
                lane = self._lanes[batch_id % len(self._lanes)]
                is_wanted = self._await_turn_of(lane, batch_id)
            if is_wanted is None:
                return
            ids = IDFeatures(features, batch_id, requires_grad)
            ref = self._register(ids)
            message = StreamedBatch(
                batch_id,
                batch_size,
                requires_grad,
                ref,
                dense,
                labels,
                None if meta is None else np.frombuffer(meta, np.uint8),
            )
            kept = _Kept(ids, message)
            if is_wanted:
                self._relocate_for_predecessor(lane, kept)
                return
            with self._turn(lane, lambda: lane.is_closed or lane.has_room):
                with self._changed:
                    self._check_open(lane)
                    lane.kept[batch_id] = kept
                    self._next_id += self._num_loaders
                self._deliver(lane, kept)
        finally:
            self._sending.release()

    def _await_turn_of(self, lane: _Lane, batch_id: int) -> bool | None:
        """Wait, with the lock held, until it is known what becomes of a batch.

        Returns:
            Whether its ids alone are wanted; None if it is dropped.
        """
        self._wait(lambda: lane.was_open or lane.is_closed, lambda: f"{lane} to open a stream")
        self._check_open(lane)
        if batch_id >= lane.skip_below:
            self._wait(lambda: lane.has_room or lane.is_closed, lambda: f"a credit of {lane}")
            self._check_open(lane)
            return False
        if batch_id in lane.wanted_later:
            return True
        self._next_id += self._num_loaders
        self._counts["dropped"] += 1
        return None

    def _relocate_for_predecessor(self, lane: _Lane, kept: _Kept) -> None:
        """Give a rank the ids of a batch that it has from the loader before this one."""
        message = kept.message
        kept.was_sent = True
        with self._changed:
            lane.kept[message.batch_id] = kept
            lane.wanted_later.discard(message.batch_id)
            self._next_id += self._num_loaders
            self._counts["registered_again"] += 1
        try:
            self._relocate(lane, message)
        except UnknownStream:
            self._reopen(lane)

    def finish(self) -> None:
        """End the streams; wait until each rank has acknowledged all, closed, or the job ended.

        Raises:
            BaseException: What ended a thread of this feeder.
        """
        with self._changed:
            self._is_ending = True
        try:
            for lane in self._lanes:
                self._spawn(f"persia-end {lane}", partial(self._end, lane))
            with self._changed, contextlib.suppress(JobFinished):
                self._wait(
                    lambda: all(lane.is_settled for lane in self._lanes),
                    self._unsettled,
                    logging.WARNING,
                )
        except BaseException as exc:
            self.fail(exc)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the ranks that no more will come, as the script failed; wait for nothing else."""
        if self._is_over() and self._failure is None:
            return
        text = "".join(traceback.format_exception(error))[-MAX_FAILURE:]
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        threads = [
            self._spawn(f"persia-end {lane}", partial(self._say_failure, lane, text))
            for lane in self._lanes
            if not lane.is_closed
        ]
        _join(threads, FAREWELL_S)

    def _unsettled(self) -> str:
        return ", ".join(
            f"{lane} to end {len(lane.kept)} batches, the first {min(lane.kept)}"
            if lane.kept
            else f"{lane} to hear that the data has ended"
            for lane in self._lanes
            if not lane.is_settled
        )

    def close(self) -> None:
        """Disconnect and end the threads; what is still kept is counted as lost."""
        with self._changed:
            is_first = not self._stopping.is_set()
            self._stopping.set()
            self._changed.notify_all()
        self._disconnect()
        alive = [thread.name for thread in _join(self._threads, FAREWELL_S)]
        if alive:
            logger.warning("%s: still running: %s", self, ", ".join(alive))
        with self._changed:
            for lane in self._lanes:
                self._lose(lane)
        if is_first and self._counts["lost"]:
            # When the job has failed, the traceback of its script is the last on the screen.
            is_expected = self._status is not None or all(x.is_closed for x in self._lanes)
            logger.log(
                logging.INFO if is_expected else logging.WARNING,
                "%s: %d batches were not acknowledged when it ended",
                self,
                self._counts["lost"],
            )

    # --- embedding-workers ------------------------------------------------------------------

    def _register(self, ids: IDFeatures, avoid: int | None = None) -> RemoteRef:
        """Register ids at the next embedding-worker that takes them; without the lock.

        Args:
            ids: What to register.
            avoid: The worker that should be asked last.

        Raises:
            ServiceUnavailable: If none lives.
        """
        alive_at = time.monotonic()
        try_s = TRY_S
        while True:
            failures: dict[int, ServiceError] = {}
            for index in self._workers_in_turn(avoid):
                try:
                    ref = self._workers[index].register(ids, try_s)
                except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as exc:
                    failures[index] = exc
                    with self._changed:
                        self._check()
                        self._avoided[index] = time.monotonic() + AVOID_S
                        self._counts["skipped"] += 1
                    if isinstance(exc, ServiceBusy):
                        alive_at = time.monotonic()
                else:
                    with self._changed:
                        self._avoided.pop(index, None)
                    return RemoteRef(index, ref)
            gone_s = time.monotonic() - alive_at
            if gone_s >= self._deadline_s:
                why = "; ".join(f"embedding-worker {i}: {e}" for i, e in failures.items())
                raise ServiceUnavailable(
                    f"no embedding-worker takes batch {ids.batch_id}, for {gone_s:.0f} s: {why}",
                    role="embedding-worker",
                    method="register",
                )
            self._pause()
            try_s = min(2 * try_s, max(TRY_S, self._deadline_s))

    def _workers_in_turn(self, avoid: int | None) -> list[int]:
        """Return all workers, the one whose turn it is first, those that failed last."""
        num = len(self._workers)
        with self._changed:
            now = time.monotonic()
            first = self._turn_of_worker
            self._turn_of_worker += 1
            return sorted(
                ((first + i) % num for i in range(num)),
                key=lambda index: (index == avoid, self._avoided.get(index, 0.0) > now),
            )

    def _watch(self) -> None:
        watcher = f"{self}, {self._stream[1]:x}"
        index = self._loader
        while not self._stopping.wait(WATCH_S):
            try:
                status = self._workers[index % len(self._workers)].job_status(watcher, ASK_S)
            except ServiceError:
                index += 1  # another one is asked; whoever is gone is missed elsewhere
                continue
            if status is not None:
                with self._changed:
                    self._status = status
                    self._changed.notify_all()
                self._disconnect()
                return

    # --- ranks ------------------------------------------------------------------------------

    def _follow(self, lane: _Lane) -> None:
        """What the thread of a rank does."""
        while not lane.is_closed:
            try:
                if not lane.is_open:
                    self._open(lane)
                self._redeliver(lane)
                self._end(lane)
                poll = partial(lane.rank.poll, self._stream, lane.seen)
                self._apply(lane, self._ask(lane, poll))
            except UnknownStream as exc:
                self._note_forgotten(lane, exc)
                self._reopen(lane)

    def _open(self, lane: _Lane) -> None:
        with self._turn(lane):
            with self._changed:
                first = min(lane.kept, default=self._next_id_for(lane))
            opening = StreamOpening(*self._stream_of(), first)
            incarnation = getattr(lane.rank, "incarnation", None)
            state = self._ask(lane, partial(lane.rank.open_stream, opening))
            with self._changed:
                lane.incarnation = getattr(lane.rank, "incarnation", incarnation)
                lane.skip_below = max(lane.skip_below, state.next_batch_id)
                lane.backlog = deque(sorted(x for x in lane.kept if x >= state.next_batch_id))
                lane.credits = lane.delivered = lane.seen = 0
                lane.is_ended = False
                lane.is_open = lane.was_open = True
        self._relocate_all(lane, state.wanted)

    def _stream_of(self) -> tuple[int, int, int]:
        return self._loader, self._num_loaders, self._stream[1]

    def _next_id_for(self, lane: _Lane) -> int:
        """Return the lowest id that this rank may still get, with the lock held."""
        start = max(self._next_id, lane.skip_below)
        start += (self._loader - start) % self._num_loaders
        ids = range(start, start + self._num_loaders * len(self._lanes), self._num_loaders)
        return next((x for x in ids if x % len(self._lanes) == lane.number), start)

    def _reopen(self, lane: _Lane) -> None:
        with self._changed:
            lane.is_open = False

    def _note_forgotten(self, lane: _Lane, exc: UnknownStream) -> None:
        """Give up if a process that has not changed forgets the stream again and again."""
        incarnation = getattr(lane.rank, "incarnation", None)
        if incarnation is None or incarnation != lane.incarnation:
            logger.warning("%s: %s was started anew; its stream is opened again", self, lane)
            return
        lane.num_forgotten += 1
        if lane.num_forgotten > 1:
            raise ConfigError(
                f"{lane} takes batches from another data-loader {self._loader}: expected each "
                f"REPLICA_INDEX once"
            ) from exc

    def _redeliver(self, lane: _Lane) -> None:
        """Deliver what a rank lost, as far as there are credits."""
        while lane.is_open and lane.backlog and lane.delivered < lane.credits:
            with self._turn(lane):
                kept = lane.kept.get(lane.backlog[0])
                if kept is not None:
                    self._deliver(lane, kept)
                if lane.is_open:
                    with self._changed:
                        lane.backlog.popleft()
                        self._changed.notify_all()

    def _deliver(self, lane: _Lane, kept: _Kept) -> None:
        """Deliver one batch, in turn. If the stream is not known, its thread does it again."""
        deliver = partial(lane.rank.deliver, self._stream, kept.message)
        try:
            self._ask(lane, deliver)
        except UnknownStream:
            self._reopen(lane)
            return
        with self._changed:
            lane.delivered += 1
            self._counts["redelivered" if kept.was_sent else "sent"] += 1
            kept.was_sent = True

    def _apply(self, lane: _Lane, news: StreamNews) -> None:
        with self._changed:
            lane.credits = max(lane.credits, news.credits)
            for batch_id in news.acknowledged:
                lane.kept.pop(batch_id, None)
            if news.is_closed:
                lane.is_closed = True
                self._lose(lane)
            self._changed.notify_all()
        if not news.is_closed:
            self._relocate_all(lane, news.wanted)
        lane.seen = max(lane.seen, news.version)

    def _relocate_all(self, lane: _Lane, wanted: Sequence[int]) -> None:
        """Register again what a rank cannot look up, and say where it is now."""
        for batch_id in wanted:
            with self._changed:
                kept = lane.kept.get(batch_id)
                if kept is None:
                    self._note_wanted(lane, batch_id)
                    continue
            ref = self._register(kept.ids, avoid=kept.message.ids.worker)
            with self._changed:
                kept.message = replace(kept.message, ids=ref)
                self._counts["registered_again"] += 1
            self._relocate(lane, kept.message)

    def _note_wanted(self, lane: _Lane, batch_id: int) -> None:
        """Deal, with the lock held, with a wanted batch that is not kept."""
        if batch_id >= self._next_id:
            lane.wanted_later.add(batch_id)
        elif batch_id < lane.skip_below and batch_id not in lane.wanted_later:
            self._counts["lost"] += 1
            raise ServiceError(
                f"batch {batch_id} is lost: {self} sent it before it was restarted, and has "
                f"passed it over since; its embedding-worker holds its ids no more, and {lane} "
                f"waits for them",
                role="nn-worker",
                replica=lane.number,
            )
        # Otherwise it was acknowledged meanwhile: old news.

    def _relocate(self, lane: _Lane, message: StreamedBatch) -> None:
        self._ask(
            lane, partial(lane.rank.relocate, self._stream, message.batch_id, message.ids)
        )

    def _end(self, lane: _Lane) -> None:
        """Say that the data has ended, if it has and the rank does not know."""
        if not self._is_ending or not lane.is_open or lane.backlog or lane.is_ended:
            return  # the thread of the rank comes here again
        with self._turn(lane):
            if lane.is_ended or not lane.is_open:
                return
            try:
                self._ask(lane, partial(lane.rank.end_stream, self._stream, self._next_id, ""))
            except UnknownStream:
                self._reopen(lane)
                return
            with self._changed:
                lane.is_ended = True
                self._changed.notify_all()

    def _say_failure(self, lane: _Lane, failure: str) -> None:
        try:
            lane.rank.end_stream(self._stream, self._next_id, failure)
        except ServiceError as exc:
            logger.info("%s: %s was not told that the script failed: %s", self, lane, exc)

    def _lose(self, lane: _Lane) -> None:
        """Count what is kept as lost, with the lock held."""
        self._counts["lost"] += len(lane.kept)
        lane.kept.clear()
        lane.backlog.clear()

    # --- waiting ----------------------------------------------------------------------------

    def _spawn(self, name: str, function: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(function,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _guard(self, function: Callable[[], None]) -> None:
        """Run a thread; what ends it is raised in the user's thread."""
        try:
            function()
        except BaseException as exc:
            with self._changed:
                if not self._is_over():
                    self._failure = exc
                self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._failure is not None or self._status is not None or self._stopping.is_set()

    def _check(self) -> None:
        """Raise what ended this feeder, if anything did; with the lock held."""
        if self._failure is not None:
            raise self._failure
        if self._status is not None:
            raise JobFinished(f"the job has ended, with exit status {self._status}")
        if self._stopping.is_set():
            raise JobFinished(f"{self} is closed")

    def _check_open(self, lane: _Lane) -> None:
        self._check()
        if lane.is_closed:
            raise JobFinished(f"{lane} reads no more", role="nn-worker", replica=lane.number)

    def _wait(
        self, is_ready: Callable[[], bool], whom: Callable[[], str], level: int = logging.INFO
    ) -> None:
        """Wait, with the lock held, saying now and then for whom.

        It has no deadline of its own: a rank may take as long as it likes for a step, and one
        that is gone ends the wait as the failure of its thread.
        """
        while not self._changed.wait_for(lambda: is_ready() or self._is_over(), LINE_S):
            logger.log(level, "%s waits for %s", self, whom())
        self._check()

    @contextlib.contextmanager
    def _turn(self, lane: _Lane, is_ready: Callable[[], bool] | None = None) -> Iterator[None]:
        """Be the only one who delivers to a rank, opens or ends its stream."""
        with self._changed:
            self._wait(
                lambda: not lane.is_in_turn and (is_ready is None or is_ready()),
                lambda: f"a turn at {lane}",
            )
            lane.is_in_turn = True
        try:
            yield
        finally:
            with self._changed:
                lane.is_in_turn = False
                self._changed.notify_all()

    def _pause(self) -> None:
        self._stopping.wait(AGAIN_S)
        with self._changed:
            self._check()

    def _ask(self, lane: _Lane, call: Callable[[], T]) -> T:
        """Call a rank; again until the deadline, if it does not answer.

        Raises:
            UnknownStream: If it does not know the stream.
            ServiceUnavailable: If it is gone for too long; names it.
            ServiceTimeout: If it does not answer for too long; names it.
        """
        alive_at = time.monotonic()
        while True:
            try:
                return call()
            except ServiceBusy:
                alive_at = time.monotonic()  # it says so
            except (ServiceUnavailable, ServiceTimeout) as exc:
                with self._changed:
                    self._check()
                silent_s = time.monotonic() - alive_at
                is_gone = isinstance(exc, ServiceUnavailable)
                if silent_s >= (self._gone_s if is_gone else self._deadline_s):
                    what = "is gone" if is_gone else "does not answer"
                    raise type(exc)(
                        f"{self}: {lane} {what}, for {silent_s:.0f} s: {exc}",
                        role="nn-worker",
                        replica=lane.number,
                        address=exc.address,
                        method=exc.method,
                    ) from exc
            self._pause()


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    """Wait for threads, for so long in all, and return those that are still alive."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def connect() -> Feeder:
    """Connect to every server that the environment names, and begin to feed.

    Raises:
        ConfigError: If this process is no data-loader, or the addresses are not of one set.
        ServiceUnavailable: If some are missing at the deadline; names them.
        JobFinished: If the job ended before all were there.
    """
    from persia._rpc.zmq_transport import ZmqTransport
    from persia._services import addresses

    is_child = env.feeds_parent()
    loader, num_loaders = env.get_replica_index(), env.get_replica_size()
    if loader is None or num_loaders is None:
        if not is_child:
            raise ConfigError(
                "a DataCtx is entered in a data-loader; RANK is set, so this process is an "
                "nn-worker"
            )
        loader, num_loaders = 0, 1
    transport = ZmqTransport()
    links: list[RemoteEmbeddingWorker | RemoteNNWorker] = []

    @functools.cache
    def disconnect() -> None:
        for link in links:
            link.close()
        transport.close()

    try:
        workers = addresses.connect_embedding_workers(transport)
        links += workers

        def has_ended() -> bool:
            return workers[0].job_status(f"data-loader {loader}", ASK_S) is not None

        ranks = addresses.connect_nn_workers(
            transport, timeout_s=CHILD_CALL_S if is_child else None, should_stop=has_ended
        )
        links += ranks
        feeder = Feeder(
            workers,
            ranks,
            loader=loader,
            num_loaders=num_loaders,
            disconnect=disconnect,
            gone_s=ORPHAN_S if is_child else None,
        )
    except BaseException:
        disconnect()
        raise
    feeder.start()
    return feeder
