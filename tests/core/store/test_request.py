"""A request's split by shard, kept from a lookup to its update."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.store.request import kept_numbers
from persia._core.store.store import EmbeddingStore
from tests.core.stores import ADAGRAD, UNIFORM, new_store

DIM = 16


def stores(num_threads: int = 1, capacity: int = 1 << 20) -> tuple[EmbeddingStore, ...]:
    arguments = {"num_shards": 8, "seed": 3, "num_threads": num_threads}
    return tuple(new_store(capacity, ADAGRAD, **arguments) for _ in range(2))


def look_up(
    store: EmbeddingStore, signs: NDArray[np.uint64], numbers: NDArray[np.uint32]
) -> NDArray[np.float32]:
    rows = np.empty((len(signs), DIM), np.float32)
    store.lookup_train(signs, UNIFORM, 1.0, 0, rows, numbers)
    return rows


def values(store: EmbeddingStore, signs: NDArray[np.uint64]) -> bytes:
    found, rows, states = store.read(signs, DIM)
    return found.tobytes() + rows.tobytes() + states.tobytes()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [1, 300, 20_000])
def test_an_update_with_kept_numbers_is_one_without(count: int, num_threads: int) -> None:
    rng = np.random.default_rng(count)
    signs = rng.permutation(np.arange(1, count + 1, dtype=np.uint64))
    gradients = rng.normal(size=(count, DIM)).astype(np.float32)
    kept, plain = stores(num_threads)
    numbers, copies = kept_numbers(count), np.empty(count, np.uint32)
    assert look_up(kept, signs, numbers).tobytes() == look_up(plain, signs, copies).tobytes()
    assert numbers.tobytes() == copies.tobytes()
    for _ in range(2):  # the second time it is still there
        assert kept.update(signs, numbers, gradients) == 0
        assert plain.update(signs, None, gradients) == 0
    assert values(kept, signs) == values(plain, signs)


def test_other_signs_are_split_again() -> None:
    rng = np.random.default_rng(0)
    signs = np.arange(1, 301, dtype=np.uint64)
    gradients = rng.normal(size=(300, DIM)).astype(np.float32)
    kept, plain = stores()
    numbers = kept_numbers(300)
    other = rng.permutation(signs)
    for store in (kept, plain):
        look_up(store, signs, numbers if store is kept else np.empty(300, np.uint32))
    for given in (other, signs.copy(), signs[::-1].copy()):
        assert kept.update(given, numbers, gradients) == 0
        assert plain.update(given, None, gradients) == 0
    # As many fewer: the numbers are a part of those kept.
    assert kept.update(signs[:100], numbers[:100], gradients[:100]) == 0
    assert plain.update(signs[:100], None, gradients[:100]) == 0
    assert values(kept, signs) == values(plain, signs)


def test_rows_that_went_meanwhile_are_missed_and_no_others() -> None:
    store, plain = stores(capacity=1024)
    signs = np.arange(1, 1001, dtype=np.uint64)
    numbers = kept_numbers(1000)
    look_up(store, signs, numbers)
    look_up(plain, signs, np.empty(1000, np.uint32))
    newer = np.arange(5001, 5501, dtype=np.uint64)
    gradients = np.ones((1000, DIM), np.float32)
    for one in (store, plain):
        look_up(one, newer, np.empty(500, np.uint32))
    num_missing = store.update(signs, numbers, gradients)
    assert num_missing == plain.update(signs, None, gradients) > 0
    assert values(store, signs) == values(plain, signs)
    assert values(store, newer) == values(plain, newer)


def test_a_large_lookup_hands_on_what_small_ones_do() -> None:
    count = 40_000  # more than a cache has room for
    store, _ = stores(num_threads=3)
    signs = np.arange(1, count + 1, dtype=np.uint64)
    rows = look_up(store, signs, kept_numbers(count))
    evaluated = np.empty((count, DIM), np.float32)
    assert store.lookup_eval(signs, evaluated) == 0
    assert rows.tobytes() == evaluated.tobytes()
    for start in range(0, count, 5000):
        part = np.empty((5000, DIM), np.float32)
        assert store.lookup_eval(signs[start : start + 5000], part) == 0
        assert part.tobytes() == rows[start : start + 5000].tobytes()
