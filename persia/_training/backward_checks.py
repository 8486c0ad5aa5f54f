"""What is checked before a backward changes any gradient, of its loss and of its batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from persia._training.batch import PersiaTrainingBatch
from persia._training.inflight import State
from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from persia._training.backward import LearningRates
    from persia._training.inflight import InFlightBatch, InFlightTracker

logger = logging.getLogger("persia.ctx")


class BackwardChecks:
    """Checks of one training context; what is no error is logged once."""

    def __init__(self) -> None:
        self.is_forwarded_again = False  # the current batch, which may have two losses
        self._has_warned_no_gradients = False
        self._has_warned_lost = False
        self._has_warned_rate = False
        self._dense_lr: float | None = None  # of the first step

    def to_train(
        self, batch: PersiaTrainingBatch | None, tracker: InFlightTracker
    ) -> PersiaTrainingBatch:
        """Return the batch that was prepared last, if it can take a backward."""
        if batch is None:
            raise DataError(
                "no batch to take gradients of: call ctx.forward(batch) or "
                "ctx.prepare_features(batch) first"
            )
        if batch.ticket is not None:
            tracker.check_open(batch.ticket)
        elif not self._has_warned_no_gradients:
            self._has_warned_no_gradients = True
            logger.warning(
                "batch %d has no embedding gradients (made with requires_grad=False, or looked "
                "up in an eval_ctx), so it trains the dense net only; said once",
                batch.batch_id,
            )
        tracker.release_orphans()
        return batch

    def warn_of_lost(self, batch: PersiaTrainingBatch | None) -> None:
        """Warn of a batch that is left with gradients that will not be sent."""
        if batch is not None and not self._has_warned_lost and _has_own_backward(batch):
            self._has_warned_lost = True
            logger.warning(
                "batch %d had loss.backward() and no ctx.backward(loss), so its embedding "
                "gradients are lost; call ctx.backward(loss), or to accumulate "
                "ctx.backward(loss, step=False); said once",
                batch.batch_id,
            )

    def warn_of_schedule(self, optimizer: torch.optim.Optimizer, rates: LearningRates) -> None:
        """Warn if the dense rate has changed, and that of the rows was never set."""
        if self._has_warned_rate or rates.current:
            return
        rate = optimizer.param_groups[0].get("lr")
        if not isinstance(rate, float | int):
            return  # a tensor may be on a device
        if self._dense_lr is None:
            self._dense_lr = rate
        elif rate != self._dense_lr:
            self._has_warned_rate = True
            logger.warning(
                "the dense optimizer's learning rate went from %s to %s, and that of the "
                "embeddings stays: call ctx.set_lr(lr) to change it, or to keep it as it is; "
                "said once",
                self._dense_lr,
                rate,
            )

    def warn_of_kept(self, kept: Sequence[PersiaTrainingBatch]) -> None:
        """Warn of batches that a context is left with."""
        if kept:
            logger.warning(
                "%d batches wait for a step, kept by ctx.keep or ctx.backward(loss, "
                "step=False): none came, and their gradients are lost",
                len(kept),
            )


def ticket_to_keep(batch: PersiaTrainingBatch) -> InFlightBatch:
    """Return the ids of a batch that is to be held."""
    if not isinstance(batch, PersiaTrainingBatch):
        raise DataTypeError(
            "TrainCtx.keep: expected a batch with its embeddings, as the DataLoader gives it, "
            f"got {type(batch).__name__}"
        )
    if batch.ticket is None:
        raise DataError(f"batch {batch.batch_id} has no gradients that could be kept")
    return batch.ticket


_CALLED_TWICE = (
    "loss.backward() was called before ctx.backward(loss), which calls it: leave it out, give "
    "several losses as their sum, and accumulate by ctx.backward(loss, step=False)"
)


def check_no_backward(batch: PersiaTrainingBatch) -> None:
    """Refuse a batch, forwarded once, whose loss a script ran backward itself."""
    if _has_own_backward(batch):
        raise DataError(f"batch {batch.batch_id} has gradients already: {_CALLED_TWICE}")


def run_backward(loss: torch.Tensor) -> None:
    """Call ``loss.backward()``; a DataError if its graph is gone."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as exc:
        if "through the graph a second time" not in str(exc):
            raise
        raise DataError(
            f"TrainCtx.backward: the graph of the loss is gone; {_CALLED_TWICE}"
        ) from exc


def _has_own_backward(batch: PersiaTrainingBatch) -> bool:
    # Those of a kept batch are accumulated.
    ticket = batch.ticket
    return ticket is not None and ticket.state is not State.KEPT and has_gradients(batch)


def has_gradients(batch: PersiaTrainingBatch) -> bool:
    """Whether a backward has reached an embedding of a batch, and was not collected."""
    # A generator would be entered once for each feature, twice a step.
    for leaf in batch.leaves:  # noqa: SIM110
        if leaf.tensor.grad is not None:
            return True
    return False


def check_loss(loss: torch.Tensor) -> None:
    """Refuse, before any gradient changes, what torch would refuse after that."""
    if not callable(getattr(loss, "backward", None)):
        raise DataTypeError(
            f"TrainCtx.backward: expected a tensor, got {type(loss).__name__}; give the loss "
            "tensor, not its .item()"
        )
    if loss.numel() != 1:
        raise DataError(
            "TrainCtx.backward: expected a loss of one number that requires grad, got one of "
            f'shape {list(loss.shape)}; give its .mean(), or take reduction="none" out'
        )
    if not loss.requires_grad:
        raise DataError(
            "TrainCtx.backward: expected a loss of one number that requires grad, got one "
            "without a graph: it was detached, made from a number, or under torch.no_grad()"
        )
