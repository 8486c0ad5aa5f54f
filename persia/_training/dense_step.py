"""The step of the dense net, and what is decided with it: whether the updates are sent.

    loss.backward() --> unscale --> clip (max_norm) --> before_step() --> optimizer.step()
                        GradScaler                                        updates are queued

Without a scaler the updates are queued before the optimizer steps, so that workers send them
meanwhile. Under a scaler a gradient that is not finite, dense or sparse, drops both.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from persia._core.kernels.optim import number
from persia.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from persia._training.backward import BackwardPipeline
    from persia._training.inflight import InFlightBatch, InFlightTracker
    from persia._training.ranks import Ranks

logger = logging.getLogger("persia.ctx")


# A scale below it was lowered dozens of times; one of 0 could not rise again.
LEAST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """What a script asks for between the gradients and the step."""

    max_norm: float | None = None
    hook: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and number("backward", "max_norm", self.max_norm) <= 0:
            raise ConfigError(f"backward: max_norm must be above 0, got {self.max_norm!r}")
        if self.hook is not None and not callable(self.hook):
            raise ConfigError(
                "backward: before_step must be a function without arguments, got "
                f"{type(self.hook).__name__}"
            )

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the dense gradients, which are of the unscaled loss, and call the hook."""
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters(optimizer), self.max_norm)
        if self.hook is not None:
            self.hook()


class DenseStep:
    """Steps the dense optimizer with its updates; logs what is not finite.

    Args:
        update_factor: What the scale is divided by after a gradient that is not finite.
        reduction: What the embedding gradients are divided by: how many ranks they are a mean
            over.
    """

    def __init__(self, update_factor: float = 4.0, reduction: int = 1) -> None:
        self.loss: torch.Tensor | None = None  # of the last step; reading it waits
        self._update_factor = update_factor
        self._reduction = reduction
        self._num_warned = 0  # rows that were not finite, when that was last logged
        self._num_bad_losses = 0  # not finite, of those that were read

    def run(
        self,
        engine: BackwardPipeline,
        updates: list[InFlightBatch],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        ranks: Ranks | None,
        before: BeforeStep,
        are_own: bool,
    ) -> None:
        """Step the dense optimizer and queue the updates; under a scaler both or neither.

        ``are_own``: the dense gradients are this rank's, and may be finite on it only; a scaler
        would skip the step there, and the average that goes with it.
        """
        scale, is_made = 1.0, True
        try:
            if scaler is None:
                before.run(optimizer)
            else:
                scale = scaler.get_scale()
                is_made = self.step_scaled(scaler, optimizer, updates, ranks, before, are_own)
        except BaseException:
            engine.discard(updates)
            raise
        if not is_made:
            engine.skip(updates)
            self.is_loss_bad(engine.steps + 1)
            _check_scale(scaler)
            return
        # Before the optimizer steps: workers send meanwhile.
        engine.submit(updates, scale, self._reduction)
        if scaler is None:
            optimizer.step()

    def step_scaled(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        updates: list[InFlightBatch],
        ranks: Ranks | None,
        before: BeforeStep,
        are_own: bool,
    ) -> bool:
        """Step by a scaler; False if a gradient of it or of ``updates`` is not finite."""
        scale = scaler.get_scale()
        is_finite = all(update.is_finite() for update in updates)
        if ranks is not None:
            is_finite = is_finite and (not are_own or is_dense_finite(optimizer))
            is_finite = not ranks.any(not is_finite)
        if not is_finite:
            # The dense gradients are dropped too: no step, and a smaller scale.
            scaler.update(scale / self._update_factor)
            return False
        if not gradients(optimizer):
            return True  # the scaler refuses an optimizer without any gradient
        if before != BeforeStep():
            scaler.unscale_(optimizer)
            if is_dense_finite(optimizer):  # otherwise there will be no step
                try:
                    before.run(optimizer)
                except BaseException:
                    scaler.update(scale)  # so that it takes these gradients for done with
                    raise
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


def reader(loss: torch.Tensor) -> Callable[[], float]:
    """Return what reads a loss later, from any thread, and waits for it only then."""
    if not loss.is_cuda:
        return loss.item
    # Another thread's current stream may be ahead of the one that computes the loss.
    stream = torch.cuda.current_stream(loss.device)

    def read() -> float:
        with torch.cuda.stream(stream):
            return float(loss.item())

    return read


def _check_scale(scaler: torch.amp.GradScaler | None) -> None:
    """Raise DataError if a scaler lowers its scale without an end."""
    scale = 1.0 if scaler is None else scaler.get_scale()
    if scale < LEAST_SCALE:
        raise DataError(
            "some gradient was not finite in every one of the last steps, and the GradScaler's "
            f"scale has fallen to {scale:g}, so it is not for lack of range: look for NaN in "
            "data or parameters, or for a division by 0, with mixed_precision=False"
        )


def is_dense_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no dense gradient holds NaN or Inf. Waits for the device."""
    checks = [torch.isfinite(gradient).all() for gradient in gradients(optimizer)]
    return not checks or bool(torch.stack(checks).all())


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one."""
    return [one.grad for one in parameters(optimizer) if one.grad is not None]


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]
