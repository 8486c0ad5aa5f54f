"""A request's split by shard, kept from a lookup to its update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from persia._core.store.request import kept_numbers
from persia._core.store.store import EmbeddingStore
from tests.core.stores import ADAGRAD, UNIFORM, Floats, Words, evaluate, new_store

DIM = 16


def look_up(store: EmbeddingStore, signs: Any, numbers: Words) -> Floats:
    rows = np.empty((len(signs), DIM), np.float32)
    store.lookup_train(signs, UNIFORM, 1.0, 0, rows, numbers)
    return rows


class Pair:
    """Equal stores that looked the same signs up; the first one kept its split."""

    def __init__(self, signs: Any, num_threads: int = 1, capacity: int = 1 << 20) -> None:
        arguments = {"num_shards": 8, "seed": 3, "num_threads": num_threads}
        self.stores = [new_store(capacity, ADAGRAD, **arguments) for _ in range(2)]
        self.numbers = kept_numbers(len(signs))
        copies = np.empty(len(signs), np.uint32)
        first, second = (
            look_up(store, signs, numbers).tobytes()
            for store, numbers in zip(self.stores, (self.numbers, copies), strict=True)
        )
        assert first == second
        assert self.numbers.tobytes() == copies.tobytes()

    def update(self, signs: Any) -> int:
        """How many were missing."""
        rng = np.random.default_rng(len(signs))
        gradients = rng.normal(size=(len(signs), DIM)).astype(np.float32)
        kept, plain = self.stores
        missing: int = kept.update(signs, self.numbers[: len(signs)], gradients)
        assert missing == plain.update(signs, None, gradients)
        return missing

    def check(self, signs: Any) -> None:
        kept, plain = (store.read(signs, DIM) for store in self.stores)
        for one, other in zip(kept, plain, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [1, 300, 20_000])
def test_an_update_with_kept_numbers_is_one_without(count: int, num_threads: int) -> None:
    rng = np.random.default_rng(count)
    signs = rng.permutation(np.arange(1, count + 1, dtype=np.uint64))
    pair = Pair(signs, num_threads)
    for _ in range(2):  # the second time it is still there
        assert pair.update(signs) == 0
    # Other signs are split again; of fewer, the numbers are a part of those kept.
    for given in (rng.permutation(signs), signs.copy(), signs[::-1].copy(), signs[:100]):
        assert pair.update(given) == 0
    pair.check(signs)


def test_rows_that_went_meanwhile_are_missed_and_no_others() -> None:
    signs = np.arange(1, 1001, dtype=np.uint64)
    pair = Pair(signs, capacity=1024)
    newer = np.arange(5001, 5501, dtype=np.uint64)
    for store in pair.stores:
        look_up(store, newer, np.empty(500, np.uint32))
    assert pair.update(signs) > 0
    pair.check(signs)
    pair.check(newer)


def test_a_large_lookup_hands_on_what_small_ones_do() -> None:
    signs = np.arange(1, 40_001, dtype=np.uint64)  # more than a cache has room for
    store = new_store(1 << 20, ADAGRAD, num_shards=8, num_threads=3)
    rows = look_up(store, signs, kept_numbers(len(signs)))
    for size in (40_000, 5000):
        for start in range(0, 40_000, size):
            part, missing = evaluate(store, signs[start : start + size], DIM)
            assert missing == 0
            assert part.tobytes() == rows[start : start + size].tobytes()
