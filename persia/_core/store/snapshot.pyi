from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia._core.store.blocks import RowBlock

@final
class Arrays:
    """A block that is being filled."""

@final
class Cut:
    """The rows of a store at one moment; ``EmbeddingStore.begin_cut`` makes it.

    A row that changes before it is read is copied first, so what comes out is of that moment
    however long the reading takes. Reading is for one thread at a time. A cut is to be closed,
    by ``close`` or as a context manager; one that nobody reads makes training wait, once, and
    is then given up.

    Attributes:
        num_rows: At that moment; of a cut of changes, an upper bound.
        copied_bytes: Of copies of all its rows, an upper bound: so much they take if every row
            changes at once.
        is_full: It has all rows and no deletions: whatever the reader had is out of date.
        is_read: All its blocks were given out.
        is_closed: It is over, read or not.
        consumer: Whose changes it has; None: nobody's.
        num_parts: Shards.
        side_bytes: Of copies, above which the next request waits for the reader.
        wait_seconds: How long a request waits until the cut is given up.
        last: Number of the epoch that it closed.
    """

    num_rows: int
    is_full: bool
    is_read: bool
    is_closed: bool
    consumer: str | None
    num_parts: int
    copied_bytes: int
    side_bytes: int
    wait_seconds: float
    last: int

    @property
    def fill(self) -> float:
        """What part of their room copies take; beyond 1 requests wait for the reader."""

    def allow(self, side_bytes: int) -> None:
        """Let copies take so much, from now on."""

    def blocks(self, max_rows: int = 65536) -> Iterator[RowBlock]:
        """Yield the rows, shard after shard, in no particular order; once.

        Raises:
            StoreError: The cut is closed, was given up, or is being read already.
            DataError: ``max_rows`` is out of its range.
        """

    def deleted(self) -> NDArray[np.uint64]:
        """Return the signs dropped since the consumer's last cut, each once, ascending.

        To be applied before the rows: a sign that came again is in both. Empty where the cut
        is full.
        """

    def commit(self) -> None:
        """Say that the rows are safe: the consumer's next cut begins where this one ended.

        Raises:
            StoreError: The cut was not read to its end, is closed, or was given up.
        """

    def close(self) -> None:
        """End the cut. What it had comes again in the consumer's next one, unless committed."""

    def make_room(self) -> None:
        """Wait until copies fit into ``side_bytes`` again, or give the cut up."""

    def wait_until_read(self) -> None:
        """Wait until all blocks were given out, or give the cut up."""

    def give_up(self, why: str) -> None:
        """End the cut; its reader gets a StoreError that says why."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class Watch:
    """Who watches a store: consumers of its changes, and cuts under way."""

    cursors: dict[str, int | None]
    cuts: tuple[Cut, ...]

    def ended(self, cut: Cut, committed: bool) -> None:
        """Watch no longer for this cut."""
