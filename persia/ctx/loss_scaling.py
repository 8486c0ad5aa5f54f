"""Mixed precision's steps, and what is logged of losses and gradients that are not finite."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from persia._training.inflight import InFlightTracker

logger = logging.getLogger("persia.ctx")


class LossScaling:
    """Steps under a GradScaler, and what is logged of gradients that are not finite."""

    def __init__(self) -> None:
        self.loss: torch.Tensor | None = None  # of the last step; reading it waits
        self._num_warned = 0  # rows that were not finite, when that was last logged
        self._num_bad_losses = 0  # not finite, of those that were read

    @staticmethod
    def step(
        scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, scale: float
    ) -> bool:
        """Step the dense optimizer; False if the scaler found a gradient that is not finite."""
        if not gradients(optimizer):
            return True  # the scaler refuses an optimizer without any gradient
        scaler.step(optimizer)
        scaler.update()
        # The scaler shows that it skipped the step by lowering the scale.
        return scaler.get_scale() >= scale

    def warn_of_nans(self, tracker: InFlightTracker, step: int, is_last: bool = False) -> None:
        """Log how many embedding gradients were not finite, if there are more than before."""
        total, by_feature = tracker.nan_counts()
        if total <= self._num_warned:
            return
        if self.is_loss_bad(step) and not is_last:
            return  # all gradients of a bad loss are: counted at the end
        self._num_warned = total
        logger.warning(
            "%d embedding gradients were not finite so far and were left out: %s",
            total,
            ", ".join(f"{name} {count}" for name, count in sorted(by_feature.items())),
        )

    def is_loss_bad(self, step: int) -> bool:
        """Whether the last loss is not finite; logs the 1st, 10th, 100th... that is not.

        It waits for the device: call it only where a gradient is known not to be finite.
        """
        value = 0.0 if self.loss is None else self.loss.item()
        if math.isfinite(value):
            return False
        self._num_bad_losses += 1
        if str(self._num_bad_losses).strip("0") == "1":
            logger.warning(
                "the loss is %s at step %d: lower the learning rate, or look at the data",
                value,
                step,
            )
        return True


def is_dense_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no dense gradient holds NaN or Inf. Waits for the device."""
    checks = [torch.isfinite(gradient).all() for gradient in gradients(optimizer)]
    return not checks or bool(torch.stack(checks).all())


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return [one.grad for one in parameters if one.grad is not None]
