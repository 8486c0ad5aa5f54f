"""``persia._core.ids.numbering`` against its model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base import cpu
from persia._core.base.hashing import mix64_array
from persia._core.ids.signs import merge
from persia.errors import DataTypeError
from tests.reference import distinct as model
from tests.support import strategies as own


def number(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Number one array, as ``merge`` does it for several."""
    distinct, (numbers,) = merge([values])
    return distinct, numbers


@given(st.data(), own.id_lists(max_size=200))
def test_number(data: st.DataObject, values: list[int]) -> None:
    distinct, numbers = number(data.draw(own.layouts(values)))
    assert distinct.dtype == np.uint64
    assert numbers.dtype == np.uint32
    assert (distinct.tolist(), numbers.tolist()) == model.number(values)


# The sides of the least table and of larger ones.
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 65, 32768, 32769, 65536, 65537])
@pytest.mark.parametrize("num_values", [1, 100, 2**64 - 1])
def test_sizes(size: int, num_values: int) -> None:
    values = np.random.default_rng(size).integers(0, num_values, size, dtype=np.uint64)
    distinct, numbers = number(values)
    assert (distinct.tolist(), numbers.tolist()) == model.number(values.tolist())


def test_values_that_share_their_first_slot() -> None:
    # Of 200,000 values those whose hash begins with 8 zero bits: all but one are left over.
    values = np.arange(200_000, dtype=np.uint64)
    values = np.concatenate([values[mix64_array(values) >> np.uint64(56) == 0]] * 2)
    assert values.size > 1000
    distinct, numbers = number(values)
    assert (distinct.tolist(), numbers.tolist()) == model.number(values.tolist())


def test_levels_number_alike() -> None:
    values = np.random.default_rng(0).integers(0, 500, 1003, dtype=np.uint64)
    try:
        for level in cpu.available():
            cpu.select(level)
            distinct, numbers = number(values)
            assert (distinct.tolist(), numbers.tolist()) == model.number(values.tolist())
    finally:
        cpu.select(None)


def test_memory_that_is_kept_or_not() -> None:
    # 2**20 values are the most whose block is kept for the next call; the rest of the block
    # still holds what a larger call left there.
    for size in (5, 2**20, 3, 2**20 + 1, 2**20, 100):
        values = np.arange(size, dtype=np.uint64) % np.uint64(1000)
        distinct, numbers = number(values)
        assert distinct.tolist() == list(range(min(size, 1000)))
        assert (numbers == values).all()


def test_a_thread_may_number_while_others_do() -> None:
    arrays = [np.arange(20_000, dtype=np.uint64) % np.uint64(97 + n) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for array, (distinct, numbers) in zip(
            arrays * 8, pool.map(number, arrays * 8), strict=True
        ):
            assert (numbers == array).all()
            assert len(distinct) == array.max() + 1


def test_values_written_meanwhile_leave_numbers_in_range() -> None:
    values = np.arange(50_000, dtype=np.uint64)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            np.bitwise_xor(values, np.uint64(3), out=values)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            for _ in range(10):
                distinct, numbers = number(values)
                # A value that is read again when it has changed may come twice.
                assert len(distinct) == numbers.max() + 1
        finally:
            done.set()
        writer.result(60)


@pytest.mark.parametrize(("value", "message"), own.NOT_IDS)
def test_not_ids(value: Any, message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        number(value)
