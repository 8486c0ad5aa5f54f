import numpy as np
from numpy.typing import NDArray

def hash_texts(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]: ...
def parse_hex(
    data: NDArray[np.uint8], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], int]: ...
