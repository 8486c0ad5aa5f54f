"""Whether a pass did what it is for, and the error if it did nothing.

A loop without a batch, or one that moves no row, ends like any other, and its process with
status 0. Each of these is a DataError, unless ``DataLoader(allow_untrained=True)``:

    no batch came, or none from one data-loader    at the end of the pass, in every context
    some rank had no batch in the first round      the same, on all ranks
    batches came, none had a backward              at the end, or after ``MANY`` of them
    no backward reached an embedding               the same
    all gradients were zero since the beginning    at the end, after ``FEW`` steps or more

Gradients are looked at until one is not zero, and rates are not: rows that a schedule lets
begin at a rate of 0 are no error. Nor is a first step of zeros, as a model has one whose last
layer begins with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia._training.inflight import Reason
from persia.errors import DataError

if TYPE_CHECKING:
    from persia._training.inflight import InFlightBatch, InFlightTracker

# Batches after which it is said: an epoch may take hours.
MANY = 100
# Steps before which gradients of zero are no error.
FEW = 10

_INTENDED = "if that is intended, write DataLoader(..., allow_untrained=True)"


class PassOutcome:
    """What became of the batches of one pass; the user's thread's."""

    def __init__(self, tracker: InFlightTracker, *, is_checked: bool) -> None:
        self._tracker = tracker
        self._is_checked = is_checked
        self._num_abandoned = 0  # had no backward
        self._num_backward = 0
        self._unreached: tuple[str, ...] = ()  # features of one that reached no embedding
        self._has_reached = False  # a backward of this pass has

    def note(self, batch: InFlightBatch) -> None:
        """Count a batch that has had its backward, or will have none."""
        if batch.reason is Reason.ABANDONED:
            self._num_abandoned += 1
            return
        self._num_backward += 1
        self._has_reached |= not batch.unreached
        self._unreached = batch.unreached or self._unreached

    def check_trained(self, least: int) -> None:
        """Raise DataError if none of at least ``least`` batches has trained a row."""
        if not self._is_checked:
            return
        if self._has_reached:
            if self._tracker.zero_steps is not None:
                self._check_gradients(self._tracker.zero_steps, max(least, FEW))
            return
        if self._num_abandoned >= least and not self._num_backward:
            raise DataError(
                f"none of {self._num_abandoned} batches had a backward, so nothing is trained: "
                "call ctx.backward(loss) for each, or evaluate inside eval_ctx(model=...); "
                f"{_INTENDED}"
            ) from None  # of ``Finished``
        if self._num_backward >= least:
            raise DataError(
                f"{self._num_backward} batches had a backward and none of them reached an "
                f"embedding, so no row is trained: the loss has to depend on the tensors of "
                f"{', '.join(self._unreached)} as ctx.forward gives them to the model, without "
                f".detach(), numpy or torch.no_grad() between; {_INTENDED}"
            ) from None

    def _check_gradients(self, zero_steps: int, least: int) -> None:
        if zero_steps >= least:
            raise DataError(
                f"the gradients of all embeddings were zero in {zero_steps} steps, so no row "
                "has moved: so are those of a product of embeddings that begin as zeros (begin "
                "with Uniform(-0.01, 0.01)), of what is behind a ReLU that gives only zeros, "
                f"and of a loss that is constant; {_INTENDED}"
            ) from None

    def fail_empty(self, who: str) -> None:
        """Raise DataError, as the pass has ended and some had no batch; says who had none."""
        if self._is_checked:
            raise DataError(
                f"{who} no batch in this pass: check the files, what is filtered, and the "
                f"shard of each rank and data-loader; {_INTENDED}"
            ) from None
