"""Senders that are closed after a test."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from persia._loader.sender import BatchSender
from tests.support.streams import Background, FakeRank, FakeWorker, Line, send
from tests.support.waiting import PATIENCE_S

MakeFeeder = Callable[..., BatchSender]


@pytest.fixture
def make_feeder() -> Iterator[MakeFeeder]:
    """Of one rank or several, and one worker if not given; with ``sent`` batches on the way."""
    made = []

    def make(
        ranks: Any,
        workers: Any = None,
        sent: int = 0,
        faults: random.Random | None = None,
        **options: Any,
    ) -> BatchSender:
        both: list[Any] = [
            [Line(one, faults) for one in (given if isinstance(given, list) else [given])]
            for given in (FakeWorker() if workers is None else workers, ranks)
        ]

        def disconnect() -> None:
            for line in itertools.chain(*both):
                line.cut()

        options = {"deadline_s": PATIENCE_S, "disconnect": disconnect, **options}
        made.append(BatchSender(*both, **options))
        made[-1].start()
        send_some(made[-1], sent)
        return made[-1]

    yield make
    for one in made:
        one.close()


def send_some(feeder: BatchSender, *numbers: int) -> None:
    """Send the batches with the numbers of a range."""
    for number in range(*numbers):
        send(feeder, number)


def send_all(feeder: BatchSender, num_batches: int) -> None:
    send_some(feeder, num_batches)
    feeder.finish()


def sent_before(make_feeder: MakeFeeder, rank: FakeRank, worker: Any, count: int) -> list[int]:
    """Let a feeder send batches, which the rank takes, and end; returns their ids."""
    made = make_feeder(rank, worker, sent=count)
    taken = [rank.take().batch_id for _ in range(count)]
    made.close()
    return taken


def finish_with(feeder: BatchSender, rank: FakeRank, *taken: int) -> None:
    """Finish, which waits for the acknowledgement of these batches."""
    finish = Background(feeder.finish)
    rank.wait_for_end()
    for batch_id in taken:
        rank.acknowledge(batch_id)
    finish.result()


class ReportingRank(FakeRank):
    """Reports what has not ended."""

    def open_stream(self, opening: Any) -> Any:
        with self.changed:
            state = super().open_stream(opening)
            return replace(state, unfinished=(*self.waiting, *self.taken))
