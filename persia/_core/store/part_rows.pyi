"""Rows on their way into the parts of a checkpoint, and their signs on the way back."""

import numpy as np
from numpy.typing import NDArray

def copy_rows(
    rows: NDArray[np.uint8], places: NDArray[np.uint32], out: NDArray[np.uint8]
) -> None:
    """Copy rows by their places, one after the other.

    Args:
        rows: [n, bytes of a row].
        places: [k], of rows.
        out: [k * bytes of a row].

    Raises:
        DataError: If a place is that of no row, or ``out`` has another size.
    """

def find_stranger(signs: NDArray[np.uint64], first: int, end: int) -> int:
    """Return the place of the first sign whose bucket is not in first..end - 1; -1 without one.

    Raises:
        DataError: If these are no buckets.
    """

def all_once(signs: NDArray[np.uint64]) -> bool:
    """Return whether each sign certainly comes once; a sort finds out where it says no.

    It says no if one comes twice, or if their hashes crowd, as those of chance do not.
    """
