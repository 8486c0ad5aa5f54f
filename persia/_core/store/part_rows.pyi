import numpy as np
from numpy.typing import NDArray

def copy_rows(
    rows: NDArray[np.uint8], places: NDArray[np.uint32], out: NDArray[np.uint8]
) -> None:
    """Copy rows [n, bytes] by their places [k], one after the other, to ``out`` [k * bytes]."""

def find_stranger(signs: NDArray[np.uint64], first: int, end: int) -> int:
    """Return the place of the first sign whose bucket is not in first..end - 1, or -1."""

def all_once(signs: NDArray[np.uint64]) -> bool:
    """Return whether each sign certainly comes once; a sort finds out where it says no.

    It says no if one comes twice, or if their hashes crowd, as those of chance do not.
    """
