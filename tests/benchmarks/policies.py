"""Rates of eviction and admission policies as parts of plain LRU's.

    python -m tests.benchmarks.policies [ROWS]

A step is a training lookup and an Adagrad update of 34,000 distinct ids, dim 16, one thread.
`zipf`: ids by popularity; `cold`: uniform over all rows; `new`: a tenth of the ids is new, so
that a full store evicts as many. Rows expire after 150 steps. Timed by the thread's CPU clock;
a ratio above 1 is faster than LRU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from tests.benchmarks.interleaved import interleave, ratio, row, table

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


WORKLOADS = {workload.__name__: workload for workload in (zipf, cold, new)}


class Rows:
    """A full store of the first ``rows`` ids, and steps on it."""

    def __init__(self, policy: str, rows: int) -> None:
        arguments, self.policy = POLICIES[policy]
        self.rows = rows
        self.store = EmbeddingStore(rows, num_shards=16, **arguments)
        self.store.configure(RowOptimizer("adagrad", lr=0.1))
        self.out = np.empty((3 * IDS, DIM), np.float32)
        self.hints = np.empty(3 * IDS, np.uint32)
        admitted = {key: value for key, value in self.policy.items() if key == "policy"}
        signs = np.arange(rows, dtype=np.uint64)
        for first in range(0, rows, IDS):
            self.lookup(signs[first : first + IDS], 0, admitted)

    def lookup(self, signs: Signs, step: int, policy: dict[str, Any]) -> None:
        out, hints = self.out[: len(signs)], self.hints[: len(signs)]
        self.store.lookup_train(signs, UNIFORM, 1.0, step, out, hints, **policy)

    def steps(self, batches: list[Signs], first: int) -> float:
        """Return million ids a second."""
        start = time.thread_time()
        for step, signs in enumerate(batches, first):
            self.store.set_clocks(0, step)
            self.lookup(signs, step, self.policy)
            self.store.update(signs, self.hints[: len(signs)], self.out[: len(signs)])
        return sum(map(len, batches)) / (time.thread_time() - start) / 1e6

    def train(self, draw: Any) -> Iterator[float]:
        """Yield the rates of turns, on the same batches for every policy."""
        rng = np.random.default_rng(1)
        for first in range(1, 3 * (PAIRS + 2), 3):
            drawn = (np.unique(draw(rng, self.rows, first + i)) for i in range(3))
            yield self.steps([rng.permutation(ids) for ids in drawn], first)


def main(num_rows: str = "2000000") -> None:
    rows = int(num_rows)
    title = f"{rows} rows, medians of {PAIRS} interleaved pairs"
    columns = [column for name in WORKLOADS for column in (f"{name} M ids/s", "of lru")]
    table(title, "policy", *columns)
    for policy in POLICIES:
        cells: list[object] = [policy]
        for draw in WORKLOADS.values():
            own, base = Rows(policy, rows).train(draw), Rows("lru", rows).train(draw)
            series = interleave({"own": own.__next__, "lru": base.__next__}, PAIRS, warm=2)
            cells += [f"{series['own'].rate:.2f}", ratio(series["own"], series["lru"])]
        row(*cells)


if __name__ == "__main__":
    main(*sys.argv[1:])
