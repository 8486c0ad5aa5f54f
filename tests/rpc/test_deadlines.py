"""Deadlines that callees inherit, and attempts until a deadline."""

from __future__ import annotations

import math
import threading
import time

import pytest

from persia._rpc.deadlines import Retry, caller_deadline, within


def test_the_nearest_deadline_holds() -> None:
    assert caller_deadline.get() == math.inf
    with within(10.0):
        outer = caller_deadline.get()
        assert outer <= time.monotonic() + 10.0
        with within(60.0):
            assert caller_deadline.get() == outer
        with within(1.0):
            assert caller_deadline.get() < outer
    assert caller_deadline.get() == math.inf


class Clock:
    """Time that passes only in pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pauses, self.is_set = 0.0, list[float](), False
        monkeypatch.setattr("persia._rpc.deadlines.time.monotonic", lambda: self.now)

    def wait(self, pause_s: float) -> bool:
        self.now += pause_s
        self.pauses.append(pause_s)
        return self.is_set


@pytest.mark.parametrize(
    ("first_s", "pauses"),
    [(0.1, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]), (0.0, [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])],
)
def test_pauses_double_up_to_the_longest(
    monkeypatch: pytest.MonkeyPatch, first_s: float, pauses: list[float]
) -> None:
    clock = Clock(monkeypatch)
    event = threading.Event()
    monkeypatch.setattr(event, "wait", clock.wait)
    left = list(Retry(4.0, first_s=first_s, stop=event))
    assert clock.pauses == pauses
    assert left[0] == 4.0
    assert left == sorted(left, reverse=True)


def test_one_attempt_is_always_made() -> None:
    assert list(Retry(0.0)) == [0.0]
    assert list(Retry(-1.0)) == [0.0]


def test_a_stop_ends_the_attempts() -> None:
    stop = threading.Event()
    stop.set()
    assert len(list(Retry(60.0, stop=stop))) == 1
