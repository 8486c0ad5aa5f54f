"""Queues between threads: order, bounds, and waking up."""

from __future__ import annotations

import threading
import time

import pytest

from persia._training.queues import BoundedQueue, Closed, Finished, OrderedQueue, join
from tests.support.streams import Background

WAIT_S = 20.0


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
    delivery: OrderedQueue[str] = OrderedQueue(2, ordered=True)
    delivery.put(2, "two")
    delivery.put(1, "one")
    late = Background(lambda: delivery.put(3, "three"))
    delivery.put(0, "zero")  # full, but the reader waits for this one
    assert [delivery.get(WAIT_S) for _ in range(4)] == ["zero", "one", "two", "three"]
    late.result()
    with pytest.raises(TimeoutError):
        delivery.get(0)


def test_delivery_out_of_order_gives_what_came_first() -> None:
    delivery: OrderedQueue[str] = OrderedQueue(2, ordered=False)
    delivery.put(5, "five")
    delivery.put(1, "one")
    assert [delivery.get(WAIT_S) for _ in range(2)] == ["five", "one"]
    delivery.finish(None)
    with pytest.raises(Finished):
        delivery.get(WAIT_S)


def test_delivery_raises_a_failure_at_once_and_an_end_after_its_items() -> None:
    ended: OrderedQueue[int] = OrderedQueue(2, ordered=True)
    ended.put(0, 10)
    ended.finish(KeyError("end"))
    assert ended.get(WAIT_S) == 10
    with pytest.raises(KeyError, match="end"):
        ended.get(WAIT_S)
    failed: OrderedQueue[int] = OrderedQueue(2, ordered=True)
    failed.put(0, 10)
    failed.fail(KeyError("now"))
    with pytest.raises(KeyError, match="now"):
        failed.get(WAIT_S)
    with pytest.raises(Closed):
        failed.put(1, 11)
    assert failed.close() == [10]


def test_threads_are_joined_within_one_deadline_for_all() -> None:
    go = threading.Event()
    threads = [threading.Thread(target=go.wait, args=(WAIT_S,)) for _ in range(20)]
    never = threading.Thread(target=go.wait)
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    assert join([*threads, never, threading.current_thread()], 0.2) == threads
    assert time.monotonic() - begin < 20 * 0.2
    go.set()
    assert join(threads, WAIT_S) == []
