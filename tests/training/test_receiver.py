"""What a rank holds of the batches that data-loaders send."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from persia._rpc.deadlines import within
from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening, StreamState
from persia._training import receiver as receiver_module
from persia._training.progress import Watermark, to_position
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
from tests.support.fixtures import Log, Monkey
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S, until

ORDERS = pytest.mark.parametrize("in_order", [False, True])
LOST = UnknownRef("no ref 3")
Opened = tuple[int, int]  # data-loader and incarnation


@pytest.fixture(autouse=True)
def no_farewell(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 0.0)


def make_receiver(
    rank: int = 0, world_size: int = 1, capacity: int = 4, patience_s: float = PATIENCE_S
) -> BatchReceiver:
    return BatchReceiver(rank, world_size, capacity, patience_s)


def batch(batch_id: int, epoch: int = 0) -> StreamedBatch:
    return StreamedBatch(batch_id, 1, True, RemoteRef(0, batch_id + 100), (), (), None, epoch)


def opened(
    receiver: BatchReceiver,
    loader: int = 0,
    num_loaders: int = 1,
    incarnation: int = 7,
    first: int = 0,
    epoch: int = 0,
) -> Opened:
    receiver.open_stream(StreamOpening(loader, num_loaders, incarnation, first, epoch))
    return loader, incarnation


class Taken:
    """A batch that was taken, and what the trainer calls for it."""

    def __init__(self, receiver: BatchReceiver, in_order: bool = True) -> None:
        stream, batch = receiver.take(in_order, lambda: False)
        self.batch_id = batch.batch_id
        self.end = partial(receiver.end, stream, batch.batch_id)
        self.register_again = partial(receiver.register_again, stream, batch.batch_id)


def take(receiver: BatchReceiver, count: int = 1, in_order: bool = True) -> list[int]:
    return [Taken(receiver, in_order).batch_id for _ in range(count)]


def deliver(
    receiver: BatchReceiver, streams: Sequence[Opened], *batch_ids: int, epoch: int = 0
) -> None:
    """Deliver batches, each in the stream of its data-loader."""
    for batch_id in batch_ids:
        receiver.deliver(streams[batch_id % len(streams)], batch(batch_id, epoch))


def fed(
    *batch_ids: int, num_loaders: int = 1, **options: Any
) -> tuple[BatchReceiver, list[Opened]]:
    """A receiver in a pass, with open streams of data-loaders that delivered these batches."""
    receiver = make_receiver(**options)
    receiver.begin_pass()
    streams = [opened(receiver, loader, num_loaders) for loader in range(num_loaders)]
    deliver(receiver, streams, *batch_ids)
    return receiver, streams


def credits_of(receiver: BatchReceiver, streams: list[Opened]) -> list[int]:
    return [receiver.poll(stream, -1).credits for stream in streams]


def has_finished(receiver: BatchReceiver, in_order: bool = True) -> bool:
    with pytest.raises(Finished):
        take(receiver, in_order=in_order)
    return True


def test_a_pass_waits_for_an_id_until_its_stream_has_passed_it() -> None:
    receiver, streams = fed(1, num_loaders=2)
    assert receiver._streams.order.take(True) is None  # batch 0 may come
    receiver.end_stream(streams[0], 0, "", 0)
    assert take(receiver) == [1]
    receiver = make_receiver()
    deliver(receiver, [opened(receiver, 1, 2)] * 2, 1)
    assert receiver._streams.order.take(True) is None  # of one that has not connected, too
    receiver.end_stream(opened(receiver, 0, 2), 0, "", 0)
    assert take(receiver) == [1]


@pytest.mark.parametrize(
    ("in_order", "delivered", "ends", "world_size", "taken"),
    [
        (True, [1, 0, 2], [4, 3], 1, [0, 1, 2]),
        (False, [1, 0, 2], [4, 3], 1, [1, 0, 2]),
        # One ended early.
        (True, [0, 2, 4, 6, 1], [8, 3], 1, [0, 1, 2, 4, 6]),
        # Of the second data-loader, all go to rank 1: it is not waited for.
        (True, [0], [2], 2, [0]),
        # Batch 1 was acknowledged by the rank before this one.
        (True, [0, 2, 3], [4], 1, [0, 2, 3]),
        # W-13: the same batch again is dropped.
        (True, [0, 1, 0, 1, 1], [2], 1, [0, 1]),
    ],
)
def test_w23_a_pass_ends_when_every_loader_has(
    in_order: bool, delivered: list[int], ends: list[int], world_size: int, taken: list[int]
) -> None:
    num_loaders = max(len(ends), world_size)
    receiver, streams = fed(
        *delivered, num_loaders=num_loaders, world_size=world_size, capacity=16
    )
    for stream, end in zip(streams, ends, strict=False):
        receiver.end_stream(stream, end, "", 0)
    assert take(receiver, len(taken), in_order) == taken
    assert has_finished(receiver, in_order)
    assert receiver.stats().get("delivered_again", 0) == len(delivered) - len(taken)


def test_ranks_get_their_own_batches_only() -> None:
    receiver, streams = fed(rank=1, world_size=2)
    with pytest.raises(DataError, match=r"batch 2 .* not rank 1's of 2"):
        deliver(receiver, streams, 2)
    deliver(receiver, streams, 1, 3)
    assert take(receiver, 2) == [1, 3]


def test_credits_come_back_when_batches_are_taken() -> None:
    receiver, streams = fed(num_loaders=2, capacity=5)
    assert credits_of(receiver, streams) == [2, 2]
    deliver(receiver, streams, 0)
    assert credits_of(receiver, streams) == [2, 2]
    take(receiver)
    assert credits_of(receiver, streams) == [3, 2]
    # Each may always have one batch there.
    assert credits_of(*fed(num_loaders=3, capacity=1)) == [1, 1, 1]


def test_a_delivery_beyond_its_credits_is_refused_at_once() -> None:
    receiver, (stream,) = fed(0, 1, 2, 3)
    with pytest.raises(ServiceBusy, match=r"batch 4 of data-loader 0: .* 4 credits are used"):
        deliver(receiver, [stream], 4)
    assert (receiver.stats()["pending"], receiver.stats()["refused"]) == (4, 1)
    deliver(receiver, [stream], 3)  # the answer to the first was lost
    assert take(receiver) == [0]
    deliver(receiver, [stream], 4)
    # One that was restarted has the credits that it is granted, and no others.
    assert take(receiver, 3) == [1, 2, 3]
    reopened(receiver)
    (granted,) = credits_of(receiver, [(0, 8)])
    deliver(receiver, [(0, 8)], *range(5, 5 + granted))
    with pytest.raises(ServiceBusy, match="3 credits are used"):
        deliver(receiver, [(0, 8)], 5 + granted)


def test_an_id_far_ahead_is_refused_at_once() -> None:
    """Ids that are left out were trained before a restart: each is marked as done."""
    receiver, (stream,) = fed(0)
    delivery = Background(partial(deliver, receiver, [stream], 1 << 48))
    with pytest.raises(DataError, match=r"batch 281474976710656 .* expected at most 1048577"):
        delivery.result()
    deliver(receiver, [stream], 5)
    assert take(receiver, 2) == [0, 5]
    here = receiver.position()
    assert here is not None
    assert (here["floors"], here["above"]) == ({"0": 0}, {"0": [1, 2, 3, 4]})


def test_in_order_ids_that_do_not_come_are_not_counted_through() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    streams = [opened(receiver, 0, 2, first=0), opened(receiver, 1, 2, first=1 << 48)]
    late = (1 << 48) + 1
    deliver(receiver, streams, late)
    receiver.end_stream(streams[0], 0, "", 0)
    taking = Background(partial(take, receiver))
    assert taking.result() == [late]


def test_an_opening_that_is_repeated_late_takes_no_credits() -> None:
    """An attempt of which the caller knew nothing more may be executed behind what followed."""
    receiver, streams = fed(0, 1)
    opened(receiver)
    assert credits_of(receiver, streams) == [4]  # since the opening, two of them used
    assert take(receiver, 2) == [0, 1]
    assert credits_of(receiver, streams) == [6]


def test_a_poll_waits_for_news() -> None:
    receiver, (stream,) = fed()
    seen = receiver.poll(stream, -1).version
    polling = Background(partial(receiver.poll, stream, seen))
    deliver(receiver, [stream], 0)
    taken = Taken(receiver)
    news = polling.result()
    assert (news.credits, news.acknowledged) == (5, ())
    taken.end()
    news = receiver.poll(stream, news.version)
    assert news.acknowledged == (0,)
    # Repeated until the data-loader says that it has seen it.
    assert receiver.poll(stream, news.version - 1).acknowledged == (0,)


def test_a_poll_without_news_returns(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", 0.0)
    receiver, (stream,) = fed()
    news = receiver.poll(stream, 0)
    assert (news.version, news.is_closed) == (0, False)
    assert receiver.poll(stream, news.version).acknowledged == ()
    deliver(receiver, [stream], 0)
    Taken(receiver).end()
    news = receiver.poll(stream, news.version)
    assert news.acknowledged == (0,)
    assert receiver.poll(stream, news.version).acknowledged == ()


def test_a_poll_is_answered_within_the_time_of_its_caller(monkeypatch: Monkey) -> None:
    """Or a data-loader with a short PERSIA_RPC_TIMEOUT takes a rank without news for gone."""
    monkeypatch.setattr(receiver_module, "POLL_S", 1000 * PATIENCE_S)
    receiver, (stream,) = fed()
    waits: list[float] = []
    news = receiver._streams.order.streams[0].news
    monkeypatch.setattr(news, "wait_for", lambda _, seconds: waits.append(seconds))
    with within(PATIENCE_S):
        receiver.poll(stream, 0)
    (wait_s,) = waits
    assert 0 < wait_s <= 0.75 * PATIENCE_S


def test_a_batch_wakes_its_own_loader_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", PATIENCE_S)
    receiver, streams = fed(num_loaders=4, capacity=8)
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
    polls = [Background(partial(receiver.poll, stream, 0)) for stream in streams[1:]]
    assert have_looked.wait(PATIENCE_S)
    for batch_id in range(0, 400, 4):
        deliver(receiver, streams, batch_id)
        Taken(receiver, in_order=False).end()
    assert receiver.poll(streams[0], 0).acknowledged == tuple(range(0, 400, 4))
    assert len(polled) == len(polls)
    deliver(receiver, streams, 2)
    take(receiver, in_order=False)
    assert polls[1].result().version == 1
    receiver.close()
    assert all(poll.result().is_closed for poll in (polls[0], polls[2]))


def ask_again(receiver: BatchReceiver, stream: Opened, taken: Taken) -> Background:
    """Ask for the ids of a batch again; returns when the data-loader could know."""
    seen = receiver.poll(stream, -1).version
    asking = Background(partial(taken.register_again, LOST))
    assert receiver.poll(stream, seen).wanted == (taken.batch_id,)
    return asking


def with_lost_ids() -> tuple[BatchReceiver, Opened, Background]:
    """A receiver that has asked for the ids of batch 0 again."""
    receiver, (stream,) = fed(0)
    return receiver, stream, ask_again(receiver, stream, Taken(receiver))


def reopened(receiver: BatchReceiver, first: int = 0) -> StreamState:
    """The state that a data-loader learns that was restarted."""
    return receiver.open_stream(StreamOpening(0, 1, 8, first))


def test_lost_ids_are_asked_for_and_relocated() -> None:
    receiver, stream, asking = with_lost_ids()
    receiver.relocate(stream, 0, RemoteRef(2, 55))
    assert asking.result() == 2 << 64 | 55
    assert receiver.poll(stream, 0).wanted == ()


def test_ids_that_none_sends_again_are_a_lost_batch() -> None:
    receiver, _ = fed(0, patience_s=0.0)
    taken = Taken(receiver)
    with pytest.raises(ServiceTimeout, match=r"batch 0 is lost: no ref 3; and data-loader 0"):
        taken.register_again(LOST)
    assert receiver.stats()["lost"] == 1
    assert reopened(receiver).wanted == ()


def test_ids_of_a_batch_that_has_ended_are_not_waited_for() -> None:
    """An update may be given up while it asks for them, by a Ctrl-C for instance."""
    receiver, (stream,) = fed(0)
    taken = Taken(receiver)
    asking = ask_again(receiver, stream, taken)
    taken.end()
    with pytest.raises(UnknownRef, match="no ref 3"):
        asking.result()
    assert "lost" not in receiver.stats()
    assert receiver.poll(stream, -1).wanted == ()


def test_a_restarted_loader_goes_on_where_the_old_one_was() -> None:
    receiver, streams = fed(0, 1)
    state = reopened(receiver)
    assert (state.next_batch_id, state.wanted) == (2, ())
    with pytest.raises(UnknownStream, match="data-loader 0 has no such stream"):
        deliver(receiver, streams, 2)
    assert credits_of(receiver, [(0, 8)]) == [2]  # two of four are taken up
    deliver(receiver, [(0, 8)], 2)
    assert take(receiver, 3) == [0, 1, 2]
    assert receiver.stats()["loader_restarts"] == 1


def test_a_restarted_loader_learns_what_has_not_ended() -> None:
    receiver, _ = fed(0, 1, 2)
    taken = [Taken(receiver) for _ in range(2)]
    taken[0].end()
    assert reopened(receiver).unfinished == (1, 2)
    taken[1].end()
    assert receiver.poll((0, 8), -1).acknowledged == (1,)
    assert receiver.open_stream(StreamOpening(0, 1, 9, 0)).unfinished == (2,)


@pytest.mark.parametrize("failure", ["", "ServiceError: batch 0 is lost"])
def test_a_restarted_loader_learns_of_wishes(failure: str) -> None:
    """One that failed, too: a batch whose ids only it can register would be lost."""
    receiver, stream, asking = with_lost_ids()
    if failure:
        receiver.end_stream(stream, 1, failure, 0)
    state = reopened(receiver)
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    receiver.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result() == 9
    deliver(receiver, [(0, 8)], 1)
    receiver.end_stream((0, 8), 2, "", 0)
    assert take(receiver) == [1]
    assert has_finished(receiver)


def test_a_rank_that_was_restarted_begins_where_the_loader_is() -> None:
    receiver = make_receiver(rank=1, world_size=2)
    streams = [opened(receiver, loader, 2, first=11 + loader) for loader in range(2)]
    deliver(receiver, streams, 13)
    assert take(receiver) == [13]


def ended(receiver: BatchReceiver, stream: Opened, first: int = 0) -> Taken:
    """Let a stream of one batch end, which has been taken and has not ended."""
    deliver(receiver, [stream], first)
    receiver.end_stream(stream, first + 1, "", 0)
    return Taken(receiver)


UNDER_WAY = "this pass over the data is still under way"


@pytest.mark.parametrize("is_past", [False, True])
def test_an_ended_loader_returns_if_its_ids_are_wanted(is_past: bool) -> None:
    """No other process can register them; what it has ended stays ended."""
    receiver, (stream,) = fed()
    last = ended(receiver, stream)
    if is_past:
        receiver.end_pass()
    else:
        with pytest.raises(ServiceBusy, match=UNDER_WAY):
            reopened(receiver)
    asking = ask_again(receiver, stream, last)
    state = reopened(receiver)
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    receiver.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result() == 9
    last.end()
    assert receiver.poll((0, 8), -1).acknowledged == (0,)
    if not is_past:
        assert has_finished(receiver)  # though this process has not come to the end yet
    receiver.end_stream((0, 8), 1, "", 0)
    # The next one is the next pass's.
    if not is_past:
        receiver.end_pass()
    receiver.begin_pass()
    deliver(receiver, [opened(receiver, incarnation=9)], 0)
    assert take(receiver) == [0]
    stats = receiver.stats()
    assert (stats["loader_restarts"], stats["relocated"]) == (1, 1)
    assert "lost" not in stats


@pytest.mark.parametrize("is_past", [False, True])
def test_an_ended_stream_of_ranks_takes_no_loader(is_past: bool) -> None:
    """Another might take it for the next pass's, and neither pass would end."""
    receiver, (stream,) = fed(rank=1, world_size=2)
    asking = ask_again(receiver, stream, ended(receiver, stream, 1))
    if is_past:
        receiver.end_pass()
        state = reopened(receiver, 1)
        assert (state.next_batch_id, state.wanted, state.unfinished) == (1, (), ())
    else:
        with pytest.raises(ServiceBusy, match=UNDER_WAY):
            reopened(receiver)
    receiver.relocate(stream, 1, RemoteRef(0, 9))
    assert asking.result() == 9
    assert "loader_restarts" not in receiver.stats()


def test_the_next_pass_is_another_stream() -> None:
    receiver, (first,) = fed()
    last = ended(receiver, first)
    with pytest.raises(ServiceBusy, match=UNDER_WAY):
        reopened(receiver)
    receiver.end_pass()
    second = opened(receiver, incarnation=8)
    receiver.begin_pass()
    deliver(receiver, [second], 0)
    # A batch of the first pass may end in the second.
    assert receiver.stats()["taken"] == 1
    last.end()
    assert receiver.stats()["taken"] == 0
    assert receiver.poll(first, -1).acknowledged == (0,)
    assert receiver.poll(second, -1).acknowledged == ()
    receiver.end_stream(second, 1, "", 0)
    assert take(receiver) == [0]
    assert has_finished(receiver)


def test_a_pass_that_was_left_early_goes_on_in_the_next() -> None:
    receiver, _ = fed(0, 1, 2)
    assert take(receiver) == [0]
    receiver.end_pass()
    receiver.begin_pass()
    assert take(receiver, 2) == [1, 2]


def test_what_other_ranks_have_no_match_for_is_acknowledged_and_counted() -> None:
    receiver, (stream,) = fed(0, 1, 2)
    take(receiver)
    dropped: list[int] = []
    assert not receiver.drop_rest(lambda: dropped.append(1), 0.0)
    deliver(receiver, [stream], 3)
    receiver.end_pass()
    deliver(receiver, [stream], 4)  # late: it is not the next pass's
    receiver.end_stream(stream, 5, "", 0)
    assert receiver.poll(stream, -1).acknowledged == (1, 2, 3, 4)
    receiver.begin_pass()
    assert "a data-loader to connect" in receiver.describe_wait()
    deliver(receiver, [opened(receiver, incarnation=8)], 0)
    assert take(receiver) == [0]
    assert len(dropped) == 4
    receiver.end_stream((0, 8), 1, "", 0)
    assert receiver.drop_rest(lambda: None, 0.0)


def test_w24_two_passes_at_a_time_are_refused() -> None:
    receiver, _ = fed()
    with pytest.raises(ConfigError, match="one DataLoader over a StreamingDataset at a time"):
        receiver.begin_pass()


def test_loaders_must_agree_on_how_many_they_are() -> None:
    receiver = make_receiver()
    opened(receiver, 0, 2)
    with pytest.raises(ConfigError, match="says that there are 3 of them, others said 2"):
        opened(receiver, 1, 3)
    with pytest.raises(ConfigError, match="expected a number below REPLICA_SIZE 2, got 2"):
        opened(receiver, 2, 2)


def test_closing_wakes_every_thread_that_waits() -> None:
    receiver, stream, asking = with_lost_ids()
    taking = Background(partial(take, receiver))
    polling = Background(partial(receiver.poll, stream, receiver.poll(stream, -1).version))
    deliver(receiver, [stream], 1)
    assert taking.result() == [1]
    again = Background(partial(take, receiver))
    receiver.close()
    for waiting in (again, asking):
        with pytest.raises(Closed):
            waiting.result()
    polling.result()
    assert receiver.poll(stream, 1 << 40).is_closed


def test_polls_of_passes_long_over_end(monkeypatch: Monkey) -> None:
    """Leaving the context waits for them; their data-loaders may be gone."""
    monkeypatch.setattr(receiver_module, "POLL_S", 1000 * PATIENCE_S)
    receiver = make_receiver()
    polls = []
    for incarnation in range(3):
        receiver.begin_pass()
        stream = opened(receiver, incarnation=incarnation)
        receiver.end_stream(stream, 0, "", 0)
        seen = receiver.poll(stream, -1).version
        polls.append(Background(partial(receiver.poll, stream, seen)))
        receiver.end_pass()
    polls[0].result()
    receiver.close()
    for poll in polls:
        poll.result()


def test_a_failed_loader_is_an_error_after_its_batches(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 1000 * PATIENCE_S)
    receiver, (stream,) = fed(0)
    receiver.end_stream(stream, 1, "Traceback: no such file", 0)
    assert take(receiver) == [0]
    with pytest.raises(RemoteError, match=r"data-loader 0 failed.*\nTraceback: no such file"):
        take(receiver)
    receiver.close()


def test_the_poll_of_a_process_that_was_restarted_ends(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", 1000 * PATIENCE_S)
    receiver, (stream,) = fed()
    news = receiver._streams.order.streams[0].news
    wait_for, is_waiting = news.wait_for, threading.Event()

    def wait(is_so: Any, timeout: float) -> bool:
        is_waiting.set()  # with the lock held, until it waits
        return bool(wait_for(is_so, timeout))

    news.wait_for = wait  # type: ignore[method-assign,assignment]
    polling = Background(partial(receiver.poll, stream, 0))
    assert is_waiting.wait(PATIENCE_S)
    reopened(receiver)
    polling.result()


@pytest.mark.parametrize("waits_for", ["batch", "taken", "acknowledged", "restarted", ""])
def test_closing_waits_until_data_loaders_know(monkeypatch: Monkey, waits_for: str) -> None:
    """All but one that has ended, and knows that all that it sent has."""
    receiver, (stream,) = fed()
    if waits_for == "restarted":
        receiver.end_stream(stream, 0, "no such file", 0)
        reopened(receiver)
        stream = 0, 8
    elif waits_for != "batch":
        last = ended(receiver, stream)
        if waits_for != "taken":
            last.end()
        if not waits_for:
            receiver.poll(stream, receiver.poll(stream, -1).version - 1)
            monkeypatch.setattr(receiver_module, "POLL_S", 0.0)
            receiver.poll(stream, receiver.poll(stream, -1).version)
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 1000 * PATIENCE_S)
    asked: list[Opened] = []

    def close() -> bool:
        receiver.close()
        return bool(asked)

    closing = Background(close)
    if waits_for:
        until(lambda: receiver._is_closed)
        asked.append(stream)
        assert receiver.poll(stream, -1).is_closed
    assert closing.result() == bool(waits_for)


def test_closing_ends_the_wait_for_what_is_dropped() -> None:
    receiver, _ = fed(0)
    dropping = Background(partial(receiver.drop_rest, lambda: None, 1000 * PATIENCE_S))
    receiver.close()
    assert dropping.result()


def test_a_stream_that_was_opened_before_its_pass_is_closed_with_it() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    receiver.begin_pass()
    receiver.close()
    assert receiver.poll(stream, -1).is_closed


def test_the_first_of_two_failures_is_raised() -> None:
    receiver, _ = fed()
    for why in ("one", "two"):
        receiver.fail(KeyError(why))
    with pytest.raises(KeyError, match="one"):
        take(receiver)


def test_streams_behind_a_run_that_continued_begin_at_0() -> None:
    receiver = BatchReceiver(
        0, 1, 4, PATIENCE_S, resumed=to_position("stream", 1, {0: Watermark(2)})
    )
    receiver.begin_pass()
    receiver.end_stream(opened(receiver), 2, "", 0)
    assert has_finished(receiver)
    next_pass(receiver)
    state = reopened(receiver)
    assert (state.next_batch_id, state.is_resumed) == (0, False)


def test_an_end_is_the_first_one() -> None:
    """A call may be executed again behind what followed it."""
    receiver, (stream,) = fed(0)
    receiver.end_stream(stream, 1, "no such file", 0)
    assert take(receiver) == [0]
    with pytest.raises(RemoteError, match="no such file"):
        take(receiver)
    receiver.end_stream(stream, 1, "no such file", 0)
    receiver.end_stream(stream, 3, "", 0)
    assert has_finished(receiver)
    with pytest.raises(DataError, match=r"batch 1 .* came after the end at 1"):
        deliver(receiver, [stream], 1)


def test_what_is_not_read_is_left_and_counted_once() -> None:
    receiver, _ = fed(0)
    with pytest.raises(Closed):
        receiver.take(True, lambda: True)
    assert receiver.stats()["pending"] == 1
    receiver.close()
    receiver.close()
    assert receiver.stats()["unread"] == 1


def test_a_stream_outside_a_pass_is_for_the_next_context() -> None:
    receiver = make_receiver()
    stream = opened(receiver)
    receiver.close()
    with pytest.raises(UnknownStream):
        receiver.poll(stream, -1)
    with pytest.raises(ServiceBusy, match="reads no more"):
        opened(receiver)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_failure_is_raised_though_others_go_on(in_order: bool) -> None:
    # Or the pass would go on for hours without the batches of one data-loader.
    receiver, streams = fed(0, 1, 3, 5, 7, num_loaders=2, capacity=16)
    receiver.end_stream(streams[0], 2, "no such file", 0)
    assert take(receiver, 1, in_order) == [0]
    with pytest.raises(RemoteError, match="no such file"):
        take(receiver, 1, in_order)
    # Once: a trainer that continues gets the rest.
    receiver.end_stream(streams[1], 9, "", 0)
    assert take(receiver, 4, in_order) == [1, 3, 5, 7]


def test_where_a_pass_ends_all_that_came_is_done() -> None:
    receiver, _ = fed(1, 3, 5, rank=1, world_size=2)
    take(receiver)
    here, end = receiver.position(), receiver.position(at_end=True)
    assert here is not None
    assert here["floors"] == {"0": 1}
    assert end is not None
    assert (end["floors"], end["above"]) == ({"0": 7}, {"0": []})


@pytest.mark.parametrize("epoch", [0, 2])
def test_one_that_has_not_connected_is_where_the_run_before_left_it(epoch: int) -> None:
    before = to_position(
        "stream", 2, {0: Watermark(8, 2), 1: Watermark(9, 2, {13})}, epoch, {"0": 2, "1": 3}
    )
    receiver = BatchReceiver(0, 1, 4, PATIENCE_S, resumed=before)
    receiver.begin_pass()
    deliver(receiver, [opened(receiver, 0, 2)] * 2, 8, epoch=epoch)
    stream, _ = receiver.take(False, lambda: False)
    receiver.mark_done(stream, 8)
    assert receiver.position() == {**before, "floors": {"0": 10, "1": 9}}


def test_a_failure_before_the_pass_begins_is_raised_in_it() -> None:
    """A data-loader may connect between ``iter(loader)`` and the first batch."""
    before = to_position("stream", 2, {0: Watermark(8, 2), 1: Watermark(9, 2)})
    receiver = BatchReceiver(0, 1, 4, PATIENCE_S, resumed=before)
    with pytest.raises(ConfigError, match="made with 2 data-loaders, now there are 1"):
        opened(receiver)
    receiver.begin_pass()
    taking = Background(partial(take, receiver))
    with pytest.raises(ConfigError, match="made with 2 data-loaders, now there are 1"):
        taking.result()
    next_pass(receiver)  # which begins without it
    again = Background(partial(take, receiver))
    deliver(receiver, [opened(receiver, loader, 2) for loader in range(2)], 8)
    assert again.result() == [8]


# --- epochs of one stream; of senders and receivers together: tests/faults ----------------


def next_pass(receiver: BatchReceiver) -> None:
    receiver.end_pass()
    receiver.begin_pass()


@ORDERS
def test_a_pass_takes_the_batches_of_one_epoch(in_order: bool) -> None:
    receiver, streams = fed(0, num_loaders=2, capacity=8)
    deliver(receiver, streams, 2, 4, epoch=1)  # ahead
    deliver(receiver, streams, 1, 3)
    assert take(receiver, 3, in_order) == [0, 1, 3]
    assert receiver._streams.order.take(in_order) is None  # 5 may come
    assert receiver.describe_wait().startswith("data-loader 1 of 2")
    deliver(receiver, streams, 5, epoch=1)
    assert has_finished(receiver, in_order)
    assert receiver.describe_missing() == ""
    next_pass(receiver)
    assert take(receiver, 3, in_order) == [2, 4, 5]
    for stream, end in zip(streams, (6, 7), strict=True):
        receiver.end_stream(stream, end, "", 1)
    assert has_finished(receiver, in_order)
    next_pass(receiver)
    assert receiver.describe_wait().startswith(
        "a data-loader to connect again: data-loader 0, 1 of 2 ended after 2 epochs, and "
        "each loop over the DataLoader reads one"
    )


@ORDERS
def test_one_that_is_an_epoch_ahead_takes_no_other_ones_room(in_order: bool) -> None:
    receiver, streams = fed(0, num_loaders=2, capacity=2)
    if not in_order:
        assert take(receiver, 1, in_order) == [0]
        deliver(receiver, streams, 2, epoch=1)
    for batch_id in range(1, 20, 2):
        deliver(receiver, streams, batch_id)
        assert take(receiver, 1 + (in_order and batch_id == 1), in_order)[-1] == batch_id
        if batch_id == 1 and in_order:
            deliver(receiver, streams, 2, epoch=1)
        with pytest.raises(ServiceBusy, match="credits are used"):
            deliver(receiver, streams, 4, epoch=1)
    deliver(receiver, streams, 21, epoch=1)
    assert has_finished(receiver, in_order)
    next_pass(receiver)
    assert take(receiver, 1, in_order) == [2]
    deliver(receiver, streams, 4, epoch=1)  # its credit is back


def test_a_rank_without_a_batch_of_an_epoch_has_a_pass_without_one() -> None:
    """The others have one: ranks count the same passes."""
    receiver, streams = fed(0, world_size=2)
    deliver(receiver, streams, 2, epoch=2)  # rank 1 has batch 1, of epoch 1
    receiver.end_stream(streams[0], 4, "", 3)  # and batch 3, of epoch 3
    for batches in ([0], [], [2], []):
        assert take(receiver, len(batches)) == batches
        assert has_finished(receiver)
        assert receiver.describe_missing() == ("" if batches else "rank 0 of 2 had")
        next_pass(receiver)
    assert "data-loader 0 of 1 ended after 4 epochs" in receiver.describe_wait()


def test_epochs_do_not_go_back() -> None:
    receiver, streams = fed(0)
    deliver(receiver, streams, 1, epoch=2)
    with pytest.raises(DataError, match=r"batch 2 .* epoch 1, .* of epoch 2 .*ctx.end_epoch"):
        deliver(receiver, streams, 2, epoch=1)
    deliver(receiver, streams, 2, epoch=2)


def test_a_pass_that_was_left_early_goes_on_in_its_epoch() -> None:
    receiver, streams = fed(0, 1)
    deliver(receiver, streams, 2, epoch=1)
    assert take(receiver) == [0]
    next_pass(receiver)
    assert take(receiver) == [1]
    assert has_finished(receiver)


def test_what_other_ranks_have_no_match_for_is_of_one_epoch() -> None:
    receiver, streams = fed(0, 1, num_loaders=2, capacity=12)
    deliver(receiver, streams, 2, epoch=1)
    dropped: list[int] = []
    dropping = Background(partial(receiver.drop_rest, lambda: dropped.append(1), PATIENCE_S))
    until(lambda: len(dropped) == 2)
    deliver(receiver, streams, 3)
    deliver(receiver, streams, 5, epoch=1)
    assert dropping.result()
    assert len(dropped) == 3
    # Not done yet: with another number of ranks a run that continues here would train it.
    here = receiver.position()
    assert here is not None
    assert (here["floors"], here["above"]) == ({"0": 0, "1": 1}, {"0": [], "1": []})
    end = receiver.next_position()
    next_pass(receiver)
    assert take(receiver, 2, in_order=False) == [2, 5]
    # What was dropped is not trained again by a run that continues in the next epoch.
    assert end is not None
    assert receiver.position() == end
    assert end["floors"] == end["begins"] == {"0": 2, "1": 5}


def test_one_that_joins_late_has_no_part_in_what_is_dropped() -> None:
    receiver = make_receiver(capacity=8)
    receiver.begin_pass()
    streams = [opened(receiver, 0, 2)]
    receiver.deliver(streams[0], batch(0))
    dropped: list[int] = []
    dropping = Background(partial(receiver.drop_rest, lambda: dropped.append(1), PATIENCE_S))
    until(lambda: len(dropped) == 1)
    streams.append(opened(receiver, 1, 2))
    deliver(receiver, streams, 1, 3)
    deliver(receiver, streams, 2, 5, epoch=1)
    assert dropping.result()
    assert len(dropped) == 3
    next_pass(receiver)
    assert take(receiver, 2, in_order=False) == [2, 5]


def test_one_that_joins_behind_a_pass_that_was_dropped_is_in_the_next_epoch() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    streams = [opened(receiver, 0, 2)]
    assert not receiver.drop_rest(lambda: None, 0.0)
    next_pass(receiver)
    streams.append(opened(receiver, 1, 2))
    deliver(receiver, streams, 1)
    assert receiver.stats()["pending"] == 0
    deliver(receiver, streams, 2, 3, epoch=1)
    assert take(receiver, 2) == [2, 3]


def test_the_room_of_those_that_are_over_is_the_others() -> None:
    """With several ranks; never more than all, but for what is of the next epoch already."""
    receiver, streams = fed(num_loaders=3, world_size=2, capacity=7)
    assert credits_of(receiver, streams) == [2, 2, 2]
    receiver.end_stream(streams[1], 1, "", 0)
    assert credits_of(receiver, streams) == [3, 2, 3]
    deliver(receiver, streams, 2, epoch=1)
    assert credits_of(receiver, streams) == [7, 2, 3]
    deliver(receiver, streams, 0, epoch=1)
    assert has_finished(receiver)
    next_pass(receiver)  # in which two are not over
    assert take(receiver, 2) == [0, 2]
    assert credits_of(receiver, streams) == [7, 2, 4]
    receiver, streams = fed(num_loaders=3, capacity=7)  # one rank waits for no other
    receiver.end_stream(streams[1], 1, "", 0)
    assert credits_of(receiver, streams) == [2, 2, 2]


def test_what_is_dropped_late_is_behind_the_position_of_the_next_epoch() -> None:
    """A run that continued there would be sent a batch of the epoch before."""
    receiver, (stream,) = fed(0, 1)
    assert not receiver.drop_rest(lambda: None, 0.0)
    next_pass(receiver)
    deliver(receiver, [stream], 2, 3)
    deliver(receiver, [stream], 4, epoch=1)
    found, _ = receiver.take(True, lambda: False)
    receiver.mark_done(found, 4)
    here = receiver.position()
    assert here is not None
    assert (here["epoch"], here["floors"], here["above"]) == (1, {"0": 5}, {"0": []})


def test_one_that_outlasts_a_pass_that_was_dropped_is_not_in_the_next() -> None:
    receiver, streams = fed(0)
    assert not receiver.drop_rest(lambda: None, 0.0)
    next_pass(receiver)
    taking = Background(partial(take, receiver))
    deliver(receiver, streams, 1)
    receiver.end_stream(streams[0], 2, "", 0)
    deliver(receiver, [opened(receiver, incarnation=8)], 0)
    assert taking.result() == [0]


def test_a_rank_that_was_restarted_begins_in_the_lowest_epoch() -> None:
    receiver = make_receiver()
    receiver.begin_pass()
    streams = [opened(receiver, 0, 2, first=10, epoch=3)]
    streams.append(opened(receiver, 1, 2, first=9, epoch=2))
    deliver(receiver, streams, 10, epoch=3)
    deliver(receiver, streams, 9, epoch=2)
    deliver(receiver, streams, 11, epoch=3)
    assert take(receiver) == [9]
    assert has_finished(receiver)


def test_a_failure_is_raised_in_its_epoch() -> None:
    receiver, streams = fed(0)
    deliver(receiver, streams, 1, epoch=1)
    receiver.end_stream(streams[0], 2, "no such file", 1)
    assert take(receiver) == [0]
    assert has_finished(receiver)
    next_pass(receiver)
    assert take(receiver) == [1]
    with pytest.raises(RemoteError, match="no such file"):
        take(receiver)


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_epoch_that_no_loop_reads_is_named(is_asked: bool, caplog: Log) -> None:
    receiver, streams = fed(0)
    deliver(receiver, streams, 1, epoch=1)
    take(receiver)
    assert has_finished(receiver)
    receiver.end_pass()
    if is_asked:  # the user has left it
        receiver.begin_pass()
        receiver.end_pass()
    receiver.close()
    unread = make_receiver()
    deliver(unread, [opened(unread)], 0)
    unread.close()  # another context may read what comes then
    assert "of epoch 0" not in caplog.text
    assert ("of epoch 1, which no loop over the DataLoader has read" in caplog.text) != is_asked
