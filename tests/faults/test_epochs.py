"""Epochs of data-loaders as passes of ranks: senders and receivers, over plain objects.

Each data-loader may have one batch at each rank that is not taken. Ranks meet behind each
epoch, as they do where they validate together: one that waits for a batch behind it, or for
room that a later epoch takes, waits in vain.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from persia._loader import sender as sender_module
from persia._loader.sender import BatchSender
from persia._training import receiver as receiver_module
from persia._training.progress import Plain, Progress, count_done, merge, of_one_pass
from persia._training.queues import Finished
from persia._training.receiver import BatchReceiver
from persia.errors import JobFinished, ServiceUnavailable
from tests.support.fixtures import Monkey
from tests.support.streams import Background, FakeWorker, send
from tests.support.waiting import PATIENCE_S

Sizes = list[list[int]]  # by data-loader: how many batches each of its epochs has


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(receiver_module, "POLL_S", 0.05)
    monkeypatch.setattr(receiver_module, "FAREWELL_S", 0.0)
    monkeypatch.setattr(sender_module, "WATCH_S", 0.05)


class Way:
    """A data-loader's way to a rank, until it is cut."""

    def __init__(self, rank: BatchReceiver, is_cut: threading.Event) -> None:
        self._rank, self._is_cut = rank, is_cut

    def __getattr__(self, method: str) -> Any:
        if self._is_cut.is_set():
            raise ServiceUnavailable("the way was cut")
        return getattr(self._rank, method)


class Job:
    """Ranks, and data-loaders that send to them."""

    def __init__(
        self, sizes: Sizes, world_size: int, in_order: bool, resumed: Plain | None = None
    ) -> None:
        self.sizes, self.in_order = sizes, in_order
        self.ranks = [
            BatchReceiver(rank, world_size, 1, PATIENCE_S, resumed=resumed)
            for rank in range(world_size)
        ]
        self.meeting = threading.Barrier(world_size)
        self.has_batch = [False] * world_size
        self.worker = FakeWorker()

    @contextlib.contextmanager
    def running(self, dies_at: int | None = None) -> Iterator[None]:
        """Let data-loaders send; number 0 is killed before a batch, and started again."""
        loaders = [
            Background(partial(self._load, loader, None if loader else dies_at))
            for loader in range(len(self.sizes))
        ]
        try:
            yield
        finally:
            self.worker.job.finish_job(0, True)
            for rank in self.ranks:
                rank.close()
            for loader in loaders:
                loader.result()

    def _load(self, loader: int, dies_at: int | None) -> None:
        with contextlib.suppress(JobFinished):
            self._send(loader, dies_at)
            if dies_at is not None:
                self._send(loader, None)

    def _send(self, loader: int, dies_at: int | None) -> None:
        is_cut = threading.Event()
        ranks: list[Any] = [Way(rank, is_cut) for rank in self.ranks]
        workers: list[Any] = [self.worker]
        sender = BatchSender(
            workers,
            ranks,
            loader=loader,
            num_loaders=len(self.sizes),
            disconnect=is_cut.set,
            deadline_s=PATIENCE_S,
        )
        sender.start()
        try:
            first, number = sender.resume_position(), 0
            sender.seek(first)
            for size in self.sizes[loader]:
                for _ in range(size):
                    if number == dies_at:
                        return
                    if number >= first:
                        send(sender, number)
                    number += 1
                sender.end_epoch()  # behind the last one, too
            sender.finish()
        finally:
            sender.close()

    def on_ranks(self, train: Callable[[BatchReceiver], list[set[int]]]) -> list[set[int]]:
        """Run in a thread for each rank; return what all trained, by pass."""
        runs = [Background(partial(train, rank)) for rank in self.ranks]
        of_ranks = [run.result() for run in runs]
        return [set().union(*sets) for sets in zip(*of_ranks, strict=True)]

    def train(self, rank: BatchReceiver, epochs: int) -> list[set[int]]:
        """Read whole passes of a rank."""
        passes: list[set[int]] = []
        for _ in range(epochs):
            rank.begin_pass()
            passes.append(self.read(rank))
            rank.end_pass()
            self.meeting.wait(PATIENCE_S)
        return passes

    def train_in_step(self, rank: BatchReceiver, epochs: int) -> list[set[int]]:
        """Read passes of rounds in which each rank has a batch; drop the rest of each."""
        passes: list[set[int]] = []
        for _ in range(epochs):
            rank.begin_pass()
            passes.append(set())
            is_complete = True
            while is_complete:
                ids = self.read(rank, 1)
                self.has_batch[rank.replica_index] = bool(ids)
                self.meeting.wait(PATIENCE_S)
                is_complete = all(self.has_batch)
                self.meeting.wait(PATIENCE_S)
                passes[-1] |= ids if is_complete else set()
            assert rank.drop_rest(lambda: None, PATIENCE_S)
            rank.end_pass()
        return passes

    def read(self, rank: BatchReceiver, most: int = 1000) -> set[int]:
        """Train some batches of a pass, at most all of them."""
        ids: list[int] = []
        with contextlib.suppress(Finished):
            while len(ids) < most:
                stream, batch = rank.take(self.in_order, lambda: False)
                ids.append(batch.batch_id)
                rank.mark_done(stream, batch.batch_id)
                rank.end(stream, batch.batch_id)
        assert len(ids) == len(set(ids))
        assert not self.in_order or ids == sorted(ids)
        return set(ids)


def expected(sizes: Sizes) -> list[set[int]]:
    """The ids of each epoch."""
    epochs: list[set[int]] = [set() for _ in sizes[0]]
    for loader, of_epochs in enumerate(sizes):
        numbers = iter(range(sum(of_epochs)))
        for epoch, size in enumerate(of_epochs):
            epochs[epoch] |= {next(numbers) * len(sizes) + loader for _ in range(size)}
    return epochs


def draw(seed: int) -> tuple[Sizes, int, random.Random]:
    """Unequal sizes, some of them 0, and a world size."""
    rng = random.Random(seed)
    num_epochs = rng.randint(2, 4)
    sizes = [
        [*(rng.randint(0, 5) for _ in range(num_epochs - 1)), rng.randint(1, 5)]
        for _ in range(rng.randint(1, 3))
    ]
    return sizes, rng.randint(1, 3), rng


SEEDS = pytest.mark.parametrize("seed", range(12))
ORDERS = pytest.mark.parametrize("in_order", [False, True])


@SEEDS
@ORDERS
def test_each_pass_of_all_ranks_is_one_epoch(seed: int, in_order: bool) -> None:
    sizes, world_size, _ = draw(seed)
    job = Job(sizes, world_size, in_order)
    with job.running():
        assert job.on_ranks(partial(job.train, epochs=len(sizes[0]))) == expected(sizes)


@SEEDS
def test_ranks_in_step_drop_what_is_left_of_an_epoch_and_no_more(seed: int) -> None:
    sizes, world_size, _ = draw(seed)
    job = Job(sizes, world_size, in_order=True)
    with job.running():
        trained = job.on_ranks(partial(job.train_in_step, epochs=len(sizes[0])))
    for ids, whole in zip(trained, expected(sizes), strict=True):
        of_ranks = [sorted(x for x in whole if x % world_size == r) for r in range(world_size)]
        num_rounds = min(map(len, of_ranks))
        assert ids == {x for of_rank in of_ranks for x in of_rank[:num_rounds]}


@ORDERS
@pytest.mark.parametrize(
    ("sizes", "world_size"),
    [
        ([[4, 4], [3, 1], [2, 1]], 2),  # at the end of the data
        ([[4, 4, 1], [3, 1, 1], [2, 1, 1]], 2),  # of an epoch
        ([[4, 3], [2, 1], [5, 8], [1, 6], [8, 1]], 3),
    ],
)
def test_what_a_rank_has_more_than_others_holds_up_no_data_loader(
    sizes: Sizes, world_size: int, in_order: bool
) -> None:
    """It has batches of data-loaders that have ended, before those that others wait behind."""
    job = Job(sizes, world_size, in_order)
    with job.running():
        trained = job.on_ranks(partial(job.train_in_step, epochs=len(sizes[0])))
    for ids, whole in zip(trained, expected(sizes), strict=True):
        of_ranks = [sum(x % world_size == rank for x in whole) for rank in range(world_size)]
        assert len(ids) == world_size * min(of_ranks)


@SEEDS
@ORDERS
def test_a_data_loader_that_was_killed_sends_the_rest_of_its_epoch(
    seed: int, in_order: bool
) -> None:
    sizes, world_size, rng = draw(seed)
    job = Job(sizes, world_size, in_order)
    with job.running(dies_at=rng.randrange(sum(sizes[0]))):
        assert job.on_ranks(partial(job.train, epochs=len(sizes[0]))) == expected(sizes)


@SEEDS
@ORDERS
@pytest.mark.parametrize("at_boundary", [False, True])
def test_a_run_that_continues_trains_the_rest_of_its_epoch(
    seed: int, in_order: bool, at_boundary: bool
) -> None:
    sizes, world_size, rng = draw(seed)
    whole, epoch = expected(sizes), rng.randrange(len(sizes[0]) - at_boundary)
    most = 1000 if at_boundary else rng.randint(0, 3)
    snapshots: dict[int, Plain] = {}

    def stop(rank: BatchReceiver) -> list[set[int]]:
        passes, progress = job.train(rank, epoch), Progress()
        rank.begin_pass()
        progress.begin(rank.position)
        passes.append(job.read(rank, most))
        if at_boundary:
            progress.end(
                rank.position, rank.position(at_end=True), rank.next_position(), is_empty=False
            )
        snapshots[rank.replica_index] = progress.snapshot()
        job.meeting.wait(PATIENCE_S)
        rank.end_pass()
        return passes

    job = Job(sizes, world_size, in_order)
    with job.running():
        trained = job.on_ranks(stop)
    assert trained[:epoch] == whole[:epoch]

    number, positions = of_one_pass([snapshots[rank] for rank in range(world_size)])
    merged = json.loads(json.dumps(merge(positions)))
    assert number == at_boundary
    assert (merged or {}).get("epoch", 0) == epoch + at_boundary
    num_done = 0 if merged is None else count_done(merged)  # of no data-loader yet
    assert num_done == (0 if at_boundary else len(trained[-1]))
    # Of another number of ranks, too.
    job = Job(sizes, rng.randint(1, 3), in_order, merged)
    left = len(sizes[0]) - epoch - at_boundary
    with job.running():
        rest = job.on_ranks(partial(job.train, epochs=left))
    assert rest[1 - at_boundary :] == whole[epoch + 1 :]
    if not at_boundary:
        assert not rest[0] & trained[-1]
        assert rest[0] | trained[-1] == whole[epoch]
    else:
        assert trained[-1] == whole[epoch]
