"""How long a lookup takes while others train.

A lookup is an evaluation of 4096 samples of 26 features. It is timed in slices, each slice
while another thread of the process

    idle       does nothing
    trains     trains batches whose ids have rows
    grows      trains batches of which 10 % of the ids are new, below capacity
    evicts     does so at full capacity, so that each new row takes an old one's place

Slices alternate. A p99 is over all slices of a kind; its ratio's interval is by the bootstrap
over slices. What the threads take from each other (a core, the GIL, memory) is in `trains`;
what growth and eviction add to it is the last column.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from tests.benchmarks.contenders import Persia
from tests.benchmarks.interleaved import Ratio
from tests.benchmarks.workload import Batch, Step, batches, fresh, sizes

LOOKUPS = 60  # a slice
NEW = 0.1  # of all ids
RESAMPLES = 500


class Load:
    """A thread that steps until its event is set."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.count = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for step in self._steps:
                if self._stop.is_set():
                    return
                step()
                self.count += 1
        except BaseException as error:
            self._error = error


def slice_of(lookups: list[Step], steps: Iterator[Step] | None) -> tuple[list[float], float]:
    """Return the seconds of LOOKUPS lookups, and steps a second beside them."""

    def timed() -> list[float]:
        seconds = []
        for _, lookup in zip(range(LOOKUPS), itertools.cycle(lookups)):
            start = time.perf_counter()
            lookup()
            seconds.append(time.perf_counter() - start)
        return seconds

    if steps is None:
        return timed(), 0.0
    with Load(steps) as load:
        start, before = time.perf_counter(), load.count
        seconds = timed()
        return seconds, (load.count - before) / (time.perf_counter() - start)


def p99(slices: list[list[float]]) -> float:
    return float(np.percentile(np.concatenate(slices), 99))


def ratio(own: list[list[float]], other: list[list[float]]) -> Ratio:
    """Return p99 over p99; slices that were taken together are drawn together."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(0, len(own), len(own))
        ratios.append(p99([own[at] for at in drawn]) / p99([other[at] for at in drawn]))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(p99(own) / p99(other), float(low), float(high))


def training(
    persia: Persia, data: list[Batch], renew: Callable[[Batch], Batch]
) -> Iterator[Step]:
    """Yield steps for ever."""
    for batch in itertools.cycle(data):
        yield persia.train_step(renew(batch))


def latency(quick: bool, threads: int, pairs: int) -> None:
    table_sizes = sizes(quick)
    capacity = sum(table_sizes)
    data = batches("single", quick, 8)
    roomy = Persia(table_sizes, threads)
    full = Persia(table_sizes, threads, capacity=capacity)
    rng = np.random.default_rng(0)
    numbers = itertools.count(1 << 40, 1 << 20)

    def renew(batch: Batch) -> Batch:
        return fresh(batch, rng, next(numbers), NEW, False)

    loads: dict[str, tuple[Persia, Iterator[Step] | None]] = {
        "idle": (roomy, None),
        "trains": (roomy, training(roomy, data, lambda batch: batch)),
        "grows": (roomy, training(roomy, data, renew)),
        "evicts": (full, training(full, data, renew)),
    }
    slices: dict[str, list[list[float]]] = {name: [] for name in loads}
    rates: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(pairs + 1):
        for name, (persia, steps) in loads.items():
            seconds, rate = slice_of([persia.evaluate_step(batch) for batch in data], steps)
            if number > 0:  # the first only warms
                slices[name].append(seconds)
                rates[name].append(rate)
    print(f"\nA lookup of 4096 samples, {pairs * LOOKUPS} of each, ms\n")
    print("| beside it | steps/s | p50 | p99 | p99 of idle [95 %] | p99 of trains [95 %] |")
    print("|---|---|---|---|---|---|")
    for name, own in slices.items():
        p50 = np.percentile(np.concatenate(own), 50) * 1e3
        print(
            f"| {name} | {np.median(rates[name]):.0f} | {p50:.2f} | {p99(own) * 1e3:.2f} | "
            f"{ratio(own, slices['idle'])} | {ratio(own, slices['trains'])} |",
            flush=True,
        )
