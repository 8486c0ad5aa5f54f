"""The stream to one rank: credits, acknowledgements, restarts of either side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from persia._loader.rank_stream import RankStream
from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening, StreamState
from persia.errors import (
    ConfigError,
    DataError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceUnavailable,
    StreamRewound,
)
from tests.loader.conftest import (
    MakeFeeder,
    ReportingRank,
    finish_with,
    send_all,
    send_some,
    sent_before,
)
from tests.support.fixtures import Monkey
from tests.support.streams import Background, FakeRank, FakeWorker, number_of, send
from tests.support.waiting import PATIENCE_S, until


def test_wanted_after_it_was_acknowledged_is_old_news(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder(rank, sent=1)
    rank.train(1)
    until(lambda: "kept" not in made.stats())
    rank.want(0)
    send(made, 1)
    rank.train(1)
    made.finish()
    assert rank.relocations == []


def test_a_restarted_rank_gets_again_what_it_had_not_ended(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=4)
    made = make_feeder(rank, sent=4)
    assert [number_of(rank.take()) for _ in range(2)] == [0, 1]
    assert number_of(rank.train(1)[0]) == 2  # before those
    until(lambda: made.stats()["kept"] == 3)
    rank.restart()
    rank.wait_for(lambda: len(rank.order) == 3)
    send(made, 4)
    # In order, what is new behind what is old; and batch 2 does not come again.
    assert rank.order == [0, 1, 3, 4]
    assert rank.streams[0].opening.first_batch_id == 0
    rank.train(4)
    made.finish()
    assert made.stats() == {"sent": 5, "redelivered": 3}


class ResumingRank(FakeRank):
    """Goes on from a checkpoint; once restarted at batch 1, whatever it was sent since."""

    def open_stream(self, opening: StreamOpening) -> StreamState:
        found = replace(super().open_stream(opening), is_resumed=True)
        return found if self.incarnation == 1 else replace(found, next_batch_id=1)


@pytest.mark.parametrize("ended", [(), (0,), (0, 1), (0, 2)])
def test_a_rank_that_goes_on_from_a_checkpoint_has_its_loader_start_again(
    make_feeder: MakeFeeder, ended: tuple[int, ...]
) -> None:
    """Whatever is kept: of what it needs the process before may have ended some batches."""
    rank, worker = ResumingRank(credits=4), FakeWorker()
    made = make_feeder(rank, worker, sent=3)
    refs = {rank.take().batch_id: worker.refs[number] for number in range(3)}
    for batch_id in ended:
        rank.acknowledge(batch_id)
    until(lambda: made.stats()["kept"] == 3 - len(ended))
    rank.restart()
    with pytest.raises(StreamRewound, match="goes on from a checkpoint, at batch 1: start"):
        made.finish()
    assert rank.failures == []  # it is no failure of the script
    assert rank.order == []
    # The next one registers them again.
    assert worker.released == [ref for number, ref in refs.items() if number not in ended]


def test_a_restarted_rank_learns_in_which_epoch_it_begins(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder(rank, sent=1)
    rank.train(1)
    until(lambda: "kept" not in made.stats())
    assert rank.streams[0].opening.epoch == 0
    made.end_epoch()
    send(made, 1)
    made.end_epoch()
    rank.restart()
    rank.wait_for(lambda: rank.order == [1])
    assert rank.streams[0].opening.epoch == 1
    rank.train(1)
    until(lambda: "kept" not in made.stats())
    rank.restart()
    rank.wait_for(lambda: rank.streams)
    assert rank.streams[0].opening.epoch == 2


def test_a_rank_restarted_at_the_end_is_told_again(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder(rank, sent=1)
    finish = Background(made.finish)
    rank.wait_for_end()
    rank.restart()
    rank.train(1)
    rank.wait_for_end()
    finish.result()


def test_a_rank_that_stays_away_is_an_error_that_names_it(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2), FakeRank(1, 2)]
    made = make_feeder(ranks, deadline_s=PATIENCE_S, gone_s=0.1, sent=1)
    ranks[1].go_down()
    with pytest.raises(ServiceUnavailable, match="nn-worker 1 is gone") as caught:
        send_all(made, 100)
    assert (caught.value.role, caught.value.replica) == ("nn-worker", 1)


def test_an_error_of_a_polling_thread_surfaces_in_the_users(make_feeder: MakeFeeder) -> None:
    class Broken(FakeRank):
        def poll_until(self, *arguments: Any) -> Any:
            if self.order:
                raise ZeroDivisionError("in a thread")
            return super().poll_until(*arguments)

    rank = Broken(credits=1)
    made = make_feeder(rank)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        send_all(made, 3)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        made.finish()
    # The rank gets the reason why nothing more comes.
    assert "ZeroDivisionError: in a thread" in rank.failures[0]


def test_a_loader_that_is_restarted_goes_on_where_the_rank_is(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(rank, 2, credits=3) for rank in range(2)]
    workers = [FakeWorker()]
    first = make_feeder(ranks, workers, sent=5)
    ranks[0].train(2)
    first.close()
    assert first.stats()["lost"] >= 3
    second = make_feeder(ranks, workers)
    run = Background(lambda: send_all(second, 8))
    for rank in ranks:
        rank.wait_for_end()
        rank.train(len(rank.waiting))
    run.result()
    assert [rank.order for rank in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert second.stats() == {"dropped": 5, "sent": 3}


@pytest.mark.parametrize("is_too_late", [False, True])
def test_a_restarted_loader_holds_what_is_open(
    make_feeder: MakeFeeder, is_too_late: bool
) -> None:
    """What is wanted after it was read is lost no more."""
    rank, worker = ReportingRank(credits=4), FakeWorker()
    taken = sent_before(make_feeder, rank, worker, 3)
    rank.acknowledge(0)
    second = make_feeder(rank, worker)
    assert second.resume_position() == 1
    if is_too_late:  # one of them ends before it is read again
        rank.acknowledge(taken.pop())
        until(lambda: second._streams[0]._unfinished == {1})
    send_some(second, 3)
    assert second.stats() == {"dropped": 3, "kept": len(taken) - 1}
    worker.restart()
    rank.want(1)
    rank.wait_for(lambda: rank.relocations)
    assert rank.relocations == [(1, RemoteRef(0, worker.refs[1]))]
    finish_with(second, rank, *taken[1:])
    assert second.stats() == {"dropped": 3, "registered_again": 1}
    assert rank.order == [0, 1, 2]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_is_restarted_gets_what_a_loader_had_sent(
    make_feeder: MakeFeeder, monkeypatch: Monkey, is_late: bool
) -> None:
    """Of which this one has read a part; it held the last one just then, or had not begun."""
    rank, worker = ReportingRank(credits=6), FakeWorker()
    first = make_feeder(rank, worker, sent=6)
    rank.take()
    rank.acknowledge(0)
    rank.acknowledge(rank.take().batch_id)
    first.close()
    second = make_feeder(rank, worker, sent=3)
    (lane,) = second._streams
    hold = lane.hold

    def restart() -> None:
        rank.restart()
        until(lambda: lane._received_below == 3)

    def hold_late(*kept: Any) -> None:
        monkeypatch.setattr(lane, "hold", hold)
        restart()
        hold(*kept)

    if is_late:
        monkeypatch.setattr(lane, "hold", hold_late)
    else:
        restart()

    run = Background(lambda: send_some(second, 3, 8))
    trained: list[int] = []
    while len(trained) < 6:
        trained += [batch.batch_id for batch in rank.train(1)]
    run.result()
    assert trained == [2, 3, 4, 5, 6, 7]
    # Those that had ended are not trained again.
    until(lambda: second.stats() == {"dropped": 3, "redelivered": 1, "sent": 5})


def test_a_quick_script_skips_no_wanted_batch(
    make_feeder: MakeFeeder, monkeypatch: Monkey
) -> None:
    """The script of a restarted loader goes on as soon as the stream is open."""
    rank, worker = FakeRank(credits=4), FakeWorker()
    taken = sent_before(make_feeder, rank, worker, 2)
    worker.restart()
    rank.want(0)
    has_sent = threading.Event()
    relocate_all = RankStream._relocate_all

    def late(lane: RankStream, wanted: Sequence[int]) -> None:
        assert has_sent.wait(PATIENCE_S)
        relocate_all(lane, wanted)

    monkeypatch.setattr(RankStream, "_relocate_all", late)
    second = make_feeder(rank, worker, sent=2)
    has_sent.set()
    finish_with(second, rank, *taken)
    assert {batch_id for batch_id, _ in rank.relocations} == {0}
    assert second.stats()["dropped"] == 1
    assert "lost" not in second.stats()


def test_a_batch_that_none_holds_any_more_is_an_error(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(credits=4), FakeWorker()
    sent_before(make_feeder, rank, worker, 1)
    second = make_feeder(rank, worker, sent=2)
    assert second.stats()["dropped"] == 1
    worker.restart()
    rank.want(0)  # too late
    with pytest.raises(ServiceError, match="batch 0 is lost: data-loader 0 of 1"):
        second.finish()
    assert second.stats()["lost"] >= 1


@pytest.mark.parametrize("kind", [FakeRank, ResumingRank])
def test_two_loaders_of_one_number_do_not_fight_for_ever(
    make_feeder: MakeFeeder, kind: type[FakeRank]
) -> None:
    rank = kind(credits=10)
    made = [make_feeder(rank) for _ in range(2)]
    until(lambda: any(one._feed.failure for one in made))
    (failure,) = [one._feed.failure for one in made if one._feed.failure]
    assert isinstance(failure, ConfigError)
    assert "each REPLICA_INDEX once" in str(failure)


def test_credits_bound_what_is_sent_and_registered(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(credits=2), FakeWorker()
    made = make_feeder(rank, worker)
    run = Background(lambda: send_all(made, 10))
    for taken in range(8):
        rank.wait_for(lambda: len(rank.waiting) == 2)
        # The credit comes before the ids are registered.
        assert len(worker.registered) == taken + 2
        rank.train(1)
    rank.train(2)
    run.result()
    assert rank.most_waiting == 2


def test_a_batch_that_a_rank_refuses_is_not_waited_for(make_feeder: MakeFeeder) -> None:
    class Strict(FakeRank):
        def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
            if batch.batch_id == 1:
                raise DataError("batch 1: of an epoch before")
            super().deliver(stream, batch)

    rank = Strict(credits=3)
    made = make_feeder(rank, sent=1)
    with pytest.raises(DataError, match="of an epoch before"):
        send(made, 1)
    send(made, 2)
    finish = Background(made.finish)
    rank.train(2)
    finish.result()
    assert (rank.order, made.stats()) == ([0, 2], {"sent": 2})


def test_a_rank_that_closes_while_it_is_busy_ends_the_delivery(make_feeder: MakeFeeder) -> None:
    class Busy(FakeRank):
        is_asked = threading.Event()

        def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
            self.is_asked.set()
            raise ServiceBusy("all credits are used")

    rank = Busy()
    made = make_feeder(rank)
    sending = Background(lambda: send(made))
    assert rank.is_asked.wait(PATIENCE_S)
    rank.close()
    with pytest.raises(JobFinished, match="nn-worker 0 reads no more"):
        sending.result()
