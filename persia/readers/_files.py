"""Folders of Parquet and Arrow files."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from persia.errors import ConfigError, DataError
from persia.readers._reader import PieceReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from persia.readers._columns import Columns
    from persia.readers._reader import Piece

# Rows that are decoded at a time: enough that calls cost nothing, few enough for a cache.
CHUNK_ROWS = 1 << 15
# Bytes of a row group that is decoded in one go, which costs a third less; larger ones are
# decoded by chunks. Of numbers; texts and lists count by what they take in the file.
WHOLE_BYTES = 1 << 25
# Footers that are read at the same time, of files that may be far away.
NUM_THREADS = 16


class _File:
    """One file: its columns, and those that its folders' names say (``day=3``)."""

    def __init__(self, reader: _FileReader, path: str, keys: dict[str, Any]) -> None:
        self.reader = reader
        self.path = path
        self.keys = keys

    def open(self) -> Any:
        return self.reader._filesystem.open_input_file(self.path)

    def whole(self, rows: Any) -> Any:
        """Return rows of the file with the columns of its folders."""
        names, arrays = list(rows.schema.names), list(rows.columns)
        for name, value in self.keys.items():
            if name in self.reader.columns.names and name not in names:
                kind = self.reader._schema.field(name).type
                names.append(name)
                arrays.append(pa.repeat(pa.scalar(value, kind), rows.num_rows))
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def own_columns(self, schema: Any) -> list[str]:
        """Return the columns that are in the file, all checked."""
        names = [name for name in self.reader.columns.names if name not in self.keys]
        for name in names:
            want = self.reader._schema.field(name).type
            got = schema.field(name).type if name in schema.names else "no such column"
            if got != want:
                raise DataError(
                    f"{self.path}: column {name!r}: expected {want} as in the other files, "
                    f"got {got}"
                )
        return names


class _RowGroup:
    """A row group of a Parquet file."""

    def __init__(self, file: _File, number: int, num_rows: int) -> None:
        self._file = file
        self._number = number
        self._num_rows = num_rows

    def num_rows(self) -> int:
        return self._num_rows

    def read(self) -> Iterator[Any]:
        file, size = self._file, self._file.reader.batch_size
        with file.open() as source:
            opened = pq.ParquetFile(source)
            names = file.own_columns(opened.schema_arrow)
            # Whole batches, so that most of them are a part of one chunk.
            chunk = max(CHUNK_ROWS // size, 1) * size
            group = opened.metadata.row_group(self._number)
            if max(group.total_byte_size, 8 * group.num_rows * len(names)) <= WHOLE_BYTES:
                parts = opened.read_row_group(self._number, columns=names).to_batches()
            else:
                parts = opened.iter_batches(chunk, row_groups=[self._number], columns=names)
            for rows in parts:
                yield file.whole(rows)


class _RecordBatch:
    """A record batch of an Arrow file."""

    def __init__(self, file: _File, number: int) -> None:
        self._file = file
        self._number = number

    def _get(self, source: Any, names: list[str] | None = None) -> Any:
        opened = pa.ipc.open_file(source)
        if names is None:
            return opened.get_batch(self._number)
        own = self._file.own_columns(opened.schema)
        return opened.get_batch(self._number).select(own)

    def num_rows(self) -> int:
        with self._file.open() as source:
            return int(self._get(source).num_rows)

    def read(self) -> Iterator[Any]:
        with self._file.open() as source:
            rows = self._get(source, self._file.reader.columns.names)
        for begin in range(0, rows.num_rows, CHUNK_ROWS):
            yield self._file.whole(rows.slice(begin, CHUNK_ROWS))


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
        super().__init__(
            columns, batch_size, shuffle_seed=shuffle_seed, drop_last=drop_last, shard=shard
        )
        try:
            dataset = ds.dataset(
                os.fspath(path),
                format=self._FORMAT,
                partitioning="hive",
                filesystem=filesystem,
            )
        except FileNotFoundError as exc:
            raise ConfigError(f"{os.fspath(path)}: no such file or folder") from exc
        except pa.ArrowInvalid as exc:
            raise ConfigError(
                f"{os.fspath(path)}: expected {self._FORMAT} files, got: {exc}"
            ) from exc
        if not dataset.files:
            raise ConfigError(f"no {self._SUFFIX} files in {os.fspath(path)}")
        columns.check(os.fspath(path), dataset.schema)
        self._schema = dataset.schema
        self._filesystem = dataset.filesystem
        fragments = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = list(threads.map(self._pieces_of, fragments))
        self._all: list[Piece] = [piece for pieces in found for piece in pieces]

    def _pieces(self) -> Sequence[Piece]:
        return self._all

    def _file_of(self, fragment: Any) -> _File:
        return _File(self, fragment.path, ds.get_partition_keys(fragment.partition_expression))

    def _pieces_of(self, fragment: Any) -> list[Piece]:
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
        shuffle_seed: Mixes the row groups.
        drop_last: Leave out a last batch that is smaller.
        shard: Whose part is read.
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

    def _pieces_of(self, fragment: Any) -> list[Piece]:
        file = self._file_of(fragment)
        return [_RowGroup(file, group.id, group.num_rows) for group in fragment.row_groups]


class ArrowReader(_FileReader):
    """Reads a folder of Arrow files (``.arrow``, ``.feather``: the IPC file format), or one.

    Pieces are their record batches. The arguments are those of ``ParquetReader``.
    """

    _FORMAT = "ipc"
    _SUFFIX = ".arrow"

    def _pieces_of(self, fragment: Any) -> list[Piece]:
        file = self._file_of(fragment)
        with file.open() as source:
            count = pa.ipc.open_file(source).num_record_batches
        return [_RecordBatch(file, number) for number in range(count)]
