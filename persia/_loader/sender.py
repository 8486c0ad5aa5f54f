"""The data-loader's side of the streams: ids to embedding-workers, the rest to the ranks.

    user's thread    send: waits for a credit of the batch's rank, registers the ids at an
                     embedding-worker, delivers.  finish: ends the streams,
                     waits until all is acknowledged
    thread per rank  (``rank_stream``) polls: credits, acknowledged ids, wanted ids, and whether
                     the rank has closed; registers wanted ids again; after a restart of the
                     rank opens the stream again and delivers what is not acknowledged
    watcher          asks an embedding-worker four times a second whether the job has ended

A batch is kept, ids and all, until its rank acknowledges it; one that a process before this one
sent, from when it is read again. Batches reach a rank one at a time in ascending order, after
its restart too: an id that was left out will not come.

Why no cycle of waits closes: docs/services.md. A turn at a rank lasts for one call. No lock is
held across a call, each call has a deadline, and what waits for a thread ends with it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from persia import env
from persia._core.ids.feature_batch import FeatureBatch
from persia._loader.rank_stream import (
    LINE_S,
    NO_REF,
    Action,
    LoaderState,
    RankStream,
    job_finished,
)
from persia._metrics.timings import Timings
from persia._rpc.client import Client
from persia._rpc.deadlines import within
from persia._rpc.messages import IDFeatures, NamedArray, NNWorker, RemoteRef, StreamedBatch
from persia._rpc.stubs import RemoteEmbeddingWorker
from persia._rpc.worker_pool import WorkerPool
from persia._training.queues import join
from persia.errors import (
    ConfigError,
    DataError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
    StreamRewound,
)

logger = logging.getLogger(__name__)

# Seconds of the first try at a worker, doubled in each round up to the longest.
TRY_S = 2.0
LONGEST_TRY_S = 30.0
# Seconds between two polls of the job's status, and the limit of one.
WATCH_S = 0.25
ASK_S = 2.0
# Seconds to report that the script failed, and for threads to end.
END_S = 5.0
# Of the child of a trainer in embedded mode: seconds without a connection to its parent, and
# of one call; half of that a poll may take without news.
ORPHAN_S = 5.0
CHILD_CALL_S = 10.0
# Characters of a traceback; a frame's header holds far more.
MAX_FAILURE = 16_384


class RegistrationPool(WorkerPool):
    """Registers ids at each embedding-worker in turn; all, by replica index."""

    def __init__(self, workers: Sequence[RemoteEmbeddingWorker], feed: LoaderState) -> None:
        super().__init__()
        self._workers = workers
        self._feed = feed
        # Loaders start at different workers.
        self._turns = itertools.count(feed.loader)

    def register(self, ids: IDFeatures, avoid: int | None = None) -> RemoteRef:
        """Register ids at the next embedding-worker that takes them; ``avoid`` is tried last.

        A busy worker is alive: there is no deadline as long as one answers so.
        """
        feed = self._feed
        alive_at = logged_at = time.monotonic()
        try_s = TRY_S
        while True:
            failures: dict[int, ServiceError] = {}
            order = self.order(next(self._turns), len(self._workers))
            for index in sorted(order, key=lambda index: index == avoid):
                try:
                    ref = self._workers[index].register(ids, try_s)
                except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as exc:
                    feed.check()
                    failures[index] = exc
                    self.avoid(index)
                    with feed.changed:
                        feed.counts["skipped"] += 1
                    if isinstance(exc, ServiceBusy):
                        alive_at = time.monotonic()
                else:
                    self.readmit(index)
                    return RemoteRef(index, ref)
            now = time.monotonic()
            reasons = "; ".join(f"embedding-worker {i}: {e}" for i, e in failures.items())
            if now - logged_at >= LINE_S:
                logged_at = now
                logger.warning("%s: batch %d waits for %s", feed, ids.batch_id, reasons)
            silent_s = now - alive_at
            is_gone = all(isinstance(one, ServiceUnavailable) for one in failures.values())
            if silent_s >= (feed.gone_s if is_gone else feed.deadline_s):
                raise ServiceUnavailable(
                    f"{feed}: no embedding-worker has answered for {silent_s:.0f} s, to take "
                    f"batch {ids.batch_id}: {reasons}",
                    role="embedding-worker",
                    method="register",
                )
            feed.pause()
            try_s = min(2 * try_s, LONGEST_TRY_S)


class BatchSender:
    """Sends the batches of one data-loader to all ranks.

    Args:
        workers: All embedding-workers, by replica number.
        ranks: All nn-workers, by rank.
        loader: Number of this data-loader, of ``num_loaders``.
        disconnect: Ends every call in flight, at once; any thread may call it, repeatedly.
        deadline_s: Seconds to wait for a server that does not answer; None is
            ``PERSIA_RPC_TIMEOUT``.
        gone_s: Seconds to wait for one to which there is no connection; None is the same.
    """

    def __init__(
        self,
        workers: Sequence[RemoteEmbeddingWorker],
        ranks: Sequence[NNWorker],
        *,
        loader: int = 0,
        num_loaders: int = 1,
        disconnect: Callable[[], None] = lambda: None,
        deadline_s: float | None = None,
        gone_s: float | None = None,
    ) -> None:
        deadline_s = env.rpc_timeout_s() if deadline_s is None else deadline_s
        gone_s = deadline_s if gone_s is None else gone_s
        self._feed = LoaderState(loader, num_loaders, len(ranks), deadline_s, gone_s)
        self._workers = workers
        self._pool = RegistrationPool(workers, self._feed)
        self._streams = [
            RankStream(number, rank, self._feed, self._pool.register)
            for number, rank in enumerate(ranks)
        ]
        self._disconnect = disconnect
        self._sending = threading.Lock()  # held in ``send``; never waited for
        self.timings = Timings("persia_loader_wait_seconds")
        self.clients: Sequence[Client] = ()  # what it calls by, for their counts

    @property
    def job_status(self) -> int | None:
        """The exit status of the job; None while it goes on."""
        return self._feed.status

    def stats(self) -> Mapping[str, int]:
        """Return the counts of ``DataCtx.stats``; those that are zero are absent.

        ``skipped`` calls went to another embedding-worker than the one whose turn it was.
        """
        with self._feed.changed:
            kept = sum(len(stream.unacked) for stream in self._streams)
            return dict(self._feed.counts, **({"kept": kept} if kept else {}))

    def peers(self) -> dict[str, int | None]:
        """Return by address which process each rank was when its stream was opened last."""
        return dict(stream.peer for stream in self._streams)

    def measure(self) -> tuple[int, int, int]:
        """Return how many batches are kept, their bytes, and how many ranks would take now."""
        with self._feed.changed:
            kept = [one for stream in self._streams for one in stream.unacked.values()]
            num_credits = sum(stream.num_credits for stream in self._streams)
        num_bytes = 0
        for ids, message in kept:
            num_bytes += sum(part.nbytes for one in ids.features for part in one.parts())
            arrays = (*message.non_id_type_features, *message.labels)
            num_bytes += sum(one.array.nbytes for one in arrays)
        return len(kept), num_bytes, num_credits

    def why_not_ready(self) -> str:
        """Say what keeps batches from being sent; "" if nothing does."""
        why = self.why_not_healthy()
        if why:
            return why
        with self._feed.changed:
            closed = [str(stream) for stream in self._streams if not stream.is_open]
        return f"no stream to {', '.join(closed)}" if closed else ""

    def why_not_healthy(self) -> str:
        """Say what has ended a thread; "" if none has failed."""
        failure = self._feed.failure
        return "" if failure is None else f"{type(failure).__name__}: {failure}"

    def start(self) -> None:
        """Begin to open the streams."""
        for stream in self._streams:
            self._feed.spawn(f"persia-feed {stream}", stream.run)
        self._feed.spawn("persia-watch job", self._watch)

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
        """Send one batch as ``DataCtx.send_data`` does. The arrays are kept, not copied."""
        if not self._sending.acquire(blocking=False):
            raise ConfigError("send_data is called by two threads at a time")
        try:
            feed = self._feed
            with feed.changed:
                batch_id = feed.next_id
                stream = self._streams[batch_id % len(self._streams)]
                begin = time.perf_counter()
                action = stream.wait_for_room(batch_id)
                waited_s = time.perf_counter() - begin
                self.timings["persia_loader_wait_seconds"].add(waited_s)
                if action is Action.DROP:
                    feed.count_batch()
                    feed.counts["dropped"] += 1
                    return
                epoch = feed.epoch
            ids = IDFeatures(features, batch_id, requires_grad)
            message = StreamedBatch(
                batch_id,
                batch_size,
                requires_grad,
                NO_REF if action is Action.HOLD else self._pool.register(ids),
                dense,
                labels,
                None if meta is None else np.frombuffer(meta, np.uint8),
                epoch,
            )
            send = stream.deliver if action is Action.DELIVER else stream.hold
            send(ids, message)
        finally:
            self._sending.release()

    def end_epoch(self) -> None:
        """Let the batches from here on be the next epoch's."""
        with self._feed.changed:
            self._feed.epoch += 1

    def resume_position(self) -> int:
        """Return how many of this data-loader's batches no rank needs; waits for the ranks."""
        feed = self._feed
        with feed.changed:
            needed = [stream.find_first_needed() for stream in self._streams]
            first = min((x for x in needed if x is not None), default=feed.loader)
            return max(0, -(-(first - feed.loader) // feed.num_loaders))

    def seek(self, batch: int) -> None:
        """Let the next batch be this one of the data-loader's own, counted from 0."""
        position = self.resume_position()
        feed = self._feed
        with feed.changed:
            if feed.next_id != feed.loader:
                raise DataError(
                    "seek: expected a call before the first send_data; several epochs of a "
                    "reader are one call, reader.send(ctx, epochs=3)"
                )
            if not 0 <= batch <= position:
                raise DataError(
                    f"seek: expected 0..{position}, the first batch that is needed, got {batch}"
                )
            feed.next_id += batch * feed.num_loaders
            feed.counts["dropped"] += batch

    def finish(self) -> None:
        """End the streams; wait until all is acknowledged, a rank closed, or the job ended."""
        feed = self._feed
        with feed.changed:
            feed.is_ending = True
        try:
            for stream in self._streams:
                feed.spawn(f"persia-end {stream}", stream.end)
            with feed.changed, contextlib.suppress(JobFinished):
                feed.wait(
                    lambda: all(stream.is_done for stream in self._streams),
                    lambda: ", ".join(
                        x.describe_pending() for x in self._streams if not x.is_done
                    ),
                    logging.WARNING,
                )
        except BaseException as exc:
            self.fail(exc)
            raise

    def fail(self, error: BaseException) -> None:
        """Report to the ranks that the script failed; wait only until they answer.

        A failure of servers is not the script's, and neither is SIGTERM, as for a pod that is
        evicted: where a supervisor starts this process again it goes on, and the ranks wait.
        """
        is_stopped = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
        is_healed = env.is_supervised() and (is_stopped or isinstance(error, ServiceError))
        if isinstance(error, StreamRewound):
            self._release_kept()
            return  # it is started again
        if self.job_status is not None or is_healed:
            return
        text = "".join(traceback.format_exception(error))[-MAX_FAILURE:]
        # A lone surrogate cannot travel.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        threads = [
            self._feed.spawn(f"persia-end {stream}", partial(stream.report_failure, text))
            for stream in self._streams
            if not stream.is_closed
        ]
        join(threads, END_S)

    def _release_kept(self) -> None:
        """Release what is registered: the process after this one registers it again.

        Or what was on its way to each trainer that is killed would fill the workers.
        """
        with self._feed.changed:
            kept = [ids for stream in self._streams for ids in stream.registered()]
        with within(END_S):
            for ids in kept:
                with contextlib.suppress(ServiceError):
                    self._workers[ids.worker].release(ids.ref)

    def close(self) -> None:
        """Disconnect and end the threads; count unacknowledged batches as lost."""
        feed = self._feed
        with feed.changed:
            is_first = not feed.stopping.is_set()
            feed.stopping.set()
            feed.changed.notify_all()
        self._disconnect()
        alive = [thread.name for thread in join(feed.threads, END_S)]
        if alive:
            logger.warning("%s: still running: %s", feed, ", ".join(alive))
        with feed.changed:
            for stream in self._streams:
                stream.drop_unacked()
            num_lost = feed.counts["lost"]
        if is_first and num_lost:
            # Where the job has ended, they are not needed; and where its script has failed,
            # the traceback is the last on the screen.
            is_over = feed.status is not None or any(
                stream.is_closed for stream in self._streams
            )
            logger.log(
                logging.INFO if is_over else logging.WARNING,
                "%s: %d batches were not trained on, or not acknowledged",
                feed,
                num_lost,
            )

    def _watch(self) -> None:
        """Ask the workers until the job has ended, and end what waits then."""
        feed = self._feed
        watcher = f"{feed}, {feed.stream[1]:x}"
        index = feed.loader
        while feed.status is None and not feed.stopping.wait(WATCH_S):
            try:
                status = self._workers[index % len(self._workers)].job_status(watcher, ASK_S)
            except ServiceError:
                index += 1  # a worker that is gone is reported elsewhere
                continue
            if status is not None:
                with feed.changed:
                    feed.status = status
                    feed.changed.notify_all()
                self._disconnect()


def connect() -> BatchSender:
    """Connect to every server that the environment names, and begin to feed.

    Raises:
        ConfigError: If this process is no data-loader, or the addresses are not of one set.
        ServiceUnavailable: If some are missing at the deadline; names them.
        JobFinished: If the job ended before all were there.
    """
    from persia._cluster import connect
    from persia._rpc.zmq_transport import ZmqTransport

    is_child = env.feeds_parent()
    loader, num_loaders = env.get_replica_index(), env.get_replica_size()
    if loader is None or num_loaders is None:
        if not is_child:
            raise ConfigError("a DataCtx is for a data-loader; RANK is set in an nn-worker")
        loader, num_loaders = 0, 1
    connections = contextlib.ExitStack()
    closing = threading.Lock()  # held while closing, so that a second call waits for the first

    def disconnect() -> None:
        with closing:
            connections.close()

    statuses: list[int] = []  # of the job, if it ended

    def has_ended() -> bool:
        with contextlib.suppress(ServiceError):
            status = workers[0].job_status(f"data-loader {loader}", ASK_S)
            statuses.extend(() if status is None else (status,))
        return bool(statuses)

    transport = connections.enter_context(contextlib.closing(ZmqTransport()))
    try:
        workers = connect.connect_embedding_workers(transport)
        for worker in workers:
            connections.callback(worker.close)
        wait_s = CHILD_CALL_S if is_child else None
        ranks = connect.connect_nn_workers(transport, timeout_s=wait_s, should_stop=has_ended)
        for rank in ranks:
            connections.callback(rank.close)
        sender = BatchSender(
            workers,
            ranks,
            loader=loader,
            num_loaders=num_loaders,
            disconnect=disconnect,
            gone_s=ORPHAN_S if is_child else None,
        )
    except BaseException as exc:
        disconnect()
        if statuses and isinstance(exc, JobFinished):
            raise job_finished(statuses[0]) from exc
        raise
    sender.clients = [remote.client for remote in (*workers, *ranks)]
    sender.start()
    return sender
