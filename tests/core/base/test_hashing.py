"""``persia._core.base.hashing`` against its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.base import hashing
from persia.errors import ConfigError, DataError, DataTypeError
from tests.reference import hashing as model
from tests.support import strategies as own

# SplitMix64 as published: https://prng.di.unimi.it/splitmix64.c. The first value of the stream
# seeded with each x; those of seed 0 after the first are mix64 of multiples of the increment.
VECTORS = {
    0: 0xE220A8397B1DCDAF,
    0x9E3779B97F4A7C15: 0x6E789E6AA1B965F4,
    2 * 0x9E3779B97F4A7C15 % 2**64: 0x06C45D188009454F,
    3 * 0x9E3779B97F4A7C15 % 2**64: 0xF88BB8A8724C81EC,
    1234567: 6457827717110365317,
    (1234567 + 0x9E3779B97F4A7C15) % 2**64: 3203168211198807973,
    (1234567 + 2 * 0x9E3779B97F4A7C15) % 2**64: 9817491932198370423,
}


def test_published_vectors() -> None:
    assert hashing.mix64_array(own.id_array(list(VECTORS))).tolist() == list(VECTORS.values())
    assert [model.mix64(x) for x in VECTORS] == list(VECTORS.values())
    assert [model.unmix64(x) for x in VECTORS.values()] == list(VECTORS)


@given(st.data(), own.id_lists())
def test_mix64_array(data: st.DataObject, ids: list[int]) -> None:
    array = data.draw(own.layouts(ids))
    assert hashing.mix64_array(array).tolist() == [model.mix64(one) for one in ids]
    assert array.tolist() == ids
    assert [hashing.bucket(one) for one in ids] == [model.bucket(one) for one in ids]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4, 7, 1000, 16383, 16384])
def test_owners_are_contiguous_and_even(num_servers: int) -> None:
    owner = hashing.owners(num_servers)
    assert owner.dtype == np.uint16
    assert owner.tolist() == model.owners(num_servers)
    sizes = np.bincount(owner, minlength=num_servers)
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(owner.astype(np.int64)) >= 0).all()


@pytest.mark.parametrize("num_servers", [-1, 0, 16385])
def test_servers_beyond_the_buckets(num_servers: int) -> None:
    with pytest.raises(ConfigError, match=rf"1\.\.16384, got {num_servers}"):
        hashing.owners(num_servers)


@given(st.data(), own.id_lists(), st.sampled_from([1, 2, 3, 5, 16384]))
def test_route(data: st.DataObject, signs: list[int], num_servers: int) -> None:
    owner = hashing.owners(num_servers)
    if data.draw(st.booleans()):  # moved buckets: no longer contiguous
        owner = owner[::-1]
    order, starts = hashing.route(data.draw(own.layouts(signs)), owner, num_servers)
    assert order.dtype == np.uint32
    assert starts.dtype == np.int64
    assert (order.tolist(), starts.tolist()) == model.route(signs, owner.tolist(), num_servers)


@pytest.mark.parametrize(("value", "message"), own.NOT_IDS)
def test_w39_not_ids(value: Any, message: str) -> None:
    for call in (
        lambda: hashing.mix64_array(value),
        lambda: hashing.route(value, hashing.owners(1), 1),
    ):
        with pytest.raises(DataTypeError, match=message):
            call()


def test_more_than_a_u32_can_number() -> None:
    endless = np.broadcast_to(np.uint64(1), 2**32 - 1)
    with pytest.raises(DataError, match="at most 4294967294 items, got 4294967295"):
        hashing.mix64_array(endless)


def test_route_refuses_a_table_that_does_not_fit() -> None:
    signs = own.id_array([1])
    with pytest.raises(ConfigError, match="16384 buckets, got 16383"):
        hashing.route(signs, hashing.owners(2)[1:], 2)
    with pytest.raises(ConfigError, match="below 2, got 2"):
        hashing.route(signs, hashing.owners(3), 2)
    with pytest.raises(DataTypeError, match="uint16, got int64"):
        hashing.route(signs, hashing.owners(2).astype(np.int64), 2)
