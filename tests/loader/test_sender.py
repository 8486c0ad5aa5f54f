"""The data-loader's side of the streams, over plain objects and over sockets."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._loader import feed, registrars, sender
from persia._loader.rank_stream import RankStream, UnackedBatch
from persia._loader.sender import BatchSender
from persia._rpc.messages import RemoteRef
from persia.embedding.data import (
    IDTypeFeature,
    PersiaBatch,
)
from persia.errors import (
    ConfigError,
    DataError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)
from tests.support.services import make_servers, make_worker
from tests.support.streams import (
    PATIENCE_S,
    Background,
    FakeRank,
    FakeWorker,
    feeder,
    number_of,
    send,
)
from tests.support.waiting import until

MakeFeeder = Callable[..., BatchSender]


@pytest.fixture
def make_feeder() -> Iterator[MakeFeeder]:
    made = []

    def make(*arguments: Any, **options: Any) -> BatchSender:
        made.append(feeder(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def send_all(feeder: BatchSender, num_batches: int) -> None:
    for number in range(num_batches):
        send(feeder, number)
    feeder.finish()


# --- the way of a batch ---------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_loaders", [1, 2, 3])
def test_ids_and_order_for_any_number_of_loaders_and_ranks(
    make_feeder: MakeFeeder, num_loaders: int, world_size: int
) -> None:
    workers = [FakeWorker(), FakeWorker()]
    ranks = [FakeRank(rank, world_size, credits=100) for rank in range(world_size)]
    counts = [7 + loader for loader in range(num_loaders)]
    runs = []
    for loader, count in enumerate(counts):
        made = make_feeder(workers, ranks, loader=loader, num_loaders=num_loaders)
        runs.append(Background(partial(send_all, made, count)))
    want = sorted(
        i * num_loaders + loader for loader, count in enumerate(counts) for i in range(count)
    )
    for rank in ranks:
        rank.wait_for_end(num_loaders)
        mine = [x for x in want if x % world_size == rank.replica_index]
        for batch in rank.train(len(mine)):
            assert number_of(batch) == batch.batch_id // num_loaders
            worker = workers[batch.ids.worker]
            assert worker.refs[batch.batch_id] == batch.ids.ref
        assert sorted(rank.order) == mine
        for loader in range(num_loaders):
            of_loader = [x for x in rank.order if x % num_loaders == loader]
            assert of_loader == sorted(of_loader)
            end = rank.streams[loader].end
            assert end == counts[loader] * num_loaders + loader
    for run in runs:
        run.result()
    # One after the other, beginning with a loader's own number.
    assert abs(len(workers[0].registered) - len(workers[1].registered)) <= num_loaders


def test_a_batch_arrives_as_it_was_sent(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder([FakeWorker()], [rank])
    send(made, 7)
    batch = rank.take()
    assert (batch.batch_size, batch.requires_grad) == (1, True)
    assert [item.name for item in (*batch.non_id_type_features, *batch.labels)] == [
        "dense",
        "label",
    ]
    assert batch.meta is not None
    assert bytes(batch.meta) == b"7"


def test_seeking_after_a_batch_is_told_how_several_epochs_are_sent(
    make_feeder: MakeFeeder,
) -> None:
    made = make_feeder([FakeWorker()], [FakeRank(0, 1, credits=100)])
    send(made, 0)
    with pytest.raises(DataError, match=r"before the first send_data; .*send\(ctx, epochs=3\)"):
        made.seek(0)


def test_credits_bound_what_is_sent_and_registered(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(credits=2), FakeWorker()
    made = make_feeder([worker], [rank])
    run = Background(lambda: send_all(made, 10))
    for taken in range(8):
        rank.wait_for(lambda: len(rank.waiting) == 2)
        # The credit comes before the ids are registered.
        assert len(worker.registered) == taken + 2
        rank.train(1)
    rank.train(2)
    run.result()
    assert rank.most_waiting == 2


def test_a_batch_is_kept_until_it_is_acknowledged(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=3)
    made = make_feeder([FakeWorker()], [rank])
    for number in range(3):
        send(made, number)
    first = [rank.take().batch_id for _ in range(3)]
    assert made.stats() == {"sent": 3, "kept": 3}
    rank.acknowledge(first[1])
    until(lambda: made.stats() == {"sent": 3, "kept": 2})
    finish = Background(made.finish)
    rank.wait_for_end()
    rank.acknowledge(first[0])
    rank.acknowledge(first[2])
    finish.result()
    assert made.stats() == {"sent": 3}


def test_one_stalled_rank_leaves_the_other_its_batches(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2, credits=1), FakeRank(1, 2, credits=1)]
    made = make_feeder([FakeWorker()], ranks)
    run = Background(lambda: send_all(made, 4))
    assert [number_of(x) for x in ranks[1].train(1)] == [1]
    assert [number_of(x) for x in ranks[0].train(2)] == [0, 2]
    assert [number_of(x) for x in ranks[1].train(1)] == [3]
    run.result()


def test_a_bad_batch_leaves_no_gap(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(), FakeWorker()
    made = make_feeder([worker], [rank])
    worker.error = DataError("unknown feature")
    with pytest.raises(DataError, match="unknown feature"):
        send(made)
    worker.error = None
    send(made, 1)
    assert rank.train(1)[0].batch_id == 0


def test_two_threads_cannot_send_at_a_time(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=1)
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    run = Background(lambda: send(made, 1))
    until(made._sending.locked)
    with pytest.raises(ConfigError, match="two threads"):
        send(made, 2)
    rank.train(2)
    run.result()


# --- servers that are down, busy or new -----------------------------------------------------


def test_w13_lost_answers_register_and_train_a_batch_once(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = make_worker(make_servers(), forward_buffer_size=1000)

    class Worker:
        lost = True

        def register(self, features: Any, timeout_s: float | None = None) -> int:
            ref = real.register(features)
            self.lost = not self.lost
            if not self.lost:
                raise ServiceTimeout("the answer was lost")
            return ref

        def job_status(self, watcher: str, timeout_s: float | None = None) -> None:
            return None

    rank = FakeRank(credits=5)
    made = make_feeder([Worker()], [rank], faults=None)
    monkeypatch.setattr(feed, "AGAIN_S", 0.0)
    for number in range(5):
        made.send(
            PersiaBatch(
                [IDTypeFeature("sum", [np.array([number], np.uint64)])], requires_grad=False
            ).features,
            (),
            (),
            batch_size=1,
            requires_grad=False,
        )
    refs = {batch.ids.ref for batch in rank.train(5)}
    made.finish()
    assert len(refs) == real.stats()["in_flight"] == 5
    assert real.stats()["registered_again"] == 5
    real.close()


@pytest.mark.parametrize("error", [ServiceUnavailable("down"), ServiceBusy("full")])
def test_w69_a_worker_that_is_down_or_busy_is_passed_over(
    make_feeder: MakeFeeder, error: ServiceError
) -> None:
    workers = [FakeWorker(), FakeWorker(), FakeWorker()]
    rank = FakeRank(credits=100)
    made = make_feeder(workers, [rank])
    workers[1].error = error
    for number in range(9):
        send(made, number)
    assert workers[1].registered == []
    assert {batch.ids.worker for batch in rank.train(9)} == {0, 2}
    # It was asked once, and is left alone for a while.
    assert made.stats()["skipped"] == 1


def test_w69_a_worker_that_came_back_gets_its_turn(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrars, "AVOID_S", 0.0)
    workers = [FakeWorker(), FakeWorker()]
    made = make_feeder(workers, [FakeRank(credits=100)])
    workers[0].error = ServiceUnavailable("down")
    send(made)
    workers[0].error = None
    for number in range(3):
        send(made, number)
    assert len(workers[0].registered) >= 1


def test_all_workers_down_is_an_error_that_names_them(make_feeder: MakeFeeder) -> None:
    workers = [FakeWorker(), FakeWorker()]
    made = make_feeder(workers, [FakeRank()], deadline_s=0.1)
    for number, worker in enumerate(workers):
        worker.error = ServiceUnavailable(f"no way to {number}")
    with pytest.raises(ServiceUnavailable) as caught:
        send(made)
    for text in ("embedding-worker 0: no way to 0", "embedding-worker 1: no way to 1"):
        assert text in str(caught.value)
    # It is not the end: they may come back.
    workers[0].error = None
    send(made)


def test_a_busy_worker_is_waited_for_without_a_deadline(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registrars, "LINE_S", 0.02)
    worker = FakeWorker()
    made = make_feeder([worker], [FakeRank()], deadline_s=0.05)
    worker.error = ServiceBusy("full")
    run = Background(lambda: send(made))
    until(lambda: made.stats().get("skipped", 0) > 5)
    worker.error = None
    run.result()
    assert "data-loader 0 of 1: batch 0 waits for embedding-worker 0: full" in caplog.text


def test_wanted_ids_are_registered_elsewhere_and_relocated(make_feeder: MakeFeeder) -> None:
    workers, rank = [FakeWorker(), FakeWorker()], FakeRank()
    made = make_feeder(workers, [rank])
    send(made)
    batch = rank.take()
    workers[batch.ids.worker].restart()
    rank.want(batch.batch_id)
    rank.wait_for(lambda: rank.relocations)
    ((batch_id, ids),) = rank.relocations
    assert batch_id == batch.batch_id
    assert ids.worker != batch.ids.worker
    assert workers[ids.worker].refs[batch_id] == ids.ref
    rank.acknowledge(batch_id)
    made.finish()
    assert made.stats()["registered_again"] == 1


def test_a_restarted_worker_loses_no_batch(make_feeder: MakeFeeder) -> None:
    worker, rank = FakeWorker(), FakeRank(credits=4)
    made = make_feeder([worker], [rank])
    for number in range(4):
        send(made, number)
    batches = [rank.take() for _ in range(4)]
    worker.restart()
    for batch in batches:
        rank.want(batch.batch_id)
    rank.wait_for(lambda: len(rank.relocations) == 4)
    assert dict(rank.relocations).keys() == {0, 1, 2, 3}
    assert {ids.ref for _, ids in rank.relocations} == set(worker.refs.values())


def test_wanted_after_it_was_acknowledged_is_old_news(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    rank.train(1)
    until(lambda: "kept" not in made.stats())
    rank.want(0)
    send(made, 1)
    rank.train(1)
    made.finish()
    assert rank.relocations == []


def test_a_restarted_rank_gets_again_what_it_had_not_ended(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=4)
    made = make_feeder([FakeWorker()], [rank])
    for number in range(4):
        send(made, number)
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


def test_a_restarted_rank_is_not_given_more_than_its_credits(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=2)
    made = make_feeder([FakeWorker()], [rank])
    for number in range(6):
        send(made, number)
        rank.take()
    rank.restart()
    rank.most_waiting = 0
    finish = Background(made.finish)
    assert [number_of(batch) for batch in rank.train(6)] == list(range(6))
    finish.result()
    assert rank.most_waiting == 2
    assert rank.streams[0].end == 6


def test_a_rank_restarted_at_the_end_is_told_again(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    finish = Background(made.finish)
    rank.wait_for_end()
    rank.restart()
    rank.train(1)
    rank.wait_for_end()
    finish.result()


def test_a_rank_that_is_down_for_a_while_is_waited_for(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    rank.go_down()
    run = Background(lambda: send_all(made, 3))
    rank.restart()
    rank.train(4)
    run.result()


def test_a_rank_that_stays_away_is_an_error_that_names_it(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2), FakeRank(1, 2)]
    made = make_feeder([FakeWorker()], ranks, deadline_s=PATIENCE_S, gone_s=0.1)
    send(made)
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
    made = make_feeder([FakeWorker()], [rank])
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        send_all(made, 3)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        made.finish()
    # The rank is told why nothing more comes.
    assert "ZeroDivisionError: in a thread" in rank.failures[0]


def test_a_loader_that_is_restarted_goes_on_where_the_rank_is(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(rank, 2, credits=3) for rank in range(2)]
    workers = [FakeWorker()]
    first = make_feeder(workers, ranks)
    for number in range(5):
        send(first, number)
    ranks[0].train(2)
    first.close()
    assert first.stats()["lost"] >= 3
    second = make_feeder(workers, ranks)
    run = Background(lambda: send_all(second, 8))
    for rank in ranks:
        rank.wait_for_end()
        rank.train(len(rank.waiting))
    run.result()
    assert [rank.order for rank in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert second.stats() == {"dropped": 5, "sent": 3}


def test_a_loader_that_is_restarted_registers_what_is_wanted(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(credits=4), FakeWorker()
    first = make_feeder([worker], [rank])
    for number in range(4):
        send(first, number)
    batches = [rank.take() for _ in range(4)]
    first.close()
    worker.restart()
    rank.want(2)
    second = make_feeder([worker], [rank])
    run = Background(lambda: send_all(second, 4))
    rank.wait_for_end()
    assert [batch_id for batch_id, _ in rank.relocations] == [2]
    for batch in batches:
        rank.acknowledge(batch.batch_id)
    run.result()
    assert second.stats() == {"dropped": 3, "registered_again": 1}
    assert rank.order == [0, 1, 2, 3]


class TellingRank(FakeRank):
    """Says what has not ended."""

    def open_stream(self, opening: Any) -> Any:
        with self.changed:
            state = super().open_stream(opening)
            return replace(state, unfinished=(*self.waiting, *self.taken))


@pytest.mark.parametrize("is_too_late", [False, True])
def test_a_loader_that_is_restarted_holds_what_has_not_ended(
    make_feeder: MakeFeeder, is_too_late: bool
) -> None:
    """What is wanted after it was read is lost no more."""

    rank, worker = TellingRank(credits=4), FakeWorker()
    first = make_feeder([worker], [rank])
    for number in range(3):
        send(first, number)
    batches = [rank.take() for _ in range(3)]
    rank.acknowledge(0)
    first.close()
    second = make_feeder([worker], [rank])
    assert second.resume_position() == 1
    if is_too_late:  # one of them ends before it is read again
        rank.acknowledge(batches.pop().batch_id)
        until(lambda: second._lanes[0]._unfinished == {1})
    for number in range(3):
        send(second, number)
    assert second.stats() == {"dropped": 3, "kept": len(batches) - 1}
    worker.restart()
    rank.want(1)
    rank.wait_for(lambda: rank.relocations)
    assert rank.relocations == [(1, RemoteRef(0, worker.refs[1]))]
    finish = Background(second.finish)
    rank.wait_for_end()
    for batch in batches[1:]:
        rank.acknowledge(batch.batch_id)
    finish.result()
    assert second.stats() == {"dropped": 3, "registered_again": 1}
    assert rank.order == [0, 1, 2]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_is_started_anew_gets_what_a_loader_before_had_sent(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Of which this one has read a part; it held the last one just then, or had not begun."""
    rank, worker = TellingRank(credits=6), FakeWorker()
    first = make_feeder([worker], [rank])
    for number in range(6):
        send(first, number)
    rank.take()
    rank.acknowledge(0)
    rank.acknowledge(rank.take().batch_id)
    first.close()
    second = make_feeder([worker], [rank])
    for number in range(3):
        send(second, number)
    (lane,) = second._lanes
    hold = lane.hold

    def restart() -> None:
        rank.restart()
        until(lambda: lane._received_below == 3)

    def hold_late(kept: UnackedBatch) -> None:
        monkeypatch.setattr(lane, "hold", hold)
        restart()
        hold(kept)

    if is_late:
        monkeypatch.setattr(lane, "hold", hold_late)
    else:
        restart()

    def send_rest() -> None:
        for number in range(3, 8):
            send(second, number)

    run = Background(send_rest)
    trained: list[int] = []
    while len(trained) < 6:
        trained += [batch.batch_id for batch in rank.train(1)]
    run.result()
    assert trained == [2, 3, 4, 5, 6, 7]
    # Those that had ended are not trained again.
    until(lambda: second.stats() == {"dropped": 3, "redelivered": 1, "sent": 5})


def test_ids_that_no_worker_has_are_registered_at_the_one_whose_turn_it_is(
    make_feeder: MakeFeeder,
) -> None:
    rank, workers = TellingRank(credits=4), [FakeWorker(), FakeWorker()]
    first = make_feeder(workers, [rank])
    send(first, 0)
    rank.take()
    first.close()
    second = make_feeder(workers, [rank])
    send(second, 0)
    rank.want(0)
    rank.wait_for(lambda: rank.relocations)
    assert [ref.worker for _, ref in rank.relocations] == [0]


def test_a_wanted_batch_is_not_passed_over_by_a_quick_script(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of a restarted loader goes on as soon as the stream is open."""
    rank, worker = FakeRank(credits=4), FakeWorker()
    first = make_feeder([worker], [rank])
    for number in range(2):
        send(first, number)
    batches = [rank.take() for _ in range(2)]
    first.close()
    worker.restart()
    rank.want(0)
    has_sent = threading.Event()
    relocate_all = RankStream._relocate_all

    def late(lane: RankStream, wanted: Sequence[int]) -> None:
        assert has_sent.wait(PATIENCE_S)
        relocate_all(lane, wanted)

    monkeypatch.setattr(RankStream, "_relocate_all", late)
    second = make_feeder([worker], [rank])
    for number in range(2):
        send(second, number)
    has_sent.set()
    run = Background(second.finish)
    rank.wait_for_end()
    for batch in batches:
        rank.acknowledge(batch.batch_id)
    run.result()
    assert {batch_id for batch_id, _ in rank.relocations} == {0}
    assert second.stats()["dropped"] == 1
    assert "lost" not in second.stats()


def test_a_batch_that_nobody_holds_any_more_is_an_error(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(credits=4), FakeWorker()
    first = make_feeder([worker], [rank])
    send(first, 0)
    rank.take()
    first.close()
    second = make_feeder([worker], [rank])
    send(second, 0)
    send(second, 1)
    assert second.stats()["dropped"] == 1
    worker.restart()
    rank.want(0)  # too late
    with pytest.raises(ServiceError, match="batch 0 is lost: data-loader 0 of 1"):
        second.finish()
    assert second.stats()["lost"] >= 1


def test_two_loaders_of_one_number_do_not_fight_for_ever(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=10)
    made = [make_feeder([FakeWorker()], [rank]) for _ in range(2)]

    def run() -> None:
        until(lambda: any(one._feed.failure for one in made))

    run()
    (failure,) = [one._feed.failure for one in made if one._feed.failure]
    assert isinstance(failure, ConfigError)
    assert "each REPLICA_INDEX once" in str(failure)


# --- how it ends ----------------------------------------------------------------------------


def test_w23_the_end_of_the_data_is_a_message(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2), FakeRank(1, 2)]
    made = make_feeder([FakeWorker()], ranks)
    send(made)
    finish = Background(made.finish)
    for rank in ranks:
        rank.wait_for_end()
        assert rank.streams[0].end == 1
        assert rank.failures == []
    ranks[0].train(1)
    finish.result()


def test_w72_the_loader_ends_when_its_data_is_consumed(make_feeder: MakeFeeder) -> None:
    rank = FakeRank()
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    finish = Background(made.finish)
    rank.wait_for_end()
    assert not finish.is_done.is_set()
    rank.train(1)
    finish.result()
    made.close()
    assert made.stats() == {"sent": 1}


@pytest.mark.parametrize("status", [0, 3])
def test_w72_the_loader_ends_with_the_job(make_feeder: MakeFeeder, status: int) -> None:
    worker, rank = FakeWorker(), FakeRank(credits=1)
    made = make_feeder([worker], [rank])
    run = Background(lambda: send_all(made, 100))
    rank.train(1)
    worker.job.finish_job(status, True)
    with pytest.raises(JobFinished, match=f"exit status {status}") as caught:
        run.result()
    assert caught.value.status == made.job_status == status
    made.finish()  # nothing is waited for
    # The server may leave: all who watch have been told.
    assert worker.job.wait_until_told(0.0)
    made.close()
    assert made.stats()["lost"] >= 1


def test_the_end_of_the_job_is_heard_from_any_worker(make_feeder: MakeFeeder) -> None:
    workers = [FakeWorker(), FakeWorker()]
    workers[0].error = ServiceUnavailable("gone")
    made = make_feeder(workers, [FakeRank()])
    send(made)
    assert workers[1].asked.wait(PATIENCE_S)
    workers[1].job.finish_job(0, True)
    made.finish()
    assert made.job_status == 0


def test_a_rank_that_leaves_ends_the_loader(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=1)
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    run = Background(lambda: send(made, 1))
    rank.close()
    with pytest.raises(JobFinished, match="nn-worker 0 reads no more"):
        run.result()
    made.finish()
    assert made.stats() == {"sent": 1, "lost": 1}


def test_the_failure_of_the_script_is_told(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2), FakeRank(1, 2)]
    made = make_feeder([FakeWorker()], ranks)
    send(made)
    try:
        raise KeyError("no such file \ud800")
    except KeyError as exc:
        made.fail(exc)
    for rank in ranks:
        assert rank.streams[0].end == 1
        (failure,) = rank.failures
        assert failure.startswith("Traceback")
        assert "test_sender.py" in failure
        assert failure.rstrip().endswith("KeyError: 'no such file \\ud800'")
        failure.encode()


def test_where_it_is_started_anew_a_failure_of_servers_is_not_the_scripts(
    make_feeder: MakeFeeder,
) -> None:
    rank = FakeRank()
    made = make_feeder([FakeWorker()], [rank])
    send(made)
    with env.changed(PERSIA_SUPERVISED=1):
        made.fail(ServiceError("batch 3 is lost"))
        assert rank.failures == []
        assert rank.streams[0].end is None
        made.fail(ValueError("no such column"))
    assert "no such column" in rank.failures[0]


def test_a_failure_reaches_a_rank_whose_stream_is_not_open(make_feeder: MakeFeeder) -> None:
    held = threading.Event()

    class Slow(FakeRank):
        def open_stream(self, opening: Any) -> Any:
            if threading.current_thread().name.startswith("persia-feed"):
                held.wait(PATIENCE_S)
            return super().open_stream(opening)

    rank = Slow()
    made = make_feeder([FakeWorker()], [rank])
    made.fail(KeyError("early"))
    assert "KeyError: 'early'" in rank.failures[0]
    held.set()


def test_a_failing_script_does_not_wait_for_a_rank_that_is_gone(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "FAREWELL_S", 0.2)
    held = threading.Event()

    class Silent(FakeRank):
        def end_stream(self, *arguments: Any) -> None:
            held.wait(PATIENCE_S)

    ranks = [Silent(0, 2), FakeRank(1, 2)]
    made = make_feeder([FakeWorker()], ranks)
    made.fail(KeyError("x"))
    assert len(ranks[1].failures) == 1
    held.set()


def test_whoever_is_waited_for_is_named(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "LINE_S", 0.02)
    caplog.set_level(logging.INFO)
    ranks = [FakeRank(0, 2, credits=1), FakeRank(1, 2, credits=1)]
    made = make_feeder([FakeWorker()], ranks, loader=1, num_loaders=3)
    send(made)
    send(made)
    run = Background(lambda: send(made))
    until(lambda: "data-loader 1 of 3 waits for a credit of nn-worker 1" in caplog.text)
    ranks[1].train(2)
    run.result()
    finish = Background(made.finish)
    until(lambda: "waits for nn-worker 0 to end 1 batches, the first 4" in caplog.text)
    ranks[0].train(1)
    finish.result()


# --- faults at random -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_each_batch_is_trained_once_whatever_is_lost_or_repeated(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(feed, "AGAIN_S", 0.0)
    chance = random.Random(seed)
    num_loaders, world_size, count = chance.randint(1, 2), chance.randint(1, 3), 40
    workers = [FakeWorker() for _ in range(chance.randint(1, 3))]
    ranks = [FakeRank(r, world_size, chance.randint(1, 4)) for r in range(world_size)]
    runs = []
    for loader in range(num_loaders):
        faults = random.Random(chance.random())
        made = make_feeder(
            workers, ranks, loader=loader, num_loaders=num_loaders, faults=faults
        )
        runs.append(Background(partial(send_all, made, count)))

    def train(rank: FakeRank) -> list[int]:
        order = random.Random(seed + rank.replica_index)
        mine = [x for x in range(num_loaders * count) if x % world_size == rank.replica_index]
        seen: list[int] = []
        held = []
        while len(seen) < len(mine):
            batch = rank.take()
            seen.append(batch.batch_id)
            assert number_of(batch) == batch.batch_id // num_loaders
            held.append(batch)
            if order.random() < 0.1:
                workers[batch.ids.worker].restart()
                rank.relocations.clear()
                rank.want(batch.batch_id)
                rank.wait_for(lambda: rank.relocations)
                assert rank.relocations[0][0] == batch.batch_id
            while held and (order.random() < 0.7 or len(seen) == len(mine)):
                rank.acknowledge(held.pop(order.randrange(len(held))).batch_id)
        assert sorted(seen) == mine
        return seen

    trainers = [Background(partial(train, rank)) for rank in ranks]
    for each in (*trainers, *runs):
        each.result()


@pytest.mark.parametrize("seed", range(6))
def test_restarts_at_random_lose_nothing(
    make_feeder: MakeFeeder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(feed, "AGAIN_S", 0.0)
    chance = random.Random(seed)
    rank, worker = FakeRank(credits=3), FakeWorker()
    made = make_feeder([worker], [rank], faults=random.Random(seed) if seed % 2 else None)
    run = Background(lambda: send_all(made, 60))
    trained: set[int] = set()
    held: list[int] = []
    while len(trained) < 60:
        if not held or (chance.random() < 0.5 and rank.waiting):
            held.append(rank.take().batch_id)
        elif chance.random() < 0.15:
            rank.restart()
            held.clear()
        else:
            # If the rank is restarted before this is heard, the batch comes once more.
            batch_id = held.pop(chance.randrange(len(held)))
            rank.acknowledge(batch_id)
            trained.add(batch_id)
    # What comes once more.
    while not run.is_done.wait(0.0):
        with rank.changed:
            rank.changed.wait_for(lambda: rank.waiting or run.is_done.is_set(), 0.01)
            waiting = list(rank.waiting)
        rank.train(len(waiting))
        for batch_id in held:
            rank.acknowledge(batch_id)
        held.clear()
    run.result()
    assert trained == set(range(60))
