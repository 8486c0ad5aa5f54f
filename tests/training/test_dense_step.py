from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from persia._training.dense_step import BeforeStep, DenseStep, gradients
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.errors import ConfigError, DataError
from tests.support.fixtures import Log

from .conftest import MakeCtx, Net, batches, loss_of, step
from .fakes import SpyRanks, SpyWorker, make_batch


# The last: the gradients differ between ranks, and another rank's was not finite.
@pytest.mark.parametrize(
    ("gradient", "update", "others", "is_made", "scale"),
    [
        (8.0, True, None, True, 8.0),
        (math.inf, True, None, False, 4.0),  # the scaler's own factor
        (8.0, False, None, False, 2.0),
        (math.inf, True, False, False, 2.0),
        (8.0, True, True, False, 2.0),
        (8.0, True, False, True, 8.0),
        (None, True, None, True, 8.0),  # the scaler is left out
    ],
)
def test_the_scaler_steps_where_all_gradients_are_finite(
    gradient: float | None, update: bool, others: bool | None, is_made: bool, scale: float
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = None if gradient is None else torch.full((2,), gradient)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    updates: Any = [SimpleNamespace(is_finite=lambda: update)]
    ranks = None if others is None else SpyRanks(others_failed=others)
    made = DenseStep(4).step_scaled(scaler, optimizer, updates, ranks, BeforeStep(), True)
    assert made is is_made
    assert parameter.tolist() == ([0.0, 0.0] if is_made and gradient else [1.0, 1.0])
    assert scaler.get_scale() == scale


# --- in a training context ----------------------------------------------------------------


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_max_norm_clips_the_dense_gradients_unscaled(
    make_ctx: MakeCtx, mixed_precision: bool
) -> None:
    with make_ctx(mixed_precision=mixed_precision) as ctx:
        seen: list[list[torch.Tensor]] = []

        def note() -> None:
            seen.append([one.clone() for one in gradients(ctx.dense_optimizer)])

        moved = []
        for max_norm in (None, 0.125, 1e6):
            batch = ctx.get_embedding_from_data(make_batch(0))
            weights = [one.detach().clone() for one in ctx.model.parameters()]
            loss = 10 * loss_of(*ctx.forward(batch))
            ctx.backward(loss, max_norm=max_norm, before_step=note)
            pairs = zip(weights, ctx.model.parameters(), strict=True)
            moved.append(norm([new.detach() - old for old, new in pairs]))
    free, clipped, loose = map(norm, seen)
    assert free > 0.5
    assert clipped == pytest.approx(0.125, rel=1e-3)
    assert loose > 0.5
    # What the hook saw is what the optimizer stepped with, at its rate of 0.1.
    assert moved == pytest.approx([0.1 * free, 0.1 * clipped, 0.1 * loose], rel=1e-3)


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.cat([one.reshape(-1) for one in tensors]).norm())


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_a_hook_that_raises_leaves_nothing_behind(
    worker: SpyWorker, make_ctx: MakeCtx, mixed_precision: bool
) -> None:
    def fail() -> None:
        raise FloatingPointError("the norm is bad")

    with make_ctx(mixed_precision=mixed_precision) as ctx:
        weights = [one.detach().clone() for one in ctx.model.parameters()]
        loss = loss_of(*ctx.forward(ctx.get_embedding_from_data(make_batch(0))))
        with pytest.raises(FloatingPointError, match="the norm is bad"):
            ctx.backward(loss, before_step=fail)
        assert all(map(torch.equal, weights, ctx.model.parameters()))
        assert (ctx.stats()["failed"], ctx.update_times) == (1, 0)
        step(ctx, ctx.get_embedding_from_data(make_batch(1)))
        after = [one.detach().clone() for one in ctx.model.parameters()]
    assert worker.of("update") == [1]
    with make_ctx(embedding_worker=SpyWorker(), mixed_precision=mixed_precision) as ctx:
        step(ctx, ctx.get_embedding_from_data(make_batch(1)))
        torch.testing.assert_close(after, [one.detach() for one in ctx.model.parameters()])


def test_a_step_at_which_the_scale_grows_is_one_like_the_others(
    worker: SpyWorker, make_ctx: MakeCtx
) -> None:
    with make_ctx(mixed_precision=True) as ctx:
        assert ctx.grad_scaler is not None
        ctx.grad_scaler.set_growth_interval(1)
        for number in range(3):
            step(ctx, ctx.get_embedding_from_data(make_batch(number)))
            ctx.get_embedding_size()  # waits for the update
        assert (ctx.update_times, ctx.stats()["skipped"]) == (3, 0)
    assert [given.scale for given in worker.gradients] == [2.0**16, 2.0**17, 2.0**18]


# The scale of 2**16 falls below 2**-39 by factors of 2, and for embeddings of 4.
@pytest.mark.parametrize(("of_rows", "count"), [(False, 56), (True, 28)])
def test_a_scaler_that_skips_every_step_is_an_error(
    make_ctx: MakeCtx, of_rows: bool, count: int
) -> None:
    model = Net()

    def loss(ctx: TrainCtx) -> torch.Tensor:
        batch = ctx.get_embedding_from_data(make_batch(0))
        dense, embeddings, labels = ctx.prepare_features(batch)
        of = embeddings[0].sum() if of_rows else model.layer.bias.sum()
        root: torch.Tensor = (0 * of).sqrt()  # of 0: its gradient is infinite, or NaN
        return loss_of(model(dense, embeddings), labels) + root

    with make_ctx(model=model, mixed_precision=True) as ctx:
        for _ in range(count - 1):
            ctx.backward(loss(ctx))
        last = loss(ctx)
        with pytest.raises(DataError, match=r"not finite in every .*mixed_precision=False"):
            ctx.backward(last)
        assert (ctx.stats()["skipped"], ctx.stats()["failed"]) == (count, 0)
        assert all(one.grad is None for one in model.parameters())


class Failing(Net):
    """Raises in the backward of the embeddings, behind that of the layer."""

    fails = True

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        copies = [one.clone() for one in embeddings]
        copies[0].register_hook(self.check)
        return super().forward(dense, copies)

    def check(self, gradient: torch.Tensor) -> None:
        if self.fails:
            raise torch.OutOfMemoryError("the graph is too large")


def test_a_backward_that_raises_leaves_no_gradients(make_ctx: MakeCtx) -> None:
    found = []
    for fails in (True, False):
        model = Failing()
        with make_ctx(model=model, embedding_worker=SpyWorker()) as ctx:
            loss = loss_of(*ctx.forward(ctx.get_embedding_from_data(make_batch(0))))
            if fails:
                with pytest.raises(torch.OutOfMemoryError):
                    ctx.backward(loss)
            model.fails = False
            step(ctx, ctx.get_embedding_from_data(make_batch(1)))
        found.append([one.detach() for one in model.parameters()])
    torch.testing.assert_close(*found)


def test_no_hook_where_the_scaler_skips_the_step(make_ctx: MakeCtx) -> None:
    model, calls = Net(), []
    bias: Any = model.layer.bias
    bias.register_hook(lambda gradient: gradient * float("inf"))
    with make_ctx(model=model, mixed_precision=True) as ctx:
        loss = loss_of(*ctx.forward(ctx.get_embedding_from_data(make_batch(0))))
        ctx.backward(loss, before_step=lambda: calls.append(1))
        assert ctx.stats()["skipped"] == 1
    assert calls == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_norm": 0}, "max_norm must be above 0, got 0"),
        ({"max_norm": -1.0}, "max_norm must be above 0, got -1.0"),
        ({"max_norm": "1"}, "max_norm must be a number, got '1'"),
        ({"before_step": 3}, "before_step must be a function without arguments, got int"),
    ],
)
def test_bad_arguments_change_nothing(
    ctx: TrainCtx, given: dict[str, Any], message: str
) -> None:
    loss = loss_of(*ctx.forward(ctx.get_embedding_from_data(make_batch(0))))
    with pytest.raises(ConfigError, match=message):
        ctx.backward(loss, **given)
    assert all(one.grad is None for one in ctx.model.parameters())
    ctx.backward(loss)


# --- accumulation -------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [0, 1])
def test_one_gradient_that_is_not_finite_skips_all_that_are_accumulated(
    worker: SpyWorker, make_ctx: MakeCtx, spoilt: int
) -> None:
    model = Net()
    with make_ctx(model=model, mixed_precision=True) as ctx:
        before = [one.detach().clone() for one in model.parameters()]
        for number in range(2):
            dense, embeddings, labels = ctx.prepare_features(
                ctx.get_embedding_from_data(make_batch(number))
            )
            # Of the embeddings alone: the dense gradients are finite.
            alone = sum(embeddings[0].sum() * factor for factor in (1e38, 1e38))
            extra = alone if number == spoilt else 0.0
            ctx.backward(loss_of(model(dense, embeddings), labels) + extra, step=number == 1)
        assert all(map(torch.equal, before, model.parameters()))
        assert ctx.stats()["skipped"] == 2
    assert worker.of("update") == []


def test_what_is_accumulated_ends_with_the_context(make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        loss = loss_of(*ctx.forward(ctx.get_embedding_from_data(make_batch(0))))
        ctx.backward(loss, step=False)
        assert gradients(ctx.dense_optimizer)
    assert not gradients(ctx.dense_optimizer)  # those of the rows are lost too


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_accumulated_gradients_are_those_of_the_sum(
    make_ctx: MakeCtx, mixed_precision: bool, caplog: Log
) -> None:
    """``step=False`` and one loss over kept batches are the same dense step and updates."""
    found = []
    for accumulates in (True, False):
        worker = SpyWorker()
        losses: list[torch.Tensor] = []
        options = {"embedding_worker": worker, "mixed_precision": mixed_precision}
        with make_ctx(**options) as ctx:
            for number in range(8):
                ctx.get_embedding_size()  # waits for the updates before
                batch = ctx.get_embedding_from_data(make_batch(number))
                loss = loss_of(*ctx.forward(batch)) / 4
                is_last = number % 4 == 3
                if accumulates:
                    ctx.backward(loss, step=is_last)
                elif is_last:
                    ctx.backward(torch.stack([*losses, loss]).sum())
                    losses.clear()
                else:
                    ctx.keep(batch)
                    losses.append(loss)
            assert (ctx.update_times, ctx.stats()["abandoned"]) == (2, 0)
            weights = [one.detach() for one in ctx.model.parameters()]
        assert sorted(worker.of("update")) == list(range(8))
        assert "wait for a step" not in caplog.text
        found.append((weights, worker.rows))
    (weights, rows), (want_weights, want_rows) = found
    for one, other in zip(weights, want_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert rows.keys() == want_rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(row, want_rows[key], rtol=1e-4, atol=1e-6)


def test_only_what_a_loss_reaches_is_accumulated(
    worker: SpyWorker, make_ctx: MakeCtx, caplog: Log
) -> None:
    with make_ctx() as ctx:
        aside, first, last = [ctx.get_embedding_from_data(one) for one in batches(3)]
        ctx.forward(aside)
        ctx.backward(loss_of(*ctx.forward(first)), step=False)
        ctx.backward(loss_of(*ctx.forward(last)))
        assert ctx.stats()["abandoned"] == 1
    assert sorted(worker.of("update")) == [1, 2]
    assert not caplog.messages


class Wide(Net):
    """Saves an activation of 4 MB for its backward, and counts those that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most_alive = 0

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        saved = super().forward(dense, embeddings).repeat(1, 1 << 18).exp()
        self.alive.add(saved)
        gc.collect()
        self.most_alive = max(self.most_alive, len(self.alive))
        return saved.mean(1, keepdim=True)


def test_accumulation_frees_its_graphs(make_ctx: MakeCtx) -> None:
    model = Wide()
    with make_ctx(model=model) as ctx:
        for batch in DataLoader(batches(16), reproducible=True, embedding_staleness=16):
            loss = loss_of(*ctx.forward(batch)) / 16
            ctx.backward(loss, step=batch.batch_id == 15)
            del loss
        assert ctx.update_times == 1
    # One of this step; the one before is gone, or is the local of the loop still.
    assert model.most_alive <= 2


def test_accumulation_beyond_the_permits_is_an_error(make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        iterator = iter(DataLoader(batches(8), reproducible=True, embedding_staleness=2))
        for _ in range(2):
            ctx.backward(loss_of(*ctx.forward(next(iterator))), step=False)
        with pytest.raises(ConfigError, match=r"embedding_staleness=2.*at least k"):
            next(iterator)
    assert ctx.stats()["abandoned"] == 2
