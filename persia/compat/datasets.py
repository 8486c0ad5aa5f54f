"""The datasets and loaders of 2021."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from persia._training.queues import BoundedQueue, Closed, Finished
from persia.data import DataLoader, IterableDataset, IterableDatasetBase
from persia.embedding.data import PersiaBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Dataloader", "PersiaDataset", "Sender"]

# Seconds in which ``fetch_data`` ends once its batches are not read any more.
LEAVE_S = 5.0


class Sender:
    """Where ``PersiaDataset.fetch_data`` puts its batches.

    Args:
        channel: Of the pass.
    """

    def __init__(self, channel: BoundedQueue[PersiaBatch]) -> None:
        self._channel = channel

    def send(self, batch: PersiaBatch) -> None:
        """Send one batch; it is copied, so its arrays may be reused."""
        self._channel.put(PersiaBatch.from_bytes(batch.to_bytes()))


class PersiaDataset(IterableDataset):
    """A dataset that sends its batches: subclass it and write ``fetch_data``.

    Args:
        buffer_size: Batches read ahead of the lookups.
        async_iterator: Without effect: batches are always read ahead.
    """

    def __init__(self, buffer_size: int = 10, async_iterator: bool = True) -> None:
        super().__init__(buffer_size)

    @abstractmethod
    def fetch_data(self, persia_sender_channel: Sender) -> None:
        """Send the batches of one epoch."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield what ``fetch_data`` sends, which runs in a thread of its own."""
        channel: BoundedQueue[PersiaBatch] = BoundedQueue(1)

        def fetch() -> None:
            try:
                self.fetch_data(Sender(channel))
            except Closed:
                pass
            except BaseException as exc:
                channel.finish(exc)
            else:
                channel.finish()

        thread = threading.Thread(target=fetch, name="persia-fetch-data", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    batch = channel.get()
                except Finished:
                    break
                yield batch
            if channel.failure is not None:
                raise channel.failure
        finally:
            channel.close()
            thread.join(LEAVE_S)


class Dataloader(DataLoader):
    """A ``DataLoader`` with the arguments of 2021.

    Args:
        dataset: As of ``DataLoader``, as are those not named here.
        forward_buffer_size: Batches looked up ahead of the loop.
        is_training: Without effect: the context says what batches are for.
        timeout: The older name of ``timeout_ms``.
        timeout_ms: How long the loop waits for a batch, in milliseconds.
        num_workers: Lookups at the same time.
        reproducible: Keep the dataset's order.
        embedding_staleness: Most batches between lookup and update.
        **options: Those of today.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase | Iterable[PersiaBatch],
        forward_buffer_size: int = 10,
        is_training: bool = True,
        timeout: int | None = None,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
        *,
        timeout_ms: int = 1000 * 60 * 10,
        **options: Any,
    ) -> None:
        super().__init__(
            dataset,
            forward_buffer_size,
            timeout_ms if timeout is None else timeout,
            num_workers,
            reproducible,
            embedding_staleness,
            **options,
        )
