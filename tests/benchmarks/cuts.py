"""What a cut costs: the pause, reading it, and training beside it.

    python -m tests.benchmarks.cuts [ROWS]

Rows of dim 16 with Adagrad's state, 144 bytes each, 16 shards, one thread a request. A step is
a training lookup and an update of 34,000 ids, uniform over all rows (`cold`) or by popularity
(`zipf`). Steps and cuts take wall time where others wait for them, everything else the thread's
CPU time; ratios are medians over interleaved pairs, above 1 is faster than without.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from tests.benchmarks.interleaved import interleave, ratio
from tests.benchmarks.policies import IDS, WORKLOADS, Rows

CUTS = 10
PAIRS = 11
ROW_BYTES = 144


class Training(Rows):
    """A store with room for more rows than it has, and steps on it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.rng = np.random.default_rng(1)
        order = self.rng.permutation(rows).astype(np.uint64)
        super().__init__("lru", rows, order, rows + rows // 8)

    def seconds(self, pattern: str, count: int) -> float:
        """Return how long steps take, drawn before."""
        drawn = (np.unique(WORKLOADS[pattern](self.rng, self.rows, 0)) for _ in range(count))
        batches = [self.rng.permutation(signs)[:IDS] for signs in drawn]
        start = time.perf_counter()
        for signs in batches:
            self.step(signs)
        return time.perf_counter() - start


def pauses(training: Training) -> None:
    """Print how long beginning a cut takes, beside steps, and how fast it is read."""
    begun, read, steps = [], [], []
    for _ in range(CUTS):
        steps.append(training.seconds("cold", 1))
        start = time.perf_counter()
        cut = training.store.begin_snapshot()
        begun.append(time.perf_counter() - start)
        start = time.thread_time()
        count = sum(map(len, cut.blocks()))
        read.append(count * ROW_BYTES / (time.thread_time() - start) / 1e9)
        cut.close()
    print(
        f"begin_cut of {training.rows} rows: median {1e3 * median(begun):.1f} ms, longest "
        f"{1e3 * max(begun):.1f} ms of {CUTS} (a step: {1e3 * median(steps):.1f} ms)"
    )
    print(f"reading a cut: {median(read):.2f} GB/s")


def beside(training: Training, pattern: str) -> None:
    """Print the rate of training while another thread reads cut after cut."""
    is_on, is_over = threading.Event(), threading.Event()
    num_read: list[int] = []
    waited: list[float] = []

    def read_cuts() -> None:
        while not is_over.is_set():
            if is_on.wait(0.1):
                with training.store.begin_snapshot() as cut:
                    for block in itertools.takewhile(lambda _: is_on.is_set(), cut.blocks()):
                        num_read.append(block.num_bytes)

    def alone() -> float:
        return 1 / training.seconds(pattern, 8)

    def read() -> float:
        is_on.set()
        rate = alone()
        is_on.clear()
        waited.append(1 / rate)
        return rate

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_cuts)
        series = interleave({"alone": alone, "read": read}, PAIRS)
        is_over.set()
        reading.result()
    print(
        f"{pattern}: training while cuts are read at {sum(num_read) / sum(waited) / 1e9:.2f} "
        f"GB/s: {ratio(series['read'], series['alone'])} of its rate without"
    )


def main(rows: int = 10_000_000) -> None:
    """Measure all of it."""
    training = Training(rows)
    gc.disable()
    pauses(training)
    for pattern in ("zipf", "cold"):
        beside(training, pattern)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
