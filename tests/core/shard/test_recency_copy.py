"""Places in the orders of use, as a snapshot has them and a restore takes them."""

from __future__ import annotations

import numpy as np

from persia._core.store.store import EmbeddingStore
from tests.core.policies import KINDS, held, new_store, train
from tests.core.stores import blocks_of, rows_of, shuffled


def policy_store() -> tuple[EmbeddingStore, EmbeddingStore]:
    """One with a life behind it, and an empty one whose clocks begin elsewhere."""
    kinds = (("lfu", None, 0), ("lru", "steps", 40), ("lfu", "milliseconds", 60))
    stores = [new_store(5000, *kinds, sketch_bytes=640) for _ in range(2)]
    stores[0].set_clocks(900, 800)
    rng = np.random.default_rng(3)
    for turn in range(60):
        stores[0].set_clocks(900 + turn, 800 + turn)
        policy = turn % 4
        train(stores[0], rng.integers(0, 250, 90) + 1000 * policy, turn, policy=policy)
    return stores[0], stores[1]


def test_orders_classes_and_ages_come_back() -> None:
    store, other = policy_store()
    other.set_clocks(7, 3)
    for block in shuffled(blocks_of(store, 50)):
        other.restore(block)
    other.end_restore()
    other.check()
    assert held(other) == held(store)
    assert {sign: row[4] for sign, row in rows_of(blocks_of(other)).items()} == {
        sign: row[4] for sign, row in rows_of(blocks_of(store)).items()
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
        train(stores[0], range(10 * turn, 10 * turn + 10), turn, policy=policy)
    for block in shuffled(blocks_of(stores[0], 20)):
        stores[1].restore(block)
    stores[1].end_restore()
    for turn in range(5):
        kept = []
        for store in stores:
            train(store, range(1000 + 40 * turn, 1040 + 40 * turn), 100 + turn)
            kept.append(sorted(held(store)))
        assert kept[0] == kept[1]
