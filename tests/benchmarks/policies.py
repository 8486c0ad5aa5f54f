"""Rates of eviction and admission policies as parts of plain LRU's.

    python -m tests.benchmarks.policies [ROWS [POLICY ...]]

A step is a training lookup and an Adagrad update of 34,000 distinct ids, dim 16, one thread.
`zipf`: ids by popularity; `cold`: uniform over all rows; `new`: a tenth of the ids is new, so
that a full store evicts as many. Rows expire after 150 steps. Pairs are interleaved, timed by
the thread's CPU clock; the medians of their ratios, above 1 is faster than LRU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore

PAIRS = 21
DIM = 16
IDS = 34_000
UNIFORM = Initializer("uniform")
# Arguments of the store, and of its lookups.
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lru": ({}, {}),
    "lru, ttl": ({"policies": [("lru", "steps", 150)]}, {"policy": 1}),
    "lfu": ({"policies": [("lfu", None, 0)]}, {"policy": 1}),
    "lfu, ttl": ({"policies": [("lfu", "steps", 150)]}, {"policy": 1}),
    "count 2": ({"sketch_bytes": 8 << 20}, {"admit_at": 2}),
}
Signs = NDArray[np.uint64]


def zipf(rng: np.random.Generator, rows: int, step: int) -> Signs:
    return np.minimum(rng.pareto(0.25, 3 * IDS // 2) * 50, rows - 1).astype(np.uint64)


def cold(rng: np.random.Generator, rows: int, step: int) -> Signs:
    return rng.integers(0, rows, IDS).astype(np.uint64)


def new(rng: np.random.Generator, rows: int, step: int) -> Signs:
    fresh = np.arange(IDS // 10) + rows + step * (IDS // 10)
    return np.concatenate([cold(rng, rows, step)[IDS // 10 :], fresh.astype(np.uint64)])


class Rows:
    """A store of one policy, full."""

    def __init__(self, policy: str, rows: int) -> None:
        arguments, self.policy = POLICIES[policy]
        self.store = EmbeddingStore(rows, num_shards=16, **arguments)
        self.store.configure(RowOptimizer("adagrad", lr=0.1))
        self.out = np.empty((3 * IDS, DIM), np.float32)
        self.hints = np.empty(3 * IDS, np.uint32)
        admitted = {key: value for key, value in self.policy.items() if key == "policy"}
        for first in range(0, rows, IDS):
            signs = np.arange(first, min(first + IDS, rows), dtype=np.uint64)
            self.lookup(signs, 0, admitted)

    def lookup(self, signs: Signs, step: int, policy: dict[str, Any]) -> None:
        out, hints = self.out[: len(signs)], self.hints[: len(signs)]
        self.store.lookup_train(signs, UNIFORM, 1.0, step, out, hints, **policy)

    def steps(self, batches: list[Signs], first: int) -> float:
        start = time.thread_time()
        for step, signs in enumerate(batches, first):
            self.store.set_clocks(0, step)
            self.lookup(signs, step, self.policy)
            self.store.update(signs, self.hints[: len(signs)], self.out[: len(signs)])
        return time.thread_time() - start


def compare(policy: str, ids: Callable[..., Signs], rows: int) -> tuple[float, float]:
    """Return million ids a second, and LRU's time divided by the policy's."""
    mine, base = Rows(policy, rows), Rows("lru", rows)
    rng = np.random.default_rng(1)
    rates, ratios = [], []
    for pair in range(-2, PAIRS):
        first = 1 + 3 * (pair + 2)
        batches = [rng.permutation(np.unique(ids(rng, rows, first + i))) for i in range(3)]
        stores = (mine, base) if pair % 2 else (base, mine)
        times = {store: store.steps(batches, first) for store in stores}
        if pair >= 0:
            rates.append(sum(map(len, batches)) / times[mine] / 1e6)
            ratios.append(times[base] / times[mine])
    return median(rates), median(ratios)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    workloads = (zipf, cold, new)
    print(f"{rows} rows, medians of {PAIRS} interleaved pairs\n")
    print(
        "| policy |", " | ".join(f"{ids.__name__} M ids/s | of lru" for ids in workloads), "|"
    )
    print("|---" * (1 + 2 * len(workloads)) + "|")
    for policy in sys.argv[2:] or POLICIES:
        cells = [compare(policy, ids, rows) for ids in workloads]
        shown = " | ".join(f"{rate:.2f} | {ratio:.2f}" for rate, ratio in cells)
        print(f"| {policy} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
