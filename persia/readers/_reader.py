"""What all readers share: whose rows, in which order, and from which batch on.

    pieces      0  1  2  3  4  5     row groups, parts of a text, ranges of a table
    shuffled    4  1  5  0  3  2     by (seed, epoch)
    shard 1/2      1     0     2     every second one
    batches        [..][..][..]      of its rows one after the other, across pieces

The order is a function of the data, the seed, the epoch and the shard. So a position is one
number, the batches that are done, which is what a checkpoint keeps of a data-loader: a run that
continues asks for the rest, and gets exactly those rows. A piece that lies before is not read;
only its number of rows is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from persia import env
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from persia.ctx import DataCtx
    from persia.embedding.data import PersiaBatch
    from persia.readers._columns import Columns


class Piece(Protocol):
    """A part of the data that is read in one go."""

    def num_rows(self) -> int | None:
        """Return how many rows it has; None if it is known only once it was read."""

    def read(self) -> Iterator[Any]:
        """Yield its rows as ``pyarrow.RecordBatch``, in order."""


def own_shard() -> tuple[int, int]:
    """Return which of how many processes this one is: data-loaders, or else ranks."""
    size = env.get_replica_size()
    if size is not None:
        return env.get_replica_index() or 0, size
    return env.get_rank() or 0, env.get_world_size() or 1


class Reader(ABC):
    """Base of all readers; an iterable of ``PersiaBatch``, as ``DataLoader`` takes it.

    Attributes:
        buffer_size: As of ``IterableDataset``.
        epoch: Which order the next pass has, where the data is shuffled; set it before each.
    """

    buffer_size = 10
    epoch = 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one epoch."""
        return self.iter_from(0)

    @abstractmethod
    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        """Yield the batches of one epoch from number ``first`` on."""

    def send(self, ctx: DataCtx, epochs: int = 1) -> None:
        """Send the batches of some epochs, from where a run that continues has need of them.

        Once in an entered context, in which nothing was sent. For the trainer, all of them are
        one pass over its ``StreamingDataset``; ``epoch`` counts them from what it is.

        Example:
            >>> with DataCtx() as ctx:  # doctest: +SKIP
            ...     ParquetReader("clicks/", columns, 4096, shuffle_seed=1).send(ctx, epochs=3)
        """
        if epochs < 1:
            raise ConfigError(f"epochs must be at least 1, got {epochs}")
        first = ctx.resume_position
        ctx.seek(first)
        for batch in self._epochs(epochs, first):
            ctx.send_data(batch)

    def _epochs(self, count: int, first: int) -> Iterator[PersiaBatch]:
        for left in range(count - 1, -1, -1):
            size = self._num_batches() if first and left else None
            if size is not None and size <= first:
                first -= size
            elif first and left and size is None:
                for batch in self:  # only reading says how many there are
                    if first:
                        first -= 1
                    else:
                        yield batch
            else:
                yield from self.iter_from(first)
                first = 0
            self.epoch += bool(left)

    def _num_batches(self) -> int | None:
        """Return how many batches one epoch has; None if it is known only once it was read."""
        return None


class PieceReader(Reader):
    """A reader of data that comes in pieces.

    Args:
        columns: What is read.
        batch_size: Samples of a batch.
        shuffle_seed: Mixes the pieces, differently in each epoch; None keeps their order.
        drop_last: Leave out the last batch of a pass if it is smaller.
        shard: ``(index, size)``: read this one's part of the pieces only. None is
            ``REPLICA_INDEX`` of ``REPLICA_SIZE`` in a data-loader, and otherwise the rank.
    """

    def __init__(
        self,
        columns: Columns,
        batch_size: int,
        shuffle_seed: int | None,
        drop_last: bool,
        shard: tuple[int, int] | None,
    ) -> None:
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ConfigError(f"shuffle_seed must be at least 0, got {shuffle_seed}")
        if shard is not None and not 0 <= shard[0] < shard[1]:
            raise ConfigError(f"shard: expected an index below the size, got {shard}")
        self.columns = columns
        self.batch_size = batch_size
        self.shuffle_seed = shuffle_seed
        self.drop_last = drop_last
        self._shard = shard
        self._pieces: Sequence[Piece] = ()  # all, in the same order in every process

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        """Yield the batches of one epoch from number ``first`` on."""
        for rows in self._cut(_ahead(self._rows(first * self.batch_size))):
            yield self.columns.batch_of(rows)

    def num_batches(self) -> int:
        """Return how many batches one epoch of this shard has; asks every piece.

        Of what has to be read to know it, such as a stream, it is a ConfigError.
        """
        count = self._num_batches()
        if count is None:
            raise ConfigError(
                f"{type(self).__name__}: the number of its rows is not known before it was read"
            )
        return count

    def _num_batches(self) -> int | None:
        num_rows = 0
        for piece in self._own_pieces():
            count = piece.num_rows()
            if count is None:
                return None
            num_rows += count
        rest = 0 if self.drop_last else self.batch_size - 1
        return (num_rows + rest) // self.batch_size

    def _own_pieces(self) -> list[Piece]:
        """Return the pieces of this shard in the order of this epoch."""
        index, size = own_shard() if self._shard is None else self._shard
        if not self._pieces:
            raise ConfigError(f"{type(self).__name__}: expected data, got none")
        order = np.arange(len(self._pieces))
        if self.shuffle_seed is not None:
            order = np.random.default_rng([self.shuffle_seed, self.epoch]).permutation(order)
        return [self._pieces[number] for number in order[index::size]]

    def _rows(self, skipped: int) -> Generator[Any, None, None]:
        """Yield the rows of this shard but the first ``skipped``."""
        for piece in self._own_pieces():
            if skipped:
                num_rows = piece.num_rows()
                if num_rows is not None and num_rows <= skipped:
                    skipped -= num_rows
                    continue
            for rows in piece.read():
                begin = min(skipped, rows.num_rows)
                skipped -= begin
                if begin < rows.num_rows:
                    yield rows.slice(begin)

    def _cut(self, parts: Iterator[Any]) -> Iterator[Any]:
        """Yield the rows in batches; what a part leaves over begins the next one's first."""
        held: list[Any] = []
        missing = self.batch_size
        for part in parts:
            begin = 0
            while part.num_rows - begin >= missing:
                held.append(part.slice(begin, missing))
                begin += missing
                rows, held, missing = _joined(held), [], self.batch_size
                yield rows
            if begin < part.num_rows:
                held.append(part.slice(begin))
                missing -= part.num_rows - begin
        if held and not self.drop_last:
            yield _joined(held)


def _ahead(parts: Generator[Any, None, None]) -> Iterator[Any]:
    """Yield the parts, of which the next one is read meanwhile by another thread."""
    try:
        with ThreadPoolExecutor(1, "persia-read-ahead") as thread:
            coming = thread.submit(next, parts, None)
            while (part := coming.result()) is not None:
                coming = thread.submit(next, parts, None)
                yield part
    finally:
        parts.close()


def _joined(parts: list[Any]) -> Any:
    """Return record batches as one."""
    if len(parts) == 1:
        return parts[0]
    table = pa.Table.from_batches(parts).unify_dictionaries().combine_chunks()
    return table.to_batches()[0]
