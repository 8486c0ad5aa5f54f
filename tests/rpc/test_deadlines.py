"""Deadlines that callees inherit, and attempts until a deadline."""

from __future__ import annotations

import math
import threading
import time

import pytest

from persia._rpc.deadlines import Retry, caller_deadline, within
from tests.support.fixtures import Monkey


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


@pytest.mark.parametrize(
    ("first_s", "pauses"),
    [(0.1, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]), (0.0, [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])],
)
def test_pauses_double_up_to_the_longest(
    monkeypatch: Monkey, first_s: float, pauses: list[float]
) -> None:
    waited: list[float] = []  # time passes only in pauses
    monkeypatch.setattr("persia._rpc.deadlines.time.monotonic", lambda: sum(waited))
    event = threading.Event()
    monkeypatch.setattr(event, "wait", waited.append)
    left = list(Retry(4.0, first_s=first_s, stop=event))
    assert waited == pauses
    assert left[0] == 4.0
    assert left == sorted(left, reverse=True)


def test_one_attempt_is_always_made_and_a_stop_ends_them() -> None:
    assert list(Retry(0.0)) == list(Retry(-1.0)) == [0.0]
    stop = threading.Event()
    stop.set()
    assert len(list(Retry(60.0, stop=stop))) == 1
