from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from persia._core.store.blocks import RowBlock

@final
class Snapshot:
    """The rows of a store at one moment; ``EmbeddingStore.begin_snapshot`` makes it.

    A row that changes before it is read is copied first, so what comes out is of that moment
    however long the reading takes. Reading is for one thread at a time. A snapshot is to be
    closed, by ``close`` or as a context manager; one that is not read makes training wait,
    once, and is then given up: StoreError says so to its reader.
    """

    num_rows: int  # at that moment; of a snapshot of changes, an upper bound
    is_full: bool  # all rows and no deletions: whatever the reader had is out of date
    is_read: bool  # all its blocks were given out
    is_closed: bool  # it is over, read or not
    consumer: str | None  # the one whose changes it has
    copied_bytes: int  # of copies if every row changes at once, an upper bound
    side_bytes: int  # of copies, above which the next request waits for the reader
    last: int  # number of the epoch that it closed

    @property
    def fill(self) -> float:
        """What part of their room copies take; beyond 1 requests wait for the reader."""

    def allow(self, side_bytes: int) -> None:
        """Let copies take so much, from now on."""

    def blocks(self, max_rows: int = 65536) -> Iterator[RowBlock]:
        """Yield the rows, shard after shard, in no particular order; once."""

    def deleted(self) -> NDArray[np.uint64]:
        """Return the signs dropped since the consumer's last snapshot, each once, ascending.

        To be applied before the rows: a sign that came again is in both.
        """

    def commit(self) -> None:
        """The rows are safe: the consumer's next snapshot begins where this one ended."""

    def close(self) -> None:
        """End the snapshot; unless committed, its changes come again in the next one."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class Watch:
    """Consumers of a store's changes, and snapshots under way."""

    cursors: dict[str, int | None]
    snapshots: tuple[Snapshot, ...]
