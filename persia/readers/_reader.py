"""What all readers share: batches of rows, from which batch on, and how many there are."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from persia import env
from persia.errors import ConfigError, DataTypeError
from persia.readers import _order
from persia.readers._columns import Columns, check_bool
from persia.readers._windows import batches_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from persia.ctx import DataCtx
    from persia.embedding.data import PersiaBatch
    from persia.readers._order import Piece

logger = logging.getLogger(__name__)

# Samples that are mixed at a time: more mix better, and are held in memory twice.
SHUFFLE_BUFFER = 100_000


def own_shard() -> tuple[int, int]:
    """Return which of how many processes this one is: data-loaders, or else ranks."""
    size = env.get_replica_size()
    if size is not None:
        return env.get_replica_index() or 0, size
    return env.get_rank() or 0, env.get_world_size() or 1


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def paths_of(path: Paths) -> list[str]:
    """Return a path, or those of a list, as texts."""
    paths: Sequence[Any] = path if isinstance(path, list | tuple) else [path]
    if not paths or not all(isinstance(each, str | os.PathLike) for each in paths):
        raise ConfigError(f"path: expected a file, a folder or a list of files, got {path!r}")
    return [os.fspath(each) for each in paths]


def no_such_file(where: str) -> ConfigError:
    """Return the error that there is nothing at a path."""
    is_pattern = "*" in where or "?" in where
    todo = "; a pattern is not expanded: give a list, glob.glob(...)" if is_pattern else ""
    return ConfigError(f"{where:.200}: no such file or folder{todo}")


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

    def send(self, ctx: DataCtx, epochs: int = 1, *, epoch_ends: bool = False) -> None:
        """Send the batches of some epochs, from where a run that continues has need of them.

        Once in an entered context, in which nothing was sent; ``epoch`` counts them from what
        it is. With ``epoch_ends`` each is one loop over the trainer's DataLoader, which can
        validate between two; without, all of them are one loop.

        Example:
            >>> with DataCtx() as ctx:  # doctest: +SKIP
            ...     reader = ParquetReader("clicks/", columns, 4096, shuffle_seed=1)
            ...     reader.send(ctx, epochs=3, epoch_ends=True)
        """
        check_number("epochs", epochs)
        first = ctx.resume_position
        ctx.seek(first)
        end_epoch = ctx.end_epoch if epoch_ends else lambda: None
        for batch in self._epochs(epochs, first, end_epoch):
            ctx.send_data(batch)

    def __len__(self) -> int:
        """Return how many batches one epoch has, where that is known."""
        raise TypeError(
            f"{type(self).__name__} has no len: how many batches there are is known only once "
            "they were read"
        )

    def __bool__(self) -> bool:
        """Return True: a reader without a len can be asked for all the same."""
        return True

    def _epochs(
        self, count: int, first: int, end_epoch: Callable[[], None]
    ) -> Iterator[PersiaBatch]:
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
            if left:
                self.epoch += 1
                end_epoch()  # one that was left out, too

    def _num_batches(self) -> int | None:
        """Return how many batches one epoch has; None if it is known only once it was read."""
        return None


class PieceReader(Reader):
    """A reader of data that comes in pieces.

    Args:
        columns: What is read.
        batch_size: Samples of a batch.
        shuffle_seed: Shuffles pieces and samples, differently in each epoch; None keeps the
            order of the data.
        shuffle_buffer: Samples that are shuffled among each other, rounded up to whole batches;
            about twice as many are held in memory. None or 1: samples of a piece stay together.
        drop_last: Leave out the last batch of a pass if it is smaller.
        shard: ``(index, size)``: read this part of the rows only. None is ``REPLICA_INDEX`` of
            ``REPLICA_SIZE`` in a data-loader, and otherwise the rank.

    Attributes:
        allow_empty: Whether a pass may have no batch; otherwise that is a ConfigError, for a
            process without data trains nothing and says nothing.
    """

    allow_empty = False

    def __init__(
        self,
        columns: Columns,
        batch_size: int,
        shuffle_seed: int | None,
        shuffle_buffer: int | None,
        drop_last: bool,
        shard: tuple[int, int] | None,
    ) -> None:
        check_columns(self, columns)
        check_number("batch_size", batch_size)
        check_number("shuffle_seed", shuffle_seed, 0, or_none=True)
        check_number("shuffle_buffer", shuffle_buffer, or_none=True)
        check_bool("drop_last", drop_last)
        if shuffle_seed is None and shuffle_buffer not in (None, 1, SHUFFLE_BUFFER):
            raise ConfigError(
                f"shuffle_buffer={shuffle_buffer}: expected shuffle_seed= beside it, got none; "
                "without a seed nothing is shuffled"
            )
        if shard is not None and not _is_shard(shard):
            raise ConfigError(
                f"shard: expected an index below the size, (index, size), got {shard!r}"
            )
        self.columns = columns
        self.batch_size = batch_size
        self.shuffle_seed = shuffle_seed
        self.shuffle_buffer = shuffle_buffer
        self.drop_last = drop_last
        self._shard = shard
        self._pieces: Sequence[Piece] = ()  # all, in the same order in every process
        self._last_epoch: int | None = None  # that was read

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        """Yield the batches of one epoch from number ``first`` on."""
        self._note_epoch()
        pieces = self._own_pieces()
        is_mixed = self.shuffle_seed is not None and self.shuffle_buffer not in (None, 1)
        has_any = first > 0
        for batch in (self._mixed if is_mixed else self._in_order)(pieces, first):
            has_any = True
            yield batch
        if not has_any:
            self._refuse_empty()

    def num_batches(self) -> int:
        """Return how many batches one epoch of this shard has; text is read to count its lines.

        Of what has to be read to know it, such as a stream, it is a ConfigError.
        """
        count = self._num_batches()
        if count is None:
            raise ConfigError(
                f"{type(self).__name__}: the number of its rows is not known before it was read"
            )
        if not count:
            self._refuse_empty()
        return count

    def __len__(self) -> int:
        """Return ``num_batches``, where that is known without reading.

        Raises:
            TypeError: If it is not; says why.
        """
        if not all(isinstance(piece, _order.Span) for piece in self._pieces):
            return super().__len__()
        return self.num_batches()

    def _num_batches(self) -> int | None:
        num_rows = _num_rows(self._own_pieces())
        if num_rows is None:
            return None
        rest = 0 if self.drop_last else self.batch_size - 1
        return (num_rows + rest) // self.batch_size

    def _note_epoch(self) -> None:
        """Log an order that comes again, which scripts mean to be another."""
        if self.shuffle_seed is not None and self.epoch == self._last_epoch:
            logger.warning(
                "%s: epoch %d is read again, in the same order; write `reader.epoch = ...` "
                "before each pass for another one",
                type(self).__name__,
                self.epoch,
            )
        self._last_epoch = self.epoch

    def _own_shard(self) -> tuple[int, int]:
        return own_shard() if self._shard is None else self._shard

    def _own_pieces(self) -> Sequence[Piece]:
        """Return the pieces of this shard in the order of this epoch."""
        pieces = self._pieces
        if self.shuffle_seed is not None:
            rng = np.random.default_rng([self.shuffle_seed, self.epoch])
            pieces = [pieces[number] for number in rng.permutation(len(pieces))]
        return _order.deal(pieces, self._own_shard())

    def _in_order(self, pieces: Sequence[Piece], first: int) -> Iterator[PersiaBatch]:
        """Yield the batches, the rows of a piece together."""
        rows = _order.rows_of(pieces, first * self.batch_size)
        read = (part for part, _ in _ahead(rows))
        for one in map(_order.joined, _order.cut(read, self.batch_size)):
            if one.num_rows == self.batch_size or not self.drop_last:
                yield self.columns.batch_of(one)

    def _mixed(self, pieces: Sequence[Piece], first: int) -> Iterator[PersiaBatch]:
        """Yield the batches, their rows mixed within windows, each of some whole batches."""
        in_window = -(-(self.shuffle_buffer or 1) // self.batch_size)
        number, first = divmod(first, in_window)
        size = in_window * self.batch_size
        # As they are now: ``epoch`` may be set for the next pass meanwhile.
        seed = [self.shuffle_seed or 0, self.epoch, *self._own_shard()]
        windows = _order.cut(_order.rows_of(pieces, number * size), size)
        for place, (parts, thread) in enumerate(_ahead(windows), number):
            num_rows = sum(part.num_rows for part in parts)
            order = _order.permutation(num_rows, [*seed, place])
            last = num_rows - (num_rows % self.batch_size if self.drop_last else 0)
            order = order[first * self.batch_size : last]
            yield from batches_of(self.columns, parts, order, self.batch_size, thread)
            first = 0

    def _refuse_empty(self) -> None:
        """Raise that a pass has no batch, unless that is wanted."""
        if self.allow_empty:
            return
        index, count = self._own_shard()
        own, whole = _num_rows(self._own_pieces()), _num_rows(self._pieces)
        if own:
            what = (
                f"shard {index} of {count} has {own} rows, and drop_last=True leaves out a "
                f"batch of fewer than {self.batch_size}"
            )
            todo = "take a smaller batch_size, or drop_last=False"
        elif count == 1 or whole == 0:
            what, todo = "expected data, got none", "look what is at the path or in the table"
        else:
            has = "too few rows for that" if whole is None else f"{whole} in all"
            what = f"shard {index} of {count} has no rows; there are {has}"
            todo = "start fewer data-loaders or ranks, or read all in each by shard=(0, 1)"
        raise ConfigError(
            f"{type(self).__name__}: {what}; {todo}; `reader.allow_empty = True` lets it pass"
        )


def check_columns(reader: Reader, columns: Any) -> None:
    """Check that ``Columns`` say what is read, and no list of names."""
    if not isinstance(columns, Columns):
        raise DataTypeError(
            f"{type(reader).__name__}: columns: expected Columns(ids=[...], dense=[...], "
            f"labels=[...]), got {columns!r:.80}"
        )


def check_number(name: str, value: object, least: int = 1, *, or_none: bool = False) -> None:
    """Check an argument that is a whole number."""
    if not _is_number(value, least) and not (or_none and value is None):
        also = ", or None" if or_none else ""
        raise ConfigError(
            f"{name} must be a whole number, at least {least}{also}, got {value!r:.80}"
        )


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= least)


def _is_shard(shard: Any) -> bool:
    is_pair = isinstance(shard, tuple | list) and len(shard) == 2
    return is_pair and all(_is_number(each, 0) for each in shard) and shard[0] < shard[1]


def _num_rows(pieces: Sequence[Piece]) -> int | None:
    """Return the number of all rows; None if it is known only once they were read."""
    total = 0
    for piece in pieces:
        count = piece.num_rows()
        if count is None:
            return None
        total += count
    return total


def _ahead(parts: Generator[Any, None, None]) -> Iterator[tuple[Any, ThreadPoolExecutor]]:
    """Yield the parts, each with the thread that reads the next one meanwhile."""
    try:
        with ThreadPoolExecutor(1, "persia-read-ahead") as thread:
            coming = thread.submit(next, parts, None)
            while (part := coming.result()) is not None:
                coming = thread.submit(next, parts, None)
                yield part, thread
    finally:
        parts.close()
