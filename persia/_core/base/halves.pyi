import numpy as np
from numpy.typing import NDArray

DTYPES: tuple[str, ...]

def widen(values: NDArray[np.uint16], dtype: str) -> NDArray[np.float32]: ...
def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint16]: ...
def round_rows(
    rows: NDArray[np.float32],
    signs: NDArray[np.uint64],
    dtype: str,
    seed: int,
    number: int,
) -> NDArray[np.uint16]: ...
