"""``persia._core.ids.signs`` against its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia._core.ids import signs
from persia.errors import ConfigError, DataError, DataTypeError
from tests.reference import signs as model
from tests.support import strategies as own

MAX_ID = own.MAX_ID


@given(st.data(), own.id_lists(), st.integers(1, 63))
def test_pack(data: st.DataObject, ids: list[int], bits: int) -> None:
    group = data.draw(st.integers(0, 2**bits - 2))
    prefix = signs.prefix_of(group, bits)
    assert prefix == model.prefix_of(group, bits)
    packed, num_masked = signs.pack(data.draw(own.layouts(ids)), prefix, bits)
    assert packed.dtype == np.uint64
    assert (packed.tolist(), num_masked) == model.pack(ids, prefix, bits)
    assert {int(one) >> (64 - bits) for one in packed} <= {group + 1}


@given(st.data(), st.lists(st.tuples(own.id_lists(20), st.integers(0, 200)), max_size=4))
def test_pack_all(data: st.DataObject, features: list[tuple[list[int], int]]) -> None:
    prefixes = [signs.prefix_of(group, 8) for _, group in features]
    arrays = [data.draw(own.layouts(ids)) for ids, _ in features]
    packed, num_masked = signs.pack_all(arrays, prefixes, 8)
    want = [
        model.pack(ids, prefix, 8) for (ids, _), prefix in zip(features, prefixes, strict=True)
    ]
    assert packed.tolist() == [one for some, _ in want for one in some]
    assert num_masked == [count for _, count in want]


@pytest.mark.parametrize("bits", [1, 8, 63])
def test_w06_groups_beyond_the_prefix(bits: int) -> None:
    most = 2**bits - 1
    assert signs.prefix_of(most - 1, bits) >> (64 - bits) == most
    for group in (-1, most, most + 1):
        with pytest.raises(
            ConfigError, match=rf"hold {most} feature groups.* got group {group}"
        ):
            signs.prefix_of(group, bits)


def test_w08_the_last_id_does_not_alias_the_first() -> None:
    prefix = signs.prefix_of(0, 8)
    last = 2**56 - 1
    packed, num_masked = signs.pack(own.id_array([0, last, last + 1, MAX_ID]), prefix, 8)
    assert packed.tolist() == [prefix, prefix + last, prefix, prefix + last]
    assert num_masked == 2


@pytest.mark.parametrize("bits", [-1, 0, 64])
def test_prefix_bits_outside_the_word(bits: int) -> None:
    for call in (
        lambda: signs.prefix_of(0, bits),
        lambda: signs.pack(own.id_array([1]), 1 << 56, bits),
    ):
        with pytest.raises(ConfigError, match=rf"1\.\.63, got {bits}"):
            call()


@pytest.mark.parametrize("prefix", [-1, 0, 1, (1 << 56) - 1, (1 << 56) + 1, 1 << 64])
def test_prefix_outside_its_field(prefix: int) -> None:
    with pytest.raises(ConfigError, match="top 8 of 64 bits"):
        signs.pack(own.id_array([1]), prefix, 8)


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


def test_hash_stack_limits() -> None:
    ids = own.id_array([1])
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        signs.hash_stack(ids, 0, 10)
    for rounds, size in ((1, 0), (1, 2**64), (2, 2**63), (3, MAX_ID // 3 + 1)):
        with pytest.raises(ConfigError, match=f"got {size}"):
            signs.hash_stack(ids, rounds, size)
    with pytest.raises(DataError, match="at most 4294967294 rows"):
        signs.hash_stack(ids, 2**32, 10)


@given(st.data(), st.lists(own.id_lists(20), max_size=5))
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


def test_merge_names_the_array() -> None:
    wrong: Any = [own.id_array([1]), np.zeros(3)]
    with pytest.raises(DataTypeError, match=r"arrays\[1\]: .* got float64 of 1 dimension$"):
        signs.merge(wrong)


def test_merge_of_more_than_a_u32_can_number() -> None:
    with pytest.raises(DataError, match=r"arrays\[0\]: expected at most 4294967294 items"):
        signs.merge([np.broadcast_to(np.uint64(1), 2**32)])


@pytest.mark.parametrize(("value", "message"), own.NOT_IDS)
def test_w39_not_ids(value: Any, message: str) -> None:
    for call in (
        lambda: signs.pack(value, 1 << 56, 8),
        lambda: signs.hash_stack(value, 1, 10),
        lambda: signs.merge([value]),
    ):
        with pytest.raises(DataTypeError, match=message):
            call()
