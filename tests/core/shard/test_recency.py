"""Orders of use: exact, and bounded in their entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.core.stores import evaluate, held, new_store, train, u64


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


def uniform(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return rng.integers(0, 5000, 400)


def scan(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return np.arange(step * 350, step * 350 + 400)


def hot_and_slow(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return np.concatenate([rng.permutation(300), [10**6 + 2 * step, 10**6 + 2 * step + 1]])


def zipf(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return rng.zipf(1.2, 400) % 20_000


def every_fifth(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    """Leaves old segments at just less than four fifths live, again and again."""
    return np.arange(step % 5, 3000, 5) if step % 3 else scan(rng, step)


def sawtooth(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return np.arange(0, 2500 >> (step % 12))[::-1]


@pytest.mark.parametrize("pattern", [uniform, scan, hot_and_slow, zipf, every_fifth, sawtooth])
@pytest.mark.parametrize("capacity", [700, 3000])
def test_order_of_use_is_exact_under(pattern: Any, capacity: int) -> None:
    rng = np.random.default_rng(3)
    store = new_store(capacity)
    order: dict[int, None] = {}
    for step in range(150):
        signs = pattern(rng, step)
        train(store, signs, 1)
        for sign in signs.tolist():
            order.pop(sign, None)
            order[sign] = None
        while len(order) > capacity:
            del order[next(iter(order))]
        if step % 7 == 0:
            gone = rng.choice(np.array(list(order)), len(order) // 20, replace=False)
            assert store.delete(u64(gone)) == len(gone)
            for sign in gone.tolist():
                del order[sign]
        assert held(store) == list(order)
        assert store.stats()["entries"] <= 1.25 * len(order)
        store.check()


def test_order_within_a_batch_is_first_seen() -> None:
    store = new_store(5)
    train(store, [1, 2, 3, 4, 5])
    train(store, [4, 1])
    assert held(store) == [2, 3, 5, 4, 1]
    train(store, [9, 3, 8])
    assert held(store) == [4, 1, 9, 3, 8]


def test_w26_updates_evaluations_and_reads_are_no_uses() -> None:
    store = new_store(4)
    _, hints, _, _ = train(store, [1, 2, 3, 4])
    one = u64([1])
    for _ in range(3):
        evaluate(store, [1, 2])
        store.update(one, hints[:1], np.ones((1, 4), np.float32))
        store.read(one, 4)
        list(store.iterate())
    assert held(store) == [1, 2, 3, 4]
    train(store, [5])
    assert held(store) == [2, 3, 4, 5]
    assert store.stats()["evicted"] == 1
    store.write(u64([2]), np.ones((1, 4), np.float32), None)
    assert held(store) == [3, 4, 5, 2]
