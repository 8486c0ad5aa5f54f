"""The data-loader's side of the streams: ids to embedding-workers, the rest to the ranks.

    user's thread    send: waits for a credit of the batch's rank, registers the ids at an
                     embedding-worker (``registrars``), delivers.  finish: ends the streams,
                     waits until all is acknowledged
    thread per rank  (``lanes``) polls: credits, acknowledged ids, wanted ids, and whether the
                     rank has closed; registers wanted ids again; opens the stream again after
                     a restart of the rank, and delivers what it keeps
    watcher          asks an embedding-worker time and again whether the job has ended

A batch is kept, ids and all, until its rank acknowledges it; one that a process before this one
sent, from when it is read again. Batches reach a rank one at a time
in ascending order, after its restart too: an id that was left out will not come.

Who waits for whom:

    user's thread ---credit, opening---> thread of the rank ---its turn---> user's thread
       |                                    |          |                        |
       |  a ref is free                     |          | an answer              | an answer
       +-------------> embedding-worker <---+          +------> nn-worker <-----+

A turn lasts for one call at a rank and waits for nothing else, so the upper row ends at an
nn-worker. That answers every call without waiting for a data-loader. An embedding-worker has
a free ref once nn-workers have updated what they have; they can, as long as its
``forward_buffer_size`` holds the batches that all credits and the staleness allow. No lock is
held across a call. Each call has a deadline; what waits for a thread ends with that thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from persia import env
from persia._core.ids.feature_batch import FeatureBatch
from persia._loader.feed import LoaderState, ended, join
from persia._loader.rank_stream import NOWHERE, RankStream, UnackedBatch
from persia._loader.registrars import ASK_S, Registrar, Registrars
from persia._metrics.timings import Timings
from persia._process_exit import text_of
from persia._rpc.client import Client
from persia._rpc.messages import IDFeatures, NamedArray, NNWorker, StreamedBatch
from persia._rpc.stubs import RemoteEmbeddingWorker, RemoteNNWorker
from persia.errors import ConfigError, DataError, JobFinished, ServiceError

logger = logging.getLogger(__name__)

# Seconds for the word that the script failed, and for threads to end.
FAREWELL_S = 5.0
# Of the child of a trainer in embedded mode: seconds without a connection to its parent, and
# of one call; half of that a poll may take without news.
ORPHAN_S = 5.0
CHILD_CALL_S = 10.0
# Characters of a traceback; a frame's header holds far more.
MAX_FAILURE = 16_384


class BatchSender:
    """Sends the batches of one data-loader to all ranks.

    Args:
        workers: All embedding-workers, by replica number.
        ranks: All nn-workers, by rank.
        loader: Number of this data-loader.
        num_loaders: How many there are.
        disconnect: Ends every call in flight, at once; any thread may call it, repeatedly.
        deadline_s: Seconds to wait for a server that does not answer;
            ``PERSIA_RPC_TIMEOUT`` if not given.
        gone_s: Seconds to wait for one to which there is no connection; ``deadline_s`` if not
            given.
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
        deadline_s = env.rpc_timeout_s() if deadline_s is None else deadline_s
        gone_s = deadline_s if gone_s is None else gone_s
        self._feed = LoaderState(loader, num_loaders, len(ranks), deadline_s, gone_s)
        self._registrars = Registrars(workers, self._feed)
        self._lanes = [
            RankStream(number, rank, self._feed, self._registrars)
            for number, rank in enumerate(ranks)
        ]
        self._disconnect = disconnect
        self._sending = threading.Lock()  # the thread in ``send``; nobody waits for it
        self.timings = Timings("persia_loader_wait_seconds")
        self.clients: Sequence[Client] = ()  # what it calls by, for their counts

    @property
    def job_status(self) -> int | None:
        """The exit status of the job; None while it goes on."""
        return self._feed.status

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start; those that are zero are absent.

        ``sent`` batches were delivered, ``redelivered`` once more, to a rank that was started
        anew. ``registered_again`` had ids that an embedding-worker no longer held.
        ``dropped`` had been received from this loader before it was restarted. ``kept`` are
        not acknowledged now, ``lost`` were not when this loader ended. ``skipped`` calls went
        to another embedding-worker, as the one whose turn it was was down or busy.
        """
        with self._feed.changed:
            kept = sum(len(lane.kept) for lane in self._lanes)
            return dict(self._feed.counts, **({"kept": kept} if kept else {}))

    def measure(self) -> tuple[int, int, int]:
        """Return how many batches are kept, their bytes, and how many ranks would take now."""
        with self._feed.changed:
            kept = [one for lane in self._lanes for one in lane.kept.values()]
            num_credits = sum(lane.num_credits for lane in self._lanes)
        return len(kept), sum(one.num_bytes() for one in kept), num_credits

    def why_not_ready(self) -> str:
        """Say what keeps batches from being sent; "" if nothing does."""
        why = self.why_not_healthy()
        if why:
            return why
        with self._feed.changed:
            closed = [str(lane) for lane in self._lanes if not lane.is_open]
        return f"no stream to {', '.join(closed)}" if closed else ""

    def why_not_healthy(self) -> str:
        """Say what has ended a thread of this feeder; "" if none has failed."""
        failure = self._feed.failure
        return "" if failure is None else f"{type(failure).__name__}: {failure}"

    def start(self) -> None:
        """Begin to open the streams."""
        for lane in self._lanes:
            self._feed.spawn(f"persia-feed {lane}", lane.follow)
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
            feed = self._feed
            with feed.changed:
                batch_id = feed.next_id
                lane = self._lanes[batch_id % len(self._lanes)]
                begin = time.perf_counter()
                what = lane.wait_for_room(batch_id)
                waited_s = time.perf_counter() - begin
                self.timings["persia_loader_wait_seconds"].add(waited_s)
                if what == "drop":
                    feed.next_id += feed.num_loaders
                    feed.counts["dropped"] += 1
                    return
            ids = IDFeatures(features, batch_id, requires_grad)
            message = StreamedBatch(
                batch_id,
                batch_size,
                requires_grad,
                NOWHERE if what == "hold" else self._registrars.register(ids),
                dense,
                labels,
                None if meta is None else np.frombuffer(meta, np.uint8),
            )
            if what == "deliver":
                lane.deliver(UnackedBatch(ids, message))
            else:
                lane.hold(UnackedBatch(ids, message))
        finally:
            self._sending.release()

    def resume_position(self) -> int:
        """Return how many of this data-loader's batches no rank needs; waits for the ranks.

        Raises:
            JobFinished: If the job has ended, or a rank reads no more.
        """
        feed = self._feed
        with feed.changed:
            needed = [lane.first_needed() for lane in self._lanes]
            first = min((x for x in needed if x is not None), default=feed.loader)
            return max(0, -(-(first - feed.loader) // feed.num_loaders))

    def seek(self, batch: int) -> None:
        """Let the next batch be this one of the data-loader's own, counted from 0.

        Raises:
            DataError: If one was sent already, or some before it are needed.
        """
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
        """End the streams; wait until each rank has acknowledged all, closed, or the job ended.

        Raises:
            BaseException: What ended a thread of this feeder.
        """
        feed = self._feed
        with feed.changed:
            feed.is_ending = True
        try:
            for lane in self._lanes:
                feed.spawn(f"persia-end {lane}", lane.end)
            with feed.changed, contextlib.suppress(JobFinished):
                feed.wait(
                    lambda: all(lane.is_settled for lane in self._lanes),
                    lambda: ", ".join(x.awaited for x in self._lanes if not x.is_settled),
                    logging.WARNING,
                )
        except BaseException as exc:
            self.fail(exc)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the ranks that the script failed; wait only until they are told.

        What servers have failed at is not the script's fault: where this process is started
        anew it goes on, and the ranks wait for it.
        """
        is_healed = env.is_supervised() and isinstance(error, ServiceError)
        if self.job_status is not None or is_healed:
            return
        text = text_of(error)[-MAX_FAILURE:]
        # A lone surrogate cannot travel.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        threads = [
            self._feed.spawn(f"persia-end {lane}", partial(lane.say_failure, text))
            for lane in self._lanes
            if not lane.is_closed
        ]
        join(threads, FAREWELL_S)

    def close(self) -> None:
        """Disconnect and end the threads; what is still kept is counted as lost."""
        feed = self._feed
        with feed.changed:
            is_first = not feed.stopping.is_set()
            feed.stopping.set()
            feed.changed.notify_all()
        self._disconnect()
        alive = [thread.name for thread in join(feed.threads, FAREWELL_S)]
        if alive:
            logger.warning("%s: still running: %s", feed, ", ".join(alive))
        with feed.changed:
            for lane in self._lanes:
                lane.lose()
            num_lost = feed.counts["lost"]
        if is_first and num_lost:
            # Where the job has ended, nobody needs them; and where its script has failed, the
            # traceback is the last on the screen.
            is_over = feed.status is not None or any(lane.is_closed for lane in self._lanes)
            logger.log(
                logging.INFO if is_over else logging.WARNING,
                "%s: %d batches were not trained on, or it was not told so",
                feed,
                num_lost,
            )

    def _watch(self) -> None:
        status = self._registrars.wait_for_end_of_job()
        if status is not None:
            with self._feed.changed:
                self._feed.status = status
                self._feed.changed.notify_all()
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
            raise ConfigError(
                "a DataCtx is entered in a data-loader; RANK is set, so this process is an "
                "nn-worker"
            )
        loader, num_loaders = 0, 1
    transport = ZmqTransport()
    links: list[RemoteEmbeddingWorker | RemoteNNWorker] = []

    closing = threading.Lock()  # held while closing: whoever comes later waits for that
    statuses: list[int] = []

    def disconnect() -> None:
        with closing:
            while links:
                links.pop().close()
            transport.close()

    def has_ended() -> bool:
        with contextlib.suppress(ServiceError):
            status = workers[0].job_status(f"data-loader {loader}", ASK_S)
            statuses.extend(() if status is None else (status,))
        return bool(statuses)

    try:
        workers = connect.connect_embedding_workers(transport)
        links += workers
        ranks = connect.connect_nn_workers(
            transport, timeout_s=CHILD_CALL_S if is_child else None, should_stop=has_ended
        )
        links += ranks
        feeder = BatchSender(
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
            raise ended(statuses[0]) from exc
        raise
    feeder.clients = [link.client for link in (*workers, *ranks)]
    feeder.start()
    return feeder
