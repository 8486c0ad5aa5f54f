"""Orders of use: exact, and bounded in their entries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.base import cpu
from tests.core.stores import entries, evaluate, held, new_store, train, u64

PATTERNS: dict[str, Callable[[np.random.Generator, int], NDArray[np.int64]]] = {
    "uniform": lambda rng, step: rng.integers(0, 5000, 400),
    "scan": lambda rng, step: np.arange(step * 350, step * 350 + 400),
    "hot and slow": lambda rng, step: np.append(rng.permutation(300), 10**6 + step),
    "zipf": lambda rng, step: rng.zipf(1.2, 400) % 20_000,
    # Leaves old segments at just less than four fifths live, again and again.
    "every fifth": lambda rng, step: np.arange(step % 5, 3000, 5 if step % 3 else 1),
    "sawtooth": lambda rng, step: np.arange(0, 2500 >> (step % 12))[::-1],
    # A segment closes every 2048 uses and is merged with the one before, which has few live
    # entries too; the use that closed it is of a row that moved.
    "rolled": lambda rng, step: np.roll(np.arange(100 if step else 300), step),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 700, 3000])
def test_order_of_use_is_exact_under(pattern: str, capacity: int) -> None:
    rng = np.random.default_rng(3)
    store = new_store(capacity)
    order: dict[int, None] = {}
    for step in range(150):
        signs = PATTERNS[pattern](rng, step)
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


@pytest.mark.parametrize("pattern", PATTERNS)
def test_order_of_use_is_that_of_every_instruction_set(pattern: str) -> None:
    found = []
    try:
        for level in cpu.available():
            cpu.select(level)
            rng = np.random.default_rng(4)
            store = new_store(3000)
            for step in range(60):
                train(store, PATTERNS[pattern](rng, step), 1)
            store.check()
            found.append((held(store), store.stats()["entries"]))
    finally:
        cpu.select(None)
    assert all(one == found[0] for one in found)


def test_w26_updates_evaluations_and_reads_are_no_uses() -> None:
    store = new_store(4)
    _, hints, _, _ = train(store, [1, 2, 3, 4])
    one = u64([1])
    for _ in range(3):
        evaluate(store, [1, 2])
        store.update(one, hints[:1], np.ones((1, 4), np.float32))
        store.read(one, 4)
        entries(store)
    assert held(store) == [1, 2, 3, 4]
    train(store, [5])
    assert held(store) == [2, 3, 4, 5]
    assert store.stats()["evicted"] == 1
    store.write(u64([2]), np.ones((1, 4), np.float32), None)
    assert held(store) == [3, 4, 5, 2]
