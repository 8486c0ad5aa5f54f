"""Numbering of distinct u64 values in first-seen order."""

import numpy as np
from numpy.typing import NDArray

def number(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]: ...
