"""Restored rows, put in their order."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.store.store import EmbeddingStore
from tests.core.stores import adagrad_store, add, block_with, contents, u64, update


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


def test_changes_go_over_what_they_change() -> None:
    store = adagrad_store(200)
    store.open_changes("delta")
    other = adagrad_store()
    for turn in range(4):
        with store.begin_snapshot("delta") as one:
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
        add(store, range(150 + 20 * turn, 230 + 20 * turn))
        update(store, range(150 + 20 * turn, 230 + 20 * turn))
        store.delete(u64(range(turn, 200, 31)))


def test_rows_dropped_before_the_end_leave_their_chunk_to_larger_ones() -> None:
    # A place of theirs, counted in the larger rows, would be a gigabyte away.
    store = EmbeddingStore(100_000, num_shards=1)
    small = np.arange(1, 87_001, dtype=np.uint64)
    for signs, dim in ((small, 1), (u64([1 << 40]), 4096)):
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
