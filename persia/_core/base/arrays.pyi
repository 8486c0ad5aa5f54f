"""Checks of arrays for the other modules of the core, and arrays that begin with a line."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

NAMES: Final[dict[str, str]]
TEXTS: Final[str]

def empty_floats(*shape: int) -> NDArray[np.float32]: ...
def zero_floats(*shape: int) -> NDArray[np.float32]: ...
