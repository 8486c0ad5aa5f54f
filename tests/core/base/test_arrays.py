"""Arrays that begin with a cache line."""

import numpy as np
import pytest

from persia._core.base.arrays import empty_floats, is_matrix, joined


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 17), (2, 5, 16), (40_000, 16)])
def test_they_begin_with_a_line_and_are_their_own(shape: tuple[int, ...]) -> None:
    made, other = empty_floats(*shape), empty_floats(*shape)
    assert made.shape == shape
    assert made.dtype == np.float32
    assert made.flags.c_contiguous
    assert made.flags.writeable
    assert made.__array_interface__["data"][0] % 64 == 0 or made.size == 0
    assert not np.shares_memory(made, other)


def test_a_matrix_is_what_kernels_read_as_it_is() -> None:
    floats = np.zeros((4, 8), np.float32)
    assert is_matrix(floats, 4, 8)
    assert not is_matrix(floats, 8, 4)
    assert not is_matrix(floats.T, 8, 4)
    assert not is_matrix(floats[:, ::2], 4, 4)
    assert not is_matrix(floats.astype(np.float64), 4, 8)
    assert not is_matrix(floats.astype(">f4"), 4, 8)
    assert not is_matrix(floats[0], 4, 8)
    assert not is_matrix(np.ma.masked_array(floats), 4, 8)
    unaligned = np.zeros(4 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 8)
    assert not is_matrix(unaligned, 4, 8)
    assert not is_matrix(floats.tolist(), 4, 8)


def test_matrices_one_behind_the_other_are_one_without_a_copy() -> None:
    memory = np.arange(24, dtype=np.float32)
    one, none, two = (
        memory[:8].reshape(2, 4),
        memory[8:8].reshape(0, 4),
        memory[8:].reshape(4, 4),
    )
    found = joined([one, none, two])
    assert found is not None
    assert found.base == (one, none, two)  # which keep the memory
    assert not found.flags.writeable
    assert np.shares_memory(found, memory)
    assert np.array_equal(found, memory.reshape(6, 4))
    for apart in (
        *([two, one], [one, two.copy()], [one, two.reshape(8, 2)], [one, two[::2]], [none], []),
        *([one, two.astype(np.float64)], [one, memory[8:]], [one.tolist()]),
    ):
        assert joined(apart) is None  # type: ignore[arg-type]
