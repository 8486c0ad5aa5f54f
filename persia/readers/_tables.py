"""Tables in memory, Hugging Face data sets, and torch's loaders."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from persia.errors import ConfigError, DataTypeError
from persia.readers._reader import PieceReader, Reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from persia.embedding.data import PersiaBatch
    from persia.readers._columns import Columns
    from persia.readers._reader import Piece

PIECE_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Range:
    """Rows of a table, from one number to another."""

    table: Any
    begin: int
    end: int

    def num_rows(self) -> int:
        return self.end - self.begin

    def read(self) -> Iterator[Any]:
        if isinstance(self.table, pa.Table):
            part = self.table.slice(self.begin, self.num_rows())
        else:  # a data set: it knows of its own order, and of rows that it leaves out
            part = self.table[self.begin : self.end]
        yield from part.to_batches()


@dataclass(frozen=True, slots=True)
class _Stream:
    """A shard of a Hugging Face ``IterableDataset``."""

    shard: Any
    columns: Columns

    def num_rows(self) -> None:
        return None

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
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(columns, batch_size, shuffle_seed, drop_last, shard)
        if piece_rows < 1:
            raise ConfigError(f"piece_rows must be at least 1, got {piece_rows}")
        if isinstance(table, pa.Table):
            columns.check("the table", table.schema)
            table = table.select(columns.names)
        elif hasattr(table, "with_format") and hasattr(table, "features"):
            if table.features is not None:
                columns.check("the data set", table.features.arrow_schema)
                table = table.select_columns(columns.names)
            table = table.with_format("arrow")
        else:
            raise DataTypeError(
                "TableReader: expected a pyarrow.Table or a datasets.Dataset, "
                f"got {type(table).__name__}"
            )
        self._pieces = _pieces_of(table, columns, piece_rows)


def _pieces_of(table: Any, columns: Columns, piece_rows: int) -> list[Piece]:
    if not hasattr(table, "__len__"):
        size = table.num_shards
        return [_Stream(table.shard(size, number), columns) for number in range(size)]
    num_rows = len(table)
    return [
        _Range(table, begin, min(begin + piece_rows, num_rows))
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
        self.loader = loader
        self.columns = columns
        self.names = names

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        """Yield the loader's batches from number ``first`` on; those before it are read."""
        for given in itertools.islice(iter(self.loader), first, None):
            rows = self._rows_of(given)
            self.columns.check("a batch of the loader", rows.schema)
            yield self.columns.batch_of(rows)

    def _rows_of(self, given: Any) -> Any:
        if not isinstance(given, Mapping):
            names = self.names or ()
            if not isinstance(given, list | tuple) or len(names) != len(given):
                raise DataTypeError(
                    "TorchReader: expected the loader to yield mappings, or tuples of the "
                    f"columns in names={names!r}, got {given!r:.80}"
                )
            given = dict(zip(names, given, strict=True))
        used = [name for name in given if name in self.columns.names]
        return pa.RecordBatch.from_pydict({name: _array_of(name, given[name]) for name in used})


def _array_of(name: str, value: Any) -> Any:
    """Return a tensor, an array or a list as an Arrow array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_nested:
            offsets = value.offsets().numpy().astype(np.int64)
            return pa.LargeListArray.from_arrays(offsets, pa.array(value.values().numpy()))
        value = value.numpy()
    if not isinstance(value, np.ndarray) or value.ndim == 1:
        return pa.array(value)
    if value.ndim != 2:
        raise DataTypeError(
            f"column {name!r}: expected 1 or 2 dimensions, got {value.ndim} of {value.shape}"
        )
    return pa.FixedSizeListArray.from_arrays(pa.array(value.reshape(-1)), value.shape[1])
