"""Rows as arrays, on their way out of a store or into one.

    store --snapshot--> RowBlock --> files --> RowBlock --restore--> store

A block holds whole rows: a value never travels without its optimizer state. Values are as the
row keeps them, so that nothing is rounded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.optim import MAX_DIM
from persia.errors import DataError

Values = NDArray[np.float32] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Whole rows of one format and one policy; element i of each array belongs to row i.

    All arrays are C-contiguous.
    """

    policy: int  # number, as the store counts them
    dtype: str  # how rows keep their values, one of ``halves.DTYPES``
    signs: NDArray[np.uint64]  # [n]
    values: Values  # [n, dim] of f32; with another dtype the bits of its values, as u16
    states: NDArray[np.uint32]  # [n, words] of optimizer state; its type is the optimizer's
    # [n], places in the order of eviction: a larger one goes later. Comparable inside one shard
    # of one server of one snapshot.
    orders: NDArray[np.uint64]
    # [n], the class of LFU (about 2**class uses) or of a scorer; 0 for LRU
    uses: NDArray[np.uint32]
    ages: NDArray[np.uint64]  # [n], since the last use by the policy's clock; 0 without a ttl

    def check(self) -> None:
        """Raise DataError unless the arrays fit together; it names the one that does not."""
        values = np.float32 if self.dtype == "float32" else np.uint16
        dtypes = (np.uint64, values, np.uint32, np.uint64, np.uint32, np.uint64)
        names = ("signs", "values", "states", "orders", "uses", "ages")
        for name, array, dtype in zip(names, self.arrays, dtypes, strict=True):
            ndim = 2 if name in {"values", "states"} else 1
            if array.dtype != dtype or array.ndim != ndim or len(array) != len(self.signs):
                raise DataError(
                    f"block of {len(self.signs)} rows: {name} must be {np.dtype(dtype)} with "
                    f"{ndim} dimensions and {len(self.signs)} rows, got {array.dtype} "
                    f"{list(array.shape)}"
                )
            if not array.flags.c_contiguous:
                raise DataError(f"block: {name} must be C-contiguous")
        if not 1 <= self.dim <= MAX_DIM:
            raise DataError(f"block: values must have 1..{MAX_DIM} columns, got {self.dim}")

    def __len__(self) -> int:
        return len(self.signs)

    @property
    def dim(self) -> int:
        """Values a row."""
        return int(self.values.shape[1])

    @property
    def state_words(self) -> int:
        """Words of optimizer state a row, 4 bytes each."""
        return int(self.states.shape[1])

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Signs, values, states, orders, uses, ages."""
        return (self.signs, self.values, self.states, self.orders, self.uses, self.ages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(array.nbytes for array in self.arrays)
