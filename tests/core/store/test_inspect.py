"""What a store counts beside its rows' values."""

from __future__ import annotations

from tests.core.stores import new_store, train


def test_counts_are_of_all_shards() -> None:
    store = new_store(700, num_shards=4)
    train(store, range(1000), admit=0.9)
    stats = store.stats()
    assert stats["rows"] == len(store) == stats["inserted"] - stats["evicted"]
    assert stats["evicted"] == stats["evicted_lru"] == store.policy_stats()[0]["evicted"] > 0
    assert stats["inserted"] + stats["refused"] == 1000
