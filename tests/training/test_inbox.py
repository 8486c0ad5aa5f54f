"""What a rank holds of the batches that data-loaders send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening
from persia._training import receiver as inbox_module
from persia._training.queues import Closed, Finished
from persia._training.receiver import BatchReceiver
from persia.errors import (
    ConfigError,
    DataError,
    RemoteError,
    ServiceBusy,
    ServiceTimeout,
    UnknownRef,
    UnknownStream,
)

WAIT_S = 20.0
LOST = UnknownRef("no ref 3")
Stream = tuple[int, int]


@pytest.fixture(autouse=True)
def nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "FAREWELL_S", 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def make_inbox(
    rank: int = 0, world_size: int = 1, capacity: int = 4, patience_s: float = WAIT_S
) -> BatchReceiver:
    return BatchReceiver(rank, world_size, capacity, patience_s)


def batch(batch_id: int, ref: int = 0) -> StreamedBatch:
    return StreamedBatch(batch_id, 1, True, RemoteRef(0, ref or batch_id + 100), (), (), None)


def opened(
    inbox: BatchReceiver,
    loader: int = 0,
    num_loaders: int = 1,
    incarnation: int = 7,
    first: int = 0,
) -> Stream:
    inbox.open_stream(StreamOpening(loader, num_loaders, incarnation, first))
    return loader, incarnation


def take(inbox: BatchReceiver, in_order: bool = True) -> int:
    return inbox.take(in_order, lambda: False).batch.batch_id


def credits_of(inbox: BatchReceiver, stream: Stream) -> int:
    return inbox.poll(stream, -1).credits


def test_batches_are_taken_in_the_order_of_their_ids() -> None:
    inbox = make_inbox(capacity=8)
    streams = [opened(inbox, loader, 2) for loader in range(2)]
    for batch_id in (1, 3, 5):
        inbox.deliver(streams[1], batch(batch_id))
    for batch_id in (0, 2, 4):
        inbox.deliver(streams[0], batch(batch_id))
    assert [take(inbox) for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_or_as_they_arrived() -> None:
    inbox = make_inbox(capacity=8)
    streams = [opened(inbox, loader, 2) for loader in range(2)]
    for batch_id in (1, 3, 0):
        inbox.deliver(streams[batch_id % 2], batch(batch_id))
    assert [take(inbox, in_order=False) for _ in range(3)] == [1, 3, 0]


@pytest.mark.parametrize("in_order", [True, False])
def test_w23_a_pass_ends_when_every_loader_has(in_order: bool) -> None:
    inbox = make_inbox()
    streams = [opened(inbox, loader, 2) for loader in range(2)]
    inbox.deliver(streams[0], batch(0))
    inbox.deliver(streams[1], batch(1))
    inbox.deliver(streams[0], batch(2))
    inbox.end_stream(streams[0], 4, "")
    inbox.end_stream(streams[1], 3, "")
    assert sorted(take(inbox, in_order) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(Finished):
        take(inbox, in_order)


def test_a_loader_that_ended_early_is_passed_over() -> None:
    inbox = make_inbox(capacity=16)
    streams = [opened(inbox, loader, 2) for loader in range(2)]
    for batch_id in (0, 2, 4, 6):
        inbox.deliver(streams[0], batch(batch_id))
    inbox.deliver(streams[1], batch(1))
    inbox.end_stream(streams[1], 3, "")
    assert [take(inbox) for _ in range(5)] == [0, 1, 2, 4, 6]
    inbox.end_stream(streams[0], 8, "")
    with pytest.raises(Finished):
        take(inbox)


def test_ranks_get_their_own_batches_only() -> None:
    inbox = make_inbox(rank=1, world_size=2)
    stream = opened(inbox)
    with pytest.raises(DataError, match=r"batch 2 .* not rank 1's of 2"):
        inbox.deliver(stream, batch(2))
    inbox.deliver(stream, batch(1))
    inbox.deliver(stream, batch(3))
    assert [take(inbox), take(inbox)] == [1, 3]


def test_a_loader_that_sends_nothing_here_is_not_waited_for() -> None:
    inbox = make_inbox(rank=0, world_size=2)
    mine, _ = opened(inbox, 0, 2), opened(inbox, 1, 2)  # of the second, all go to rank 1
    inbox.deliver(mine, batch(0))
    inbox.end_stream(mine, 2, "")
    assert take(inbox) == 0
    with pytest.raises(Finished):
        take(inbox)


def test_w13_the_same_batch_again_is_dropped_and_counted() -> None:
    inbox = make_inbox()
    stream = opened(inbox)
    for batch_id in (0, 1, 0, 1, 1):
        inbox.deliver(stream, batch(batch_id))
    assert [take(inbox), take(inbox)] == [0, 1]
    inbox.deliver(stream, batch(0))
    assert inbox.stats()["delivered_again"] == 4
    assert inbox.stats()["pending"] == 0


def test_credits_come_back_when_batches_are_taken() -> None:
    inbox = make_inbox(capacity=5)
    streams = [opened(inbox, loader, 2) for loader in range(2)]
    assert [credits_of(inbox, stream) for stream in streams] == [2, 2]
    inbox.deliver(streams[0], batch(0))
    assert credits_of(inbox, streams[0]) == 2
    take(inbox)
    assert [credits_of(inbox, stream) for stream in streams] == [3, 2]


def test_an_opening_that_is_repeated_late_takes_no_credits() -> None:
    """An attempt of which the caller knew nothing more may be executed behind what followed."""
    inbox = make_inbox(capacity=4)
    stream = opened(inbox)
    for batch_id in (0, 1):
        inbox.deliver(stream, batch(batch_id))
    opened(inbox)
    assert credits_of(inbox, stream) == 4  # since the opening, two of them used
    assert [take(inbox), take(inbox)] == [0, 1]
    assert credits_of(inbox, stream) == 6


def test_each_loader_may_always_have_one_batch_there() -> None:
    inbox = make_inbox(capacity=1)
    streams = [opened(inbox, loader, 3) for loader in range(3)]
    assert [credits_of(inbox, stream) for stream in streams] == [1, 1, 1]


def test_a_poll_waits_for_news(pool: ThreadPoolExecutor) -> None:
    inbox = make_inbox()
    stream = opened(inbox)
    seen = inbox.poll(stream, -1).version
    polling = pool.submit(inbox.poll, stream, seen)
    inbox.deliver(stream, batch(0))
    taken = inbox.take(True, lambda: False)
    news = polling.result(WAIT_S)
    assert (news.credits, news.acknowledged) == (5, ())
    taken.ended()
    news = inbox.poll(stream, news.version)
    assert news.acknowledged == (0,)
    # Told again until the data-loader says that it has seen it.
    assert inbox.poll(stream, news.version - 1).acknowledged == (0,)


def test_a_poll_without_news_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "POLL_S", 0.0)
    inbox = make_inbox()
    stream = opened(inbox)
    news = inbox.poll(stream, 0)
    assert (news.version, news.is_closed) == (0, False)
    assert inbox.poll(stream, news.version).acknowledged == ()


def in_the_background(
    pool: ThreadPoolExecutor, inbox: BatchReceiver
) -> tuple[Stream, Future[int]]:
    """Take batch 0 and ask for its ids again; returns when the data-loader could know."""
    stream = opened(inbox)
    inbox.deliver(stream, batch(0))
    taken = inbox.take(True, lambda: False)
    seen = inbox.poll(stream, -1).version
    asking = pool.submit(taken.register_again, LOST)
    assert inbox.poll(stream, seen).wanted == (0,)
    return stream, asking


def test_lost_ids_are_asked_for_and_relocated(pool: ThreadPoolExecutor) -> None:
    inbox = make_inbox()
    stream, asking = in_the_background(pool, inbox)
    inbox.relocate(stream, 0, RemoteRef(2, 55))
    assert asking.result(WAIT_S) == 2 << 64 | 55
    assert inbox.poll(stream, 0).wanted == ()


def test_ids_that_nobody_sends_again_are_a_lost_batch() -> None:
    inbox = make_inbox(patience_s=0.0)
    stream = opened(inbox)
    inbox.deliver(stream, batch(0))
    taken = inbox.take(True, lambda: False)
    with pytest.raises(ServiceTimeout, match=r"batch 0 is lost: no ref 3; and data-loader 0"):
        taken.register_again(LOST)
    assert inbox.stats()["lost"] == 1


def test_a_restarted_loader_goes_on_where_the_old_one_was() -> None:
    inbox = make_inbox()
    old = opened(inbox)
    for batch_id in (0, 1):
        inbox.deliver(old, batch(batch_id))
    state = inbox.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (2, ())
    with pytest.raises(UnknownStream, match="data-loader 0 has no such stream"):
        inbox.deliver(old, batch(2))
    assert credits_of(inbox, (0, 8)) == 2  # two of four are taken up
    inbox.deliver((0, 8), batch(2))
    assert [take(inbox) for _ in range(3)] == [0, 1, 2]
    assert inbox.stats()["loader_restarts"] == 1


def test_a_restarted_loader_is_told_what_has_not_ended() -> None:
    inbox = make_inbox()
    old = opened(inbox)
    for batch_id in range(3):
        inbox.deliver(old, batch(batch_id))
    taken = [inbox.take(True, lambda: False) for _ in range(2)]
    taken[0].ended()
    assert inbox.open_stream(StreamOpening(0, 1, 8, 0)).unfinished == (1, 2)
    taken[1].ended()
    assert inbox.poll((0, 8), -1).acknowledged == (1,)
    assert inbox.open_stream(StreamOpening(0, 1, 9, 0)).unfinished == (2,)


def test_a_restarted_loader_is_told_what_is_wanted(pool: ThreadPoolExecutor) -> None:
    inbox = make_inbox()
    _, asking = in_the_background(pool, inbox)
    state = inbox.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    inbox.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9


def test_a_rank_that_was_restarted_begins_where_the_loader_is() -> None:
    inbox = make_inbox(rank=1, world_size=2)
    streams = [opened(inbox, loader, 2, first=11 + loader) for loader in range(2)]
    inbox.deliver(streams[1], batch(13))
    assert take(inbox) == 13


def test_the_failure_of_a_loader_comes_after_its_batches() -> None:
    inbox = make_inbox()
    stream = opened(inbox)
    inbox.deliver(stream, batch(0))
    inbox.end_stream(stream, 1, "Traceback: no such file")
    assert take(inbox) == 0
    with pytest.raises(RemoteError, match=r"data-loader 0 failed.*\nTraceback: no such file"):
        take(inbox)


def test_a_loader_that_failed_and_is_started_anew_goes_on(pool: ThreadPoolExecutor) -> None:
    """Else a batch whose ids only it can register would be waited for in vain."""
    inbox = make_inbox()
    stream, asking = in_the_background(pool, inbox)
    inbox.end_stream(stream, 1, "ServiceError: batch 0 is lost")
    state = inbox.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    inbox.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9
    inbox.deliver((0, 8), batch(1))
    inbox.end_stream((0, 8), 2, "")
    assert take(inbox) == 1
    with pytest.raises(Finished):
        take(inbox)


def with_a_stream_that_has_ended() -> tuple[BatchReceiver, tuple[int, int], Any]:
    """The stream's one batch has been taken, and has not ended."""
    inbox = make_inbox()
    inbox.begin_pass()
    stream = opened(inbox)
    inbox.deliver(stream, batch(0))
    inbox.end_stream(stream, 1, "")
    return inbox, stream, inbox.take(True, lambda: False)


@pytest.mark.parametrize("is_past", [False, True])
def test_a_loader_killed_after_its_end_is_let_in_once_its_ids_are_wanted(
    pool: ThreadPoolExecutor, is_past: bool
) -> None:
    """Nobody else can register them; what it has ended stays ended."""
    inbox, stream, last = with_a_stream_that_has_ended()
    if is_past:
        inbox.end_pass()
    else:
        with pytest.raises(ServiceBusy, match="this pass over the data goes on"):
            opened(inbox, incarnation=8)
    seen = inbox.poll(stream, -1).version
    asking = pool.submit(last.register_again, LOST)
    assert inbox.poll(stream, seen).wanted == (0,)
    state = inbox.open_stream(StreamOpening(0, 1, 8, 0))
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    inbox.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9
    last.ended()
    assert inbox.poll((0, 8), -1).acknowledged == (0,)
    if not is_past:
        with pytest.raises(Finished):
            take(inbox)  # though this process has not come to the end yet
    inbox.end_stream((0, 8), 1, "")
    # The next one is the next pass's.
    if not is_past:
        inbox.end_pass()
    inbox.begin_pass()
    inbox.deliver(opened(inbox, incarnation=9), batch(0))
    assert take(inbox) == 0
    stats = inbox.stats()
    assert (stats["loader_restarts"], stats["relocated"]) == (1, 1)
    assert "lost" not in stats


@pytest.mark.parametrize("is_past", [False, True])
def test_of_several_ranks_none_lets_a_loader_into_a_stream_that_has_ended(
    pool: ThreadPoolExecutor, is_past: bool
) -> None:
    """Another might take it for the next pass's, and neither pass would end."""
    inbox = make_inbox(rank=1, world_size=2)
    inbox.begin_pass()
    stream = opened(inbox)
    inbox.deliver(stream, batch(1))
    inbox.end_stream(stream, 2, "")
    last = inbox.take(True, lambda: False)
    seen = inbox.poll(stream, -1).version
    asking = pool.submit(last.register_again, LOST)
    assert inbox.poll(stream, seen).wanted == (1,)
    if is_past:
        inbox.end_pass()
        state = inbox.open_stream(StreamOpening(0, 1, 8, 1))
        assert (state.next_batch_id, state.wanted, state.unfinished) == (1, (), ())
    else:
        with pytest.raises(ServiceBusy, match="this pass over the data goes on"):
            opened(inbox, incarnation=8)
    inbox.relocate(stream, 1, RemoteRef(0, 9))
    assert asking.result(WAIT_S) == 9
    assert "loader_restarts" not in inbox.stats()


def test_the_next_pass_is_another_stream() -> None:
    inbox, first, last = with_a_stream_that_has_ended()
    with pytest.raises(ServiceBusy, match="this pass over the data goes on"):
        opened(inbox, incarnation=8)
    inbox.end_pass()
    second = opened(inbox, incarnation=8)
    inbox.begin_pass()
    inbox.deliver(second, batch(0))
    # A batch of the first pass may end in the second.
    last.ended()
    assert inbox.poll(first, -1).acknowledged == (0,)
    assert inbox.poll(second, -1).acknowledged == ()
    inbox.end_stream(second, 1, "")
    assert take(inbox) == 0
    with pytest.raises(Finished):
        take(inbox)


def test_a_pass_that_was_left_early_goes_on_in_the_next() -> None:
    inbox = make_inbox()
    inbox.begin_pass()
    stream = opened(inbox)
    for batch_id in range(3):
        inbox.deliver(stream, batch(batch_id))
    assert take(inbox) == 0
    inbox.end_pass()
    inbox.begin_pass()
    assert [take(inbox), take(inbox)] == [1, 2]


def test_what_other_ranks_have_no_match_for_is_acknowledged_and_counted() -> None:
    inbox = make_inbox()
    inbox.begin_pass()
    stream = opened(inbox)
    for batch_id in range(3):
        inbox.deliver(stream, batch(batch_id))
    take(inbox)
    dropped: list[int] = []
    assert not inbox.drop_rest(lambda: dropped.append(1), 0.0)
    inbox.deliver(stream, batch(3))
    inbox.end_stream(stream, 4, "")
    assert inbox.drop_rest(lambda: dropped.append(1), 0.0)
    inbox.end_pass()
    assert inbox.poll(stream, -1).acknowledged == (1, 2, 3)
    assert len(dropped) == 3
    inbox.begin_pass()
    assert "a data-loader to connect" in inbox.describe_wait()


def test_w24_two_passes_at_a_time_are_refused() -> None:
    inbox = make_inbox()
    inbox.begin_pass()
    with pytest.raises(ConfigError, match="one DataLoader over a StreamingDataset at a time"):
        inbox.begin_pass()


def test_loaders_must_agree_on_how_many_they_are() -> None:
    inbox = make_inbox()
    opened(inbox, 0, 2)
    with pytest.raises(ConfigError, match="says that there are 3 of them, others said 2"):
        opened(inbox, 1, 3)
    with pytest.raises(ConfigError, match="expected a number below REPLICA_SIZE 2, got 2"):
        opened(inbox, 2, 2)


def test_closing_wakes_whoever_waits(pool: ThreadPoolExecutor) -> None:
    inbox = make_inbox()
    inbox.begin_pass()
    stream, asking = in_the_background(pool, inbox)
    taking = pool.submit(take, inbox)
    polling = pool.submit(inbox.poll, stream, inbox.poll(stream, -1).version)
    inbox.deliver(opened(inbox), batch(1))
    assert taking.result(WAIT_S) == 1
    again = pool.submit(take, inbox)
    inbox.close()
    for waiting in (again, asking):
        with pytest.raises(Closed):
            waiting.result(WAIT_S)
    polling.result(WAIT_S)
    assert inbox.poll(stream, 1 << 40).is_closed


def test_polls_of_passes_long_over_end_before_it_closes(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leaves the context waits for them; their data-loaders may be gone."""
    monkeypatch.setattr(inbox_module, "POLL_S", 1000 * WAIT_S)
    inbox = make_inbox()
    polls = []
    for incarnation in range(3):
        inbox.begin_pass()
        stream = opened(inbox, incarnation=incarnation)
        inbox.end_stream(stream, 0, "")
        polls.append(pool.submit(inbox.poll, stream, inbox.poll(stream, -1).version))
        inbox.end_pass()
    polls[0].result(WAIT_S)
    inbox.close()
    for poll in polls:
        poll.result(WAIT_S)


def test_a_loader_that_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "FAREWELL_S", 1000 * WAIT_S)
    inbox = make_inbox()
    inbox.begin_pass()
    stream = opened(inbox)
    inbox.deliver(stream, batch(0))
    inbox.end_stream(stream, 1, "Traceback: no such file")
    assert take(inbox) == 0
    with pytest.raises(RemoteError):
        take(inbox)
    inbox.close()


def test_a_pass_that_is_closed_leaves_what_is_pending() -> None:
    inbox = make_inbox()
    stream = opened(inbox)
    closed = threading.Event()
    closed.set()
    inbox.deliver(stream, batch(0))
    with pytest.raises(Closed):
        inbox.take(True, closed.is_set)
    assert inbox.stats()["pending"] == 1
    inbox.close()
    assert inbox.stats()["unread"] == 1


def test_whom_it_waits_for_is_named() -> None:
    clock = Clock()
    inbox = BatchReceiver(0, 1, 4, WAIT_S, clock)
    assert inbox.describe_wait() == "a data-loader to connect; none has"
    opened(inbox, 1, 3)
    assert inbox.describe_wait() == "data-loader 0, 2 of 3 to connect"
    opened(inbox, 0, 3)
    two = opened(inbox, 2, 3)
    clock.now = 100.0
    inbox.deliver(two, batch(2))
    clock.now = 101.0
    text = inbox.describe_wait()
    assert "data-loader 1 of 3, which has not been heard for 101 s" in text
    assert "data-loader 2" not in text


def test_a_stream_that_nobody_read_is_for_the_next_context() -> None:
    inbox = make_inbox()
    stream = opened(inbox)
    inbox.deliver(stream, batch(0))
    inbox.close()
    with pytest.raises(UnknownStream):
        inbox.poll(stream, -1)
    with pytest.raises(ServiceBusy, match="reads no more"):
        opened(inbox)


def test_a_restarted_rank_does_not_wait_for_what_was_trained() -> None:
    inbox = make_inbox()
    stream = opened(inbox, first=0)
    inbox.deliver(stream, batch(0))
    inbox.deliver(stream, batch(2))  # 1 was acknowledged by the rank before this one
    inbox.deliver(stream, batch(3))
    assert [take(inbox) for _ in range(3)] == [0, 2, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_failure_is_raised_though_others_go_on(in_order: bool) -> None:
    # Or the pass would go on for hours without the batches of one data-loader.
    inbox = make_inbox(capacity=16)
    streams = [opened(inbox, loader, 2) for loader in range(2)]
    inbox.deliver(streams[0], batch(0))
    for batch_id in (1, 3, 5, 7):
        inbox.deliver(streams[1], batch(batch_id))
    inbox.end_stream(streams[0], 2, "no such file")
    assert take(inbox, in_order) == 0
    with pytest.raises(RemoteError, match="no such file"):
        take(inbox, in_order)
    # Once: whoever goes on has the rest.
    inbox.end_stream(streams[1], 9, "")
    assert [take(inbox, in_order) for _ in range(4)] == [1, 3, 5, 7]


def test_what_is_not_read_is_counted_once() -> None:
    inbox = make_inbox()
    inbox.deliver(opened(inbox), batch(0))
    inbox.close()
    inbox.close()
    assert inbox.stats()["unread"] == 1


def test_batches_of_a_pass_before_are_in_flight_still() -> None:
    inbox = make_inbox()
    stream = opened(inbox)
    inbox.begin_pass()
    inbox.deliver(stream, batch(0))
    inbox.end_stream(stream, 1, "")
    delivered = inbox.take(True, lambda: False)
    inbox.end_pass()
    assert inbox.stats()["in_flight"] == 1
    delivered.ended()
    assert inbox.stats()["in_flight"] == 0


def test_what_is_dropped_late_is_not_the_next_pass() -> None:
    inbox = make_inbox()
    inbox.begin_pass()
    first = opened(inbox)
    dropped: list[int] = []
    assert not inbox.drop_rest(lambda: dropped.append(1), 0.0)
    inbox.end_pass()
    inbox.deliver(first, batch(0))  # late
    assert len(dropped) == 1
    second = opened(inbox, incarnation=8)
    inbox.begin_pass()
    inbox.deliver(second, batch(0))
    assert take(inbox) == 0
    assert len(dropped) == 1


def test_where_a_pass_ends_all_that_came_is_done() -> None:
    inbox = make_inbox(rank=1, world_size=2)
    stream = opened(inbox)
    for batch_id in (1, 3, 5):
        inbox.deliver(stream, batch(batch_id))
    take(inbox)
    here, end = inbox.position(), inbox.end_position()
    assert here is not None
    assert here["floors"] == {"0": 1}
    assert end is not None
    assert (end["floors"], end["above"]) == ({"0": 7}, {"0": []})


def test_a_batch_wakes_its_own_loader_and_no_other(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "POLL_S", WAIT_S)
    inbox = make_inbox(capacity=8)
    inbox.begin_pass()
    streams = [opened(inbox, loader, 4) for loader in range(4)]
    told: list[int] = []
    have_looked = threading.Event()
    for stream in streams[1:]:
        news = inbox._streams[stream[0]].news
        wait_for = news.wait_for

        def counted(is_so: Any, timeout: float, wait_for: Any = wait_for) -> bool:
            def look() -> bool:
                told.append(1)
                if len(told) == 3:
                    have_looked.set()
                return bool(is_so())

            return bool(wait_for(look, timeout))

        news.wait_for = counted  # type: ignore[method-assign,assignment]
    polls = [pool.submit(inbox.poll, stream, 0) for stream in streams[1:]]
    assert have_looked.wait(WAIT_S)
    for batch_id in range(0, 400, 4):
        inbox.deliver(streams[0], batch(batch_id))
        inbox.take(False, lambda: False).ended()
    assert inbox.poll(streams[0], 0).acknowledged == tuple(range(0, 400, 4))
    assert len(told) == len(polls)
    inbox.deliver(streams[2], batch(2))
    take(inbox, in_order=False)
    assert polls[1].result(WAIT_S).version == 1
    inbox.close()
    assert all(poll.result(WAIT_S).is_closed for poll in (polls[0], polls[2]))
