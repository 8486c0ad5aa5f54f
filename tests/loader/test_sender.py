"""The sender of a data-loader, over plain objects: order, its end, and faults at random."""

from __future__ import annotations

import logging
import random
import signal
import threading
from functools import partial
from typing import Any

import pytest

from persia import env
from persia._loader import rank_stream, sender
from persia.errors import (
    ConfigError,
    DataError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceUnavailable,
)
from tests.loader.conftest import MakeFeeder, send_all, send_some
from tests.support.fixtures import Log, Monkey
from tests.support.streams import Background, FakeRank, FakeWorker, number_of, send
from tests.support.waiting import PATIENCE_S, until


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_loaders", [1, 2, 3])
def test_ids_and_order(make_feeder: MakeFeeder, num_loaders: int, world_size: int) -> None:
    workers = [FakeWorker(), FakeWorker()]
    ranks = [FakeRank(rank, world_size, credits=100) for rank in range(world_size)]
    counts = [7 + loader for loader in range(num_loaders)]
    runs = []
    for loader, count in enumerate(counts):
        made = make_feeder(ranks, workers, loader=loader, num_loaders=num_loaders)
        runs.append(Background(partial(send_all, made, count)))
    want = sorted(
        i * num_loaders + loader for loader, count in enumerate(counts) for i in range(count)
    )
    for rank in ranks:
        rank.wait_for_end(num_loaders)
        mine = [x for x in want if x % world_size == rank.replica_index]
        for batch in rank.train(len(mine)):
            number = number_of(batch)
            assert number == batch.batch_id // num_loaders
            assert (batch.batch_size, batch.requires_grad) == (1, True)
            assert bytes(batch.meta or b"") == str(number).encode()
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


def test_one_stalled_rank_leaves_the_other_its_batches(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2, credits=1), FakeRank(1, 2, credits=1)]
    made = make_feeder(ranks)
    run = Background(lambda: send_all(made, 4))
    assert [number_of(x) for x in ranks[1].train(1)] == [1]
    assert [number_of(x) for x in ranks[0].train(2)] == [0, 2]
    assert [number_of(x) for x in ranks[1].train(1)] == [3]
    run.result()


def test_a_bad_batch_leaves_no_gap(make_feeder: MakeFeeder) -> None:
    rank, worker = FakeRank(), FakeWorker()
    made = make_feeder(rank, worker)
    worker.error = DataError("unknown feature")
    with pytest.raises(DataError, match="unknown feature"):
        send(made)
    worker.error = None
    send(made, 1)
    assert rank.train(1)[0].batch_id == 0


@pytest.mark.parametrize("ends_last", [False, True])
def test_batches_are_of_epochs(make_feeder: MakeFeeder, ends_last: bool) -> None:
    ranks = [FakeRank(0, 2, credits=8), FakeRank(1, 2, credits=8)]
    made = make_feeder(ranks)
    for epoch, numbers in enumerate([range(3), range(3, 4), range(4, 7)]):
        if epoch:
            made.end_epoch()
        send_some(made, numbers.start, numbers.stop)
    if ends_last:
        made.end_epoch()
    finish = Background(made.finish)
    assert [batch.epoch for batch in ranks[0].train(4)] == [0, 0, 2, 2]
    assert [batch.epoch for batch in ranks[1].train(3)] == [0, 1, 2]
    finish.result()
    assert [rank.last_epochs for rank in ranks] == [[2], [2]]


def test_two_threads_cannot_send_at_a_time(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=1)
    made = make_feeder(rank, sent=1)
    run = Background(lambda: send(made, 1))
    until(made._sending.locked)
    with pytest.raises(ConfigError, match="two threads"):
        send(made, 2)
    rank.train(2)
    run.result()


def test_w23_w72_the_end_of_the_data_is_a_message(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2), FakeRank(1, 2)]
    made = make_feeder(ranks, sent=1)
    finish = Background(made.finish)
    for rank in ranks:
        rank.wait_for_end()
        assert rank.streams[0].end == 1
        assert rank.failures == []
    assert not finish.is_done.is_set()
    ranks[0].train(1)
    finish.result()
    made.close()
    assert made.stats() == {"sent": 1}


@pytest.mark.parametrize("status", [0, 3])
def test_w72_the_loader_ends_with_the_job(make_feeder: MakeFeeder, status: int) -> None:
    """It hears of that from any worker."""
    gone, worker, rank = FakeWorker(), FakeWorker(), FakeRank(credits=1)
    gone.error = ServiceUnavailable("gone")
    made = make_feeder(rank, [gone, worker])
    run = Background(lambda: send_all(made, 100))
    rank.train(1)
    worker.job.finish_job(status, True)
    with pytest.raises(JobFinished, match=f"exit status {status}") as caught:
        run.result()
    assert caught.value.status == made.job_status == status
    made.finish()  # nothing is waited for
    # The server may leave: every watcher knows the end.
    assert worker.job.wait_until_notified(0.0)
    made.close()
    assert made.stats()["lost"] >= 1


def test_a_rank_that_leaves_ends_the_loader(make_feeder: MakeFeeder) -> None:
    rank = FakeRank(credits=1)
    made = make_feeder(rank, sent=1)
    run = Background(lambda: send(made, 1))
    rank.close()
    with pytest.raises(JobFinished, match="nn-worker 0 reads no more"):
        run.result()
    made.finish()
    assert made.stats() == {"sent": 1, "lost": 1}


def test_the_failure_of_the_script_is_told(make_feeder: MakeFeeder) -> None:
    ranks = [FakeRank(0, 2), FakeRank(1, 2)]
    made = make_feeder(ranks, sent=1)
    with env.changed(PERSIA_SUPERVISED=1):  # it is started again if servers have failed
        made.fail(ServiceError("batch 3 is lost"))
        made.fail(SystemExit(128 + signal.SIGTERM))  # its pod is evicted
    assert [(rank.failures, rank.streams[0].end) for rank in ranks] == [([], None)] * 2
    try:
        raise KeyError("no such file \ud800")
    except KeyError as exc:
        with env.changed(PERSIA_SUPERVISED=1):
            made.fail(exc)
    for rank in ranks:
        assert rank.streams[0].end == 1
        (failure,) = rank.failures
        assert failure.startswith("Traceback")
        assert "test_sender.py" in failure
        assert failure.rstrip().endswith("KeyError: 'no such file \\ud800'")
        failure.encode()


def test_a_script_that_is_stopped_has_failed_where_nothing_starts_it_again(
    make_feeder: MakeFeeder,
) -> None:
    rank = FakeRank(0, 1)
    make_feeder([rank], sent=1).fail(SystemExit(128 + signal.SIGTERM))
    assert "SystemExit: 143" in rank.failures[0]
    other = FakeRank(0, 1)
    with env.changed(PERSIA_SUPERVISED=1):
        make_feeder([other], sent=1).fail(SystemExit(3))
    assert "SystemExit: 3" in other.failures[0]


def test_a_failure_is_always_told(make_feeder: MakeFeeder, monkeypatch: Monkey) -> None:
    """One whose stream is not open, and one beside a rank that is gone."""
    monkeypatch.setattr(sender, "END_S", 0.2)
    held = threading.Event()

    class Slow(FakeRank):
        def open_stream(self, opening: Any) -> Any:
            if threading.current_thread().name.startswith("persia-feed"):
                held.wait(PATIENCE_S)
            return super().open_stream(opening)

    class Silent(FakeRank):
        def end_stream(self, *arguments: Any) -> None:
            held.wait(PATIENCE_S)

    ranks = [Silent(0, 2), Slow(1, 2)]
    make_feeder(ranks).fail(KeyError("early"))
    until(lambda: ranks[1].failures)
    assert "KeyError: 'early'" in ranks[1].failures[0]
    held.set()


def test_who_is_waited_for_is_named(
    make_feeder: MakeFeeder, monkeypatch: Monkey, caplog: Log
) -> None:
    monkeypatch.setattr(rank_stream, "LINE_S", 0.02)
    caplog.set_level(logging.INFO)
    ranks = [FakeRank(0, 2, credits=1), FakeRank(1, 2, credits=1)]
    made = make_feeder(ranks, loader=1, num_loaders=3)
    send(made)
    send(made)
    run = Background(lambda: send(made))
    until(lambda: "data-loader 1 of 3 waits for a credit of nn-worker 1" in caplog.text)
    ranks[1].train(2)
    run.result()
    finish = Background(made.finish)
    until(lambda: "waits for nn-worker 0 to acknowledge 1 batches, the first 4" in caplog.text)
    ranks[0].train(1)
    finish.result()


@pytest.mark.parametrize("seed", range(8))
def test_each_batch_is_trained_once_whatever_is_lost_or_repeated(
    make_feeder: MakeFeeder, monkeypatch: Monkey, seed: int
) -> None:
    monkeypatch.setattr(rank_stream, "AGAIN_S", 0.0)
    chance = random.Random(seed)
    num_loaders, world_size, count = chance.randint(1, 2), chance.randint(1, 3), 40
    workers = [FakeWorker() for _ in range(chance.randint(1, 3))]
    ranks = [FakeRank(r, world_size, chance.randint(1, 4)) for r in range(world_size)]
    runs = []
    for loader in range(num_loaders):
        faults = random.Random(chance.random())
        made = make_feeder(
            ranks, workers, loader=loader, num_loaders=num_loaders, faults=faults
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
                batch_id, ids = rank.relocations[0]
                assert batch_id == batch.batch_id
                assert batch_id in workers[ids.worker].registered
            while held and (order.random() < 0.7 or len(seen) == len(mine)):
                rank.acknowledge(held.pop(order.randrange(len(held))).batch_id)
        assert sorted(seen) == mine
        return seen

    trainers = [Background(partial(train, rank)) for rank in ranks]
    for each in (*trainers, *runs):
        each.result()


@pytest.mark.parametrize("seed", range(6))
def test_random_restarts_lose_nothing(
    make_feeder: MakeFeeder, monkeypatch: Monkey, seed: int
) -> None:
    monkeypatch.setattr(rank_stream, "AGAIN_S", 0.0)
    chance = random.Random(seed)
    rank, worker = FakeRank(credits=3), FakeWorker()
    made = make_feeder(rank, worker, faults=random.Random(seed) if seed % 2 else None)
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
    assert rank.most_waiting <= rank.credits


# --- embedding-workers that are down, busy or new ---------------------------------------------


@pytest.mark.parametrize("error", [ServiceUnavailable("down"), ServiceBusy("full")])
def test_w69_a_worker_that_is_down_or_busy_is_passed_over_until_it_is_back(
    make_feeder: MakeFeeder, monkeypatch: Monkey, error: ServiceError
) -> None:
    workers = [FakeWorker(), FakeWorker(), FakeWorker()]
    rank = FakeRank(credits=100)
    made = make_feeder(rank, workers)
    workers[1].error = error
    send_some(made, 9)
    assert workers[1].registered == []
    assert {batch.ids.worker for batch in rank.train(9)} == {0, 2}
    # It was asked once, and is left alone for a while.
    assert made.stats()["skipped"] == 1
    workers[1].error = None
    monkeypatch.setattr("persia._rpc.worker_pool.AVOID_S", 0.0)
    with pytest.raises(DataError, match="before the first send_data"):
        made.seek(0)
    workers[0].error = workers[2].error = error
    send(made)
    assert len(workers[1].registered) == 1


def test_all_workers_down_is_an_error_that_names_them(make_feeder: MakeFeeder) -> None:
    workers = [FakeWorker(), FakeWorker()]
    made = make_feeder(FakeRank(), workers, deadline_s=0.1)
    for number, worker in enumerate(workers):
        worker.error = ServiceUnavailable(f"no way to {number}")
    with pytest.raises(ServiceUnavailable) as caught:
        send(made)
    for text in ("embedding-worker 0: no way to 0", "embedding-worker 1: no way to 1"):
        assert text in str(caught.value)
    # It is not the end: they may come back.
    workers[0].error = None
    send(made)


def test_a_busy_worker_is_waited_for(
    make_feeder: MakeFeeder, monkeypatch: Monkey, caplog: Log
) -> None:
    monkeypatch.setattr(sender, "LINE_S", 0.02)
    worker = FakeWorker()
    made = make_feeder(FakeRank(), worker, deadline_s=0.05)
    worker.error = ServiceBusy("full")
    run = Background(lambda: send(made))
    until(lambda: made.stats().get("skipped", 0) > 5)
    worker.error = None
    run.result()
    assert "data-loader 0 of 1: batch 0 waits for embedding-worker 0: full" in caplog.text
