"""``TrainCtx.set_lr``: which gradients a rate goes with, and which groups it is for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from persia._rpc.messages import LearningRate
from persia.data import DataLoader
from persia.embedding.optim import SGD
from persia.errors import ConfigError
from tests.training.fakes import FakeWorker

from .conftest import MakeCtx, step
from .test_backward import batches


def test_a_rate_goes_with_the_gradients_computed_under_it(
    worker: FakeWorker, make_ctx: MakeCtx
) -> None:
    """The first update is held until the last rate is set, and keeps its own."""
    is_set = threading.Event()

    def hold(batch_id: int) -> None:
        assert is_set.wait(20)

    worker.before_update = hold
    with make_ctx() as ctx:
        loader = DataLoader(batches(5), embedding_staleness=5)
        want = {}
        for batch, lr in zip(loader, [None, 0.5, 0.25, 0.25, 0.125], strict=True):
            if lr is not None:
                ctx.set_lr(lr)
            step(ctx, batch)
            assert batch.ticket is not None
            want[batch.ticket.number] = () if lr is None else (LearningRate(0, lr),)
        ctx.set_lr(0.0)
        is_set.set()
    assert {given.update_id[1]: given.learning_rates for given in worker.gradients} == want


class Counting(FakeWorker):
    """Has a table for each group, and one for all others; notes who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str | None] = []

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        self.asked.append(group)
        if group == "unknown":
            raise ConfigError("unknown group 'unknown'")
        return {None: (0, 2), "g": (1,), "h": (2,)}[group]


def test_groups_keep_the_rate_that_was_set_for_them(make_ctx: MakeCtx) -> None:
    worker = Counting()
    with make_ctx(embedding_worker=worker) as ctx:
        with pytest.raises(ConfigError, match="set_lr: lr must be a number, got None"):
            ctx.set_lr(None)  # type: ignore[arg-type]
        rates: Any = ctx.backward_engine.learning_rates  # type: ignore[union-attr]

        def current() -> dict[int, float]:
            return {rate.table: rate.lr for rate in rates.current}

        ctx.set_lr(0.5, "g")
        assert current() == {1: 0.5}
        ctx.set_lr(0.25)
        assert current() == {0: 0.25, 1: 0.5, 2: 0.25}
        ctx.set_lr(1, group="h")
        kept = rates.current
        assert kept == (LearningRate(0, 0.25), LearningRate(1, 0.5), LearningRate(2, 1.0))
        for _ in range(3):
            ctx.set_lr(0.25)
            ctx.set_lr(0.5, "g")
        assert rates.current is kept
        ctx.set_lr(0.125)
        assert current() == {0: 0.125, 1: 0.5, 2: 1.0}
        for lr, group, message in (
            (-1.0, None, "set_lr: lr must be at least 0"),
            (float("nan"), "g", "set_lr: lr must be finite"),
            ("fast", None, "set_lr: lr must be a number"),
            (True, "h", "set_lr: lr must be a number"),
            (0.5, "unknown", "unknown group"),
        ):
            with pytest.raises(ConfigError, match=message):
                ctx.set_lr(lr, group)  # type: ignore[arg-type]
        assert current() == {0: 0.125, 1: 0.5, 2: 1.0}
        assert worker.asked == ["g", None, "h", "unknown"]
        SGD(lr=0.5).apply()
        assert current() == {}


def test_it_holds_inside_the_block_only(make_ctx: MakeCtx) -> None:
    ctx = make_ctx()
    with pytest.raises(ConfigError):
        ctx.set_lr(0.5)
    with ctx:
        ctx.set_lr(0.5)
    with ctx:
        engine = ctx.backward_engine
        assert engine is not None
        assert engine.learning_rates.current == ()
