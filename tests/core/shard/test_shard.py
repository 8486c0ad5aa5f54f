"""What keeps the rows of a shard within its capacity and its share of memory."""

from __future__ import annotations

import numpy as np

from tests.core.stores import held, new_store, train
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
