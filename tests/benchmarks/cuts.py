"""What a cut costs: the pause, reading, restoring, and training beside it.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from tests.benchmarks.interleaved import interleave, ratio
from tests.benchmarks.policies import IDS, WORKLOADS, Rows, Signs

CUTS = 10
PAIRS = 11
ROW_BYTES = 144
PATTERNS = ("zipf", "cold")


class Training(Rows):
    """A store with room for more rows than it has, and steps on it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.rng = np.random.default_rng(1)
        order = self.rng.permutation(rows).astype(np.uint64)
        super().__init__("lru", rows, order, rows + rows // 8)

    def draw(self, pattern: str, count: int) -> list[Signs]:
        drawn = (np.unique(WORKLOADS[pattern](self.rng, self.rows, 0)) for _ in range(count))
        return [self.rng.permutation(signs)[:IDS] for signs in drawn]

    def seconds(self, batches: list[Signs], clock: Callable[[], float]) -> float:
        start = clock()
        for signs in batches:
            self.step(signs)
        return clock() - start


def pauses(training: Training) -> None:
    """Print how long beginning a cut takes, beside steps, and how fast it is read."""
    begun, read, steps = [], [], []
    for _ in range(CUTS):
        steps.append(training.seconds(training.draw("cold", 1), time.perf_counter))
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


def restoring(training: Training) -> None:
    """Print how fast rows enter an empty store, whose memory is still to be had, and again."""
    other = EmbeddingStore(training.rows + training.rows // 8, num_shards=16)
    other.configure(RowOptimizer("adagrad", lr=0.1))
    for kind in ("an empty store", "a store that has them"):
        seconds = 0.0
        count = 0
        with training.store.begin_snapshot() as cut:
            for block in cut.blocks():
                start = time.thread_time()
                count += other.restore(block)
                seconds += time.thread_time() - start
        start = time.thread_time()
        other.end_restore()
        ended = time.thread_time() - start
        print(
            f"restoring to {kind}: {count * ROW_BYTES / seconds / 1e9:.2f} GB/s, with their "
            f"order {count * ROW_BYTES / (seconds + ended) / 1e9:.2f} GB/s"
        )


def beside(training: Training) -> None:
    """Print the rate of training while another thread reads cut after cut."""
    is_on, is_over = threading.Event(), threading.Event()
    num_read, waited = [0], list[float]()

    def read_cuts() -> None:
        while not is_over.is_set():
            if is_on.wait(0.1):
                with training.store.begin_snapshot() as cut:
                    for block in itertools.takewhile(lambda _: is_on.is_set(), cut.blocks()):
                        num_read[0] += block.num_bytes

    for pattern in PATTERNS:

        def alone(pattern: str = pattern) -> float:
            return 1 / training.seconds(training.draw(pattern, 8), time.perf_counter)

        def read(alone: Callable[[], float] = alone) -> float:
            is_on.set()
            rate = alone()
            is_on.clear()
            waited.append(1 / rate)
            return rate

        is_over.clear()
        num_read[0] = 0
        waited.clear()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_cuts)
            series = interleave({"alone": alone, "read": read}, PAIRS)
            is_over.set()
            reading.result()
        print(
            f"{pattern}: training while cuts are read at {num_read[0] / sum(waited) / 1e9:.2f} "
            f"GB/s: {ratio(series['read'], series['alone'])} of its rate without"
        )


def watched(training: Training) -> None:
    """Print the cost of being watched, without a reader."""
    store = training.store
    for pattern in PATTERNS:
        batches = training.draw(pattern, 3)

        def alone(batches: list[Signs] = batches) -> float:
            return 1 / training.seconds(batches, time.thread_time)

        def log(alone: Callable[[], float] = alone) -> float:
            store.open_changes("feed")
            rate = alone()
            store.close_changes("feed")
            return rate

        def cut(alone: Callable[[], float] = alone) -> float:
            with store.begin_snapshot(side_bytes=1 << 40):
                return alone()

        series = interleave({"alone": alone, "log": log, "cut": cut}, PAIRS)
        print(
            f"{pattern}: with a consumer of changes {ratio(series['log'], series['alone'])}, "
            f"with a cut that is not read {ratio(series['cut'], series['alone'])} of the rate "
            "without"
        )


def main(rows: int = 10_000_000) -> None:
    """Measure all of it."""
    training = Training(rows)
    gc.disable()
    pauses(training)
    watched(training)
    beside(training)
    restoring(training)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
