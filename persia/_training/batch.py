"""The forms of a batch in the trainer, in the order in which it passes through them.

    HostBatch             dense data and labels copied; ids, or the ref of registered ids
    StagedBatch           looked up; copies to the device may still be under way
    PersiaTrainingBatch   what the model receives, with the leaves that collect gradients

A feature has three kinds:

    feature   lookup               leaf (has the gradient)       what the model receives
    -------   ------------------   ---------------------------   --------------------------
    pooled    f32 [B, dim]         the same                      the same
    raw       f32 [D + 1, dim]     rows at index, [B * fixed,    [B, fixed, dim + 1]: the
              i64 [B * fixed]      dim]; row 0 is the padding    last channel is the mask
    jagged    f32 [D, dim]         rows at index, [N, dim]       Jagged(values, offsets)
              i64 [N], [B + 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from persia._core.ids.feature_batch import FeatureBatch
    from persia._rpc.messages import SlotOutput
    from persia._training.inflight import InFlightBatch
    from persia.errors import ServiceError


class Jagged(NamedTuple):
    """One vector per id, without padding: sample ``b`` owns rows offsets[b]:offsets[b+1]."""

    values: torch.Tensor  # f32 [N, dim]
    offsets: torch.Tensor  # i64 [B + 1]


@dataclass(slots=True)
class HostBatch:
    """A batch on its way to its lookup, with dense data and labels copied."""

    features: tuple[FeatureBatch, ...]  # empty if a data-loader has registered the ids
    dense: list[torch.Tensor]
    labels: list[torch.Tensor]
    meta: bytes | None
    batch_size: int
    requires_grad: bool

    # The key of admission draws, from the data-loader or by ``Lookups.number``.
    batch_id: int = -1
    # Running number of the training batches of this context: second half of the update id.
    number: int = -1
    # Under which the ids, if not in ``features``, are registered at an embedding-worker.
    ref: int | None = None
    # Registers the ids once more, given what their embedding-worker raised, and returns the
    # new ref; None if the embedding-worker, being of this process, cannot lose them.
    register_again: Callable[[ServiceError], int] | None = None
    # Called when a resumed run does not need the batch any more.
    on_done: Callable[[], None] | None = None
    # Called when the ids are not needed any more.
    on_end: Callable[[], None] | None = None


class StagedBatch(NamedTuple):
    """A looked-up batch whose copies to the device may still be under way."""

    host: HostBatch
    dense: list[torch.Tensor]
    labels: list[torch.Tensor]
    outputs: tuple[SlotOutput, ...]
    floats: list[torch.Tensor]  # pooled values or rows, one per output
    indices: list[torch.Tensor]  # index, then offsets, of the outputs that have them
    ticket: InFlightBatch | None
    event: torch.cuda.Event | None = None  # recorded behind the copies
    uploaded: tuple[torch.Tensor, ...] = ()  # one per storage that the side stream allocated


class Leaf:
    """The tensor of one feature that receives the gradient, and what it is summed by."""

    __slots__ = ("has_padding", "index", "name", "num_rows", "tensor")

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        index: torch.Tensor | None = None,
        num_rows: int = 0,
        has_padding: bool = False,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.index = index  # i64, one row number per row of the leaf; None if pooled
        self.num_rows = num_rows  # rows of the sum, the padding row included
        self.has_padding = has_padding  # row 0 is padding and has no gradient


class PersiaTrainingBatch:
    """One batch, ready for the model.

    Attributes:
        non_id_type_tensors: Dense tensors, in the order of the batch.
        embedding_tensors: One entry per id feature, in the order of the batch's features.
        labels: Label tensors, or None if the batch has none.
        meta: The bytes that the user attached, or None.
        batch_id: The data-loader's number, or a running one of the context, where batches
            without gradients have a series of their own.
        feature_names: Names of the id features, in the order of ``embedding_tensors``.
        batch_size: Number of samples.
    """

    def __init__(
        self,
        staged: StagedBatch,
        embedding_tensors: list[torch.Tensor | Jagged],
        leaves: list[Leaf],
    ) -> None:
        self.non_id_type_tensors = staged.dense
        self.embedding_tensors = embedding_tensors
        self.labels: list[torch.Tensor] | None = staged.labels or None
        self.meta = staged.host.meta
        self.batch_id = staged.host.batch_id
        self.feature_names = tuple([output.name for output in staged.outputs])
        self.batch_size = staged.host.batch_size
        self.leaves = leaves  # of the features with a gradient; empty in evaluation
        self.ticket = staged.ticket  # None in evaluation

    @property
    def requires_grad(self) -> bool:
        """Whether a backward is expected for this batch."""
        return self.ticket is not None

    def awaits_backward(self) -> bool:
        """Whether a backward is expected and has not come."""
        return self.ticket is not None and self.ticket.is_open()

    def __repr__(self) -> str:
        return (
            f"PersiaTrainingBatch(batch_id={self.batch_id}, batch_size={self.batch_size}, "
            f"feature_names={self.feature_names})"
        )
