from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool

NUM_REGISTERS: int

def add(
    sketches: Sequence[NDArray[np.uint8]],
    arrays: Sequence[NDArray[np.uint64]],
    threads: ThreadPool,
) -> None: ...
def estimate(registers: NDArray[np.uint8]) -> float: ...
