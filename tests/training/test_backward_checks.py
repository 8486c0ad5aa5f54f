from __future__ import annotations

from typing import Any

import pytest
import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.errors import DataError, DataTypeError

from .conftest import batches, loss_of
from .fakes import SpyWorker, make_batch

CALLED = r"loss\.backward\(\) was called before ctx\.backward\(loss\), which calls it: leave it"


@pytest.mark.parametrize("retains", [False, True])
def test_a_loss_that_ran_backward_before(ctx: TrainCtx, retains: bool) -> None:
    batch = ctx.get_embedding_from_data(make_batch(0))
    loss = loss_of(*ctx.forward(batch))
    loss.backward(retain_graph=retains)  # type: ignore[no-untyped-call]
    before = [one.grad for one in ctx.model.parameters()]
    with pytest.raises(DataError, match=CALLED):
        ctx.backward(loss)
    assert [one.grad for one in ctx.model.parameters()] == before  # nothing was added


def test_a_loss_without_embeddings_that_ran_backward_before(ctx: TrainCtx) -> None:
    ctx.prepare_features(ctx.get_embedding_from_data(make_batch(0)))
    loss: Any = ctx.model.layer.weight.square().sum()
    loss.backward()
    with pytest.raises(DataError, match=rf"the graph of the loss is gone; {CALLED}"):
        ctx.backward(loss)


def test_a_backward_without_the_contexts_is_warned_of_once(
    worker: SpyWorker, ctx: TrainCtx, caplog: pytest.LogCaptureFixture
) -> None:
    for batch in DataLoader(batches(4), reproducible=True, allow_untrained=True):
        loss: Any = loss_of(*ctx.forward(batch))
        loss.backward()  # as torch accumulates
    (line,) = [one for one in caplog.messages if "ctx.backward(loss)" in one and "lost" in one]
    assert line.startswith(
        "batch 0 had loss.backward() and no ctx.backward(loss), so its embed"
    )
    assert worker.of("update") == []


RATE = "learning rate went from 0.1 to 0.05, and that of the embeddings stays: call ctx.set_lr"


@pytest.mark.parametrize(("sets", "count"), [(None, 1), ("before", 0), ("with it", 0)])
def test_a_schedule_of_the_dense_rate_alone_is_warned_of_once(
    ctx: TrainCtx, caplog: pytest.LogCaptureFixture, sets: str | None, count: int
) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(ctx.dense_optimizer, step_size=2, gamma=0.5)
    if sets == "before":
        ctx.set_lr(0.5)
    for batch in DataLoader(batches(8), reproducible=True):
        ctx.backward(loss_of(*ctx.forward(batch)))
        schedule.step()
        if sets == "with it":
            ctx.set_lr(float(schedule.get_last_lr()[0]))
    assert sum(RATE in line for line in caplog.messages) == count


def test_a_rate_that_stays_is_not_warned_of(
    ctx: TrainCtx, caplog: pytest.LogCaptureFixture
) -> None:
    group = ctx.dense_optimizer.param_groups[0]
    for given in (0.1, torch.tensor(0.1)):  # torch's schedules change a tensor in its place
        group["lr"] = given
        for batch in DataLoader(batches(2)):
            ctx.backward(loss_of(*ctx.forward(batch)))
    assert not [line for line in caplog.messages if "rate" in line]


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (0.5, DataTypeError, "expected a tensor, got float; give the loss tensor, not its"),
        (
            torch.ones(2, requires_grad=True),
            DataError,
            r"got one of shape \[2\]; give its .mean",
        ),
        (torch.ones(()), DataError, "without a graph: it was detached"),
    ],
)
def test_what_is_no_loss(ctx: TrainCtx, loss: Any, kind: type[DataError], message: str) -> None:
    ctx.prepare_features(ctx.get_embedding_from_data(make_batch(0)))
    with pytest.raises(kind, match=message):
        ctx.backward(loss)
