"""Measuring contenders one after another, many times over, so that their ratios can be trusted.

A rate says little on a shared machine: it moves by 15 % between runs. What is compared here is
compared within a repetition, in which everyone met the same load: a ratio is the median over
the repetitions' own ratios, and its interval is what the median of so many could as well have
been (95 %, by the bootstrap).
"""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.benchmarks.memory import resident
from tests.benchmarks.workload import Step

# glibc's mallopt: without these, some contenders give their big buffers back after each batch
# and pay for the pages again. Alike for all, and the faults are counted.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30
RESAMPLES = 2000


@dataclass(frozen=True)
class Series:
    """One contender's repetitions."""

    rates: list[float]  # million units a second
    faults: list[float]  # page faults a step

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def fault(self) -> float:
        return statistics.median(self.faults)


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and the interval that holds it with 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(own: Series, other: Series) -> Ratio:
    """Return how many times the other's rate this one's is, taken pair by pair."""
    ratios = np.divide(own.rates, other.rates)
    draws = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def libc_call(name: str, *arguments: int) -> bool:
    """Call a function of the C library; returns whether it is there and returned 1."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function is not None and function(*arguments) == 1


def pin_malloc() -> bool:
    """Make malloc keep freed memory; returns whether this C library can."""
    options = (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)
    return all(libc_call("mallopt", option, KEEP_BYTES) for option in options)


def settled() -> int:
    """Return the resident bytes of this process without what malloc keeps for later."""
    gc.collect()
    libc_call("malloc_trim", 0)
    return resident()


def run(steps: Sequence[Step]) -> tuple[float, float]:
    """Return seconds and page faults of the steps.

    An untimed one goes before: it finds the caches as the contender before has left them, and
    that one's threads still looking for work.
    """
    steps[-1]()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for step in steps:
        step()
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def measure(
    everyone: dict[str, Sequence[Step]], num_units: float, pairs: int
) -> dict[str, Series]:
    """Run everyone's steps one after another, ``pairs`` times over.

    Each repetition starts with another contender, so that none always follows the same one.

    Args:
        everyone: What to run, by name.
        num_units: How many units (ids, samples) one contender's steps are.
        pairs: Repetitions. Of two contenders each is one pair.
    """
    names = list(everyone)
    series: dict[str, Series] = {name: Series([], []) for name in names}
    for name in names:
        run(everyone[name])  # buffers grow to their size
    for repetition in range(pairs):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            seconds, faulted = run(everyone[name])
            series[name].rates.append(num_units / seconds / 1e6)
            series[name].faults.append(faulted / len(everyone[name]))
    return series
