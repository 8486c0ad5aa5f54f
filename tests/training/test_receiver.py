"""What a rank holds of the batches that data-loaders send."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening
from persia._training import receiver as receiver_module
from persia._training.queues import Closed, Finished
from persia._training.receiver import BatchReceiver, ChildStream, LoaderStream, PassOrder
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.errors import (
    ConfigError,
    DataError,
    RemoteError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    UnknownRef,
    UnknownStream,
)
from tests.faults.batches import occurrences
from tests.faults.job import make_ctx, trained
from tests.support.processes import ROOT

WAIT_S = 20.0
LOST = UnknownRef("no ref 3")
Stream = tuple[int, int]


@pytest.fixture(autouse=True)
def no_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def make_receiver(
    rank: int = 0, world_size: int = 1, capacity: int = 4, patience_s: float = WAIT_S
) -> BatchReceiver:
    return BatchReceiver(rank, world_size, capacity, patience_s)


def batch(batch_id: int, ref: int = 0) -> StreamedBatch:
    return StreamedBatch(batch_id, 1, True, RemoteRef(0, ref or batch_id + 100), (), (), None)


def opened(
    receiver: BatchReceiver,
    loader: int = 0,
    num_loaders: int = 1,
    incarnation: int = 7,
    first: int = 0,
) -> Stream:
    receiver.open_stream(StreamOpening(loader, num_loaders, incarnation, first))
    return loader, incarnation


class Taken:
    """A batch that was taken, and what the trainer calls for it."""

    def __init__(self, receiver: BatchReceiver, in_order: bool = True) -> None:
        stream, batch = receiver.take(in_order, lambda: False)
        self.batch_id = batch.batch_id
        self.end = partial(receiver.end, stream, batch.batch_id)
        self.mark_done = partial(receiver.mark_done, stream, batch.batch_id)
        self.register_again = partial(receiver.register_again, stream, batch.batch_id)


def take(receiver: BatchReceiver, in_order: bool = True) -> int:
    return Taken(receiver, in_order).batch_id


def credits_of(receiver: BatchReceiver, stream: Stream) -> int:
    return receiver.poll(stream, -1).credits


def pass_of(*firsts: int) -> PassOrder:
    """The pass of one rank over data-loaders that begin at these batch ids."""
    order = PassOrder(1)
    order.num_loaders = len(firsts)
    for loader, first in enumerate(firsts):
        opening = StreamOpening(loader, len(firsts), 7, first)
        order.streams[loader] = LoaderStream(opening, 0, 1)
    return order


@pytest.mark.parametrize(("in_order", "taken"), [(True, [0, 1, 2]), (False, [1, 0, 2])])
def test_a_pass_gives_batches_by_id_or_as_they_arrive(in_order: bool, taken: list[int]) -> None:
    order = pass_of(0, 1)
    for batch_id in (1, 0, 2):
        stream = order.streams[batch_id % 2]
        stream.mark_received(batch_id)
        order.add(stream, batch(batch_id))
    found = [order.take(in_order) for _ in range(3)]
    assert [one[1].batch_id for one in found if one is not None] == taken
    assert order.take(in_order) is None
    assert [stream.credits for stream in order.streams.values()] == [2, 1]


def test_a_pass_waits_for_an_id_until_its_stream_has_passed_it() -> None:
    order = pass_of(0, 1)
    order.streams[1].mark_received(1)
    order.add(order.streams[1], batch(1))
    assert order.take(True) is None  # batch 0 may come
    order.streams[0].ended_at = 0
    found = order.take(True)
    assert found is not None
    assert found[1].batch_id == 1
    assert not order.is_over()
    order.streams[1].ended_at = 2
    assert order.is_over()


def test_batches_are_taken_in_the_order_of_their_ids() -> None:
    receiver = make_receiver(capacity=8)
    streams = [opened(receiver, loader, 2) for loader in range(2)]
    for batch_id in (1, 3, 5):
        receiver.deliver(streams[1], batch(batch_id))
    for batch_id in (0, 2, 4):
        receiver.deliver(streams[0], batch(batch_id))
    assert [take(receiver) for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_or_as_they_arrived() -> None:
    receiver = make_receiver(capacity=8)
    streams = [opened(receiver, loader, 2) for loader in range(2)]
    for batch_id in (1, 3, 0):
        receiver.deliver(streams[batch_id % 2], batch(batch_id))
    assert [take(receiver, in_order=False) for _ in range(3)] == [1, 3, 0]


@pytest.mark.parametrize("in_order", [True, False])
def test_w23_a_pass_ends_when_every_loader_has(in_order: bool) -> None:
    receiver = make_receiver()
    streams = [opened(receiver, loader, 2) for loader in range(2)]
    receiver.deliver(streams[0], batch(0))
    receiver.deliver(streams[1], batch(1))
    receiver.deliver(streams[0], batch(2))
    receiver.end_stream(streams[0], 4, "")
    receiver.end_stream(streams[1], 3, "")
    assert sorted(take(receiver, in_order) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(Finished):
        take(receiver, in_order)


def test_a_loader_that_ended_early_is_passed_over() -> None:
    receiver = make_receiver(capacity=16)
    streams = [opened(receiver, loader, 2) for loader in range(2)]
    for batch_id in (0, 2, 4, 6):
        receiver.deliver(streams[0], batch(batch_id))
    receiver.deliver(streams[1], batch(1))
    receiver.end_stream(streams[1], 3, "")
    assert [take(receiver) for _ in range(5)] == [0, 1, 2, 4, 6]
    receiver.end_stream(streams[0], 8, "")
    with pytest.raises(Finished):
        take(receiver)


def test_ranks_get_their_own_batches_only() -> None:
    receiver = make_receiver(rank=1, world_size=2)
    stream = opened(receiver)
    with pytest.raises(DataError, match=r"batch 2 .* not rank 1's of 2"):
        receiver.deliver(stream, batch(2))
    receiver.deliver(stream, batch(1))
    receiver.deliver(stream, batch(3))
    assert [take(receiver), take(receiver)] == [1, 3]


def test_a_loader_that_sends_nothing_here_is_not_waited_for() -> None:
    receiver = make_receiver(rank=0, world_size=2)
    mine, _ = opened(receiver, 0, 2), opened(receiver, 1, 2)  # of the second, all go to rank 1
    receiver.deliver(mine, batch(0))
    receiver.end_stream(mine, 2, "")
    assert take(receiver) == 0
    with pytest.raises(Finished):
        take(receiver)


def test_w13_the_same_batch_again_is_dropped_and_counted() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    for batch_id in (0, 1, 0, 1, 1):
        receiver.deliver(stream, batch(batch_id))
    assert [take(receiver), take(receiver)] == [0, 1]
    receiver.deliver(stream, batch(0))
    assert receiver.stats()["delivered_again"] == 4
    assert receiver.stats()["pending"] == 0


def test_credits_come_back_when_batches_are_taken() -> None:
    receiver = make_receiver(capacity=5)
    streams = [opened(receiver, loader, 2) for loader in range(2)]
    assert [credits_of(receiver, stream) for stream in streams] == [2, 2]
    receiver.deliver(streams[0], batch(0))
    assert credits_of(receiver, streams[0]) == 2
    take(receiver)
    assert [credits_of(receiver, stream) for stream in streams] == [3, 2]


def test_an_opening_that_is_repeated_late_takes_no_credits() -> None:
    """An attempt of which the caller knew nothing more may be executed behind what followed."""
    receiver = make_receiver(capacity=4)
    stream = opened(receiver)
    for batch_id in (0, 1):
        receiver.deliver(stream, batch(batch_id))
    opened(receiver)
    assert credits_of(receiver, stream) == 4  # since the opening, two of them used
    assert [take(receiver), take(receiver)] == [0, 1]
    assert credits_of(receiver, stream) == 6


def test_each_loader_may_always_have_one_batch_there() -> None:
    receiver = make_receiver(capacity=1)
    streams = [opened(receiver, loader, 3) for loader in range(3)]
    assert [credits_of(receiver, stream) for stream in streams] == [1, 1, 1]


def test_a_poll_waits_for_news(pool: ThreadPoolExecutor) -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    seen = receiver.poll(stream, -1).version
    polling = pool.submit(receiver.poll, stream, seen)
    receiver.deliver(stream, batch(0))
    taken = Taken(receiver)
    news = polling.result(WAIT_S)
    assert (news.credits, news.acknowledged) == (5, ())
    taken.end()
    news = receiver.poll(stream, news.version)
    assert news.acknowledged == (0,)
    # Repeated until the data-loader says that it has seen it.
    assert receiver.poll(stream, news.version - 1).acknowledged == (0,)


def test_a_poll_without_news_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", 0.0)
    receiver = make_receiver()
    stream = opened(receiver)
    news = receiver.poll(stream, 0)
    assert (news.version, news.is_closed) == (0, False)
    assert receiver.poll(stream, news.version).acknowledged == ()


def in_the_background(
    pool: ThreadPoolExecutor, receiver: BatchReceiver
) -> tuple[Stream, Future[int]]:
    """Take batch 0 and ask for its ids again; returns when the data-loader could know."""
    stream = opened(receiver)
    receiver.deliver(stream, batch(0))
    taken = Taken(receiver)
    seen = receiver.poll(stream, -1).version
    asking = pool.submit(taken.register_again, LOST)
    assert receiver.poll(stream, seen).wanted == (0,)
    return stream, asking


def test_lost_ids_are_asked_for_and_relocated(pool: ThreadPoolExecutor) -> None:
    receiver = make_receiver()
    stream, asking = in_the_background(pool, receiver)
    receiver.relocate(stream, 0, RemoteRef(2, 55))
    assert asking.result(WAIT_S) == 2 << 64 | 55
    assert receiver.poll(stream, 0).wanted == ()


def test_ids_that_nobody_sends_again_are_a_lost_batch() -> None:
    receiver = make_receiver(patience_s=0.0)
    stream = opened(receiver)
    receiver.deliver(stream, batch(0))
    taken = Taken(receiver)
    with pytest.raises(ServiceTimeout, match=r"batch 0 is lost: no ref 3; and data-loader 0"):
        taken.register_again(LOST)
    assert receiver.stats()["lost"] == 1


def test_a_restarted_loader_goes_on_where_the_old_one_was() -> None:
    receiver = make_receiver()
    old = opened(receiver)
    for batch_id in (0, 1):
        receiver.deliver(old, batch(batch_id))
    state = receiver.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (2, ())
    with pytest.raises(UnknownStream, match="data-loader 0 has no such stream"):
        receiver.deliver(old, batch(2))
    assert credits_of(receiver, (0, 8)) == 2  # two of four are taken up
    receiver.deliver((0, 8), batch(2))
    assert [take(receiver) for _ in range(3)] == [0, 1, 2]
    assert receiver.stats()["loader_restarts"] == 1


def test_a_restarted_loader_is_told_what_has_not_ended() -> None:
    receiver = make_receiver()
    old = opened(receiver)
    for batch_id in range(3):
        receiver.deliver(old, batch(batch_id))
    taken = [Taken(receiver) for _ in range(2)]
    taken[0].end()
    assert receiver.open_stream(StreamOpening(0, 1, 8, 0)).unfinished == (1, 2)
    taken[1].end()
    assert receiver.poll((0, 8), -1).acknowledged == (1,)
    assert receiver.open_stream(StreamOpening(0, 1, 9, 0)).unfinished == (2,)


def test_a_restarted_loader_is_told_what_is_wanted(pool: ThreadPoolExecutor) -> None:
    receiver = make_receiver()
    _, asking = in_the_background(pool, receiver)
    state = receiver.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    receiver.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9


def test_a_rank_that_was_restarted_begins_where_the_loader_is() -> None:
    receiver = make_receiver(rank=1, world_size=2)
    streams = [opened(receiver, loader, 2, first=11 + loader) for loader in range(2)]
    receiver.deliver(streams[1], batch(13))
    assert take(receiver) == 13


def test_the_failure_of_a_loader_comes_after_its_batches() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    receiver.deliver(stream, batch(0))
    receiver.end_stream(stream, 1, "Traceback: no such file")
    assert take(receiver) == 0
    with pytest.raises(RemoteError, match=r"data-loader 0 failed.*\nTraceback: no such file"):
        take(receiver)


def test_a_loader_that_failed_and_is_started_anew_goes_on(pool: ThreadPoolExecutor) -> None:
    """Else a batch whose ids only it can register would be waited for in vain."""
    receiver = make_receiver()
    stream, asking = in_the_background(pool, receiver)
    receiver.end_stream(stream, 1, "ServiceError: batch 0 is lost")
    state = receiver.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    receiver.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9
    receiver.deliver((0, 8), batch(1))
    receiver.end_stream((0, 8), 2, "")
    assert take(receiver) == 1
    with pytest.raises(Finished):
        take(receiver)


def with_a_stream_that_has_ended() -> tuple[BatchReceiver, tuple[int, int], Any]:
    """The stream's one batch has been taken, and has not ended."""
    receiver = make_receiver()
    receiver.begin_pass()
    stream = opened(receiver)
    receiver.deliver(stream, batch(0))
    receiver.end_stream(stream, 1, "")
    return receiver, stream, Taken(receiver)


@pytest.mark.parametrize("is_past", [False, True])
def test_a_loader_killed_after_its_end_is_let_in_once_its_ids_are_wanted(
    pool: ThreadPoolExecutor, is_past: bool
) -> None:
    """No other process can register them; what it has ended stays ended."""
    receiver, stream, last = with_a_stream_that_has_ended()
    if is_past:
        receiver.end_pass()
    else:
        with pytest.raises(ServiceBusy, match="this pass over the data is still under way"):
            opened(receiver, incarnation=8)
    seen = receiver.poll(stream, -1).version
    asking = pool.submit(last.register_again, LOST)
    assert receiver.poll(stream, seen).wanted == (0,)
    state = receiver.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    receiver.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9
    last.end()
    assert receiver.poll((0, 8), -1).acknowledged == (0,)
    if not is_past:
        with pytest.raises(Finished):
            take(receiver)  # though this process has not come to the end yet
    receiver.end_stream((0, 8), 1, "")
    # The next one is the next pass's.
    if not is_past:
        receiver.end_pass()
    receiver.begin_pass()
    receiver.deliver(opened(receiver, incarnation=9), batch(0))
    assert take(receiver) == 0
    stats = receiver.stats()
    assert (stats["loader_restarts"], stats["relocated"]) == (1, 1)
    assert "lost" not in stats


@pytest.mark.parametrize("is_past", [False, True])
def test_of_several_ranks_none_lets_a_loader_into_a_stream_that_has_ended(
    pool: ThreadPoolExecutor, is_past: bool
) -> None:
    """Another might take it for the next pass's, and neither pass would end."""
    receiver = make_receiver(rank=1, world_size=2)
    receiver.begin_pass()
    stream = opened(receiver)
    receiver.deliver(stream, batch(1))
    receiver.end_stream(stream, 2, "")
    last = Taken(receiver)
    seen = receiver.poll(stream, -1).version
    asking = pool.submit(last.register_again, LOST)
    assert receiver.poll(stream, seen).wanted == (1,)
    if is_past:
        receiver.end_pass()
        state = receiver.open_stream(StreamOpening(0, 1, 8, 1))
        assert (state.next_batch_id, state.wanted, state.unfinished) == (1, (), ())
    else:
        with pytest.raises(ServiceBusy, match="this pass over the data is still under way"):
            opened(receiver, incarnation=8)
    receiver.relocate(stream, 1, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9
    assert "loader_restarts" not in receiver.stats()


def test_the_next_pass_is_another_stream() -> None:
    receiver, first, last = with_a_stream_that_has_ended()
    with pytest.raises(ServiceBusy, match="this pass over the data is still under way"):
        opened(receiver, incarnation=8)
    receiver.end_pass()
    second = opened(receiver, incarnation=8)
    receiver.begin_pass()
    receiver.deliver(second, batch(0))
    # A batch of the first pass may end in the second.
    last.end()
    assert receiver.poll(first, -1).acknowledged == (0,)
    assert receiver.poll(second, -1).acknowledged == ()
    receiver.end_stream(second, 1, "")
    assert take(receiver) == 0
    with pytest.raises(Finished):
        take(receiver)


def test_a_pass_that_was_left_early_goes_on_in_the_next() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    stream = opened(receiver)
    for batch_id in range(3):
        receiver.deliver(stream, batch(batch_id))
    assert take(receiver) == 0
    receiver.end_pass()
    receiver.begin_pass()
    assert [take(receiver), take(receiver)] == [1, 2]


def test_what_other_ranks_have_no_match_for_is_acknowledged_and_counted() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    stream = opened(receiver)
    for batch_id in range(3):
        receiver.deliver(stream, batch(batch_id))
    take(receiver)
    dropped: list[int] = []
    assert not receiver.drop_rest(lambda: dropped.append(1), 0.0)
    receiver.deliver(stream, batch(3))
    receiver.end_stream(stream, 4, "")
    assert receiver.drop_rest(lambda: dropped.append(1), 0.0)
    receiver.end_pass()
    assert receiver.poll(stream, -1).acknowledged == (1, 2, 3)
    assert len(dropped) == 3
    receiver.begin_pass()
    assert "a data-loader to connect" in receiver.describe_wait()


def test_w24_two_passes_at_a_time_are_refused() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    with pytest.raises(ConfigError, match="one DataLoader over a StreamingDataset at a time"):
        receiver.begin_pass()


def test_loaders_must_agree_on_how_many_they_are() -> None:
    receiver = make_receiver()
    opened(receiver, 0, 2)
    with pytest.raises(ConfigError, match="says that there are 3 of them, others said 2"):
        opened(receiver, 1, 3)
    with pytest.raises(ConfigError, match="expected a number below REPLICA_SIZE 2, got 2"):
        opened(receiver, 2, 2)


def test_closing_wakes_whoever_waits(pool: ThreadPoolExecutor) -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    stream, asking = in_the_background(pool, receiver)
    taking = pool.submit(take, receiver)
    polling = pool.submit(receiver.poll, stream, receiver.poll(stream, -1).version)
    receiver.deliver(opened(receiver), batch(1))
    assert taking.result(WAIT_S) == 1
    again = pool.submit(take, receiver)
    receiver.close()
    for waiting in (again, asking):
        with pytest.raises(Closed):
            waiting.result(WAIT_S)
    polling.result(WAIT_S)
    assert receiver.poll(stream, 1 << 40).is_closed


def test_polls_of_passes_long_over_end_before_it_closes(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving the context waits for them; their data-loaders may be gone."""
    monkeypatch.setattr(receiver_module, "POLL_S", 1000 * WAIT_S)
    receiver = make_receiver()
    polls = []
    for incarnation in range(3):
        receiver.begin_pass()
        stream = opened(receiver, incarnation=incarnation)
        receiver.end_stream(stream, 0, "")
        polls.append(pool.submit(receiver.poll, stream, receiver.poll(stream, -1).version))
        receiver.end_pass()
    polls[0].result(WAIT_S)
    receiver.close()
    for poll in polls:
        poll.result(WAIT_S)


def test_a_loader_that_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 1000 * WAIT_S)
    receiver = make_receiver()
    receiver.begin_pass()
    stream = opened(receiver)
    receiver.deliver(stream, batch(0))
    receiver.end_stream(stream, 1, "Traceback: no such file")
    assert take(receiver) == 0
    with pytest.raises(RemoteError):
        take(receiver)
    receiver.close()


def test_a_pass_that_is_closed_leaves_what_is_pending() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    closed = threading.Event()
    closed.set()
    receiver.deliver(stream, batch(0))
    with pytest.raises(Closed):
        receiver.take(True, closed.is_set)
    assert receiver.stats()["pending"] == 1
    receiver.close()
    assert receiver.stats()["unread"] == 1


def test_whom_it_waits_for_is_named() -> None:
    clock = Clock()
    receiver = BatchReceiver(0, 1, 4, WAIT_S, clock)
    assert receiver.describe_wait() == "a data-loader to connect; none has"
    opened(receiver, 1, 3)
    assert receiver.describe_wait() == "data-loader 0, 2 of 3 to connect"
    opened(receiver, 0, 3)
    two = opened(receiver, 2, 3)
    clock.now = 100.0
    receiver.deliver(two, batch(2))
    clock.now = 101.0
    text = receiver.describe_wait()
    assert "data-loader 1 of 3, which has not been heard for 101 s" in text
    assert "data-loader 2" not in text


def test_a_stream_that_nobody_read_is_for_the_next_context() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    receiver.deliver(stream, batch(0))
    receiver.close()
    with pytest.raises(UnknownStream):
        receiver.poll(stream, -1)
    with pytest.raises(ServiceBusy, match="reads no more"):
        opened(receiver)


def test_a_restarted_rank_does_not_wait_for_what_was_trained() -> None:
    receiver = make_receiver()
    stream = opened(receiver, first=0)
    receiver.deliver(stream, batch(0))
    receiver.deliver(stream, batch(2))  # 1 was acknowledged by the rank before this one
    receiver.deliver(stream, batch(3))
    assert [take(receiver) for _ in range(3)] == [0, 2, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_failure_is_raised_though_others_go_on(in_order: bool) -> None:
    # Or the pass would go on for hours without the batches of one data-loader.
    receiver = make_receiver(capacity=16)
    streams = [opened(receiver, loader, 2) for loader in range(2)]
    receiver.deliver(streams[0], batch(0))
    for batch_id in (1, 3, 5, 7):
        receiver.deliver(streams[1], batch(batch_id))
    receiver.end_stream(streams[0], 2, "no such file")
    assert take(receiver, in_order) == 0
    with pytest.raises(RemoteError, match="no such file"):
        take(receiver, in_order)
    # Once: a trainer that continues gets the rest.
    receiver.end_stream(streams[1], 9, "")
    assert [take(receiver, in_order) for _ in range(4)] == [1, 3, 5, 7]


def test_what_is_not_read_is_counted_once() -> None:
    receiver = make_receiver()
    receiver.deliver(opened(receiver), batch(0))
    receiver.close()
    receiver.close()
    assert receiver.stats()["unread"] == 1


def test_batches_of_a_pass_before_are_in_flight_still() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    receiver.begin_pass()
    receiver.deliver(stream, batch(0))
    receiver.end_stream(stream, 1, "")
    delivered = Taken(receiver)
    receiver.end_pass()
    assert receiver.stats()["in_flight"] == 1
    delivered.end()
    assert receiver.stats()["in_flight"] == 0


def test_what_is_dropped_late_is_not_the_next_pass() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    first = opened(receiver)
    dropped: list[int] = []
    assert not receiver.drop_rest(lambda: dropped.append(1), 0.0)
    receiver.end_pass()
    receiver.deliver(first, batch(0))  # late
    assert len(dropped) == 1
    second = opened(receiver, incarnation=8)
    receiver.begin_pass()
    receiver.deliver(second, batch(0))
    assert take(receiver) == 0
    assert len(dropped) == 1


def test_where_a_pass_ends_all_that_came_is_done() -> None:
    receiver = make_receiver(rank=1, world_size=2)
    stream = opened(receiver)
    for batch_id in (1, 3, 5):
        receiver.deliver(stream, batch(batch_id))
    take(receiver)
    here, end = receiver.position(), receiver.end_position()
    assert here is not None
    assert here["floors"] == {"0": 1}
    assert end is not None
    assert (end["floors"], end["above"]) == ({"0": 7}, {"0": []})


def test_a_batch_wakes_its_own_loader_and_no_other(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", WAIT_S)
    receiver = make_receiver(capacity=8)
    receiver.begin_pass()
    streams = [opened(receiver, loader, 4) for loader in range(4)]
    polled: list[int] = []
    have_looked = threading.Event()
    for stream in streams[1:]:
        news = receiver._streams.order.streams[stream[0]].news
        wait_for = news.wait_for

        def counted(is_so: Any, timeout: float, wait_for: Any = wait_for) -> bool:
            def look() -> bool:
                polled.append(1)
                if len(polled) == 3:
                    have_looked.set()
                return bool(is_so())

            return bool(wait_for(look, timeout))

        news.wait_for = counted  # type: ignore[method-assign,assignment]
    polls = [pool.submit(receiver.poll, stream, 0) for stream in streams[1:]]
    assert have_looked.wait(WAIT_S)
    for batch_id in range(0, 400, 4):
        receiver.deliver(streams[0], batch(batch_id))
        Taken(receiver, in_order=False).end()
    assert receiver.poll(streams[0], 0).acknowledged == tuple(range(0, 400, 4))
    assert len(polled) == len(polls)
    receiver.deliver(streams[2], batch(2))
    take(receiver, in_order=False)
    assert polls[1].result(WAIT_S).version == 1
    receiver.close()
    assert all(poll.result(WAIT_S).is_closed for poll in (polls[0], polls[2]))


# --- embedded mode's data-loader: a child process, once for each pass ---------------------

SENDS = """
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

with DataCtx() as ctx:
    for number in range({count}):
        ctx.send_data(make_batch(number))
"""
TIMEOUT_MS = 30_000


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data-loader's script, to be written."""
    path = tmp_path / "data_loader.py"
    path.touch()
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


def train(ctx: TrainCtx, loader: DataLoader) -> list[int]:
    """Train one pass; returns the numbers of the batches."""
    seen = []
    for batch in loader:
        loss, _ = ctx.forward(batch)
        ctx.backward(loss)
        seen.append(int(batch.meta or b"-1"))
    return seen


def new_loader() -> DataLoader:
    return DataLoader(StreamingDataset(4), reproducible=True, timeout_ms=TIMEOUT_MS)


def test_each_pass_runs_the_script_though_it_may_still_be_ending(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child ends only when the next pass has begun, which must not take its end for a
    # failure, and must not wait for it in vain.
    pipe = tmp_path / "pipe"  # opening one end waits for the other
    os.mkfifo(pipe)
    linger = f"import atexit, pathlib\natexit.register(open, {str(pipe)!r})\n"
    script.write_text(linger + SENDS.format(count=6))
    begin_pass, num_begun = ChildStream.begin_pass, itertools.count()

    def begin_before_the_last_child_ends(stream: ChildStream) -> None:
        begin_pass(stream)
        if next(num_begun):
            pipe.write_bytes(b"")

    monkeypatch.setattr(ChildStream, "begin_pass", begin_before_the_last_child_ends)
    with make_ctx() as ctx:
        loader = new_loader()
        assert [train(ctx, loader) for _ in range(2)] == [list(range(6))] * 2
        pipe.write_bytes(b"")
        counts = trained(ctx)
    assert (counts["user"] == 2 * occurrences(6)["user"]).all()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "ended with status 0"),
        ("import os\nos.kill(os.getpid(), 9)", "died of signal 9"),
    ],
)
def test_a_script_that_sends_nothing_is_named(script: Path, text: str, error: str) -> None:
    script.write_text(text)
    with make_ctx() as ctx:
        loader = new_loader()
        with pytest.raises(ServiceError, match=rf"{script} {error} before it had ended"):
            train(ctx, loader)
        # Another pass is another run, which the failure of this one says nothing of.
        script.write_text(SENDS.format(count=2))
        assert train(ctx, loader) == [0, 1]


def test_the_traceback_of_the_script_is_raised(script: Path) -> None:
    script.write_text(SENDS.format(count=3) + "    raise KeyError('no such column')\n")
    raised = pytest.raises(ServiceError, match=r"(?s)data-loader 0 failed.*no such column")
    with raised, make_ctx() as ctx:
        train(ctx, new_loader())
    # Leaving the context waits for the updates, which the failure of a pass does not.
    assert ctx.stats()["batches"] == 3


OPENS = """
from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeature, PersiaBatch

def batch_of(row):
    return PersiaBatch([IDTypeFeature("user", row["user"])])

with DataCtx() as ctx:
    {line}
"""


@pytest.mark.parametrize(
    ("text", "frames", "error"),
    [
        (OPENS.format(line="batch_of({})"), [9, 6], "KeyError: 'user'"),
        # What refuses a batch is not explained by the way there.
        (OPENS.format(line="batch_of({'user': 3})"), [9, 6], "DataTypeError: feature 'user': "),
        ("rows = {}\nrows['user']", [2], "KeyError: 'user'"),  # in no context
        ("rows = {", [1], "SyntaxError: "),
    ],
)
def test_what_is_seen_last_is_the_scripts_own_error_where_it_was_raised(
    script: Path, text: str, frames: list[int], error: str
) -> None:
    script.write_text(text)
    with pytest.raises(RemoteError) as raised, make_ctx() as ctx:
        train(ctx, new_loader())
    printed = "".join(traceback.format_exception(raised.value))
    here, over_there = printed.split("data-loader 0 failed; over there:\n")
    assert f"{script}" not in here
    found = re.findall(r'File "(.*)", line (\d+)', over_there)
    ours = [int(line) for file, line in found if file == str(script)]
    assert ours == frames
    assert over_there.splitlines()[-1].startswith((error, f"persia.errors.{error}"))


def test_a_loop_that_is_left_ends_the_child_soon(script: Path) -> None:
    script.write_text(SENDS.format(count=100_000))
    with make_ctx() as ctx:
        for batch in new_loader():
            loss, _ = ctx.forward(batch)
            ctx.backward(loss)
            break
        begin = time.monotonic()
    assert time.monotonic() - begin < 5.0


def test_embedding_workers_that_cannot_hold_what_is_sent_are_refused(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(SENDS.format(count=3))
    config = tmp_path / "global.yml"
    config.write_text("embedding_worker_config: {forward_buffer_size: 5}\n")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(config))
    with make_ctx() as ctx:
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=2)
        said = r"forward_buffer_size: .* room for 5 .* at least 6, .*buffer_size 4 \+ 2 .*to 6"
        with pytest.raises(ConfigError, match=said):
            next(iter(loader))
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
        assert train(ctx, loader) == [0, 1, 2]
