"""Rows on their way back into a store."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError, DataError, DimMismatch
from tests.core.test_cuts import array, contents, rows_of, train, update
from tests.core.test_cuts import new_store as adagrad_store
from tests.core.test_policies import KINDS, held, new_store
from tests.core.test_policies import train as train_policy
from tests.core.test_store import resident

UNIFORM = Initializer("uniform")


def cut(store: EmbeddingStore, max_rows: int = 65536) -> list[RowBlock]:
    with store.begin_cut() as one:
        return list(one.blocks(max_rows))


def shuffled(blocks: list[RowBlock]) -> list[RowBlock]:
    rng = np.random.default_rng(7)
    return [blocks[i] for i in rng.permutation(len(blocks))]


@pytest.mark.parametrize("expected", [0, 2000, 1 << 60])
@pytest.mark.parametrize("num_shards", [1, 4, 7])
def test_rows_come_back_bit_for_bit_into_any_number_of_shards(
    num_shards: int, expected: int
) -> None:
    store = adagrad_store(2000)
    update(store, range(0, 2000, 3))
    other = adagrad_store(num_shards=num_shards)
    other.expect(expected)
    for block in shuffled(cut(store, 100)):
        assert other.restore(block) == len(block)
    other.expect(expected)  # of a store that has rows: no matter
    for share in range(3):
        other.end_restore(share, 3)
    other.check()
    assert contents(other) == contents(store)
    with pytest.raises(DataError, match="got 3 of 3"):
        other.end_restore(3, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_byte_values_are_not_rounded_again(dtype: str) -> None:
    store = adagrad_store()
    train(store, range(500), dtype=dtype)
    other = adagrad_store()
    for block in cut(store):
        assert block.values.dtype == np.uint16
        other.restore(block)
    other.end_restore()
    assert rows_of(cut(other)) == rows_of(cut(store))


def policy_store() -> tuple[EmbeddingStore, EmbeddingStore]:
    """One with a life behind it, and an empty one whose clocks begin elsewhere."""
    kinds = (("lfu", None, 0), ("lru", "steps", 40), ("lfu", "milliseconds", 60))
    stores = [new_store(5000, *kinds, sketch_bytes=640) for _ in range(2)]
    stores[0].set_clocks(900, 800)
    rng = np.random.default_rng(3)
    for turn in range(60):
        stores[0].set_clocks(900 + turn, 800 + turn)
        policy = turn % 4
        train_policy(stores[0], rng.integers(0, 250, 90) + 1000 * policy, turn, policy=policy)
    return stores[0], stores[1]


def test_orders_classes_and_ages_come_back() -> None:
    store, other = policy_store()
    other.set_clocks(7, 3)
    for block in shuffled(cut(store, 50)):
        other.restore(block)
    other.end_restore()
    other.check()
    assert held(other) == held(store)
    assert {sign: row[4] for sign, row in rows_of(cut(other)).items()} == {
        sign: row[4] for sign, row in rows_of(cut(store)).items()
    }
    for later in range(1, 70, 3):
        store.set_clocks(959 + later, 859 + later)
        other.set_clocks(7 + later, 3 + later)
        # Expiry is exact to a sixteenth of the ttl, before and after.
        assert abs(len(held(other)) - len(held(store))) <= 60


def test_policies_take_turns_at_eviction_as_before() -> None:
    stores = [new_store(300, *KINDS) for _ in range(2)]
    for turn in range(30):
        policy = (turn // 3) % 2
        train_policy(stores[0], range(10 * turn, 10 * turn + 10), turn, policy=policy)
    for block in shuffled(cut(stores[0], 20)):
        stores[1].restore(block)
    stores[1].end_restore()
    for turn in range(5):
        kept = []
        for store in stores:
            train_policy(store, range(1000 + 40 * turn, 1040 + 40 * turn), 100 + turn)
            kept.append(sorted(held(store)))
        assert kept[0] == kept[1]


def test_counts_of_ids_not_admitted_come_back() -> None:
    store, other = (new_store(1000, sketch_bytes=6400) for _ in range(2))
    for turn in range(3):
        train_policy(store, range(turn, 40), turn, admit_at=5)
    counts, numbers = store.sketch()
    other.restore_sketch(counts, numbers)
    for turn in range(3, 6):
        for one in (store, other):
            train_policy(one, range(40), turn, admit_at=5)
        assert sorted(held(one)) == sorted(held(store))
    assert held(store)
    with pytest.raises(DataError, match=r"must be \[1, 6400\]"):
        other.restore_sketch(counts[:, :64].copy(), numbers)
    with pytest.raises(DataError, match="next line to halve"):
        other.restore_sketch(counts, np.array([[0, 100]], np.uint64))
    with pytest.raises(DataError, match="next line to halve"):  # times 64 it is 0
        other.restore_sketch(counts, np.array([[0, 1 << 58]], np.uint64))


@pytest.mark.parametrize(
    ("step", "first"), [(1, 0), (1, 7), (3, 0), (0, 5), (1 << 31, 0), (1 << 40, 0)]
)
def test_rows_stand_as_their_orders_say(step: int, first: int) -> None:
    """Whether they are of one shard, without gaps, or of several; equal ones as they came."""
    rng = np.random.default_rng(5)
    places = rng.permutation(1000).astype(np.uint64)
    orders = first + step * (places // 2 if first == 7 else places)
    store = EmbeddingStore(2000, num_shards=1)
    for some in (slice(0, 600), slice(600, 1000)):
        n = len(places[some])
        store.restore(
            block_with(
                signs=places[some] + np.uint64(1),
                values=np.ones((n, 2), np.float32),
                states=np.zeros((n, 0), np.uint32),
                orders=orders[some].astype(np.uint64),
                uses=np.zeros(n, np.uint32),
                ages=np.zeros(n, np.uint64),
            )
        )
    store.end_restore()
    store.check()
    # Notes have room for 32 bits of an order: what is beyond them is equal.
    noted = np.minimum(orders.astype(np.uint64), np.uint64(2**32 - 1))
    found = np.concatenate([block[0] for block in store.iterate()])
    assert found.tolist() == (places[np.argsort(noted, kind="stable")] + 1).tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("num_rows", "num_shards"), [(1000, 1), (1000, 4), (200_000, 1)])
def test_memory_of_cleared_rows_is_used_again_and_given_back(
    num_rows: int, num_shards: int
) -> None:
    def filled(num_rows: int, dim: int, seed: int) -> EmbeddingStore:
        store = EmbeddingStore(10**6, num_shards=num_shards, seed=seed)
        store.configure(RowOptimizer("sgd", 0.1, lr=0.1))
        signs = np.arange(1, num_rows + 1, dtype=np.uint64)
        out = np.empty((num_rows, dim), np.float32)
        store.lookup_train(signs, UNIFORM, 1.0, 0, out, np.empty(num_rows, np.uint32))
        return store

    other = filled(num_rows, 3, seed=4)
    blocks = cut(other)
    store = filled(300_000, 64, seed=3)  # 80 MiB
    full = resident()
    store.clear(reuse=True)
    store.check()
    assert len(store) == 0
    assert full - resident() < 8 << 20
    store.expect(num_rows)
    for block in blocks:
        store.restore(block)
    store.end_restore()
    assert full - resident() > 60 << 20
    store.check()
    assert contents(store) == contents(other)
    assert [block[0].tolist() for block in store.iterate()] == [
        block[0].tolist() for block in other.iterate()
    ]


def test_another_optimizer_begins_with_its_own_state() -> None:
    store = adagrad_store(50)
    other = EmbeddingStore(1000, num_shards=1)
    adam = RowOptimizer("rowwise_adam", lr=0.1)
    other.configure(adam)
    for block in cut(store):
        other.restore(block, adam)
    other.end_restore()
    found, values, states = other.read(array(range(50)), 5)
    assert found.all()
    assert (
        states.shape[1] == adam.state_words(5) != RowOptimizer("adagrad", lr=0.1).state_words(5)
    )
    assert values.tobytes() == store.read(array(range(50)), 5)[1].tobytes()


def test_changes_go_over_what_they_change() -> None:
    store = adagrad_store(200)
    store.open_changes("delta")
    other = adagrad_store()
    for turn in range(4):
        with store.begin_cut("delta") as one:
            blocks = list(one.blocks())
            other.delete(one.deleted())
            for block in blocks:
                other.restore(block)
            other.end_restore()
            one.commit()
        assert contents(other) == contents(store)
        assert [block[0].tolist() for block in other.iterate()] == [
            block[0].tolist() for block in store.iterate()
        ]
        train(store, range(150 + 20 * turn, 230 + 20 * turn))
        update(store, range(150 + 20 * turn, 230 + 20 * turn))
        store.delete(array(range(turn, 200, 31)))


def test_rows_that_do_not_fit_are_evicted() -> None:
    store = adagrad_store(1000, num_shards=1)
    other = adagrad_store(capacity=100, num_shards=1)
    for block in cut(store, 64):
        other.restore(block)
        assert len(other) <= 100
    other.end_restore()
    other.check()
    assert len(other) == 100


def test_rows_dropped_before_the_end_leave_their_chunk_to_larger_ones() -> None:
    # A place of theirs, counted in the larger rows, would be a gigabyte away.
    store = EmbeddingStore(100_000, num_shards=1)
    small = np.arange(1, 87_001, dtype=np.uint64)
    for signs, dim in ((small, 1), (array([1 << 40]), 4096)):
        store.restore(
            block_with(
                signs=signs,
                values=np.ones((len(signs), dim), np.float32),
                states=np.zeros((len(signs), 0), np.uint32),
                orders=signs,
                uses=np.zeros(len(signs), np.uint32),
                ages=np.zeros(len(signs), np.uint64),
            )
        )
        if dim == 1:
            assert store.delete(signs) == len(signs)
    store.end_restore()
    store.check()
    assert len(store) == 1


def block_with(**changed: Any) -> RowBlock:
    arrays: dict[str, Any] = {
        "signs": np.arange(3, dtype=np.uint64),
        "values": np.zeros((3, 5), np.float32),
        "states": np.zeros((3, 5), np.uint32),
        "orders": np.zeros(3, np.uint64),
        "uses": np.zeros(3, np.uint32),
        "ages": np.zeros(3, np.uint64),
    }
    arguments: dict[str, Any] = {"policy": 0, "dtype": "float32", **arrays, **changed}
    return RowBlock(**arguments)


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
    ],
)
def test_w50_a_block_that_does_not_fit_together_changes_nothing(
    changed: dict[str, Any], says: str
) -> None:
    store = adagrad_store(5)
    before = contents(store)
    with pytest.raises(DataError, match=says):
        store.restore(block_with(**changed))
    assert contents(store) == before


def test_w50_foreign_numbers_in_a_block_are_bounded() -> None:
    largest = np.full(3, 2**64 - 1, np.uint64)
    store = new_store(1000, *KINDS)
    for policy in range(5):
        signs = np.arange(3, dtype=np.uint64) + np.uint64(10 * policy)
        uses = np.full(3, 2**32 - 1, np.uint32)
        store.restore(
            block_with(signs=signs, policy=policy, orders=largest, uses=uses, ages=largest)
        )
    store.end_restore()
    store.check()
    with pytest.raises(ConfigError, match=r"policy must be in 0\.\.4, got 5"):
        store.restore(block_with(policy=5))
    with pytest.raises(ConfigError, match="dtype"):
        store.restore(block_with(dtype="float8"))
    store = adagrad_store(5)
    with pytest.raises(DimMismatch):
        store.restore(block_with(values=np.zeros((3, 4), np.float32)))


@pytest.mark.parametrize("num_rows", [140_000, 190_000])
def test_a_store_that_was_prepared_takes_no_more_memory(num_rows: int) -> None:
    signs = np.arange(1, num_rows + 1, dtype=np.uint64)
    store = EmbeddingStore(200_000, num_shards=1, seed=3)
    out = np.empty((num_rows, 2), np.float32)
    hints = np.empty(num_rows, np.uint32)
    store.lookup_train(signs, UNIFORM, 1.0, 0, out, hints, RowOptimizer("sgd", 0.1, lr=0.1))
    used = []
    for expected in (0, num_rows):
        other = EmbeddingStore(200_000, num_shards=1, seed=3)
        other.expect(expected)
        for block in cut(store):
            other.restore(block)
        other.end_restore()
        other.check()
        found = np.empty_like(out)
        assert other.lookup_eval(signs, found) == 0
        np.testing.assert_array_equal(found, out)
        used.append(other.stats()["bytes"])
    assert used[1] <= used[0]
