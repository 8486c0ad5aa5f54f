"""Arrays of f32 that begin with a cache line.

At dim 16 a row is one line. One that begins between two lines costs whoever reads or writes it
another line, which is a fifth of a lookup; NumPy itself aligns to 16 bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats


def empty(*shape: int) -> NDArray[np.float32]:
    """Return an array of this shape with any values in it."""
    return empty_floats(*shape)


def zeros(*shape: int) -> NDArray[np.float32]:
    """Return an array of this shape filled with zeros."""
    array = empty_floats(*shape)
    array.fill(0.0)
    return array
