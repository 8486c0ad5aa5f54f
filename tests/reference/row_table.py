"""Plain model of ``persia._core.table.row_table``: dictionaries, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.halves import held, shorten, widen

Signs = NDArray[np.uint64]
Floats = NDArray[np.float32]

DTYPES = ("float32", "float16", "bfloat16", "int8")
F16_LARGEST = np.float32(65504.0)
ABSENT, PRESENT, DELETED = 0, 1, 2


def _f16(value: np.float32) -> int:
    return shorten("float16", value)


def _wide(code: int) -> np.float32:
    value: np.float32 = widen("float16", np.array([code], np.uint16))[0]
    return value


def packed_int8(row: Floats) -> tuple[int, int, NDArray[np.uint8]]:
    """The f16 codes of a row's scale and offset, and its steps above the offset.

    The offset is the largest f16 that is not above the smallest value, the scale the smallest
    f16 by which 255 steps reach the largest one. A row with a value that is not finite has the
    offset NaN, and reads as NaN throughout.
    """
    steps = np.zeros(len(row), np.uint8)
    if not np.isfinite(row).all():
        return 0, 0x7E00, steps
    low = max(np.float32(row.min()), -F16_LARGEST) + np.float32(0)
    offset = _f16(low)
    if _wide(offset) > low:
        offset += 1 if offset & 0x8000 else -1
    base = _wide(offset)
    span = max(np.float32(row.max()) - base, np.float32(0)) + np.float32(0)
    exact = span / np.float32(255)
    scale = _f16(exact)
    if _wide(scale) < exact and scale < 0x7BFF:
        scale += 1
    if scale:
        above = np.clip((row - base) / _wide(scale), np.float32(0), np.float32(255))
        steps = np.rint(above).astype(np.uint8)  # to even, where it lies between
    return scale, offset, steps


def read_as(dtype: str, row: Floats) -> Floats:
    """What a row that is written reads as."""
    if dtype != "int8":
        return held(dtype, row)
    scale, offset, steps = packed_int8(np.asarray(row, np.float32))
    values: Floats = _wide(offset) + _wide(scale) * steps.astype(np.float32)
    return values


class ReferenceRowTable:
    """A sign is in one table at most; a row that is written to another one leaves the first."""

    def __init__(
        self, dims: Sequence[int], dtype: str = "float32", *, num_threads: int = 1
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        self.dims = tuple(dims)
        self.dtype = dtype
        self.num_threads = num_threads
        self._rows: dict[int, tuple[int, Floats]] = {}  # by sign: table, values as read
        self._deleted: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_deleted(self) -> int:
        return len(self._deleted)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self._deleted) + sum(8 + row.nbytes for _, row in self._rows.values())

    def reserve(self, num_rows: int) -> None:
        """Nothing here."""

    def write(self, table: int, signs: Signs, rows: Floats) -> None:
        if rows.shape != (len(signs), self.dims[table]):
            raise ValueError(f"rows of dim {self.dims[table]}: got {rows.shape}")
        for sign, row in zip(signs.tolist(), rows, strict=True):
            self._rows[sign] = table, read_as(self.dtype, row)
            self._deleted.discard(sign)

    def delete(self, signs: Signs) -> int:
        """Forget rows and tombstones; returns how many rows there were."""
        found = 0
        for sign in signs.tolist():
            found += self._rows.pop(sign, None) is not None
            self._deleted.discard(sign)
        return found

    def mark_deleted(self, signs: Signs) -> None:
        self.delete(signs)
        self._deleted.update(signs.tolist())

    def lookup(
        self,
        table: int,
        signs: Signs,
        rows_out: Floats,
        state_out: NDArray[np.uint8] | None = None,
    ) -> int:
        missing = 0
        for i, sign in enumerate(signs.tolist()):
            held_in, row = self._rows.get(sign, (None, None))
            is_present = held_in == table
            rows_out[i] = row if is_present else 0
            missing += not is_present
            if state_out is not None:
                deleted = DELETED if sign in self._deleted else ABSENT
                state_out[i] = PRESENT if is_present else deleted
        return missing

    def signs(self, table: int) -> Signs:
        found = [sign for sign, (held_in, _) in self._rows.items() if held_in == table]
        return np.array(found, np.uint64)

    def deleted_signs(self) -> Signs:
        return np.array(list(self._deleted), np.uint64)

    def blocks(self, table: int, max_rows: int = 1 << 16) -> Iterator[tuple[Signs, Floats]]:
        signs = self.signs(table)
        for first in range(0, len(signs), max_rows):
            some = signs[first : first + max_rows]
            rows = np.empty((len(some), self.dims[table]), np.float32)
            self.lookup(table, some, rows)
            yield some, rows

    def merge(
        self,
        other: ReferenceRowTable,
        start: int = 0,
        max_rows: int = 1 << 16,
        *,
        keep_deleted: bool = False,
    ) -> int:
        """Take over the other's places ``start``.. bit for bit; returns where to go on, or 0.

        Its tombstones delete here, or with ``keep_deleted`` become tombstones.
        """
        if (other.dims, other.dtype) != (self.dims, self.dtype):
            raise ValueError("tables of other dims or another dtype")
        entries = sorted([*other._rows, *other._deleted])
        for sign in entries[start : start + max_rows]:
            self.delete(np.array([sign], np.uint64))
            if sign in other._rows:
                self._rows[sign] = other._rows[sign]
            elif keep_deleted:
                self._deleted.add(sign)
        end = start + max_rows
        return end if end < len(entries) else 0
