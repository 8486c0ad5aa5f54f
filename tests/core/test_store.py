from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.initial import Initializer
from persia._core.optim import RowOptimizer
from persia._core.store import EmbeddingStore
from tests.reference.hashing import mix64
from tests.reference.store import unmix64

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Signs = Sequence[int] | NDArray[np.int64] | NDArray[np.uint64]

UNIFORM = Initializer("uniform")
NO_ROW = 2**32 - 1


def u64(signs: Iterable[int] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    if isinstance(signs, np.ndarray):
        return np.ascontiguousarray(signs, np.uint64)
    return np.array(list(signs), dtype=np.uint64)


def new_store(
    capacity: int,
    optimizer: RowOptimizer | None = None,
    *,
    num_shards: int = 1,
    seed: int = 0,
    memory_limit: int = 0,
    num_threads: int = 1,
) -> EmbeddingStore:
    store = EmbeddingStore(
        capacity,
        num_shards=num_shards,
        seed=seed,
        memory_limit=memory_limit,
        num_threads=num_threads,
    )
    store.configure(optimizer or RowOptimizer("sgd", lr=0.5))
    return store


def train(
    store: EmbeddingStore,
    signs: Signs,
    dim: int = 4,
    *,
    admit: float = 1.0,
    batch_id: int = 0,
    initializer: Initializer = UNIFORM,
) -> tuple[Floats, Words, int, int]:
    """Rows, hints, and how many were inserted and refused."""
    array = u64(signs)
    rows = np.full((len(array), dim), np.nan, np.float32)
    hints = np.full(len(array), 7, np.uint32)
    inserted, refused = store.lookup_train(array, initializer, admit, batch_id, rows, hints)
    return rows, hints, inserted, refused


def evaluate(store: EmbeddingStore, signs: Signs, dim: int = 4) -> tuple[Floats, int]:
    array = u64(signs)
    rows = np.full((len(array), dim), np.nan, np.float32)
    return rows, store.lookup_eval(array, rows)


def held(store: EmbeddingStore, shard: int = 0) -> list[int]:
    """Signs of a shard that holds one shape, oldest first."""
    return [int(sign) for signs, _, _ in store.shard_entries(shard) for sign in signs]


# --- recency ------------------------------------------------------------------------------


def test_a_row_touched_while_its_segment_is_merged_keeps_one_place() -> None:
    # Every 2048 appends the newest segment closes; both it and the one before have few live
    # entries then, so they merge, and the touch that closed it is of a row that moved.
    store = new_store(1000)
    train(store, range(300))
    for shift in range(60):
        hot = np.roll(np.arange(100), shift)
        train(store, hot)
        store.check()
        assert held(store)[-100:] == list(hot)
    assert held(store)[:200] == list(range(100, 300))


@pytest.mark.parametrize("capacity", [1, 2, 3, 10])
def test_entries_are_bounded_after_a_batch_larger_than_the_capacity(capacity: int) -> None:
    store = new_store(capacity)
    for first in range(0, 5000, 500):
        train(store, range(first, first + 500))
        store.check()
        assert store.stats()["entries"] <= 1.25 * capacity
        assert held(store) == list(range(first + 500 - capacity, first + 500))


# --- the index ----------------------------------------------------------------------------


def sign_of_bucket(bucket: int, serial: int) -> int:
    """A sign whose home is that bucket; serials differ in the tag and above it."""
    return unmix64((serial + 1) << 32 | bucket)


def test_a_search_ends_although_rows_passed_every_bucket() -> None:
    store = new_store(64)
    # Two buckets of twelve. The thirteenth row passes the first, then room is made there, the
    # second fills, and its thirteenth row passes on to the first.
    first = [sign_of_bucket(0, serial) for serial in range(13)]
    train(store, first)
    assert store.delete(u64(first[:10])) == 10
    second = [sign_of_bucket(1, serial) for serial in range(100, 112)]
    expected, _, _, _ = train(store, second)
    store.check()
    for bucket in range(2):
        rows, missing = evaluate(store, [sign_of_bucket(bucket, 999)])
        assert missing == 1
        assert not rows.any()
    assert np.array_equal(evaluate(store, second)[0], expected)
    assert evaluate(store, first)[1] == 10


# --- the memory limit ---------------------------------------------------------------------


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
