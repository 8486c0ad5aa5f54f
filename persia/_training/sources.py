"""Where a pass over a dataset gets its batches from: this process, or data-loaders."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from persia._training.lookups import Item
from persia._training.queues import BoundedQueue, Closed, Finished
from persia._training.resume import Plain, Watermark, of_series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from persia._training.stream import Stream
    from persia._training.transfer import DeviceTransfer, HostBatch, UserBatch

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

    def get(self) -> Item:
        """Wait for the next batch and take it.

        Raises:
            Closed: If the pass is closed.
            Finished: If there are no more.
        """

    def position(self) -> Plain | None:
        """Return what is done of the pass; None if nothing is known of it."""

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was read is done, if other ranks need it."""

    def waits_for(self) -> str:
        """Say whom ``get`` is waiting for; empty if for nobody."""

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Drop what is left without looking it up, and wait for its end.

        Args:
            on_drop: Called for each batch.
        """

    def close(self) -> list[threading.Thread]:
        """Let nobody wait any more; returns the threads that are about to end."""


class DatasetSource:
    """Iterates a dataset in a thread of its own.

    Args:
        dataset: Iterated once.
        converter: Of the context's device.
        capacity: Batches read ahead of the lookups.
        resumed: What is done already; those batches are read and left out, or not even read
            where the dataset has ``iter_from``.
    """

    def __init__(
        self,
        dataset: Iterable[UserBatch],
        converter: DeviceTransfer,
        capacity: int,
        resumed: Plain | None = None,
    ) -> None:
        self._dataset = dataset
        self._converter = converter
        self.channel: BoundedQueue[tuple[int, HostBatch]] = BoundedQueue(capacity)
        self._lock = threading.Lock()  # guards the series
        self._series = Watermark()
        if resumed is not None:
            self._series.floor = resumed["floors"]["0"]
            self._series.above = set(resumed["above"]["0"])
        self._first = self._series.floor
        self._left_out = frozenset(self._series.above)
        self._has_ended = False  # for messages only
        self._thread = threading.Thread(target=self._read, name="persia-dataset", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What the dataset raised."""
        return self.channel.failure

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def get(self) -> Item:
        """Take the next batch that the thread has read."""
        place, host = self.channel.get()
        return Item(host, done=partial(self._done, place))

    def _done(self, place: int) -> None:
        with self._lock:
            self._series.done(place)

    def position(self) -> Plain | None:
        """Return what is done of the pass."""
        with self._lock:
            return of_series("dataset", 0, {0: self._series})

    def end_position(self) -> Plain | None:
        """Return None: a dataset is its rank's own."""
        return None

    def waits_for(self) -> str:
        """Name the dataset, while it is being read."""
        if self._has_ended:
            return ""
        return f"the dataset ({type(self._dataset).__name__}) to yield a batch"

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Nothing: what was not read is not known."""

    def close(self) -> list[threading.Thread]:
        """Close the channel, where the thread notices it."""
        self.channel.close()
        return [self._thread]

    def _read(self) -> None:
        iterator = None
        try:
            iterator = self._begin()
            for place, batch in enumerate(iterator, self._first):
                if place not in self._left_out:
                    self.channel.put((place, self._converter.host(batch)))
        except Closed:
            pass
        except BaseException as exc:
            self._has_ended = True
            self.channel.finish(exc)
        else:
            self._has_ended = True
            self.channel.finish()
        self._close_iterator(iterator)  # it may stand still at a batch that was refused

    def _begin(self) -> Iterator[Any]:
        if not self._first:
            return iter(self._dataset)
        seek = getattr(self._dataset, "iter_from", None)
        if seek is not None:
            return iter(seek(self._first))
        return itertools.islice(iter(self._dataset), self._first, None)

    @staticmethod
    def _close_iterator(iterator: object) -> None:
        """Run the ``finally`` blocks of the user's generator now, in its own thread."""
        if not isinstance(iterator, Generator):
            return  # another iterator's ``close`` may be meant for its owner
        try:
            iterator.close()
        except Exception:
            # The loop is over and nobody is left to raise this at.
            logger.exception("the dataset raised while it was closed")


class StreamSource:
    """Takes what data-loaders deliver.

    Args:
        stream: Where they deliver it.
        converter: Of the context's device.
        in_order: Whether by batch id.
    """

    def __init__(self, stream: Stream, converter: DeviceTransfer, in_order: bool) -> None:
        self._stream = stream
        self._inbox = stream.inbox
        self._converter = converter
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

    def get(self) -> Item:
        """Take the next batch."""
        if self.failure is not None:
            raise Finished
        try:
            taken = self._inbox.take(self._in_order, lambda: self._is_closed)
        except (Closed, Finished):
            raise
        except BaseException as exc:
            self.failure = exc
            raise Finished from exc
        batch = taken.batch
        try:
            host = self._converter.host_of(batch)
        except BaseException:
            taken.ended()
            raise
        return Item(host, taken.ref, taken, batch.batch_id, done=taken.done)

    def position(self) -> Plain | None:
        """Return what is done of every data-loader's batches that are this rank's."""
        return self._inbox.position()

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was received is done."""
        return self._inbox.end_position()

    def waits_for(self) -> str:
        """Name the data-loaders that owe a batch."""
        return f"{self._inbox.describe_wait()} (this nn-worker is at {self._stream.address})"

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Have the inbox acknowledge whatever comes until the data-loaders have ended."""
        if not self._inbox.drop_rest(on_drop, DROP_S):
            logger.warning(
                "the pass has ended for want of batches at other ranks, and for %g s the rest "
                "of this one's was waited for in vain: %s",
                DROP_S,
                self._inbox.describe_wait(),
            )

    def close(self) -> list[threading.Thread]:
        """End the pass; what is pending stays for the next one."""
        self._is_closed = True
        self._inbox.wake()
        if self._has_begun:
            self._has_begun = False
            self._inbox.end_pass()
        return []
