"""Queues between threads: order, bounds, and waking up."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from persia._training import queues
from persia._training.queues import BoundedQueue, Closed, Finished, OrderedQueue, join
from tests.support.fixtures import Monkey
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S, until


def test_channel_keeps_order_and_ends_with_what_it_holds() -> None:
    channel: BoundedQueue[int] = BoundedQueue(3)
    for number in range(3):
        assert channel.put(number)
    assert len(channel) == 3
    assert not channel.put(3, timeout_s=0)
    failure = KeyError("why")
    channel.finish(failure)
    assert [channel.get() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Finished):
        channel.get()
    assert channel.failure is failure


@pytest.mark.parametrize("call", ["put", "get"])
def test_close_wakes_all_that_wait(call: str) -> None:
    channel: BoundedQueue[int] = BoundedQueue(1)
    if call == "put":
        channel.put(0)
    wait = channel.get if call == "get" else lambda: channel.put(1)
    waiting = [Background(wait) for _ in range(3)]
    assert channel.close() == ([0] if call == "put" else [])
    for run in waiting:
        with pytest.raises(Closed):
            run.result()
    with pytest.raises(Closed):
        channel.put(2)
    with pytest.raises(Closed):
        channel.get()


def test_delivery_in_order_admits_the_next_beyond_its_capacity() -> None:
    delivery: OrderedQueue[str] = OrderedQueue(2)
    delivery.put(2, "two")
    delivery.put(1, "one")
    late = Background(lambda: delivery.put(3, "three"))
    delivery.put(0, "zero")  # full, but the reader waits for this one
    assert [delivery.get(PATIENCE_S) for _ in range(4)] == ["zero", "one", "two", "three"]
    late.result()
    with pytest.raises(TimeoutError):
        delivery.get(0)


def test_what_was_taken_first_is_given_first() -> None:
    """One that had to wait for room is not overtaken by those that come when there is some."""
    delivery: OrderedQueue[int] = OrderedQueue(1)
    delivery.put(0, 0)
    waiting = Background(lambda: delivery.put(1, 1))
    until(lambda: delivery._waiting)
    with delivery._lock:  # before the one that waits can look
        assert delivery.get(PATIENCE_S) == 0
        delivery.put(2, 2)
    assert [delivery.get(PATIENCE_S) for _ in range(2)] == [1, 2]
    waiting.result()
    delivery.finish(None)
    with pytest.raises(Finished):
        delivery.get(PATIENCE_S)


def test_room_wakes_the_lowest_and_no_other() -> None:
    delivery: OrderedQueue[int] = OrderedQueue(1)
    delivery.put(0, 0)
    looks: list[int] = []  # of the threads that put, at their own numbers
    admits, own = delivery._admits, threading.local()

    def look(number: int) -> bool:
        if getattr(own, "number", None) == number:
            looks.append(number)
        return admits(number)

    def put(number: int) -> None:
        own.number = number
        delivery.put(number, number)

    delivery._admits = look  # type: ignore[method-assign]
    waiting = [Background(partial(put, number)) for number in (3, 1, 2)]
    until(lambda: len(looks) == 6)  # each before it waits, and as it does
    for number in range(4):
        until(lambda number=number: number in delivery._items)  # type: ignore[misc]
        assert delivery.get(PATIENCE_S) == number
    for one in waiting:
        one.result()
    assert sorted(looks) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_room_that_was_made_twice_is_for_two() -> None:
    delivery: OrderedQueue[int] = OrderedQueue(2)
    for number in range(2):
        delivery.put(number, number)
    waiting = [Background(partial(delivery.put, number, number)) for number in (2, 3)]
    until(lambda: len(delivery._waiting) == 2)
    with delivery._lock:  # before one that waits can look
        assert [delivery.get(PATIENCE_S) for _ in range(2)] == [0, 1]
    for one in waiting:
        one.result()
    assert [delivery.get(PATIENCE_S) for _ in range(2)] == [2, 3]


@pytest.mark.parametrize("end", ["close", "fail"])
def test_all_that_wait_for_room_are_woken_by_the_end(end: str) -> None:
    delivery: OrderedQueue[int] = OrderedQueue(1)
    delivery.put(5, 5)
    waiting = [Background(partial(delivery.put, number, number)) for number in (3, 1, 2)]
    until(lambda: len(delivery._waiting) == 3)
    if end == "fail":
        delivery.fail(KeyError("why"))
    assert delivery.close() == [5]
    for one in waiting:
        with pytest.raises(Closed):
            one.result()


def test_delivery_raises_a_failure_at_once_and_an_end_after_its_items() -> None:
    ended: OrderedQueue[int] = OrderedQueue(2)
    ended.put(0, 10)
    ended.finish(KeyError("end"))
    assert ended.get(PATIENCE_S) == 10
    with pytest.raises(KeyError, match="end"):
        ended.get(PATIENCE_S)
    failed: OrderedQueue[int] = OrderedQueue(2)
    failed.put(0, 10)
    failed.fail(KeyError("now"))
    failed.finish(KeyError("later"))
    with pytest.raises(KeyError, match="now"):
        failed.get(PATIENCE_S)
    with pytest.raises(Closed):
        failed.put(1, 11)
    assert failed.close() == [10]


def test_threads_are_joined_within_one_deadline_for_all(monkeypatch: Monkey) -> None:
    now, go = 0.0, threading.Event()

    class Held(threading.Thread):
        """Time passes only while it is waited for."""

        def join(self, timeout: float | None = None) -> None:
            nonlocal now
            if go.is_set():
                super().join(timeout)
            else:
                now += timeout or 0.0

    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: now))
    threads = [Held(target=go.wait, args=(PATIENCE_S,)) for _ in range(20)]
    never = threading.Thread(target=go.wait)
    for thread in threads:
        thread.start()
    assert join([*threads, never, threading.current_thread()], 0.2) == threads
    assert now == 0.2
    go.set()
    assert join(threads, PATIENCE_S) == []
