"""What a rank holds of the batches that data-loaders send."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening, StreamState
from persia._training import receiver as receiver_module
from persia._training.queues import Closed, Finished
from persia._training.receiver import BatchReceiver, ChildStream
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
from tests.faults.job import make_ctx, step, trained
from tests.support.fixtures import Monkey
from tests.support.streams import Background

WAIT_S = 20.0
LOST = UnknownRef("no ref 3")
Stream = tuple[int, int]


@pytest.fixture(autouse=True)
def no_farewell(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 0.0)


def make_receiver(
    rank: int = 0, world_size: int = 1, capacity: int = 4, patience_s: float = WAIT_S
) -> BatchReceiver:
    return BatchReceiver(rank, world_size, capacity, patience_s)


def batch(batch_id: int) -> StreamedBatch:
    return StreamedBatch(batch_id, 1, True, RemoteRef(0, batch_id + 100), (), (), None)


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
        self.register_again = partial(receiver.register_again, stream, batch.batch_id)


def take(receiver: BatchReceiver, count: int = 1, in_order: bool = True) -> list[int]:
    return [Taken(receiver, in_order).batch_id for _ in range(count)]


def deliver(receiver: BatchReceiver, streams: Sequence[Stream], *batch_ids: int) -> None:
    """Deliver batches, each in the stream of its data-loader."""
    for batch_id in batch_ids:
        receiver.deliver(streams[batch_id % len(streams)], batch(batch_id))


def fed(
    *batch_ids: int, num_loaders: int = 1, **options: Any
) -> tuple[BatchReceiver, list[Stream]]:
    """A receiver in a pass, with open streams of data-loaders that delivered these batches."""
    receiver = make_receiver(**options)
    receiver.begin_pass()
    streams = [opened(receiver, loader, num_loaders) for loader in range(num_loaders)]
    deliver(receiver, streams, *batch_ids)
    return receiver, streams


def credits_of(receiver: BatchReceiver, streams: list[Stream]) -> list[int]:
    return [receiver.poll(stream, -1).credits for stream in streams]


def has_finished(receiver: BatchReceiver, in_order: bool = True) -> bool:
    with pytest.raises(Finished):
        take(receiver, in_order=in_order)
    return True


def test_a_pass_waits_for_an_id_until_its_stream_has_passed_it() -> None:
    receiver, streams = fed(1, num_loaders=2)
    assert receiver._streams.order.take(True) is None  # batch 0 may come
    receiver.end_stream(streams[0], 0, "")
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
        receiver.end_stream(stream, end, "")
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


def ask_again(receiver: BatchReceiver, stream: Stream, taken: Taken) -> Background:
    """Ask for the ids of a batch again; returns when the data-loader could know."""
    seen = receiver.poll(stream, -1).version
    asking = Background(partial(taken.register_again, LOST))
    assert receiver.poll(stream, seen).wanted == (taken.batch_id,)
    return asking


def with_lost_ids() -> tuple[BatchReceiver, Stream, Background]:
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
        receiver.end_stream(stream, 1, failure)
    state = reopened(receiver)
    assert (state.next_batch_id, state.wanted) == (1, (0,))
    receiver.relocate((0, 8), 0, RemoteRef(0, 9))
    assert asking.result() == 9
    deliver(receiver, [(0, 8)], 1)
    receiver.end_stream((0, 8), 2, "")
    assert take(receiver) == [1]
    assert has_finished(receiver)


def test_a_rank_that_was_restarted_begins_where_the_loader_is() -> None:
    receiver = make_receiver(rank=1, world_size=2)
    streams = [opened(receiver, loader, 2, first=11 + loader) for loader in range(2)]
    deliver(receiver, streams, 13)
    assert take(receiver) == [13]


def ended(receiver: BatchReceiver, stream: Stream, first: int = 0) -> Taken:
    """Let a stream of one batch end, which has been taken and has not ended."""
    deliver(receiver, [stream], first)
    receiver.end_stream(stream, first + 1, "")
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
    receiver.end_stream((0, 8), 1, "")
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
    receiver.end_stream(second, 1, "")
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
    receiver.end_stream(stream, 5, "")
    assert receiver.poll(stream, -1).acknowledged == (1, 2, 3, 4)
    receiver.begin_pass()
    assert "a data-loader to connect" in receiver.describe_wait()
    deliver(receiver, [opened(receiver, incarnation=8)], 0)
    assert take(receiver) == [0]
    assert len(dropped) == 4
    receiver.end_stream((0, 8), 1, "")
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
    monkeypatch.setattr(receiver_module, "POLL_S", 1000 * WAIT_S)
    receiver = make_receiver()
    polls = []
    for incarnation in range(3):
        receiver.begin_pass()
        stream = opened(receiver, incarnation=incarnation)
        receiver.end_stream(stream, 0, "")
        seen = receiver.poll(stream, -1).version
        polls.append(Background(partial(receiver.poll, stream, seen)))
        receiver.end_pass()
    polls[0].result()
    receiver.close()
    for poll in polls:
        poll.result()


def test_a_failed_loader_is_an_error_after_its_batches(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 1000 * WAIT_S)
    receiver, (stream,) = fed(0)
    receiver.end_stream(stream, 1, "Traceback: no such file")
    assert take(receiver) == [0]
    with pytest.raises(RemoteError, match=r"data-loader 0 failed.*\nTraceback: no such file"):
        take(receiver)
    receiver.close()


def test_what_is_not_read_is_left_and_counted_once() -> None:
    receiver, _ = fed(0)
    with pytest.raises(Closed):
        receiver.take(True, lambda: True)
    assert receiver.stats()["pending"] == 1
    receiver.close()
    receiver.close()
    assert receiver.stats()["unread"] == 1


def test_a_wait_names_data_loaders() -> None:
    now = 0.0
    receiver = BatchReceiver(0, 1, 4, WAIT_S, lambda: now)
    assert receiver.describe_wait() == "a data-loader to connect; none has"
    opened(receiver, 1, 3)
    assert receiver.describe_wait() == "data-loader 0, 2 of 3 to connect"
    opened(receiver, 0, 3)
    two = opened(receiver, 2, 3)
    now = 100.0
    receiver.deliver(two, batch(2))
    now = 101.0
    text = receiver.describe_wait()
    assert "data-loader 1 of 3, which has not been heard for 101 s" in text
    assert "data-loader 2" not in text


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
    receiver.end_stream(streams[0], 2, "no such file")
    assert take(receiver, 1, in_order) == [0]
    with pytest.raises(RemoteError, match="no such file"):
        take(receiver, 1, in_order)
    # Once: a trainer that continues gets the rest.
    receiver.end_stream(streams[1], 9, "")
    assert take(receiver, 4, in_order) == [1, 3, 5, 7]


def test_where_a_pass_ends_all_that_came_is_done() -> None:
    receiver, _ = fed(1, 3, 5, rank=1, world_size=2)
    take(receiver)
    here, end = receiver.position(), receiver.position(at_end=True)
    assert here is not None
    assert here["floors"] == {"0": 1}
    assert end is not None
    assert (end["floors"], end["above"]) == ({"0": 7}, {"0": []})


# --- embedded mode's data-loader: a child process, once for each pass ---------------------

SENDS = """
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

with DataCtx() as ctx:
    for number in range({count}):
        ctx.send_data(make_batch(number))
"""


def train(ctx: TrainCtx, loader: DataLoader, count: int | None = None) -> list[int]:
    """Train one pass, or some batches of it; returns their numbers."""
    return [step(ctx, batch) for batch in itertools.islice(loader, count)]


def new_loader() -> DataLoader:
    return DataLoader(StreamingDataset(4), reproducible=True, timeout_ms=30_000)


def test_each_pass_runs_the_script(script: Path, tmp_path: Path, monkeypatch: Monkey) -> None:
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
    [("", "ended with status 0"), ("import os\nos.kill(os.getpid(), 9)", "died of signal 9")],
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
        train(ctx, new_loader(), 1)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5.0


def test_workers_without_room_are_refused(
    script: Path, tmp_path: Path, monkeypatch: Monkey
) -> None:
    script.write_text(SENDS.format(count=3))
    config = tmp_path / "global.yml"
    config.write_text("embedding_worker_config: {forward_buffer_size: 5}\n")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(config))
    with make_ctx() as ctx:
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=2)
        said = r"forward_buffer_size: .* room for 5 .* at least 6, .*buffer_size 4 \+ 2 "
        with pytest.raises(ConfigError, match=said):
            next(iter(loader))
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
        assert train(ctx, loader) == [0, 1, 2]


def test_a_batch_wakes_its_own_loader_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", WAIT_S)
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
    assert have_looked.wait(WAIT_S)
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
