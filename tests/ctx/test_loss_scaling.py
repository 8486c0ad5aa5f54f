"""Steps under a scaler, and what is logged of values that are not finite."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from persia.ctx.loss_scaling import LossScaling, is_dense_finite


class Tracker:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def nan_counts(self) -> tuple[int, dict[str, int]]:
        return sum(self.counts.values()), self.counts


def with_gradient(value: float | None) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(2))
    if value is not None:
        parameter.grad = torch.full((2,), value)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


@pytest.mark.parametrize(("gradient", "is_made"), [(8.0, True), (math.inf, False)])
def test_the_scaler_decides_on_dense_gradients(gradient: float, is_made: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    parameter, optimizer = with_gradient(gradient)
    assert is_dense_finite(optimizer) is is_made
    assert LossScaling.step(scaler, optimizer, 8.0) is is_made
    assert parameter.tolist() == ([0.0, 0.0] if is_made else [1.0, 1.0])
    assert scaler.get_scale() == (8.0 if is_made else 4.0)


def test_without_a_dense_gradient_the_scaler_is_left_out() -> None:
    _, optimizer = with_gradient(None)
    assert is_dense_finite(optimizer)
    assert LossScaling.step(torch.amp.GradScaler("cpu"), optimizer, 1.0)


def test_a_bad_loss_is_logged_rarer_and_rarer(caplog: pytest.LogCaptureFixture) -> None:
    scaling = LossScaling()
    assert not scaling.is_loss_bad(1)
    scaling.loss = torch.tensor(math.nan)
    for step in range(1, 101):
        assert scaling.is_loss_bad(step)
    steps = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert steps == [1, 10, 100]


def test_gradients_of_a_bad_loss_are_counted_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    scaling, tracker = LossScaling(), Tracker()
    asked: Any = tracker
    scaling.warn_of_nans(asked, 1)
    assert not caplog.text
    tracker.counts = {"user": 2, "item": 1}
    scaling.warn_of_nans(asked, 1)
    assert "3 embedding gradients were not finite so far and were left out: item 1, user 2" in (
        caplog.text
    )
    tracker.counts = {"user": 4}
    scaling.loss = torch.tensor(math.inf)
    scaling.warn_of_nans(asked, 2)
    assert "user 4" not in caplog.text
    scaling.warn_of_nans(asked, 2, True)
    assert "user 4" in caplog.text
