"""Text in the layout of Criteo's logs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs

from persia.errors import ConfigError, DataError
from persia.readers._columns import Columns
from persia.readers._reader import PieceReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from persia.readers._reader import Piece

NUM_DENSE = 13
NUM_IDS = 26
LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, NUM_DENSE + 1))
IDS = tuple(f"C{number}" for number in range(1, NUM_IDS + 1))

BLOCK_BYTES = 16 << 20
# What is read at a time beyond a block, until its last line ends.
_LOOK_BYTES = 1 << 16
_PACKED = (".gz", ".bz2", ".zst", ".lz4")


class _Format:
    """How lines become columns."""

    def __init__(self, names: Sequence[str], delimiter: str, columns: Columns) -> None:
        types = {name: pa.string() if name in IDS else pa.float32() for name in names}
        self._read = pacsv.ReadOptions(column_names=list(names))
        # A line without anything is a row of nulls: rows are counted by lines.
        self._parse = pacsv.ParseOptions(
            delimiter=delimiter, quote_char=False, ignore_empty_lines=False
        )
        self._convert = pacsv.ConvertOptions(
            column_types=types,
            include_columns=columns.names,
            null_values=[""],
            strings_can_be_null=True,
        )

    def parse(self, where: str, source: Any) -> Iterator[Any]:
        """Yield record batches of a stream of lines."""
        try:
            yield from pacsv.open_csv(source, self._read, self._parse, self._convert)
        except pa.ArrowInvalid as exc:
            raise DataError(f"{where}: expected lines in Criteo's layout, got: {exc}") from exc


class _Block:
    """The lines of a file that begin in a range of its bytes."""

    def __init__(
        self, open_file: Callable[[], Any], path: str, begin: int, end: int, lines: _Format
    ) -> None:
        self._open = open_file
        self._path = path
        self._begin = begin
        self._end = end
        self._format = lines

    def _text(self) -> bytes:
        """Return those lines: from behind the first newline at ``begin - 1`` or later."""
        before = min(self._begin, 1)
        with self._open() as file:
            file.seek(self._begin - before)
            text: bytes = file.read(self._end - self._begin + before)
            # The line in which the block ends belongs to it, if it begins there.
            parts, has_ended = [text], text.endswith(b"\n")
            while not has_ended:
                more: bytes = file.read(_LOOK_BYTES)
                place = more.find(b"\n")
                parts.append(more if place < 0 else more[: place + 1])
                has_ended = place >= 0 or not more
        first = text.find(b"\n") + 1 if before else 0
        if before and not first:
            return b""  # one line that began before the block, and ends behind it
        return b"".join([text[first:], *parts[1:]]) if first < len(text) else b""

    def num_rows(self) -> int:
        text = self._text()
        return text.count(b"\n") + bool(text and not text.endswith(b"\n"))

    def read(self) -> Iterator[Any]:
        text = self._text()
        if text:
            where = f"{self._path}, line of byte {self._begin} and after it"
            yield from self._format.parse(where, pa.BufferReader(text))


class _Packed:
    """A compressed file, which can only be read from its beginning."""

    def __init__(self, open_stream: Callable[[], Any], path: str, lines: _Format) -> None:
        self._open = open_stream
        self._path = path
        self._format = lines

    def num_rows(self) -> None:
        return None

    def read(self) -> Iterator[Any]:
        with self._open() as stream:
            yield from self._format.parse(self._path, stream)


class CriteoReader(PieceReader):
    """Reads text in the layout of Criteo's click logs: a line a sample, without a header.

        label <tab> 13 numbers <tab> 26 ids in hexadecimal digits

    Any field may be empty: a number is then ``fill``, and a sample has no id of that feature.
    The columns are ``label``, ``I1`` to ``I13`` and ``C1`` to ``C26``.

    Pieces are ranges of bytes, so that one large file is shuffled and dealt to data-loaders as
    well as many are. A compressed file (``.gz``, ...) is one piece.

    Args:
        path: File or folder, or a URL that Arrow knows.
        batch_size: Samples of a batch.
        columns: What is read; None is all of it.
        has_label: Whether lines begin with a label; those of the test set do not.
        delimiter: What separates fields; ``,`` for CSV.
        block_bytes: Size of a piece.
        shuffle_seed: As of ``PieceReader``, as are the others.
        drop_last: Leave out a last batch that is smaller.
        shard: Whose part is read.

    Raises:
        ConfigError: If there is no such file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        columns: Columns | None = None,
        *,
        has_label: bool = True,
        delimiter: str = "\t",
        block_bytes: int = BLOCK_BYTES,
        shuffle_seed: int | None = None,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        labels = (LABEL,) if has_label else ()
        if columns is None:
            columns = Columns(IDS, DENSE, labels, strings="hex", requires_grad=has_label)
        super().__init__(
            columns, batch_size, shuffle_seed=shuffle_seed, drop_last=drop_last, shard=shard
        )
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be at least 1, got {block_bytes}")
        names = (*labels, *DENSE, *IDS)
        kinds = [(name, pa.string() if name in IDS else pa.float32()) for name in names]
        columns.check(os.fspath(path), pa.schema(kinds))
        lines = _Format(names, delimiter, columns)
        self._all: list[Piece] = []
        for filesystem, info in _files(os.fspath(path)):
            self._all += _pieces_of(filesystem, info, lines, block_bytes)

    def _pieces(self) -> Sequence[Piece]:
        return self._all


def _files(path: str) -> list[tuple[Any, Any]]:
    """Return the files of a path in the order of their names; hidden ones are none."""
    filesystem, place = (
        pafs.FileSystem.from_uri(path) if "://" in path else (pafs.LocalFileSystem(), path)
    )
    info = filesystem.get_file_info(place)
    infos = [info]
    if info.type == pafs.FileType.Directory:
        infos = filesystem.get_file_info(pafs.FileSelector(place, recursive=True))
    files = sorted(
        (each for each in infos if each.is_file and each.base_name[:1] not in "._"),
        key=lambda each: each.path,
    )
    if not files:
        raise ConfigError(f"{path}: expected a file or a folder of files, got none")
    return [(filesystem, each) for each in files]


def _pieces_of(filesystem: Any, info: Any, lines: _Format, block_bytes: int) -> list[Piece]:
    path = info.path
    if path.endswith(_PACKED):
        return [_Packed(lambda: filesystem.open_input_stream(path), path, lines)]
    return [
        _Block(
            lambda: filesystem.open_input_file(path),
            path,
            begin,
            min(begin + block_bytes, info.size),
            lines,
        )
        for begin in range(0, info.size, block_bytes)
    ]
