"""Where a pass over a dataset gets its batches from: this process, or data-loaders."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from persia._rpc.worker_pool import handle_of
from persia._training.queues import BoundedQueue, Closed, Finished
from persia._training.resume import Plain, Watermark, to_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from persia._training.batch import HostBatch
    from persia._training.receiver import Stream
    from persia._training.transfer import DeviceTransfer
    from persia.embedding.data import PersiaBatch

logger = logging.getLogger(__name__)

# Seconds that data-loaders may take to send what no rank will train any more.
DROP_S = 60.0


class Source(Protocol):
    """Batches of one pass, in order. ``start`` and ``close`` are the user's thread's."""

    @property
    def failure(self) -> BaseException | None:
        """What ended the data before its time, once ``get`` has raised Finished."""

    def start(self) -> None:
        """Begin."""

    def get(self) -> HostBatch:
        """Wait for the next batch and take it.

        Raises:
            Closed: If the pass is closed.
            Finished: If there are no more.
        """

    def position(self) -> Plain | None:
        """Return what is done of the pass; None if nothing is known of it."""

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was read is done, if other ranks need it."""

    def describe_wait(self) -> str:
        """Name what ``get`` is waiting for; empty if for nothing."""

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Drop what is left without looking it up, and wait for its end.

        Args:
            on_drop: Called for each batch.
        """

    def close(self) -> list[threading.Thread]:
        """Wake ``get`` and return the threads that are about to end."""


class DatasetSource:
    """Iterates a dataset in a thread of its own.

    Args:
        dataset: Iterated once.
        transfer: Of the context's device.
        capacity: Batches read ahead of the lookups.
        resumed: What is done already; those batches are read and left out, or not even read
            where the dataset has ``iter_from``.
    """

    def __init__(
        self,
        dataset: Iterable[PersiaBatch],
        transfer: DeviceTransfer,
        capacity: int,
        resumed: Plain | None = None,
    ) -> None:
        self._dataset = dataset
        self._transfer = transfer
        self.queue: BoundedQueue[HostBatch] = BoundedQueue(capacity)
        self._lock = threading.Lock()  # guards the watermark
        self._trained = Watermark()
        if resumed is not None:
            self._trained.floor = resumed["floors"]["0"]
            self._trained.above = set(resumed["above"]["0"])
        self._first = self._trained.floor
        self._left_out = frozenset(self._trained.above)
        self._has_ended = False  # for messages only
        self._thread = threading.Thread(target=self._read, name="persia-dataset", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What the dataset raised."""
        return self.queue.failure

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def get(self) -> HostBatch:
        """Take the next batch that the thread has read."""
        return self.queue.get()

    def _mark_done(self, place: int) -> None:
        with self._lock:
            self._trained.mark_done(place)

    def position(self) -> Plain | None:
        """Return what is done of the pass."""
        with self._lock:
            return to_position("dataset", 0, {0: self._trained})

    def end_position(self) -> Plain | None:
        """Return None: a dataset is its rank's own."""
        return None

    def describe_wait(self) -> str:
        """Name the dataset, while it is being read."""
        if self._has_ended:
            return ""
        return f"the dataset ({type(self._dataset).__name__}) to yield a batch"

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Do nothing: what was not read is not known."""

    def close(self) -> list[threading.Thread]:
        """Close the queue, where the thread notices it."""
        self.queue.close()
        return [self._thread]

    def _read(self) -> None:
        iterator = None
        try:
            iterator = self._begin()
            for place, batch in enumerate(iterator, self._first):
                if place not in self._left_out:
                    host = self._transfer.copy(batch)
                    host.on_done = partial(self._mark_done, place)
                    self.queue.put(host)
        except Closed:
            pass
        except BaseException as exc:
            self._has_ended = True
            self.queue.finish(exc)
        else:
            self._has_ended = True
            self.queue.finish()
        if isinstance(iterator, Generator):
            _close_generator(iterator)

    def _begin(self) -> Iterator[Any]:
        if not self._first:
            return iter(self._dataset)
        seek = getattr(self._dataset, "iter_from", None)
        if seek is not None:
            return iter(seek(self._first))
        return itertools.islice(iter(self._dataset), self._first, None)


def _close_generator(generator: Generator[Any, Any, Any]) -> None:
    """Run the ``finally`` blocks of the user's generator now, in its own thread.

    It may stand at a batch that was refused. Iterators of other kinds are left alone: their
    ``close`` may be meant for their owner.
    """
    try:
        generator.close()
    except Exception:
        # The loop is over and would not see it.
        logger.exception("the dataset raised while it was closed")


class StreamSource:
    """Takes what data-loaders deliver.

    Args:
        stream: Where they deliver it.
        transfer: Of the context's device.
        in_order: Whether by batch id.
    """

    def __init__(self, stream: Stream, transfer: DeviceTransfer, in_order: bool) -> None:
        self._stream = stream
        self._receiver = stream.receiver
        self._transfer = transfer
        self._in_order = in_order
        self._is_closed = False
        self._has_begun = False
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin a pass.

        Raises:
            ConfigError: If another one is under way.
        """
        self._stream.begin_pass()
        self._has_begun = True

    def get(self) -> HostBatch:
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
            host = self._transfer.copy_streamed(batch)
        except BaseException:
            receiver.end(stream, batch_id)
            raise
        host.ref = handle_of(batch.ids)
        host.register_again = partial(receiver.register_again, stream, batch_id)
        host.on_done = partial(receiver.mark_done, stream, batch_id)
        host.on_end = partial(receiver.end, stream, batch_id)
        return host

    def position(self) -> Plain | None:
        """Return what is done of every data-loader's batches that are this rank's."""
        return self._receiver.position()

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was received is done."""
        return self._receiver.end_position()

    def describe_wait(self) -> str:
        """Name the data-loaders whose batch is missing."""
        return f"{self._receiver.describe_wait()} (this nn-worker is at {self._stream.address})"

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Have the receiver acknowledge what comes until the data-loaders have ended."""
        if not self._receiver.drop_rest(on_drop, DROP_S):
            logger.warning(
                "the pass has ended for want of batches at other ranks, and the rest of this "
                "one's did not come within %g s: waited for %s",
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
