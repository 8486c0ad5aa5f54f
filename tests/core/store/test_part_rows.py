"""``persia._core.store.part_rows`` against its model, at every level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.store.part_rows import all_once, copy_rows, find_stranger
from persia._files.parts import check_once
from persia.errors import DataError, DataTypeError
from tests.reference.hashing import bucket, unmix64

WITH_HASH_0 = unmix64(0)


def stranger(signs: list[int], first: int, end: int) -> int:
    """The place of the first sign of another bucket."""
    places = (i for i, sign in enumerate(signs) if not first <= bucket(sign) < end)
    return next(places, -1)


pytestmark = pytest.mark.usefixtures("level")


@given(st.data())
def test_rows_are_copied_by_their_places(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 80))
    width = data.draw(st.sampled_from([0, 1, 2, 4, 8, 12, 16, 32, 64, 100, 128, 300]))
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=100))
    rows = np.random.default_rng(count).integers(0, 256, (count, width), dtype=np.uint8)
    room = np.full(len(places) * width + 9, 7, np.uint8)
    at = data.draw(st.integers(0, 8))  # wherever a row before it ended
    out = room[at : at + len(places) * width]
    copy_rows(rows, np.array(places, np.uint32), out)
    assert out.tobytes() == b"".join(rows[place].tobytes() for place in places)
    assert (room[:at] == 7).all()
    assert (room[at + len(out) :] == 7).all()


@given(
    signs=st.lists(st.integers(0, 2**64 - 1), max_size=60),
    buckets=st.tuples(st.integers(0, 16384), st.integers(0, 16384)).map(sorted),
)
def test_the_first_sign_of_another_bucket_is_found(
    signs: list[int], buckets: list[int]
) -> None:
    first, end = buckets
    found = find_stranger(np.array(signs, np.uint64), first, end)
    assert found == stranger(signs, first, end)


def test_a_stranger_among_many() -> None:
    signs = np.arange(5000, dtype=np.uint64)
    assert find_stranger(signs, 0, 16384) == -1
    expected = stranger(signs.tolist(), 10, 16384)
    assert find_stranger(signs, 10, 16384) == expected > 0


@given(
    st.lists(st.sampled_from([*range(6), WITH_HASH_0, WITH_HASH_0 ^ 1]), max_size=8),
    st.integers(0, 20_000),
)
def test_a_sign_that_comes_twice_is_never_taken_for_once(few: list[int], many: int) -> None:
    signs = np.array(few + list(range(100, 100 + many)), np.uint64)
    assert all_once(signs) == (len(set(few)) == len(few))
    assert all_once(signs[::-1].copy()) == (len(set(few)) == len(few))


def test_one_that_comes_twice_among_many_heaps() -> None:
    signs = np.arange(100_000, dtype=np.uint64) * np.uint64(2**40 + 1)
    assert all_once(signs)
    for place in (0, 5, 99_998):
        twice = signs.copy()
        twice[99_999] = signs[place]
        assert not all_once(twice)


def test_signs_that_crowd_are_left_to_a_sort() -> None:
    """Chosen on purpose; no time is spent on a table that they would fill."""
    one_heap = [unmix64(number << 44) for number in range(20_000)]
    assert not all_once(np.array(one_heap, np.uint64))
    one_place = [unmix64(number) for number in range(100)]
    assert not all_once(np.array(one_place, np.uint64))
    check_once([np.array(one_heap, np.uint64), np.array(one_place[1:], np.uint64)], "file")


def test_places_of_no_rows_and_other_sizes_are_refused() -> None:
    rows, out = np.zeros((3, 4), np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(DataError, match="places: expected those of 3 rows, got 3"):
        copy_rows(rows, np.array([0, 3], np.uint32), out)
    with pytest.raises(DataError, match="expected room for 1 rows of 4 bytes, got 8 bytes"):
        copy_rows(rows, np.array([0], np.uint32), out)
    with pytest.raises(DataTypeError, match="places: expected a 1-D numpy array of uint32"):
        copy_rows(rows, np.array([0]), out)
    assert not out.any()
