"""The ceiling as a contender: ceiling.c, compiled for this machine and called by ctypes.

It is measured in the same interleaved run as everyone else, so that what the product's rate is
of the ceiling's does not depend on the day. What ceiling.c is and leaves out stands there.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks import native
from tests.benchmarks.workload import (
    ACCUMULATOR,
    BATCH,
    DIM,
    LR,
    Batch,
    Ids,
    Step,
    all_ids,
    check_resident,
)

SOURCE = Path(__file__).with_name("ceiling.c")
# What the product may not do: this machine's own instructions, at their widest.
FLAGS = ("-march=native",)
WIDE = ("-mprefer-vector-width=512",)
EPS = 1e-10


class _Feature(ctypes.Structure):
    """feature_t of ceiling.c."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("num_ids", ctypes.c_int64),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return ceiling.c's functions."""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    loaded = native.load(SOURCE, (*FLAGS, *WIDE) if is_x86 else FLAGS)
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    c_int, c_float = ctypes.c_int, ctypes.c_float
    for name, result, arguments in (
        ("ceiling_new", pointer, [ctypes.c_uint64, c_int, c_float, c_float, c_float]),
        ("ceiling_free", None, [pointer]),
        ("ceiling_fill", None, [pointer, c_int, pointer, i64]),
        ("ceiling_num_rows", ctypes.c_uint64, [pointer]),
        ("ceiling_row", pointer, [pointer, c_int, ctypes.c_uint64]),
        ("ceiling_lookup", None, [pointer, pointer, c_int, i64, c_int, pointer]),
        ("ceiling_update", None, [pointer, pointer]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class Table:
    """ceiling.c's table, for one caller. Arrays have to outlive the call that names them."""

    def __init__(self, max_rows: int, num_threads: int) -> None:
        self._library = library()
        self._table = self._library.ceiling_new(max_rows, num_threads, LR, EPS, ACCUMULATOR)

    def close(self) -> None:
        if self._table is not None:
            self._library.ceiling_free(self._table)
            self._table = None

    __del__ = close

    def __len__(self) -> int:
        return int(self._library.ceiling_num_rows(self._table))

    def fill(self, feature: int, ids: NDArray[np.uint64]) -> None:
        """Insert those that are not held yet, with rows drawn from the ids."""
        self._library.ceiling_fill(self._table, feature, ids.ctypes.data, len(ids))

    def row(self, feature: int, id_: int) -> NDArray[np.float32] | None:
        """Return a view of an id's weights and accumulators, [2, DIM]; None if not held."""
        address = self._library.ceiling_row(self._table, feature, id_)
        if address is None:
            return None
        numbers = (ctypes.c_float * (2 * DIM)).from_address(address)
        return np.ctypeslib.as_array(numbers).reshape(2, DIM)

    def lookup(
        self,
        features: ctypes.Array[_Feature],
        num_samples: int,
        is_training: bool,
        out: NDArray[np.float32],
    ) -> None:
        """Write each feature's pooled samples to ``out`` [features, samples, DIM]."""
        self._library.ceiling_lookup(
            self._table, features, len(features), num_samples, is_training, out.ctypes.data
        )

    def update(self, gradient: NDArray[np.float32]) -> None:
        """Step the rows of the last training lookup; ``gradient`` as its output."""
        self._library.ceiling_update(self._table, gradient.ctypes.data)


def described(features: Sequence[Ids]) -> ctypes.Array[_Feature]:
    """Return ids as ceiling.c takes them; their arrays have to outlive it."""
    found = (_Feature * len(features))()
    for of_c, feature in zip(found, features, strict=True):
        of_c.ids, of_c.num_ids = feature.values.ctypes.data, len(feature.values)
        of_c.offsets = None if feature.offsets is None else feature.offsets.ctypes.data
    return found


class Ceiling:
    """The ceiling, filled with the workload's rows."""

    ids = "any u64"

    def __init__(self, table_sizes: Sequence[int], num_threads: int) -> None:
        self.table = Table(sum(table_sizes), num_threads)
        for number, ids in all_ids(table_sizes):
            self.table.fill(number, ids)
        check_resident(len(self.table), table_sizes)
        self._out = np.zeros((len(table_sizes), BATCH, DIM), np.float32)

    def train_step(self, batch: Batch) -> Step:
        features = described(batch.features)

        def step() -> None:
            self.table.lookup(features, BATCH, True, self._out)
            self.table.update(batch.gradient)

        return step

    def evaluate_step(self, batch: Batch) -> Step:
        features = described(batch.features)
        return lambda: self.table.lookup(features, BATCH, False, self._out)
