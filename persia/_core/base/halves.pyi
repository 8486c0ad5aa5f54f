import numpy as np
from numpy.typing import NDArray

DTYPES: tuple[str, ...]

def widen(values: NDArray[np.uint16], dtype: str) -> NDArray[np.float32]:
    """Return values of 2 bytes [n], given by their bits, as f32; exact."""

def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint16]:
    """Return values [n] rounded to nearest, ties to even, as their 16 bits."""

def round_rows(
    rows: NDArray[np.float32],
    signs: NDArray[np.uint64],
    dtype: str,
    seed: int,
    number: int,
) -> NDArray[np.uint16]:
    """Return rows [n, dim] rounded by chance, as update ``number`` rounds rows of ``signs``.

    Raises:
        DataError: If there is not one sign a row.
    """
