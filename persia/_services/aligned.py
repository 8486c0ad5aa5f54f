"""Arrays of f32 that begin with a cache line.

At dim 16 a row is one line. One that begins between two lines costs whoever reads or writes it
another line, which is a fifth of a lookup; NumPy itself aligns to 16 bytes.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

_LINE = 64  # bytes


def empty(*shape: int) -> NDArray[np.float32]:
    """Return an array of this shape with any values in it."""
    return _from_line(np.empty(4 * prod(shape) + _LINE, np.uint8), shape)


def zeros(*shape: int) -> NDArray[np.float32]:
    """Return an array of this shape filled with zeros."""
    return _from_line(np.zeros(4 * prod(shape) + _LINE, np.uint8), shape)


def _from_line(block: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    address: int = block.__array_interface__["data"][0]
    first = -address % _LINE
    return block[first : first + 4 * prod(shape)].view(np.float32).reshape(shape)
