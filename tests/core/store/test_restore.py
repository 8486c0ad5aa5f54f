"""Rows and counts on their way back into a store."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._core.store.store import EmbeddingStore
from persia.errors import DataError, PersiaError
from tests.benchmarks.memory import resident
from tests.core import stores
from tests.core.machine import KINDS
from tests.core.policies import new_store, train
from tests.core.stores import (
    ADAGRAD,
    adagrad_store,
    add,
    block_with,
    blocks_of,
    contents,
    held,
    orders_of,
    restore_all,
    rows_of,
    shuffled,
    u64,
    update,
)


@pytest.mark.parametrize("expected", [0, 2000, 1 << 60])
@pytest.mark.parametrize("num_shards", [1, 4, 7])
def test_rows_come_back_bit_for_bit_into_any_number_of_shards(
    num_shards: int, expected: int
) -> None:
    store = adagrad_store(2000)
    update(store, range(0, 2000, 3))
    other = adagrad_store(num_shards=num_shards)
    other.expect(expected)
    for block in shuffled(blocks_of(store, 100)):
        assert other.restore(block) == len(block)
    other.expect(expected)  # of a store that has rows: no matter
    for share in range(3):
        other.end_restore(share, 3)
    other.check()
    assert contents(other) == contents(store)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_byte_values_are_not_rounded_again(dtype: str) -> None:
    store = adagrad_store()
    add(store, range(500), dtype=dtype)
    other = adagrad_store()
    blocks = blocks_of(store)
    assert {block.values.dtype for block in blocks} == {np.dtype(np.uint16)}
    restore_all(other, blocks)
    assert rows_of(blocks_of(other)) == rows_of(blocks_of(store))


def test_counts_of_ids_not_admitted_come_back() -> None:
    store, other = (new_store(1000, sketch_bytes=6400) for _ in range(2))
    for turn in range(3):
        train(store, range(turn, 40), turn, admit_at=5)
    counts, numbers = store.sketch()
    other.restore_sketch(counts, numbers)
    for turn in range(3, 6):
        for one in (store, other):
            train(one, range(40), turn, admit_at=5)
        assert sorted(held(one)) == sorted(held(store))
    assert held(store)
    with pytest.raises(DataError, match=r"must be \[1, 6400\]"):
        other.restore_sketch(counts[:, :64].copy(), numbers)
    with pytest.raises(DataError, match="next line to halve"):
        other.restore_sketch(counts, np.array([[0, 100]], np.uint64))
    with pytest.raises(DataError, match="next line to halve"):  # times 64 it is 0
        other.restore_sketch(counts, np.array([[0, 1 << 58]], np.uint64))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("num_rows", "num_shards"), [(1000, 1), (1000, 4), (200_000, 1)])
def test_memory_of_cleared_rows_is_used_again_and_given_back(
    num_rows: int, num_shards: int
) -> None:
    def filled(num_rows: int, dim: int, seed: int) -> EmbeddingStore:
        store = stores.new_store(10**6, num_shards=num_shards, seed=seed)
        stores.train(store, range(1, num_rows + 1), dim)
        return store

    other = filled(num_rows, 3, seed=4)
    blocks = blocks_of(other)
    store = filled(300_000, 64, seed=3)  # 80 MiB
    full = resident()
    store.clear(reuse=True)
    store.check()
    assert len(store) == 0
    assert full - resident() < 8 << 20
    store.expect(num_rows)
    restore_all(store, blocks)
    assert full - resident() > 60 << 20
    assert contents(store) == contents(other)
    assert orders_of(store) == orders_of(other)


def test_another_optimizer_begins_with_its_own_state() -> None:
    store = adagrad_store(50)
    other = EmbeddingStore(1000, num_shards=1)
    adam = RowOptimizer("rowwise_adam", lr=0.1)
    other.configure(adam)
    restore_all(other, blocks_of(store), adam)
    found, values, states = other.read(u64(range(50)), 5)
    assert found.all()
    assert states.shape[1] == adam.state_words(5) != ADAGRAD.state_words(5)
    assert values.tobytes() == store.read(u64(range(50)), 5)[1].tobytes()


def test_rows_that_do_not_fit_are_evicted() -> None:
    store = adagrad_store(1000, num_shards=1)
    other = adagrad_store(capacity=100, num_shards=1)
    for block in blocks_of(store, 64):
        other.restore(block)
        assert len(other) <= 100
    other.end_restore()
    other.check()
    assert len(other) == 100


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"values": np.zeros((3, 5), np.float64)}, "values must be float32"),
        ({"values": np.zeros((2, 5), np.float32)}, "values must be float32"),
        ({"dtype": "float16"}, "values must be uint16"),
        ({"states": np.zeros(3, np.uint32)}, "states must be uint32 with 2 dimensions"),
        ({"ages": np.zeros(4, np.uint64)}, "ages must be uint64 .* got uint64 .4."),
        ({"uses": np.zeros(6, np.uint32)[::2]}, "uses must be C-contiguous"),
        ({"values": np.zeros((3, 0), np.float32)}, "1..65536 columns"),
        ({"values": np.zeros((3, 4), np.float32)}, "stored with dim 5"),
        ({"policy": 5}, r"policy must be in 0\.\.0, got 5"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_w50_a_block_that_does_not_fit_together_changes_nothing(
    changed: dict[str, Any], says: str
) -> None:
    store = adagrad_store(5)
    before = contents(store)
    with pytest.raises(PersiaError, match=says):
        store.restore(block_with(**changed))
    assert contents(store) == before


def test_w50_foreign_numbers_in_a_block_are_bounded() -> None:
    largest, uses = np.full(3, 2**64 - 1, np.uint64), np.full(3, 2**32 - 1, np.uint32)
    foreign = {"orders": largest, "uses": uses, "ages": largest}
    signs = [u64(range(10 * policy, 10 * policy + 3)) for policy in range(5)]
    blocks = [block_with(signs=one, policy=i, **foreign) for i, one in enumerate(signs)]
    restore_all(new_store(1000, *KINDS), blocks)


@pytest.mark.parametrize("num_rows", [140_000, 190_000])
def test_a_store_that_was_prepared_takes_no_more_memory(num_rows: int) -> None:
    store = stores.new_store(200_000, seed=3)
    out, *_ = stores.train(store, range(1, num_rows + 1), 2)
    used = []
    for expected in (0, num_rows):
        other = EmbeddingStore(200_000, num_shards=1, seed=3)
        other.expect(expected)
        restore_all(other, blocks_of(store))
        np.testing.assert_array_equal(stores.evaluate(other, range(1, num_rows + 1), 2)[0], out)
        used.append(other.stats()["bytes"])
    assert used[1] <= used[0]


# --- their order ------------------------------------------------------------------------------


def ordered(signs: NDArray[np.uint64], orders: Any, dim: int) -> RowBlock:
    return block_with(
        signs=signs,
        values=np.ones((len(signs), dim), np.float32),
        states=np.zeros((len(signs), 0), np.uint32),
        orders=orders.astype(np.uint64),
    )


@pytest.mark.parametrize(
    ("step", "first"), [(1, 0), (1, 7), (3, 0), (0, 5), (1 << 31, 0), (1 << 40, 0)]
)
def test_rows_stand_as_their_orders_say(step: int, first: int) -> None:
    """Whether they are of one shard, without gaps, or of several; equal ones as they came."""
    rng = np.random.default_rng(5)
    places = rng.permutation(1000).astype(np.uint64)
    orders = first + step * (places // 2 if first == 7 else places)
    store = EmbeddingStore(2000, num_shards=1)
    parts = (slice(0, 600), slice(600, 1000))
    restore_all(store, [ordered(places[one] + np.uint64(1), orders[one], 2) for one in parts])
    # Notes have room for 32 bits of an order: what is beyond them is equal.
    noted = np.minimum(orders.astype(np.uint64), np.uint64(2**32 - 1))
    assert held(store) == (places[np.argsort(noted, kind="stable")] + 1).tolist()


def test_changes_go_over_what_they_change() -> None:
    store, other = adagrad_store(200), adagrad_store()
    store.open_changes("delta")
    for turn in range(4):
        with store.begin_snapshot("delta") as one:
            blocks = list(one.blocks())
            other.delete(one.deleted())
            restore_all(other, blocks)
            one.commit()
        assert contents(other) == contents(store)
        assert orders_of(other) == orders_of(store)
        add(store, range(150 + 20 * turn, 230 + 20 * turn))
        update(store, range(150 + 20 * turn, 230 + 20 * turn))
        store.delete(u64(range(turn, 200, 31)))


def test_rows_dropped_before_the_end_leave_their_chunk_to_larger_ones() -> None:
    # A place of theirs, counted in the larger rows, would be a gigabyte away.
    store = EmbeddingStore(100_000, num_shards=1)
    small = np.arange(1, 87_001, dtype=np.uint64)
    for signs, dim in ((small, 1), (u64([1 << 40]), 4096)):
        store.restore(ordered(signs, signs, dim))
        if dim == 1:
            assert store.delete(signs) == len(signs)
    store.end_restore()
    store.check()
    assert len(store) == 1
