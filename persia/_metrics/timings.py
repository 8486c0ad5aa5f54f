"""Histograms of durations, counted where the work is done.

All else is read at scrape time from counts that components keep anyway. A duration is known
only when the work ends, so it is counted into its bucket at once: well below a microsecond.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Upper bounds in seconds. Calls take from 100 us up to PERSIA_RPC_TIMEOUT.
BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0),
)

# Upper bounds of what is no duration: a small number, such as of batches.
SMALL_NUMBERS = tuple(map(float, (*range(11), 15, 20, 30, 50, 100)))


class Distribution(NamedTuple):
    """Durations counted so far."""

    counts: tuple[int, ...]  # by bucket, the last without a bound; not cumulative
    seconds: float
    bounds: tuple[float, ...] = BOUNDS

    @property
    def num(self) -> int:
        """How often it was done."""
        return sum(self.counts)


class Timing:
    """A histogram of seconds; any thread may add to it."""

    __slots__ = ("_bounds", "_counts", "_lock", "_seconds")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()  # guards the next two
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        place = bisect_left(self._bounds, seconds)
        with self._lock:
            self._counts[place] += 1
            self._seconds += seconds

    def read(self) -> Distribution:
        """Return all so far."""
        with self._lock:
            return Distribution(tuple(self._counts), self._seconds, self._bounds)


class Timings(dict[str, Timing]):
    """A ``Timing`` by name, of names that are known beforehand."""

    def __init__(self, *names: str) -> None:
        super().__init__((name, Timing()) for name in names)

    def read(self) -> Mapping[str, Distribution]:
        """Return all so far."""
        return {name: timing.read() for name, timing in self.items()}


class Traffic(NamedTuple):
    """The calls of one method so far."""

    took: Distribution
    errors: int
    received: int  # bytes, headers included
    sent: int


class CallTimings:
    """Calls by method; any thread may add to it.

    A method's counts are made at its first call, so that only those that are used show up.
    """

    __slots__ = ("_lock", "_methods")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts, not the timings
        # By method: errors, received and sent bytes.
        self._methods: dict[str, tuple[Timing, list[int]]] = {}

    def add(
        self, method: str, seconds: float, received: int, sent: int, *, failed: bool = False
    ) -> None:
        """Count one more call."""
        with self._lock:
            if method not in self._methods:
                self._methods[method] = (Timing(), [0, 0, 0])
            took, counts = self._methods[method]
            counts[0] += failed
            counts[1] += received
            counts[2] += sent
        took.add(seconds)

    def read(self) -> Mapping[str, Traffic]:
        """Return all so far, by method."""
        with self._lock:
            items = [(name, took, [*counts]) for name, (took, counts) in self._methods.items()]
        return {name: Traffic(took.read(), *counts) for name, took, counts in items}


def total(parts: Iterable[Distribution]) -> Distribution:
    """Add up distributions, such as those of several clients."""
    all_counts, seconds, bounds = zip(*parts, strict=True)
    counts = tuple(map(sum, zip(*all_counts, strict=True)))
    return Distribution(counts, sum(seconds), bounds[0])
