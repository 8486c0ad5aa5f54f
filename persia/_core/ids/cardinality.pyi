import numpy as np
from numpy.typing import NDArray

NUM_REGISTERS: int

def add(registers: NDArray[np.uint8], ids: NDArray[np.uint64]) -> None: ...
def estimate(registers: NDArray[np.uint8]) -> float: ...
