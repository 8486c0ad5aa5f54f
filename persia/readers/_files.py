"""Folders of Parquet and Arrow files."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from persia.errors import ConfigError, DataError
from persia.readers._reader import PieceReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from persia.readers._columns import Columns
    from persia.readers._reader import Piece

# Rows that are decoded at a time: enough that calls cost nothing, few enough for a cache.
CHUNK_ROWS = 1 << 15
# Bytes of a row group that is decoded in one go, which costs a third less; larger ones are
# decoded by chunks. Of numbers; texts and lists count by what they take in the file.
WHOLE_BYTES = 1 << 25
# Footers that are read at the same time, of files that may be far away.
NUM_THREADS = 16


@dataclass(frozen=True, slots=True)
class _File:
    """One file: its columns, and those that its folders' names say (``day=3``)."""

    reader: _FileReader
    path: str
    keys: dict[str, Any]

    def open(self) -> Any:
        return self.reader.filesystem.open_input_file(self.path)

    def whole(self, rows: Any) -> Any:
        """Return rows of the file with the columns of its folders."""
        names, arrays = list(rows.schema.names), list(rows.columns)
        for name, value in self.keys.items():
            if name in self.reader.columns.names and name not in names:
                kind = self.reader.schema.field(name).type
                names.append(name)
                arrays.append(pa.repeat(pa.scalar(value, kind), rows.num_rows))
        # Always made again: files of the same types may differ in nullability and metadata.
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def own_columns(self, schema: Any) -> list[str]:
        """Return the columns that are in the file, all checked."""
        names = [name for name in self.reader.columns.names if name not in self.keys]
        for name in names:
            want = self.reader.schema.field(name).type
            got = schema.field(name).type if name in schema.names else "no such column"
            if got != want:
                raise DataError(
                    f"{self.path}: column {name!r}: expected {want} as in the other files, "
                    f"got {got}"
                )
        return names


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """A row group of a Parquet file."""

    file: _File
    number: int
    size: int

    def num_rows(self) -> int:
        return self.size

    def read(self) -> Iterator[Any]:
        size = self.file.reader.batch_size
        with self.file.open() as source:
            opened = pq.ParquetFile(source)
            names = self.file.own_columns(opened.schema_arrow)
            # Whole batches, so that most of them are a part of one chunk.
            chunk = max(CHUNK_ROWS // size, 1) * size
            group = opened.metadata.row_group(self.number)
            if max(group.total_byte_size, 8 * group.num_rows * len(names)) <= WHOLE_BYTES:
                parts = opened.read_row_group(self.number, columns=names).to_batches()
            else:
                parts = opened.iter_batches(chunk, row_groups=[self.number], columns=names)
            for rows in parts:
                yield self.file.whole(rows)


@dataclass(frozen=True, slots=True)
class _RecordBatch:
    """A record batch of an Arrow file."""

    file: _File
    number: int

    def num_rows(self) -> int:
        with self.file.open() as source:
            return int(pa.ipc.open_file(source).get_batch(self.number).num_rows)

    def read(self) -> Iterator[Any]:
        with self.file.open() as source:
            opened = pa.ipc.open_file(source)
            names = self.file.own_columns(opened.schema)
            rows = opened.get_batch(self.number).select(names)
        for begin in range(0, rows.num_rows, CHUNK_ROWS):
            yield self.file.whole(rows.slice(begin, CHUNK_ROWS))


class _FileReader(PieceReader):
    """A reader of a folder."""

    _FORMAT: str
    _SUFFIX: str

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Columns,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
        filesystem: Any = None,
    ) -> None:
        super().__init__(columns, batch_size, shuffle_seed, drop_last, shard)
        place, kind = os.fspath(path), self._FORMAT
        try:
            dataset = ds.dataset(place, format=kind, partitioning="hive", filesystem=filesystem)
        except FileNotFoundError as exc:
            raise ConfigError(f"{place}: no such file or folder") from exc
        except pa.ArrowInvalid as exc:
            raise ConfigError(f"{place}: expected {kind} files, got: {exc}") from exc
        if not dataset.files:
            raise ConfigError(f"no {self._SUFFIX} files in {place}")
        columns.check(place, dataset.schema)
        self.schema, self.filesystem = dataset.schema, dataset.filesystem
        fragments = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = list(threads.map(self._pieces_of, fragments))
        self._pieces = [piece for pieces in found for piece in pieces]

    def _pieces_of(self, fragment: Any) -> list[Piece]:
        keys = ds.get_partition_keys(fragment.partition_expression)
        return self._pieces_of_file(_File(self, fragment.path, keys), fragment)

    @staticmethod
    def _pieces_of_file(file: _File, fragment: Any) -> list[Piece]:
        raise NotImplementedError


class ParquetReader(_FileReader):
    """Reads a folder of Parquet files, or one file.

    Pieces are row groups: what is shuffled, and what is dealt to data-loaders. The footers of
    all files are read at once, and of the rows what a few batches need.

    Args:
        path: Folder or file, or a URL that Arrow knows (``s3://``, ``gs://``, ``hdfs://``).
            Folders named ``day=3`` are columns too.
        columns: As of ``PieceReader``, as are the others not named here.
        batch_size: Samples of a batch.
        filesystem: A ``pyarrow.fs.FileSystem`` or one of fsspec, if not the URL's.

    Raises:
        ConfigError: If there are no such files, or a column is in none.
        DataTypeError: If a column's type cannot be read.

    Example:
        >>> columns = Columns(ids=["user"], labels=["click"])  # doctest: +SKIP
        >>> for batch in ParquetReader("clicks/", columns, 4096):  # doctest: +SKIP
        ...     print(batch.batch_size)
    """

    _FORMAT = "parquet"
    _SUFFIX = ".parquet"

    @staticmethod
    def _pieces_of_file(file: _File, fragment: Any) -> list[Piece]:
        return [_RowGroup(file, group.id, group.num_rows) for group in fragment.row_groups]


class ArrowReader(_FileReader):
    """Reads a folder of Arrow files (``.arrow``, ``.feather``: the IPC file format), or one.

    Pieces are their record batches. The arguments are those of ``ParquetReader``.
    """

    _FORMAT = "ipc"
    _SUFFIX = ".arrow"

    @staticmethod
    def _pieces_of_file(file: _File, fragment: Any) -> list[Piece]:
        with file.open() as source:
            count = pa.ipc.open_file(source).num_record_batches
        return [_RecordBatch(file, number) for number in range(count)]
