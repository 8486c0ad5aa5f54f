"""Measuring contenders one after another, many times over, so that their ratios can be trusted.

A rate says little on a shared machine: it moves by 15 % between runs. What is compared here is
compared within a repetition, in which all met the same load: a ratio is the median over the
repetitions' own ratios, with its 95 % interval by the bootstrap.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.benchmarks.memory import resident
from tests.benchmarks.workload import Batch, Contender, Step

# glibc's mallopt: without these, some contenders give their big buffers back after each batch
# and pay for the pages again. Alike for all, and the faults are counted.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30
RESAMPLES = 2000

Clock = Callable[[], float]


@dataclass(frozen=True)
class Series:
    """One contender's repetitions."""

    rates: list[float]  # million units a second
    faults: list[float] = field(default_factory=list)  # page faults a step

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


def interleave(
    turns: Mapping[str, Callable[[], float]], pairs: int, warm: int = 1
) -> dict[str, Series]:
    """Return the rates that each turn returned, ``pairs`` times over.

    Each repetition starts with another contender, so that none always follows the same one. The
    first ones only warm.
    """
    names = list(turns)
    series: dict[str, Series] = {name: Series([]) for name in names}
    for repetition in range(-warm, pairs):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            rate = turns[name]()
            if repetition >= 0:
                series[name].rates.append(rate)
    return series


def measure(
    everyone: Mapping[str, Callable[[], Iterable[Step]]],
    num_units: float,
    options: argparse.Namespace,
) -> dict[str, Series]:
    """Run everyone's steps one after another, ``options.pairs`` times over.

    Args:
        everyone: What makes the steps of a repetition, by name. Its first step is not timed.
        num_units: How many units (ids, samples) one contender's timed steps are.
        options: ``pairs``, and the ``clock``: the machine's, or ``time.process_time`` where
            others use it: that leaves out what they take, and means something with one thread
            only.
    """
    faults: dict[str, list[float]] = {name: [] for name in everyone}

    def turn(name: str) -> float:
        untimed, *steps = everyone[name]()
        # It finds the caches as the contender before has left them, and that one's threads
        # still looking for work.
        untimed()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = options.clock()
        for step in steps:
            step()
        seconds: float = options.clock() - start
        faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        faults[name].append(faulted / len(steps))
        return num_units / seconds / 1e6

    turns = {name: functools.partial(turn, name) for name in everyone}
    series = interleave(turns, options.pairs)
    return {name: Series(own.rates, faults[name][1:]) for name, own in series.items()}


def again(steps: Sequence[Step]) -> Callable[[], Sequence[Step]]:
    """Return what ``measure`` takes of steps that can be repeated; the last goes first too."""
    repeated = [steps[-1], *steps]
    return lambda: repeated


def num_ids(data: Sequence[Batch]) -> int:
    return sum(batch.num_ids for batch in data)


def measure_kind(
    everyone: Mapping[str, Contender],
    kind: str,
    data: Sequence[Batch],
    options: argparse.Namespace,
) -> dict[str, Series]:
    """Measure steps of a kind, ``train`` or ``evaluate``, on the batches, in ids."""
    steps = {
        name: again([getattr(one, f"{kind}_step")(batch) for batch in data])
        for name, one in everyone.items()
    }
    return measure(steps, num_ids(data), options)


# --- what every benchmark reads and prints ----------------------------------------------------


def parser(doc: str | None, pairs: int, *, cpu_time: bool = False) -> argparse.ArgumentParser:
    """Return a parser of ``--quick``, ``--pairs`` and, if asked for, ``--cpu-time``."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--quick", action="store_true", help="1 %% of the rows")
    made.add_argument("--pairs", type=int, default=pairs, help="repetitions")
    if cpu_time:
        made.add_argument(
            "--cpu-time",
            dest="clock",
            action="store_const",
            const=time.process_time,
            default=time.perf_counter,
            help="for a busy machine, 1 thread: not the clock",
        )
    return made


def table(title: str, *columns: str) -> None:
    """Print the head of a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
