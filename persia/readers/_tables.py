"""Tables in memory, Hugging Face data sets, and torch's loaders."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persia.errors import DataTypeError
from persia.readers._columns import missing, names_of
from persia.readers._order import Piece, Span
from persia.readers._reader import (
    SHUFFLE_BUFFER,
    PieceReader,
    Reader,
    check_columns,
    check_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from persia.embedding.data import PersiaBatch
    from persia.readers._columns import Columns

PIECE_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Range(Span):
    """Rows of a table, from one number to another."""

    table: Any

    def read(self) -> Iterator[Any]:
        if isinstance(self.table, pa.Table):
            part = self.table.slice(self.begin, self.num_rows())
        else:  # a data set: it knows of its own order, and of rows that it leaves out
            part = self.table[self.begin : self.end]
        yield from part.to_batches()


@dataclass(frozen=True, slots=True)
class _Stream(Piece):
    """A shard of a Hugging Face ``IterableDataset``."""

    shard: Any
    columns: Columns

    def read(self) -> Iterator[Any]:
        for table in self.shard.iter(batch_size=PIECE_ROWS):
            self.columns.check("the data set", table.schema)
            yield from table.to_batches()


class TableReader(PieceReader):
    """Reads a ``pyarrow.Table``, or a ``datasets.Dataset`` of Hugging Face, streamed or not.

    Pieces are ranges of rows; of a streamed data set, its own shards.

    Args:
        table: The table or data set. Other columns than those asked for are left alone.
        columns: As of ``PieceReader``, as are the others.
        batch_size: Samples of a batch.
        piece_rows: Rows of a piece.

    Raises:
        ConfigError: If a column is not there.
        DataTypeError: If it is no table, or a column's type cannot be read.
    """

    def __init__(
        self,
        table: Any,
        columns: Columns,
        batch_size: int,
        *,
        piece_rows: int = PIECE_ROWS,
        shuffle_seed: int | None = None,
        shuffle_buffer: int | None = SHUFFLE_BUFFER,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(columns, batch_size, shuffle_seed, shuffle_buffer, drop_last, shard)
        check_number("piece_rows", piece_rows)
        if isinstance(table, pa.Table):
            columns.check("the table", table.schema)
            table = table.select(columns.names)
        elif hasattr(table, "with_format") and hasattr(table, "features"):
            if table.features is not None:
                columns.check("the data set", table.features.arrow_schema)
                table = table.select_columns(columns.names)
            table = table.with_format("arrow")
        else:
            todo = "; pa.Table.from_pandas(frame) is one" if hasattr(table, "iloc") else ""
            raise DataTypeError(
                "TableReader: expected a pyarrow.Table or a datasets.Dataset, "
                f"got {type(table).__name__}{todo}"
            )
        self._pieces = _pieces_of(table, columns, piece_rows)


def _pieces_of(table: Any, columns: Columns, piece_rows: int) -> list[Piece]:
    if not hasattr(table, "__len__"):
        size = table.num_shards
        return [_Stream(table.shard(size, number), columns) for number in range(size)]
    num_rows = len(table)
    return [
        _Range(begin, min(begin + piece_rows, num_rows), table)
        for begin in range(0, num_rows, piece_rows)
    ]


class TorchReader(Reader):
    """Reads a ``torch.utils.data.DataLoader``, or anything that yields batches of tensors.

    The batches are the loader's, and so is their order: a run that continues reads and leaves
    out what was trained, which is the same if the loader's order is (seed its ``generator``
    in each epoch).

    Args:
        loader: Yields mappings from a column to its tensor, array or list, of one or two
            dimensions; or tuples of them.
        columns: What of it is what.
        names: The columns of a tuple.

    Example:
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=512)  # doctest: +SKIP
        >>> reader = TorchReader(loader, Columns(["user"], labels=["click"]))  # doctest: +SKIP
    """

    def __init__(
        self, loader: Iterable[Any], columns: Columns, *, names: Sequence[str] | None = None
    ) -> None:
        check_columns(self, columns)
        # A data set of torch has no ``__iter__``; Python would read its samples without an end.
        if not hasattr(loader, "__iter__") or isinstance(loader, str | type):
            raise DataTypeError(
                "TorchReader: expected a loader of batches, got "
                f"{getattr(loader, '__name__', None) or type(loader).__name__}; "
                "torch.utils.data.DataLoader(dataset, batch_size=...) is one"
            )
        self.loader = loader
        self.columns = columns
        self.names = None if names is None else names_of("names", names)

    def __len__(self) -> int:
        """Return how many batches the loader says it has."""
        return len(self.loader) if isinstance(self.loader, Sized) else super().__len__()

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        """Yield the loader's batches from number ``first`` on; those before it are read."""
        columns = self.columns
        for given in itertools.islice(iter(self.loader), first, None):
            values = self._named(given)
            for name in columns.labels:
                if name not in values:
                    raise missing("a batch of the loader", name, "labels", list(values))
            yield columns.batch(values, requires_grad=columns.requires_grad)

    def _named(self, given: Any) -> Mapping[str, Any]:
        """Return a batch's values by their columns."""
        if isinstance(given, Mapping):
            return given
        names = self.names or ()
        if not isinstance(given, list | tuple) or len(names) != len(given):
            raise DataTypeError(
                "TorchReader: expected the loader to yield mappings, or tuples of the "
                f"columns in names={names!r}, got {given!r:.80}"
            )
        return dict(zip(names, given, strict=True))
