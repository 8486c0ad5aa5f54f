"""How threads of a dump make room for those who train; time is the tests' own."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from persia._server import throttle
from persia._server.throttle import (
    COPY_DIVISOR,
    LONGEST_S,
    LOOK_S,
    MAX_PROCESSORS,
    PIECE_S,
    ROOM_S,
    SHARE,
    Throttle,
    give_room,
    room_for_copies,
    urgency_of,
)


class Clock:
    """Time of one processor, which work and pauses move on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
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

    def pace(self, requests: Any, processors: float) -> Throttle:
        made = Throttle(requests, processors)
        made.rest()
        self.paused.clear()
        return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_part_of_a_processor_is_taken_beside_requests(clock: Clock) -> None:
    requests = itertools.count()
    paced = clock.pace(lambda: next(requests), 0.25)
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


def test_no_pause_where_no_requests_come(clock: Clock) -> None:
    paced = clock.pace(lambda: 7, 0.25)
    for _ in range(10):
        clock.work(1.0)
        paced.rest()
    assert not clock.paused


def test_threads_take_turns_and_no_pause_is_long(clock: Clock) -> None:
    requests = itertools.count()
    paced = clock.pace(lambda: next(requests), 0.5)
    clock.work(0.1)
    # Of two threads that work at the same time each pauses for both.
    assert paced._owed(0.1) == pytest.approx(0.1)
    assert paced._owed(0.1) == pytest.approx(0.3)
    clock.work(100.0)
    paced.rest()
    assert sum(clock.paused) == pytest.approx(LONGEST_S)
    assert max(clock.paused) <= LOOK_S


def test_a_thread_takes_its_turn_before_its_first_piece(clock: Clock) -> None:
    requests = itertools.count()
    paced = clock.pace(lambda: next(requests), 0.25)
    for _ in range(3):  # of threads that begin at once
        paced._own = threading.local()
        paced.rest()
    waited = [PIECE_S / 0.25] * 3
    assert clock.paused == pytest.approx(waited)


def test_a_pause_ends_when_training_ends(clock: Clock) -> None:
    requests = iter([0, 0, 1, 2, 2, 2])
    paced = clock.pace(lambda: next(requests), 0.25)
    clock.work(1.0)
    paced.rest()
    assert clock.paused == pytest.approx([LOOK_S] * 2)


def test_a_pause_ends_when_others_begin_to_wait(clock: Clock) -> None:
    requests = itertools.count()
    paced = clock.pace(lambda: next(requests), 0.25)
    clock.work(1.0)
    paced.rest(lambda: float(len(clock.paused) >= 2))
    assert clock.paused == pytest.approx([LOOK_S] * 2)


@pytest.mark.parametrize(
    ("held", "free", "want"),
    [
        (8 << 30, 0, (8 << 30) // COPY_DIVISOR),  # how much is free is not known
        (8 << 30, 16 << 30, 4 << 30),
        (8 << 30, 64 << 30, 8 << 30),  # all rows may change: they need no more
        (1, 64 << 30, 64 << 20),
    ],
)
def test_room_for_copies_is_taken_where_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, held: int, free: int, want: int
) -> None:
    monkeypatch.setattr(throttle, "free_memory_bytes", lambda: free)
    cut: Any = SimpleNamespace(copied_bytes=held)
    assert room_for_copies(cut) == want


def test_a_reader_hurries_before_its_room_is_full() -> None:
    found = [urgency_of(SimpleNamespace(fill=fill)) for fill in (0.2, 0.5, 0.625, 0.75, 2)]  # type: ignore[arg-type]
    assert found == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_what_was_urgent_is_not_paid_for_later(clock: Clock) -> None:
    requests = itertools.count()
    paced = clock.pace(lambda: next(requests), 0.25)
    for _ in range(20):
        clock.work(0.01)
        paced.rest(lambda: 0.9)
    clock.work(0.01)
    paced.rest()
    assert clock.paused[-1] == pytest.approx(0.03)


def test_room_follows_the_memory_that_others_leave(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 16 << 30
    monkeypatch.setattr(throttle, "free_memory_bytes", lambda: free)
    allowed: list[int] = []
    cut: Any = SimpleNamespace(copied_bytes=8 << 30, fill=0.0, side_bytes=0)

    def allow(side_bytes: int) -> None:
        copied = cut.fill * cut.side_bytes
        cut.side_bytes = side_bytes
        cut.fill = copied / side_bytes
        allowed.append(side_bytes)

    cut.allow = allow
    rest = clock.pace(lambda: 7, 0.25).beside(cut)
    rest()
    cut.fill, free = 0.25, 2 << 30  # another server took its own
    rest()
    assert allowed == [4 << 30]
    clock.work(ROOM_S)
    rest()
    assert allowed == [4 << 30, (1 << 30) + (512 << 20)]


def test_little_is_taken_of_a_small_share_and_of_a_large_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    for quota, want in ((2.0, 2 * SHARE), (float("inf"), MAX_PROCESSORS)):
        monkeypatch.setattr(throttle, "processor_quota", lambda quota=quota: quota)
        assert Throttle(lambda: 0)._processors == pytest.approx(want)


def test_a_cut_that_gets_no_room_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    cut: Any = SimpleNamespace(
        copied_bytes=1, allow=closed.append, close=lambda: closed.append(True)
    )

    def fail() -> int:
        raise ValueError("no number")

    monkeypatch.setattr(throttle, "free_memory_bytes", fail)
    with pytest.raises(ValueError, match="no number"):
        give_room(cut)
    assert closed == [True]
