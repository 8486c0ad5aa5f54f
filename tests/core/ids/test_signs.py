"""``persia._core.ids.signs`` against its model: packing, hash stacks and numbering."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base.hashing import mix64_array
from persia._core.base.threads import ThreadPool
from persia._core.ids import signs
from persia.errors import DataError, DataTypeError
from tests.reference import ids as model
from tests.support import strategies as own

MAX_ID = own.MAX_ID
ALONE = ThreadPool(1)


@given(
    st.data(),
    st.lists(st.tuples(own.id_lists(20), st.integers(0, 200)), max_size=4),
    st.integers(8, 63),
)
@example(None, [([0, 2**56 - 1, 2**56, MAX_ID], 0)], 8)
def test_w08_ids_are_packed_and_the_last_does_not_alias_the_first(
    data: st.DataObject | None, features: list[tuple[list[int], int]], bits: int
) -> None:
    prefixes = [(group + 1) << (64 - bits) for _, group in features]
    arrays = [
        own.id_array(ids) if data is None else data.draw(own.layouts(ids))
        for ids, _ in features
    ]
    packed, num_masked = signs.pack_all(arrays, prefixes, bits, ALONE)
    assert packed.dtype == np.uint64
    want = [
        model.pack(ids, prefix, bits)
        for (ids, _), prefix in zip(features, prefixes, strict=True)
    ]
    assert packed.tolist() == [one for some, _ in want for one in some]
    assert num_masked == [count for _, count in want]
    with closing(ThreadPool(3)) as threads:
        again, counted = signs.pack_all(arrays, prefixes, bits, threads)
    assert (again.tolist(), counted) == (packed.tolist(), num_masked)


@given(st.data(), own.id_lists(20), st.integers(1, 5))
def test_w12_hash_stack(data: st.DataObject, ids: list[int], rounds: int) -> None:
    limit = MAX_ID // rounds
    size = data.draw(st.one_of(st.integers(1, 50), st.integers(1, limit), st.just(limit)))
    rows = signs.hash_stack(data.draw(own.layouts(ids)), rounds, size)
    assert rows.dtype == np.uint64
    assert rows.tolist() == model.hash_stack(ids, rounds, size)
    # Round r of id i is at i * rounds + r and stays in its own range, so no round can stand on
    # another's row.
    ranges = rows.reshape(len(ids), rounds) // np.uint64(size)
    assert (ranges == np.arange(rounds, dtype=np.uint64)).all()


@given(st.data(), st.lists(own.id_lists(60), max_size=5))
@example(None, [[]])
@example(None, [[0, MAX_ID], [MAX_ID, 1, 0], [0]])
def test_merge(data: st.DataObject | None, lists: list[list[int]]) -> None:
    arrays = [
        own.id_array(ids) if data is None else data.draw(own.layouts(ids)) for ids in lists
    ]
    distinct, numbers = signs.merge(arrays)
    assert distinct.dtype == np.uint64
    assert [one.dtype for one in numbers] == [np.uint32] * len(lists)
    assert (distinct.tolist(), [one.tolist() for one in numbers]) == model.merge(lists)


def test_more_than_a_u32_can_number() -> None:
    with pytest.raises(DataError, match=r"arrays\[0\]: expected at most 4294967294 items"):
        signs.merge([np.broadcast_to(np.uint64(1), 2**32)])
    with pytest.raises(DataError, match="at most 4294967294 rows"):
        signs.hash_stack(own.id_array([1]), 2**32, 10)


@pytest.mark.parametrize(("value", "message"), own.NOT_IDS)
def test_w39_not_ids(value: Any, message: str) -> None:
    for call in (
        lambda: signs.pack_all([value], [1 << 56], 8, ALONE),
        lambda: signs.hash_stack(value, 1, 10),
        lambda: signs.merge([own.id_array([1]), value]),
    ):
        with pytest.raises(DataTypeError, match=message):
            call()


# --- numbering ------------------------------------------------------------------------------


def check_numbers(values: NDArray[np.uint64]) -> None:
    distinct, (numbers,) = signs.merge([values])
    assert (distinct.tolist(), numbers.tolist()) == model.number(values.tolist())


# The sides of the least table and of larger ones.
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 65, 32768, 32769, 65536, 65537])
@pytest.mark.parametrize("num_values", [1, 100, 2**64 - 1])
def test_sizes(size: int, num_values: int, level: str) -> None:
    check_numbers(np.random.default_rng(size).integers(0, num_values, size, dtype=np.uint64))


def test_values_that_share_their_first_slot() -> None:
    # Of 200,000 values those whose hash begins with 8 zero bits: all but one are left over.
    values = np.arange(200_000, dtype=np.uint64)
    values = np.concatenate([values[mix64_array(values) >> np.uint64(56) == 0]] * 2)
    assert values.size > 1000
    check_numbers(values)


def test_memory_that_is_kept_or_not() -> None:
    # 2**20 values are the most whose block is kept for the next call; the rest of the block
    # still holds what a larger call left there.
    for size in (5, 2**20, 3, 2**20 + 1, 2**20, 100):
        values = np.arange(size, dtype=np.uint64) % np.uint64(1000)
        distinct, (numbers,) = signs.merge([values])
        assert distinct.tolist() == list(range(min(size, 1000)))
        assert (numbers == values).all()


def test_a_thread_may_number_while_others_do() -> None:
    arrays = [np.arange(20_000, dtype=np.uint64) % np.uint64(97 + n) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        calls = pool.map(lambda one: signs.merge([one]), arrays * 8)
        for array, (distinct, (numbers,)) in zip(arrays * 8, calls, strict=True):
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
                distinct, (numbers,) = signs.merge([values])
                # A value that is read again when it has changed may come twice.
                assert len(distinct) == numbers.max() + 1
        finally:
            done.set()
        writer.result(60)
