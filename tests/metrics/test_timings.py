"""Histograms of durations, and calls by method."""

from __future__ import annotations

from persia._metrics.timings import BOUNDS, SMALL_NUMBERS, CallTimings, Timing, Timings, total


def test_a_duration_is_counted_below_its_bound() -> None:
    timing = Timing()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1] + 1):
        timing.add(seconds)
    found = timing.read()
    assert found.num == 4
    assert (found.counts[0], found.counts[1], found.counts[-1]) == (2, 1, 1)
    assert found.seconds == sum((0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1] + 1))
    assert total([found, found]).num == 8


def test_names_are_known_beforehand_and_methods_are_not() -> None:
    timings = Timings("a", "b")
    timings["b"].add(1.0)
    assert {name: took.num for name, took in timings.read().items()} == {"a": 0, "b": 1}
    calls = CallTimings()
    assert calls.read() == {}
    calls.add("lookup", 0.5, 10, 20)
    calls.add("lookup", 0.5, 1, 2, failed=True)
    ((method, traffic),) = calls.read().items()
    assert (method, traffic.errors, traffic.received, traffic.sent) == ("lookup", 1, 11, 22)
    assert (traffic.took.num, traffic.took.seconds) == (2, 1.0)


def test_small_numbers_have_a_bucket_each() -> None:
    missed = Timing(SMALL_NUMBERS)
    for number in (0, 1, 1, 9, 1000):
        missed.add(number)
    found = missed.read()
    assert found.counts[:3] == (1, 2, 0)
    assert (found.counts[9], found.counts[-1], found.num) == (1, 1, 5)
    assert found.bounds == SMALL_NUMBERS
    assert total([found, found]) == (tuple(2 * n for n in found.counts), 2022, SMALL_NUMBERS)
