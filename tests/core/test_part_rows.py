"""``persia._core.part_rows`` against its model, at every level."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core import cpu
from persia._core.part_rows import copy_rows, find_stranger
from persia.errors import DataError, DataTypeError
from tests.reference import part_rows as model


@pytest.fixture(autouse=True, params=cpu.available(), scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu.select(request.param)
    yield
    cpu.select(None)


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
    assert out.tobytes() == model.copied([row.tobytes() for row in rows], places)
    assert (room[:at] == 7).all()
    assert (room[at + len(out) :] == 7).all()


def test_places_of_no_rows_and_other_sizes_are_refused() -> None:
    rows, out = np.zeros((3, 4), np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(DataError, match="places: expected those of 3 rows, got 3"):
        copy_rows(rows, np.array([0, 3], np.uint32), out)
    with pytest.raises(DataError, match="expected room for 1 rows of 4 bytes, got 8 bytes"):
        copy_rows(rows, np.array([0], np.uint32), out)
    with pytest.raises(DataTypeError, match="places: expected a 1-D numpy array of uint32"):
        copy_rows(rows, np.array([0]), out)
    assert not out.any()


@given(
    signs=st.lists(st.integers(0, 2**64 - 1), max_size=60),
    buckets=st.tuples(st.integers(0, 16384), st.integers(0, 16384)).map(sorted),
)
def test_the_first_sign_of_another_bucket_is_found(
    signs: list[int], buckets: list[int]
) -> None:
    first, end = buckets
    found = find_stranger(np.array(signs, np.uint64), first, end)
    assert found == model.stranger(signs, first, end)


def test_a_stranger_among_many() -> None:
    signs = np.arange(5000, dtype=np.uint64)
    assert find_stranger(signs, 0, 16384) == -1
    expected = model.stranger(signs.tolist(), 10, 16384)
    assert find_stranger(signs, 10, 16384) == expected > 0
    with pytest.raises(DataError, match=r"expected buckets in 0..16384, got 5..4"):
        find_stranger(signs, 5, 4)
