"""Which rows a process reads in an epoch, and in which order.

    pieces      0  1  2  3           row groups, parts of a text, ranges of a table
    shuffled    2  0  3  1           by (seed, epoch)
    shard 1/2        [.3  1]         the second half of these rows
    windows          [...)[..)       of shuffle_buffer rows; those of each are mixed by
    batches          [.)[.)[.)       (seed, epoch, shard, window)

The order is a function of the data, the seed, the epoch and the shard. So a position is one
number, the batches that are done, which is what a checkpoint keeps of a data-loader: a run that
continues asks for the rest, and gets exactly those rows. A piece or window that lies before is
not read; only a piece's number of rows is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

# Rows in a row that one shard keeps of pieces of unknown sizes. More than one: the rows of logs
# often alternate (a click, one without), and a shard must not get one kind only.
TURN_ROWS = 64


class Piece(ABC):
    """A part of the data that is read in one go."""

    @abstractmethod
    def read(self) -> Iterator[Any]:
        """Yield its rows as ``pyarrow.RecordBatch``, in order."""

    def num_rows(self) -> int | None:
        """Return how many rows it has; None if it is known only once it was read."""
        return None


@dataclass(frozen=True, slots=True)
class Span(Piece):
    """A piece that can be cut anywhere: rows of something, or bytes of a text."""

    begin: int
    end: int

    def num_rows(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> Span:
        """Return what lies between two places, counted from the beginning of this one."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)


@dataclass(frozen=True, slots=True)
class _Turns(Piece):
    """The runs of rows of all pieces that are one shard's turn: each reads all of them."""

    pieces: Sequence[Piece]
    index: int
    count: int

    def read(self) -> Iterator[Any]:
        begin = 0
        for piece in self.pieces:
            for rows in piece.read():
                numbers = np.arange(begin, begin + rows.num_rows)
                is_own = numbers // TURN_ROWS % self.count == self.index
                begin += rows.num_rows
                yield rows.filter(pa.array(is_own))


def deal(pieces: Sequence[Piece], shard: tuple[int, int]) -> Sequence[Piece]:
    """Return what one shard of ``(index, count)`` has of the pieces, in their order.

    Shards are equal parts of the whole, cut inside pieces where need be. Pieces that cannot be
    cut are dealt one by one, or if there are fewer than shards by turns of rows.
    """
    index, count = shard
    if count == 1:
        return pieces
    spans = [piece for piece in pieces if isinstance(piece, Span)]
    if len(spans) < len(pieces):
        return pieces[index::count] if len(pieces) >= count else [_Turns(pieces, index, count)]
    whole = sum(span.end - span.begin for span in spans)
    first, last = index * whole // count, (index + 1) * whole // count
    parts: list[Piece] = []
    for span in spans:
        size = span.end - span.begin
        begin, end = max(first, 0), min(last, size)
        if begin < end:
            parts.append(span.part(begin, end))
        first, last = first - size, last - size
    return parts


def rows_of(pieces: Iterable[Piece], skipped: int) -> Generator[Any, None, None]:
    """Yield the rows of pieces but the first ``skipped``."""
    for piece in pieces:
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


def between(parts: Iterator[Any], begin: int, end: int) -> Iterator[Any]:
    """Yield the rows of record batches from one number to another."""
    for part in parts:
        rows = part.slice(max(begin, 0), max(min(end, part.num_rows) - max(begin, 0), 0))
        begin, end = begin - part.num_rows, end - part.num_rows
        if rows.num_rows:
            yield rows
        if end <= 0:
            return


def cut(parts: Iterable[Any], size: int) -> Generator[list[Any], None, None]:
    """Yield parts of ``size`` rows in all; what a part leaves over begins the next ones."""
    held: list[Any] = []
    missing = size
    for part in parts:
        begin = 0
        while part.num_rows - begin >= missing:
            done, held = [*held, part.slice(begin, missing)], []
            begin += missing
            missing = size
            yield done
        if begin < part.num_rows:
            held.append(part.slice(begin))
            missing -= part.num_rows - begin
    if held:
        yield held


def joined(parts: list[Any]) -> Any:
    """Return record batches as one."""
    if len(parts) == 1:
        return parts[0]
    names = parts[0].schema.names
    arrays = [column_of([part.column(name) for part in parts]) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def column_of(arrays: list[Any], rows: NDArray[np.int64] | None = None) -> Any:
    """Return the arrays of a column as one; with ``rows``, these of it, in their order."""
    column = pa.chunked_array(arrays)
    if rows is not None:
        # All at once: by batches it takes more than twice as long. No place is beyond the end.
        column = pc.take(column, pa.array(rows), boundscheck=False)
    # Which copies even a single one.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def permutation(num_rows: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return the numbers of some rows in a random order."""
    return np.random.default_rng(seed).permutation(num_rows)
