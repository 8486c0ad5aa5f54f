"""Arrays in one file, in the safetensors layout, which others read without us.

    8 bytes     length of the header, u64
    header      JSON: {"name": {"dtype": "U64", "shape": [n], "data_offsets": [begin, end]},
                ..., "__metadata__": {"key": "text", ...}}, padded with spaces
    the rest    the arrays end to end, little-endian, C order; offsets count from here

The widest items come first and the header is padded to 8 bytes, so that every array is aligned
in the file and can be used where it was read to. Nothing in a header is believed: offsets have
to be those that dtypes and shapes give, without a gap, up to the file's last byte.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from persia._files.json_models import Record, parse, read_json
from persia.config.document import Expect, InvalidValue, Listed, integer
from persia.errors import CheckpointError

# Of ours a header is some hundred bytes; a foreign one may list thousands of arrays.
MAX_HEADER_BYTES = 1 << 20
_MAX_DIMS = 8
_LENGTH = 8

# Two-byte floats are kept by their bits: NumPy has no bfloat16.
CODES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}
_CODE = Expect(f"one of {', '.join(CODES)}", pattern=f"^({'|'.join(CODES)})$")
_CODE_OF = {
    dtype: code for code, dtype in reversed(CODES.items()) if code not in ("F16", "BF16")
}


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a file."""

    code: str  # its dtype, a key of ``CODES``
    array: NDArray[Any]  # C-contiguous

    @staticmethod
    def of(array: NDArray[Any]) -> Column:
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        return Column(_CODE_OF[little.dtype], little)


def head(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """Return how a file of arrays, dtype and shape by name, begins, and the order of these."""
    names = sorted(arrays, key=lambda name: -CODES[arrays[name][0]].itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        code, shape = arrays[name]
        begin = end
        end += math.prod(shape) * CODES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text, names


def encode(columns: Mapping[str, Column], metadata: Mapping[str, str]) -> list[memoryview]:
    """Return the buffers of a file: its head and every array, none of them copied."""
    first, names = head(
        {name: (column.code, column.array.shape) for name, column in columns.items()}, metadata
    )
    arrays = (columns[name].array for name in names)
    return [memoryview(first), *(array.reshape(-1).view(np.uint8).data for array in arrays)]


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """What a header says of one array."""

    code: Annotated[str, _CODE] = field(metadata={"key": "dtype"})
    shape: Listed[tuple[Annotated[int, integer()], ...]]
    # Where its bytes begin in the file, and where they end.
    offsets: Annotated[
        tuple[Annotated[int, integer()], Annotated[int, integer()]],
        Expect("[begin, end] in bytes", strict=False),
    ] = field(metadata={"key": "data_offsets"})

    @property
    def begin(self) -> int:
        return self.offsets[0]

    @property
    def end(self) -> int:
        return self.offsets[1]

    def check(self) -> None:
        if len(self.shape) > _MAX_DIMS:
            raise InvalidValue(f"expected at most {_MAX_DIMS} dimensions", "shape")
        itemsize = CODES[self.code].itemsize
        num_bytes = math.prod(self.shape) * itemsize  # of Python's integers: no overflow
        if self.end - self.begin != num_bytes:
            raise InvalidValue(
                f"expected {num_bytes} bytes for {self.code} {list(self.shape)}, got "
                f"{self.begin}..{self.end}",
                "data_offsets",
            )
        # Where one of them is 0 the others may be anything, and NumPy multiplies them too.
        if math.prod(max(n, 1) for n in self.shape) * itemsize > (1 << 63) - 1:
            raise InvalidValue(f"expected fewer items, got {list(self.shape)}", "shape")


def layout(
    first: NDArray[np.uint8], num_bytes: int, file: str
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return what the header in the first bytes says of each array, and the metadata."""
    name = f"{file}: safetensors header"
    if num_bytes < _LENGTH:
        raise CheckpointError(
            f"{name}: expected a file of at least {_LENGTH} bytes, got {num_bytes}"
        )
    length = int.from_bytes(first[:_LENGTH].tobytes(), "little")
    limit = min(MAX_HEADER_BYTES, num_bytes - _LENGTH, len(first) - _LENGTH)
    if length > limit:
        raise CheckpointError(
            f"{name}: expected a length of at most {limit} bytes, got {length}"
        )
    header = parse(first[_LENGTH : _LENGTH + length].tobytes(), name)
    arrays = dict(read_json(dict[str, Any], header, name))
    metadata = read_json(
        dict[str, str], arrays.pop("__metadata__", {}), f"{name}: __metadata__"
    )
    entries = read_json(dict[str, Entry], arrays, name)
    start = _LENGTH + length
    _check_tiled(entries, num_bytes - start, name)
    return {
        key: dataclasses.replace(entry, offsets=(start + entry.begin, start + entry.end))
        for key, entry in entries.items()
    }, metadata


def decode(
    data: NDArray[np.uint8], file: str
) -> tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, str]]:
    """Return each array, a view of ``data``, with its dtype's code, and the metadata."""
    entries, metadata = layout(data, len(data), file)
    arrays = {}
    for name, entry in entries.items():
        dtype = CODES[entry.code]
        piece = data[entry.begin : entry.end]
        if (piece.ctypes.data % dtype.itemsize) != 0:
            piece = piece.copy()  # a writer that did not pad its header
        arrays[name] = (entry.code, piece.view(dtype).reshape(entry.shape))
    return arrays, metadata


class HeaderReader:
    """Header and one array of a file that is read piece by piece and not kept."""

    def __init__(self, file: str, num_bytes: int, array: str) -> None:
        self._file = file
        self._num_bytes = num_bytes
        self._array = array
        self._entries: dict[str, Entry] | CheckpointError = {}
        self._data = np.empty(0, np.uint8)

    def see(self, offset: int, piece: NDArray[np.uint8]) -> None:
        """Take what is needed of a piece; the first one has all of the header."""
        if offset == 0:
            try:
                self._entries, _ = layout(piece, self._num_bytes, self._file)
            except CheckpointError as exc:
                self._entries = exc  # of bytes that may turn out not to be the file's
        if isinstance(self._entries, CheckpointError) or self._array not in self._entries:
            return
        entry = self._entries[self._array]
        if offset == 0:
            self._data = np.empty(entry.end - entry.begin, np.uint8)
        begin, end = max(entry.begin, offset), min(entry.end, offset + len(piece))
        if begin < end:
            part = piece[begin - offset : end - offset]
            self._data[begin - entry.begin : end - entry.begin] = part

    def seen(self) -> tuple[dict[str, Entry], NDArray[np.uint8]]:
        """Return what the header says of each array, and the bytes of the one, if any."""
        if self._num_bytes == 0:
            self.see(0, self._data)  # there was nothing to see
        if isinstance(self._entries, CheckpointError):
            raise self._entries
        return self._entries, self._data


def _check_tiled(entries: Mapping[str, Entry], num_bytes: int, name: str) -> None:
    """Check that arrays follow each other without a gap, up to the last byte."""
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].offsets):
        if entry.begin != end:
            raise CheckpointError(
                f"{name}: {key}.data_offsets: expected to begin at {end}, where the array "
                f"before it ends, got {entry.begin}"
            )
        end = entry.end
    if end != num_bytes:
        raise CheckpointError(
            f"{name}: expected {end} bytes of arrays behind it, got {num_bytes}"
        )
