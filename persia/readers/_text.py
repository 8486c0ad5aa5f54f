"""Text: CSV and TSV with a header, and the layout of Criteo's logs without one.

A file is cut into ranges of bytes, and a line belongs to that in which it begins:

    user,item<newline>7,12<newline>3,<newline>8,40<newline>
    header            [.... first piece ....] [. second .]

So a newline ends a line wherever it is, in quotes too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs

from persia.errors import ConfigError, DataError, DataTypeError
from persia.readers._columns import Columns, check_bool, missing
from persia.readers._order import Piece, Span
from persia.readers._reader import (
    SHUFFLE_BUFFER,
    PieceReader,
    check_number,
    no_such_file,
    paths_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from persia.readers._reader import Paths


logger = logging.getLogger(__name__)

NUM_DENSE = 13
NUM_IDS = 26
LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, NUM_DENSE + 1))
IDS = tuple(f"C{number}" for number in range(1, NUM_IDS + 1))

BLOCK_BYTES = 16 << 20
# What is read at a time beyond a block, until its last line ends.
_LOOK_BYTES = 1 << 16
_PACKED = (".gz", ".bz2", ".zst", ".lz4")
# Fields of a CSV that say that there is nothing.
NULLS = ("", "NULL", "null", "NaN", "nan", "N/A", "NA", "None", "\\N")
_EXPECTED = "lines of the types that the first MiB has, or that types= gives"


@dataclass(frozen=True, slots=True)
class _Format:
    """How lines become columns."""

    what: str  # what lines are, for messages
    types: Mapping[str, Any]  # of all columns, in the order of the fields
    columns: list[str]  # what is read of them
    delimiter: str
    is_csv: bool  # `"` may be around a field, and lines without anything are no samples
    nulls: Sequence[str]  # what a field without a value says

    def parse(self, where: str, source: Any, has_header: bool = False) -> Iterator[Any]:
        """Yield record batches of a stream of lines."""
        read = pacsv.ReadOptions(column_names=list(self.types), skip_rows=int(has_header))
        parse = pacsv.ParseOptions(
            delimiter=self.delimiter,
            quote_char='"' if self.is_csv else False,
            ignore_empty_lines=self.is_csv,
        )
        convert = pacsv.ConvertOptions(
            column_types=self.types,
            include_columns=self.columns,
            null_values=list(self.nulls),
            strings_can_be_null=True,
        )
        try:
            yield from pacsv.open_csv(source, read, parse, convert)
        except pa.ArrowInvalid as exc:
            raise DataError(f"{where}: expected {self.what}, got: {exc}") from exc


@dataclass(frozen=True, slots=True)
class _Block(Span):
    """The lines of a file that begin in a range of its bytes."""

    filesystem: Any
    path: str
    lines: _Format

    def _text(self) -> bytes:
        """Return those lines: from behind the first newline at ``begin - 1`` or later."""
        before = min(self.begin, 1)
        with self.filesystem.open_input_file(self.path) as file:
            file.seek(self.begin - before)
            text: bytes = file.read(self.end - self.begin + before)
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
        has_empty = text[:1] in b"\r\n" or b"\n\n" in text or b"\n\r" in text
        if has_empty and self.lines.is_csv:
            return sum(bool(line.strip(b"\r")) for line in text.split(b"\n"))
        return text.count(b"\n") + bool(text and not text.endswith(b"\n"))

    def read(self) -> Iterator[Any]:
        text = self._text()
        if text.strip(b"\r\n") or (text and not self.lines.is_csv):
            where = f"{self.path}, line of byte {self.begin} and after it"
            yield from self.lines.parse(where, pa.BufferReader(text))


@dataclass(frozen=True, slots=True)
class _Packed(Piece):
    """A compressed file, which can only be read from its beginning."""

    filesystem: Any
    path: str
    lines: _Format
    has_header: bool

    def read(self) -> Iterator[Any]:
        with self.filesystem.open_input_stream(self.path) as stream:
            yield from self.lines.parse(self.path, stream, self.has_header)


def _pieces_of(
    filesystem: Any, info: Any, lines: _Format, block_bytes: int, header: bytes = b""
) -> list[Piece]:
    """Return the pieces of one file, behind its header."""
    if info.path.endswith(_PACKED):
        return [_Packed(filesystem, info.path, lines, bool(header))]
    return [
        _Block(begin, min(begin + block_bytes, info.size), filesystem, info.path, lines)
        for begin in range(len(header), info.size, block_bytes)
    ]


class _TextReader(PieceReader):
    """A reader of lines."""

    def __len__(self) -> int:
        """Raise that lines are not counted."""
        raise TypeError(
            f"{type(self).__name__} has no len: lines are counted by reading all of them; "
            "num_batches() does so"
        )


def _check_options(delimiter: object, block_bytes: object) -> None:
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ConfigError(f"delimiter: expected one character, got {delimiter!r:.80}")
    check_number("block_bytes", block_bytes)


class CsvReader(_TextReader):
    r"""Reads text with a header: CSV, or TSV with ``delimiter="\t"``.

    The first line of each file names its columns, which are the same in all. Types are those
    that Arrow finds in the first MiB of the first file, or that ``types`` says. A field may be
    in double quotes, though without a newline. Nulls are an empty field, ``NULL``, ``NaN``,
    ``NA``, ``N/A``, ``None`` and ``\N``. Name the types of ids: an id that looks like a number
    at first is that number, and otherwise the hash of its text.
    Pieces are as those of ``CriteoReader``.

    Args:
        path: File or folder, a list of them, or a URL that Arrow knows; ``.gz`` and other
            packed files too.
        columns: As of ``PieceReader``, as are the others not named here.
        batch_size: Samples of a batch.
        types: Arrow types of columns that look like others, such as ``{"zip": "string"}``.
        delimiter: What separates fields.
        block_bytes: Size of a piece.

    Raises:
        ConfigError: If there is no such file, or a column is not in the header.
        DataTypeError: If a column's type cannot be read.
        DataError: If a file has another header than the first, or one with a name twice.
    """

    def __init__(
        self,
        path: Paths,
        columns: Columns,
        batch_size: int,
        *,
        types: Mapping[str, Any] | None = None,
        delimiter: str = ",",
        block_bytes: int = BLOCK_BYTES,
        shuffle_seed: int | None = None,
        shuffle_buffer: int | None = SHUFFLE_BUFFER,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(columns, batch_size, shuffle_seed, shuffle_buffer, drop_last, shard)
        _check_options(delimiter, block_bytes)
        files = _files(path)
        known = _types_of(types or {})
        schema = _schema_of(*files[0], known, delimiter)
        _check(columns, files[0][1].path, schema, known)
        fields = dict(zip(schema.names, schema.types, strict=True))
        lines = _Format(_EXPECTED, fields, columns.names, delimiter, True, NULLS)
        pieces: list[Piece] = []
        first = _header_of(*files[0])
        for filesystem, info in files:
            header = _header_of(filesystem, info)
            if header.rstrip() != first.rstrip():
                raise DataError(
                    f"{info.path}: expected the header of {files[0][1].path}, "
                    f"{first.rstrip()!r:.200}, got {header.rstrip()!r:.200}"
                )
            pieces += _pieces_of(filesystem, info, lines, block_bytes, header)
        self._pieces = pieces


def _check(columns: Columns, path: str, schema: Any, known: Mapping[str, Any]) -> None:
    """Check what was found of the columns, and say what ids are."""
    for name in known:
        if name not in schema.names:
            raise missing(path, name, "types=", schema.names)
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(
                f"{path}: expected each column once in the header, got {name!r} twice"
            )
    ids = [name for name in dict.fromkeys(columns.ids.values()) if name in schema.names]
    found = {name: schema.field(name).type for name in ids if name not in known}
    try:
        columns.check(path, schema)
    except DataTypeError as exc:
        raise DataTypeError(f"{exc}; types= says what a column is") from None
    if found:
        kinds = ", ".join(f"{name} {kind}" for name, kind in found.items())
        logger.info(
            "%s: types of ids, from its first lines: %s; types= overrides them", path, kinds
        )


def _types_of(types: Any) -> dict[str, Any]:
    if not isinstance(types, Mapping) or not all(isinstance(name, str) for name in types):
        raise ConfigError(
            f"types: expected a mapping from a column to its type, got {types!r:.80}"
        )
    return {name: _type_of(name, kind) for name, kind in types.items()}


def _type_of(name: str, kind: Any) -> Any:
    if isinstance(kind, pa.DataType):
        return kind
    try:
        return pa.type_for_alias(kind)
    except (ValueError, AttributeError) as exc:
        raise ConfigError(
            f"types: {name!r}: expected an Arrow type such as 'string' or 'int64', got {kind!r}"
        ) from exc


def _header_of(filesystem: Any, info: Any) -> bytes:
    """Return the first line of a file."""
    text = b""
    with filesystem.open_input_stream(info.path) as stream:
        while b"\n" not in text and (more := stream.read(_LOOK_BYTES)):
            text += more
    line, newline, _ = text.partition(b"\n")
    return line + newline


def _schema_of(filesystem: Any, info: Any, types: Mapping[str, Any], delimiter: str) -> Any:
    """Return the columns of a file by its header and its first lines."""
    try:
        with filesystem.open_input_stream(info.path) as stream:
            return pacsv.open_csv(
                stream,
                parse_options=pacsv.ParseOptions(delimiter=delimiter),
                convert_options=pacsv.ConvertOptions(column_types=types, null_values=NULLS),
            ).schema
    except pa.ArrowInvalid as exc:
        raise DataError(f"{info.path}: expected a header and lines, got: {exc}") from exc


class CriteoReader(_TextReader):
    """Reads text in the layout of Criteo's click logs: a line a sample, without a header.

        label <tab> 13 numbers <tab> 26 ids in hexadecimal digits

    Any field may be empty: a number is then ``fill``, and a sample has no id of that feature.
    The columns are ``label``, ``I1`` to ``I13`` and ``C1`` to ``C26``.

    Pieces are ranges of bytes, so that one large file is shuffled and shared by data-loaders as
    well as many are. A compressed file (``.gz``, ...) is one piece; if there are fewer of them
    than data-loaders, each data-loader reads all.

    Args:
        path: File or folder, a list of them, or a URL that Arrow knows.
        batch_size: Samples of a batch.
        columns: What is read; None is all of it.
        has_label: Whether lines begin with a label; those of the test set do not.
        delimiter: What separates fields; ``,`` for CSV.
        block_bytes: Size of a piece; the others are those of ``PieceReader``.
    """

    def __init__(
        self,
        path: Paths,
        batch_size: int,
        columns: Columns | None = None,
        *,
        has_label: bool = True,
        delimiter: str = "\t",
        block_bytes: int = BLOCK_BYTES,
        shuffle_seed: int | None = None,
        shuffle_buffer: int | None = SHUFFLE_BUFFER,
        drop_last: bool = False,
        shard: tuple[int, int] | None = None,
    ) -> None:
        check_bool("has_label", has_label)
        _check_options(delimiter, block_bytes)
        labels = (LABEL,) if has_label else ()
        if columns is None:
            columns = Columns(IDS, DENSE, labels, strings="hex", requires_grad=has_label)
        super().__init__(columns, batch_size, shuffle_seed, shuffle_buffer, drop_last, shard)
        names = (*labels, *DENSE, *IDS)
        types = {name: pa.string() if name in IDS else pa.float32() for name in names}
        columns.check(paths_of(path)[0], pa.schema(list(types.items())))
        what = "lines in Criteo's layout"
        lines = _Format(what, types, columns.names, delimiter, False, [""])
        self._pieces = [
            piece
            for filesystem, info in _files(path)
            for piece in _pieces_of(filesystem, info, lines, block_bytes)
        ]


def _files(path: Paths) -> list[tuple[Any, Any]]:
    """Return the files of a path, or of a list of them, in the order of their names."""
    found = [each for one in paths_of(path) for each in _files_of(one)]
    return sorted(found, key=lambda pair: pair[1].path)


def _files_of(path: str) -> list[tuple[Any, Any]]:
    """Return the files of a path; hidden ones are none."""
    filesystem, place = (
        pafs.FileSystem.from_uri(path) if "://" in path else (pafs.LocalFileSystem(), path)
    )
    infos = [filesystem.get_file_info(place)]
    if infos[0].type == pafs.FileType.NotFound:
        raise no_such_file(path)
    if infos[0].type == pafs.FileType.Directory:
        infos = filesystem.get_file_info(pafs.FileSelector(place, recursive=True))
    files = [each for each in infos if each.is_file and each.base_name[:1] not in "._"]
    if not files:
        raise ConfigError(f"{path}: expected a file or a folder of files, got none")
    return [(filesystem, each) for each in files]
