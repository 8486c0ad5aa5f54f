"""Folders of Parquet and Arrow files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from persia.errors import ConfigError, DataError
from persia.readers._order import Span, between
from persia.readers._reader import SHUFFLE_BUFFER, PieceReader, no_such_file, paths_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from persia.readers._columns import Columns
    from persia.readers._reader import Paths

# Rows that are decoded at a time: enough that calls cost nothing, few enough for a cache.
CHUNK_ROWS = 1 << 15
# Bytes of a row group that is decoded in one go, which costs a third less; larger ones are
# decoded by chunks. Of numbers; texts and lists count by what they take in the file.
WHOLE_BYTES = 1 << 25
# Bytes of a column that are read at a time of a larger one: a row group as pandas writes it may
# have a million rows, and must not be held as a whole, packed or not.
READ_BYTES = 1 << 18
# Footers that are read at the same time, of files that may be far away.
NUM_THREADS = 16
# Columns of row groups that kept footers describe, of 0.8 kB each.
KEPT_CHUNKS = 100_000
# What Arrow raises of a file that is gone, or is another one by now.
_UNREADABLE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError)


class _Footers:
    """Footers of the files that were read last.

    A footer describes all row groups of its file: to parse it for each of them takes longer
    than to read them, if they are many and small.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Any] = {}  # the one used last at the end

    def of(self, path: str, source: Any) -> Any:
        """Return the footer of an open file; one that was written again has another size."""
        key = path, source.size()
        footer = self._kept.pop(key, None)
        if footer is None:
            footer = pq.read_metadata(source)
        self._kept[key] = footer
        num_chunks = 0
        for name, kept in reversed(list(self._kept.items())):
            num_chunks += kept.num_row_groups * kept.num_columns
            if num_chunks > KEPT_CHUNKS:
                self._kept.pop(name, None)
        return footer


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
            if name in self.reader.columns.names:
                kind = self.reader.schema.field(name).type
                names.append(name)
                arrays.append(pa.repeat(pa.scalar(value, kind), rows.num_rows))
        # Always made again: files of the same types may differ in nullability and metadata.
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def own_columns(self, schema: Any) -> list[str]:
        """Return the columns that are in the file, all checked."""
        names = [name for name in self.reader.columns.names if name not in self.keys]
        found = set(schema.names)
        for name in names:
            want = self.reader.schema.field(name).type
            got = schema.field(name).type if name in found else "no such column"
            if got != want:
                raise DataError(
                    f"{self.path}: column {name!r}: expected {want} as in the other files, "
                    f"got {got}"
                )
        return names


@dataclass(frozen=True, slots=True)
class _Part(Span):
    """Rows of a numbered part of a file, which is decoded from its beginning."""

    file: _File
    number: int
    size: int  # rows of the whole part when the reader was made

    def read(self) -> Iterator[Any]:
        try:
            yield from between(self._decoded(), self.begin, self.end)
        except _UNREADABLE as exc:
            raise DataError(
                f"{self.file.path}: expected to read part {self.number} of the file, got: {exc}"
            ) from exc

    def _decoded(self) -> Iterator[Any]:
        raise NotImplementedError

    def _check_size(self, got: int) -> None:
        """Check the part's number of rows, on which the order of all rows hangs."""
        if got != self.size:
            raise DataError(
                f"{self.file.path}: expected {self.size} rows in part {self.number} as when "
                f"the reader was made, got {got}; make a new reader of files that have changed"
            )


@dataclass(frozen=True, slots=True)
class _RowGroup(_Part):
    """Rows of a row group of a Parquet file."""

    def _decoded(self) -> Iterator[Any]:
        reader = self.file.reader
        with self.file.open() as source:
            footer = reader.footers.of(self.file.path, source)
            is_there = self.number < footer.num_row_groups
            self._check_size(footer.row_group(self.number).num_rows if is_there else 0)
            width = footer.row_group(self.number).total_byte_size
            is_small = max(width, 8 * self.size * len(reader.columns.names)) <= WHOLE_BYTES
            # From afar all columns are asked for at once. Of a disk that would be a wait before
            # any is decoded; as it is, each thread reads what it decodes.
            is_far = not isinstance(reader.filesystem, LocalFileSystem)
            opened = pq.ParquetFile(
                source, metadata=footer, pre_buffer=is_small and is_far, buffer_size=READ_BYTES
            )
            names = self.file.own_columns(opened.schema_arrow)
            # Of a part that another shard reads on from, what is behind its end is not decoded,
            # unless that is so little that all in one go costs less.
            if is_small and 4 * self.end >= 3 * self.size:
                parts = opened.read_row_group(self.number, columns=names).to_batches()
            else:
                # Whole batches, so that most of them are a part of one chunk; as many in each,
                # so that the last chunk ends near the end.
                most = max(CHUNK_ROWS // reader.batch_size, 1)
                batches = max(-(-self.end // reader.batch_size), 1)
                chunk = -(-batches // -(-batches // most)) * reader.batch_size
                parts = opened.iter_batches(chunk, row_groups=[self.number], columns=names)
            for rows in parts:
                yield self.file.whole(rows)


@dataclass(frozen=True, slots=True)
class _RecordBatch(_Part):
    """Rows of a record batch of an Arrow file."""

    def _decoded(self) -> Iterator[Any]:
        with self.file.open() as source:
            opened = pa.ipc.open_file(source)
            names = self.file.own_columns(opened.schema)
            is_there = self.number < opened.num_record_batches
            rows: Any = opened.get_batch(self.number).select(names) if is_there else ()
        self._check_size(len(rows))
        for begin in range(0, self.size, CHUNK_ROWS):
            yield self.file.whole(rows.slice(begin, CHUNK_ROWS))


class _FileReader(PieceReader):
    """A reader of a folder."""

    _FORMAT: str
    _SUFFIX: str

    def __init__(
        self,
        path: Paths,
        columns: Columns,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        shuffle_buffer: int | None = SHUFFLE_BUFFER,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
        filesystem: Any = None,
    ) -> None:
        super().__init__(columns, batch_size, shuffle_seed, shuffle_buffer, drop_last, shard)
        places, kind = paths_of(path), self._FORMAT
        source = places[0] if len(places) == 1 else places
        where = ", ".join(places)
        try:
            dataset = ds.dataset(
                source, format=kind, partitioning="hive", filesystem=filesystem
            )
        except FileNotFoundError as exc:
            raise no_such_file(where) from exc
        except IsADirectoryError as exc:
            raise ConfigError(f"{where:.200}: expected files in a list, got a folder") from exc
        except pa.ArrowInvalid as exc:
            raise ConfigError(f"{where:.200}: expected {kind} files, got: {exc}") from exc
        except TypeError as exc:
            raise ConfigError(
                "filesystem: expected one of pyarrow.fs or fsspec, or None, got "
                f"{filesystem!r:.80}"
            ) from exc
        if not dataset.files:
            raise ConfigError(f"no {self._SUFFIX} files in {where}")
        columns.check(places[0], dataset.schema)
        self.schema, self.filesystem = dataset.schema, dataset.filesystem
        self.footers = _Footers()
        fragments = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = list(threads.map(self._pieces_of, fragments))
        self._pieces = [piece for pieces in found for piece in pieces]

    def _pieces_of(self, fragment: Any) -> list[Span]:
        keys = ds.get_partition_keys(fragment.partition_expression)
        file = _File(self, fragment.path, keys)
        try:
            file.own_columns(fragment.physical_schema)
            return self._pieces_of_file(file, fragment)
        except _UNREADABLE as exc:
            raise ConfigError(
                f"{fragment.path}: expected a file of {self._FORMAT} as the others, got: {exc}"
            ) from exc

    @staticmethod
    def _pieces_of_file(file: _File, fragment: Any) -> list[Span]:
        raise NotImplementedError


class ParquetReader(_FileReader):
    """Reads a folder of Parquet files, one file, or a list of files.

    Pieces are row groups. The footers of all files are read at once, and of the rows what a few
    batches need; if samples are shuffled, what two windows hold.

    Args:
        path: Folder or file, a list of files, or a URL that Arrow knows (``s3://``, ``gs://``,
            ``hdfs://``). Folders named ``day=3`` are columns too.
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
    def _pieces_of_file(file: _File, fragment: Any) -> list[Span]:
        return [
            _RowGroup(0, group.num_rows, file, group.id, group.num_rows)
            for group in fragment.row_groups
        ]


class ArrowReader(_FileReader):
    """Reads a folder of Arrow files (``.arrow``, ``.feather``: the IPC file format), or one.

    Pieces are their record batches. The arguments are those of ``ParquetReader``.
    """

    _FORMAT = "ipc"
    _SUFFIX = ".arrow"

    @staticmethod
    def _pieces_of_file(file: _File, fragment: Any) -> list[Span]:
        with file.open() as source:
            schema = pa.ipc.open_file(source).schema
            # How many rows there are is read with one column, that of the fewest bytes.
            widths = [_num_bits(kind) for kind in schema.types]
            options = pa.ipc.IpcReadOptions(included_fields=[int(np.argmin(widths))])
            opened = pa.ipc.open_file(source, options=options)
            sizes = [opened.get_batch(i).num_rows for i in range(opened.num_record_batches)]
        return [_RecordBatch(0, size, file, number, size) for number, size in enumerate(sizes)]


def _num_bits(kind: Any) -> float:
    """Return the size of a value of a type; infinity if it is not the same for all."""
    try:
        return float(kind.bit_width)
    except ValueError:
        return float("inf")
