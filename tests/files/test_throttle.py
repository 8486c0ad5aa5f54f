"""Work beside requests: a share of the processors, in turns, and pauses that end in time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from persia._files import throttle
from persia._files.throttle import LONGEST_S, LOOK_S, MAX_PROCESSORS, PIECE_S, SHARE, Throttle
from tests.support.fixtures import Monkey


class Clock:
    """Time of one processor, which work and pauses move on."""

    def __init__(self, patch: Monkey) -> None:
        self.now = 100.0
        self.worked = 0.0
        self.paused: list[float] = []
        functions = {"monotonic": lambda: self.now, "thread_time": lambda: self.worked}
        patch.setattr(throttle, "time", SimpleNamespace(**functions))
        patch.setattr(throttle, "sleep", self.wait)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.paused.append(seconds)

    def pace(self, processors: float, requests: Iterator[int] | None = None) -> Throttle:
        """Return one beside requests of these numbers; more come all the time if not given."""
        numbers = requests or itertools.count()
        made = Throttle(lambda: next(numbers), processors)
        made.rest()
        self.paused.clear()
        return made


@pytest.fixture
def clock(monkeypatch: Monkey) -> Clock:
    return Clock(monkeypatch)


def test_a_part_of_a_processor_is_taken_beside_requests(clock: Clock) -> None:
    paced = clock.pace(0.25)
    begin = clock.now
    for _ in range(10):
        clock.work(0.01)
        paced.rest()
    assert clock.worked == pytest.approx(0.25 * (clock.now - begin))
    clock.work(0.01)
    paced.rest(lambda: 1.0)  # others wait for this thread
    assert len(clock.paused) == 10
    clock.work(0.01)
    paced.rest(lambda: 0.5)
    assert clock.paused[-1] == pytest.approx(clock.paused[0] / 2)
    for _ in range(20):  # what was urgent is not paid for later
        clock.work(0.01)
        paced.rest(lambda: 0.9)
    clock.work(0.01)
    paced.rest()
    assert clock.paused[-1] == pytest.approx(0.03)
    paced = clock.pace(0.25, itertools.repeat(7))  # no requests come
    for _ in range(10):
        clock.work(1.0)
        paced.rest()
    assert not clock.paused


def test_a_pause_ends_when_training_ends_or_others_begin_to_wait(clock: Clock) -> None:
    paced = clock.pace(0.25, iter([0, 0, 1, 2, 2, 2]))
    clock.work(1.0)
    paced.rest()
    assert clock.paused == pytest.approx([LOOK_S] * 2)
    paced = clock.pace(0.25)
    clock.work(1.0)
    paced.rest(lambda: float(len(clock.paused) >= 2))
    assert clock.paused == pytest.approx([LOOK_S] * 2)


def test_little_is_taken_of_a_small_share_and_of_a_large_machine(monkeypatch: Monkey) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    for quota, want in ((2.0, 2 * SHARE), (float("inf"), MAX_PROCESSORS)):
        monkeypatch.setattr(throttle, "processor_quota", lambda quota=quota: quota)
        assert Throttle(lambda: 0)._processors == pytest.approx(want)


def test_threads_take_turns_and_no_pause_is_long(clock: Clock) -> None:
    paced = clock.pace(0.5)
    clock.work(0.1)
    # Of two threads that work at the same time each pauses for both.
    assert paced._owed(0.1) == pytest.approx(0.1)
    assert paced._owed(0.1) == pytest.approx(0.3)
    clock.work(100.0)
    paced.rest()
    assert sum(clock.paused) == pytest.approx(LONGEST_S)
    assert max(clock.paused) <= LOOK_S


def test_a_thread_takes_its_turn_before_its_first_piece(clock: Clock) -> None:
    paced = clock.pace(0.25)
    for _ in range(3):  # of threads that begin at once
        paced._own = threading.local()
        paced.rest()
    waited = [PIECE_S / 0.25] * 3
    assert clock.paused == pytest.approx(waited)
