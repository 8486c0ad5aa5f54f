"""What keeps the rows of a shard within its capacity and its share of memory."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.store.store import EmbeddingStore
from tests.core.stores import NO_ROW, UNIFORM, evaluate, held, new_store, train, u64
from tests.reference.hashing import shard
from tests.reference.store import shard_capacities

LIMIT = 8 << 20


def test_a_first_request_beyond_the_limit_leaves_a_useful_store() -> None:
    store = new_store(10**9, memory_limit=LIMIT)
    train(store, range(200_000), 16)
    assert store.stats()["memory_limited"]
    assert len(store) * (16 + 64) > LIMIT // 2
    for first in range(0, 10_000, 1000):
        train(store, range(first, first + 1000), 16)
        assert held(store)[-1000:] == list(range(first, first + 1000))
    assert len(store) * (16 + 64) > LIMIT // 2
    store.check()


def test_the_limit_holds_and_the_rows_stay_many() -> None:
    rng = np.random.default_rng(1)
    store = new_store(10**9, memory_limit=LIMIT)
    rows = []
    for step in range(1500):
        dim = (8, 64)[step % 2]
        signs = np.unique(rng.integers(0, 500_000, 1000)) * 2 + dim // 64
        train(store, signs, dim)
        stats = store.stats()
        assert stats["bytes"] < 1.06 * LIMIT
        rows.append(stats["rows"])
    store.check()
    # Half the rows of each dim: 48 and 272 bytes, beside some 12 for index and order.
    assert min(rows[500:]) > 0.85 * LIMIT / ((48 + 272) / 2 + 12)


def test_memory_follows_rows_that_change_their_dim() -> None:
    rng = np.random.default_rng(2)
    limit = 2 * LIMIT
    store = new_store(10**9, memory_limit=limit)
    for phase in range(4):
        dim = (8, 64)[phase % 2]
        for _ in range(250):
            signs = np.unique(rng.integers(0, 10**6, 2000)) * 2 + dim // 64
            train(store, signs, dim)
            assert store.stats()["bytes"] < 1.5 * limit
        store.check()
        assert store.stats()["bytes"] < 1.1 * limit
        assert len(store) > 0.75 * limit / (16 + 4 * dim + 15)


def test_w26_capacity_is_divided_over_shards_without_loss() -> None:
    store = new_store(1003, num_shards=7)
    train(store, range(30_000))
    assert shard_capacities(1003, 7) == [144, 144, 143, 143, 143, 143, 143]
    assert [len(held(store, number)) for number in range(7)] == shard_capacities(1003, 7)
    for number in range(7):
        wanted = [sign for sign in range(30_000) if shard(sign, 7) == number]
        assert held(store, number) == wanted[-shard_capacities(1003, 7)[number] :]
    assert len(store) == 1003


@pytest.mark.parametrize("num_shards", [1, 2, 5, 16, 1024])
def test_a_shard_has_at_least_64_rows(num_shards: int) -> None:
    for capacity in (1, 63, 64, 127, 128, 64 * num_shards, 64 * num_shards - 1):
        store = EmbeddingStore(capacity, num_shards=num_shards)
        assert store.num_shards == len(shard_capacities(capacity, num_shards))


def test_rows_are_evicted_only_after_they_were_copied_out() -> None:
    store = new_store(3)
    wanted = np.array([UNIFORM.values(0, sign, 4) for sign in range(2000)])
    rows, hints, inserted, _ = train(store, range(2000))
    assert np.array_equal(rows, wanted)
    assert inserted == 2000
    assert (hints != NO_ROW).all()
    # Their hints are stale now, but no row has their numbers: nothing is stepped.
    assert store.update(u64(range(2000)), hints, np.ones((2000, 4), np.float32)) == 1997
    after, missing = evaluate(store, range(2000))
    assert missing == 1997
    assert np.array_equal(after[1997:], wanted[1997:] - np.float32(0.5))


def test_a_batch_keeps_old_rows_it_uses_late() -> None:
    store = new_store(10)
    train(store, range(10))
    store.update(u64([0]), None, np.full((1, 4), 2, np.float32))
    rows, _, inserted, _ = train(store, [*range(100, 150), 0])
    assert inserted == 50
    assert np.array_equal(rows[50], UNIFORM.values(0, 0, 4) - np.float32(1))
    assert held(store) == [*range(141, 150), 0]
