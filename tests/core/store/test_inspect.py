"""What is read from a store beside its rows' values."""

from __future__ import annotations

import numpy as np

from tests.core.policies import new_store, train
from tests.core.stores import held


def test_rows_loaded_in_the_order_of_a_dump_are_evicted_in_it() -> None:
    store = new_store(3000, ("lfu", None, 0))
    rng = np.random.default_rng(0)
    for turn in range(50):
        train(store, np.unique(rng.zipf(1.3, 200) % 3000), turn, policy=1)
    other = new_store(3000, ("lfu", None, 0))
    for signs, values, states in store.shard_entries(0):
        other.write(signs, values, states, policy=1)
    assert held(other) == held(store)


def test_w63_a_dump_takes_one_shard_at_a_time() -> None:
    store = new_store(1000, num_shards=4)
    train(store, range(500))
    seen: list[int] = []
    for step, (signs, _, _) in enumerate(store.iterate()):
        seen += signs.tolist()
        train(store, range(1000 + step, 1003 + step))  # nothing is locked in between
    assert {sign for sign in seen if sign < 1000} == set(range(500))
