"""One data-loader's stream, as the rank that it goes to sees it.

The ids of its batches are every ``lcm(num_loaders, world_size)``-th: those that are this
data-loader's and this rank's. Some pairs of the two have none in common.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

from persia._training.resume import Watermark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening


class LoaderStream:
    """One data-loader's stream to this rank; guarded by the inbox's lock.

    Args:
        opening: The data-loader's.
        rank: This nn-worker's, of ``world_size``.
        world_size: Number of ranks.
        floor: Lowest batch id of this data-loader that the run before left to be trained.
        above: Those above it that it did train.
        news: Notified of what its data-loader has not heard; of the inbox's lock.
    """

    def __init__(
        self,
        opening: StreamOpening,
        rank: int,
        world_size: int,
        floor: int = 0,
        above: Sequence[int] = (),
        news: threading.Condition | None = None,
    ) -> None:
        self.news = news or threading.Condition()
        self.loader = opening.loader
        self.num_loaders = opening.num_loaders
        self.incarnation = opening.incarnation
        self.step = math.lcm(opening.num_loaders, world_size)
        self._offset = _first_id(opening.loader, opening.num_loaders, rank, world_size)
        self.next_batch_id = self.at_or_after(max(opening.first_batch_id, floor))
        # Of this rank's batches, those done; in a resumed run some above its beginning are.
        self.left_out = frozenset(place for place in above if self.is_mine(place))
        self.trained = Watermark(self.next_batch_id or 0, self.step, set(self.left_out))
        self.pending: dict[int, StreamedBatch] = {}
        self.in_flight: dict[int, RemoteRef] = {}
        self.wanted: set[int] = set()
        self.acknowledged: deque[tuple[int, int]] = deque()  # (version, batch id)
        self.version = 0
        self.credits = 0
        self.ended_at: int | None = None  # no batch from this id on
        self.failure = ""
        # Called for each batch that comes although the pass has ended; None in a pass.
        self.on_drop: Callable[[], None] | None = None
        self.was_read = False  # a pass went on while it was open
        self.knows_end = False  # was told that the inbox is closed
        self.heard_at = 0.0

    def at_or_after(self, batch_id: int) -> int | None:
        """The first id of this stream that is not below ``batch_id``; None if it has none."""
        if self._offset is None:
            return None
        return self._offset + -(-max(batch_id - self._offset, 0) // self.step) * self.step

    def is_mine(self, batch_id: int) -> bool:
        """Whether this data-loader sends a batch to this rank."""
        return self.at_or_after(batch_id) == batch_id

    def is_new(self, batch_id: int) -> bool:
        """Whether a batch has not been received."""
        return self.next_batch_id is not None and batch_id >= self.next_batch_id

    def note(self, batch_id: int) -> None:
        """Note that a batch was received.

        After this rank was started anew some before it may be left out: they were trained.
        """
        for left_out in range(self.next_batch_id or 0, batch_id, self.step):
            self.trained.done(left_out)
        self.next_batch_id = batch_id + self.step

    def is_over(self) -> bool:
        """Whether it has ended and everything that it sent was taken."""
        return self._offset is None or (self.ended_at is not None and not self.pending)

    def is_settled(self) -> bool:
        """Whether the data-loader knows that all it sent has ended, and asks no more."""
        return (
            self.ended_at is not None
            and not self.pending
            and not self.in_flight
            and not self.acknowledged
        )


def _first_id(loader: int, num_loaders: int, rank: int, world_size: int) -> int | None:
    """The lowest batch id that this loader sends to this rank."""
    for batch_id in range(loader, math.lcm(num_loaders, world_size), num_loaders):
        if batch_id % world_size == rank:
            return batch_id
    return None
