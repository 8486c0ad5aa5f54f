"""Arrays that begin with a cache line."""

import numpy as np
import pytest

from persia._core.base.arrays import empty_floats


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 17), (2, 5, 16), (40_000, 16)])
def test_they_begin_with_a_line_and_are_their_own(shape: tuple[int, ...]) -> None:
    made, other = empty_floats(*shape), empty_floats(*shape)
    assert made.shape == shape
    assert made.dtype == np.float32
    assert made.flags.c_contiguous
    assert made.flags.writeable
    assert made.__array_interface__["data"][0] % 64 == 0 or made.size == 0
    assert not np.shares_memory(made, other)
