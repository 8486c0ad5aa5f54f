"""Rows that other programs wrote, as blocks of ids and vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError, DataTypeError

# Rows that a reader holds at a time.
BLOCK_ROWS = 1 << 16


class IDBlock(NamedTuple):
    """Some rows; element i of each array belongs to row i."""

    ids: NDArray[np.uint64]  # [n]
    vectors: NDArray[np.float32]  # [n, dim]
    states: NDArray[np.uint32] | None = None  # [n, words], of the optimizer


@dataclass(frozen=True)
class IDSource:
    """What one of the readers found; ``Table.load`` takes it.

    Attributes:
        name: Where the rows are, for errors and progress.
        dim: Values of a vector.
        num_rows: How many there are; None if it shows only at the end.
        notes: What is not carried over.
    """

    name: str
    dim: int
    num_rows: int | None
    read: Callable[[], Iterator[IDBlock]]
    notes: tuple[str, ...] = field(default=())

    def blocks(self) -> Iterator[IDBlock]:
        """Yield the rows, some thousand at a time; each call begins at the first."""
        yield from self.read()


def array_of_ids(given: Any) -> NDArray[Any]:
    """Return ids that are a list, an array or a tensor as an array, of whatever dtype it is.

    NumPy makes floats of a list that has ids on both sides of 2**63; here it is of u64.
    """
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    ids = np.asarray(given)
    if ids.dtype.kind not in ("f", "O") or not isinstance(given, list | tuple):
        return ids
    # Others stay what NumPy makes of them, which is refused.
    if all(isinstance(x, int | np.integer) and -(2**63) <= x < 2**64 for x in given):
        return np.array([int(x) % 2**64 for x in given], np.uint64)
    return ids


def as_ids(name: str, ids: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return integers [n] of any dtype as u64; signed ones keep their bits."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataTypeError(
            f"{name}: expected ids as integers [n], got {ids.dtype} {list(ids.shape)}"
        )
    if ids.dtype.kind == "i":
        ids = ids.astype(np.int64, copy=False).view(np.uint64)
    return np.ascontiguousarray(ids, np.uint64)


def as_vectors(name: str, vectors: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return floats [n, dim] as f32."""
    if vectors.ndim != 2 or not vectors.shape[1] or vectors.dtype.kind != "f":
        raise DataTypeError(
            f"{name}: expected vectors of floats [n, dim], got {vectors.dtype} "
            f"{list(vectors.shape)}"
        )
    return np.ascontiguousarray(vectors, np.float32)


def check_lengths(name: str, num_ids: int, num_vectors: int) -> None:
    """Raise a DataError unless there is one vector for each id."""
    if num_ids != num_vectors:
        raise DataError(
            f"{name}: expected a vector for each of {num_ids} ids, got {num_vectors}"
        )
