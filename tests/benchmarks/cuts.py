"""What a cut costs: the pause, reading, restoring, and training beside it.

    python -m tests.benchmarks.cuts [ROWS]

Rows of dim 16 with Adagrad's state, 144 bytes each, 16 shards, one thread a request. A step is
a training lookup and an update of 34,000 ids, uniform over all rows (`cold`) or by popularity
(`zipf`). Steps and cuts take wall time where others wait for them, everything else the thread's
CPU time; ratios are medians over interleaved pairs, above 1 is faster than without.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.snapshot import Snapshot
from persia._core.store.store import EmbeddingStore

DIM = 16
IDS = 34_000
CUTS = 10
PAIRS = 11
ROW_BYTES = 144
UNIFORM = Initializer("uniform")
Signs = NDArray[np.uint64]


def new_store(rows: int) -> EmbeddingStore:
    store = EmbeddingStore(rows + rows // 8, num_shards=16)
    store.configure(RowOptimizer("adagrad", lr=0.1))
    return store


class Training:
    """A full store, and steps on it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.store = new_store(rows)
        self.rng = np.random.default_rng(1)
        self.out = np.empty((IDS, DIM), np.float32)
        self.hints = np.empty(IDS, np.uint32)
        order = self.rng.permutation(rows).astype(np.uint64)
        for first in range(0, rows, IDS):
            self.step(order[first : first + IDS])

    def draw(self, pattern: str) -> Signs:
        if pattern == "zipf":
            raw = np.minimum(self.rng.pareto(0.25, 2 * IDS) * 50, self.rows - 1)
            return self.rng.permutation(np.unique(raw.astype(np.uint64)))[:IDS]
        return np.unique(self.rng.integers(0, self.rows, IDS).astype(np.uint64))

    def step(self, signs: Signs) -> None:
        out, hints = self.out[: len(signs)], self.hints[: len(signs)]
        self.store.lookup_train(signs, UNIFORM, 1.0, 0, out, hints)
        self.store.update(signs, hints, out)

    def seconds(self, batches: list[Signs], clock: Callable[[], float]) -> float:
        start = clock()
        for signs in batches:
            self.step(signs)
        return clock() - start


def pauses(training: Training) -> None:
    """Print how long beginning a cut takes, beside steps, and how fast it is read."""
    begun, read, steps = [], [], []
    for _ in range(CUTS):
        steps.append(training.seconds([training.draw("cold")], time.perf_counter))
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
    other = new_store(training.rows)
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


class Reader:
    """A thread that takes one cut after the other while it is on."""

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        self.is_on = threading.Event()
        self.is_over = threading.Event()
        self.num_bytes = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                if self.is_on.wait(0.1):
                    with self.store.begin_snapshot() as cut:
                        self.read(cut)
        except BaseException as error:
            self.failure = error

    def read(self, cut: Snapshot) -> None:
        for block in cut.blocks():
            self.num_bytes += block.num_bytes
            if not self.is_on.is_set():
                return


def beside(training: Training) -> None:
    """Print the rate of training while another thread reads cut after cut."""
    for pattern in ("zipf", "cold"):
        reader = Reader(training.store)
        ratios, read, waited = [], 0, 0.0
        for _ in range(PAIRS):
            batches = [training.draw(pattern) for _ in range(8)]
            alone = training.seconds(batches, time.perf_counter)
            before = reader.num_bytes
            reader.is_on.set()
            start = time.perf_counter()
            with_reader = training.seconds(batches, time.perf_counter)
            waited += time.perf_counter() - start
            read += reader.num_bytes - before
            reader.is_on.clear()
            ratios.append(alone / with_reader)
        reader.is_over.set()
        reader.thread.join()
        if reader.failure is not None:
            raise reader.failure
        print(
            f"{pattern}: training while cuts are read at {read / waited / 1e9:.2f} GB/s: "
            f"{median(ratios):.2f} of its rate without"
        )


def watched(training: Training) -> Iterator[str]:
    """Yield the cost of being watched, without anybody reading."""
    store = training.store
    for pattern in ("zipf", "cold"):
        ratios: dict[str, list[float]] = {"log": [], "cut": []}
        for _ in range(PAIRS):
            batches = [training.draw(pattern) for _ in range(3)]
            training.seconds(batches, time.thread_time)
            alone = training.seconds(batches, time.thread_time)
            store.open_changes("feed")
            ratios["log"].append(alone / training.seconds(batches, time.thread_time))
            store.close_changes("feed")
            with store.begin_snapshot(side_bytes=1 << 40):
                ratios["cut"].append(alone / training.seconds(batches, time.thread_time))
        yield (
            f"{pattern}: with a consumer of changes {median(ratios['log']):.2f}, with a cut "
            f"that is not read {median(ratios['cut']):.2f} of the rate without"
        )


def main() -> None:
    """Measure all of it."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    training = Training(rows)
    gc.disable()
    pauses(training)
    for line in watched(training):
        print(line)
    beside(training)
    restoring(training)


if __name__ == "__main__":
    main()
