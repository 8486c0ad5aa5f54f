"""Ranks brought to the end of a step: all of them, or an error that names who is missing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from persia._training.ranks import StepBarrier
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.errors import ServiceTimeout

from .conftest import step
from .fakes import make_batch


class Engine:
    """Says whether it gets to a step, and notes what it was asked."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.held: list[int] = []
        self.resumed = threading.Event()

    def hold(self, step: int, timeout_s: float) -> bool:
        self.held.append(step)
        return step <= self.steps

    def resume(self) -> None:
        self.resumed.set()


def ranks(*steps: int, timeout_s: float = 30.0) -> list[tuple[StepBarrier, Engine]]:
    store: Any = HashStore()
    found = []
    for rank, count in enumerate(steps):
        engine = Engine(count)
        state: Any = {"rank": rank}
        barrier = StepBarrier(
            len(steps), rank, engine.hold, engine.resume, state.copy, timeout_s, store
        )
        found.append((barrier, engine))
    return found


def close(found: list[tuple[StepBarrier, Engine]]) -> None:
    for barrier, _ in reversed(found):
        barrier.close()


def test_every_rank_is_held_at_the_step_and_resumes() -> None:
    found = ranks(3, 3, 4)
    for number in (2, 3):
        for _, engine in found:
            engine.resumed.clear()
        with found[0][0].hold_at(number) as states:
            assert states == [{"rank": 1}, {"rank": 2}]
            assert [engine.held[-1] for _, engine in found[1:]] == [number, number]
            assert not any(engine.resumed.is_set() for _, engine in found[1:])
        assert all(engine.resumed.wait(30) for _, engine in found[1:])
    close(found)


def test_a_rank_that_is_behind_is_named_and_the_others_resume() -> None:
    found = ranks(3, 2, 3)
    with pytest.raises(ServiceTimeout, match="rank 1 of 3"), found[0][0].hold_at(3):
        pass
    assert found[2][1].resumed.wait(30)
    close(found)


def test_a_rank_that_does_not_answer_is_named() -> None:
    found = ranks(3, 3, timeout_s=0.2)
    silent = found[1][0]
    silent._closed.set()
    assert silent._thread is not None
    silent._thread.join()
    with pytest.raises(ServiceTimeout, match="rank 1 of 2"), found[0][0].hold_at(3):
        pass


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    found = ranks(3, 2)
    found[1][0].close()
    with found[0][0].hold_at(3) as states:
        assert states == [{"rank": 1}]
    close(found[:1])


def test_a_rank_whose_data_has_ended_is_at_every_step(ctx: TrainCtx) -> None:
    engine = ctx.backward_engine
    assert engine is not None
    for batch in DataLoader([make_batch()]):
        step(ctx, batch)
        assert engine.hold(1, 30.0)
        engine.resume()
        assert not engine.hold(2, 0.1)
    assert engine.hold(2, 30.0)
    engine.resume()
