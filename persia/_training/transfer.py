"""A lookup and its batch, as torch tensors that own their memory.

    feature   lookup               leaf (has the gradient)       what the model receives
    -------   ------------------   ---------------------------   --------------------------
    pooled    f32 [B, dim]         the same                      the same
    raw       f32 [D + 1, dim]     rows at index, [B * fixed,    [B, fixed, dim + 1]: the
              i64 [B * fixed]      dim]; row 0 is the padding    last channel is the mask
    jagged    f32 [D, dim]         rows at index, [N, dim]       Jagged(values, offsets)
              i64 [N], [B + 1]

Embeddings are f32 (the original's were f16 on every device). Dense tensors and labels keep
their dtype, bool included.

Two threads work on a batch. The dataset's thread copies dense data and labels while the
user's generator stands still, so that a generator may refill its arrays for the next batch.
A forward worker then builds the tensors; for a CUDA device it packs the lookup into one
pinned buffer per dtype and starts the copies on a side stream, and the user's thread makes
its own stream wait for their event and builds the tensors there. Nothing synchronises the
device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from persia._rpc.messages import JaggedOutput, PooledOutput, RawOutput
from persia.errors import DataTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._core.ids.feature_batch import FeatureBatch
    from persia._rpc.messages import LookupResult, SlotOutput, StreamedBatch
    from persia._training.inflight import InFlightBatch


logger = logging.getLogger(__name__)


class HasArray(Protocol):
    """A dense feature or label."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> NDArray[Any]: ...


class UserBatch(Protocol):
    """What ``PersiaBatch`` is to this layer, which lies below it."""

    @property
    def features(self) -> tuple[FeatureBatch, ...]: ...
    @property
    def non_id_type_features(self) -> Sequence[HasArray]: ...
    @property
    def labels(self) -> Sequence[HasArray]: ...
    @property
    def meta(self) -> bytes | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def requires_grad(self) -> bool: ...


class Jagged(NamedTuple):
    """One vector per id, without padding: sample ``b`` owns rows offsets[b]:offsets[b+1]."""

    values: torch.Tensor  # f32 [N, dim]
    offsets: torch.Tensor  # i64 [B + 1]


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
        host: HostBatch,
        batch_id: int,
        feature_names: tuple[str, ...],
        embedding_tensors: list[torch.Tensor | Jagged],
        leaves: list[Leaf],
        ticket: InFlightBatch | None,
    ) -> None:
        self.non_id_type_tensors = host.dense
        self.embedding_tensors = embedding_tensors
        self.labels: list[torch.Tensor] | None = host.labels or None
        self.meta = host.meta
        self.batch_id = batch_id
        self.feature_names = feature_names
        self.batch_size = host.batch_size
        self.leaves = leaves  # of the features with a gradient; empty in evaluation
        self.ticket = ticket  # None in evaluation

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


@dataclass(slots=True)
class HostBatch:
    """A user's batch with dense data and labels copied, on the host or on the device."""

    features: tuple[FeatureBatch, ...]  # empty if a data-loader has registered the ids
    dense: list[torch.Tensor]
    labels: list[torch.Tensor]
    meta: bytes | None
    batch_size: int
    requires_grad: bool


class StagedBatch(NamedTuple):
    """A looked-up batch whose copies to the device may still be under way."""

    host: HostBatch
    outputs: tuple[SlotOutput, ...]
    floats: list[torch.Tensor]  # pooled values or rows, one per output
    indices: list[torch.Tensor]  # index, then offsets, of the outputs that have them
    batch_id: int
    ticket: InFlightBatch | None
    event: torch.cuda.Event | None  # recorded behind the copies
    uploaded: list[torch.Tensor]  # one per storage that the side stream allocated


class DeviceTransfer:
    """Brings batches to one device.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all batches: a stream per tensor costs more than it hides.
        self._stream = _new_stream(device)
        self._wide: set[str] = set()  # whom a line has named as float64

    def host(self, batch: UserBatch) -> HostBatch:
        """Copy what the user may overwrite; the ids are PERSIA's own already.

        Raises:
            DataTypeError: If the user's dataset yields something else than a PersiaBatch.
        """
        features = getattr(batch, "features", None)
        if not isinstance(features, tuple):
            raise DataTypeError(
                f"expected the dataset to yield PersiaBatch, got {type(batch).__name__}"
            )
        return HostBatch(
            features=features,
            dense=[
                self._copy("dense feature", item.name, item.data)
                for item in batch.non_id_type_features
            ],
            labels=[self._copy("label", item.name, item.data) for item in batch.labels],
            meta=batch.meta,
            batch_size=batch.batch_size,
            requires_grad=batch.requires_grad,
        )

    def host_of(self, batch: StreamedBatch) -> HostBatch:
        """Copy what came in one message, so that its memory is not kept."""
        return HostBatch(
            features=(),
            dense=[
                self._copy("dense feature", item.name, item.array)
                for item in batch.non_id_type_features
            ],
            labels=[self._copy("label", item.name, item.array) for item in batch.labels],
            meta=None if batch.meta is None else batch.meta.tobytes(),
            batch_size=batch.batch_size,
            requires_grad=batch.requires_grad,
        )

    def _copy(self, what: str, name: str, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.float64 and name not in self._wide:
            # A dtype that a model may want, though mostly nobody chose it; torch's own error
            # does not say whose it is.
            self._wide.add(name)
            logger.warning(
                "%s %r is float64, and so is its tensor: layers in float32 refuse it; "
                "give it as .astype(np.float32), or call .float() on it in the model",
                what,
                name,
            )
        if self._stream is None:
            return torch.from_numpy(np.array(array, order="C"))
        template = torch.from_numpy(np.empty(0, array.dtype))
        pinned = torch.empty(array.shape, dtype=template.dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned

    def stage(
        self, host: HostBatch, result: LookupResult, batch_id: int, ticket: InFlightBatch | None
    ) -> StagedBatch:
        """Start what can be done off the user's thread."""
        floats: list[NDArray[np.float32]] = []
        indices: list[NDArray[np.int64]] = []
        for output in result.outputs:
            if isinstance(output, PooledOutput):
                floats.append(output.values)
                continue
            floats.append(output.rows)
            indices.append(output.index)
            if isinstance(output, JaggedOutput):
                indices.append(output.offsets)
        if self._stream is not None:
            return self._upload(host, result, floats, indices, batch_id, ticket)
        return StagedBatch(
            host,
            result.outputs,
            [_own(array) for array in floats],
            [_own(array) for array in indices],
            batch_id,
            ticket,
            None,
            [],
        )

    def _upload(
        self,
        host: HostBatch,
        result: LookupResult,
        floats: list[NDArray[np.float32]],
        indices: list[NDArray[np.int64]],
        batch_id: int,
        ticket: InFlightBatch | None,
    ) -> StagedBatch:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            packed_floats, float_parts = self._pack(floats, torch.float32)
            packed_indices, index_parts = self._pack(indices, torch.int64)
            dense = [item.to(self._device, non_blocking=True) for item in host.dense]
            labels = [item.to(self._device, non_blocking=True) for item in host.labels]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # A new one: the same host batch may be staged again.
        moved = HostBatch(
            host.features, dense, labels, host.meta, host.batch_size, host.requires_grad
        )
        return StagedBatch(
            moved,
            result.outputs,
            float_parts,
            index_parts,
            batch_id,
            ticket,
            event,
            [packed_floats, packed_indices, *dense, *labels],
        )

    def _pack(
        self, arrays: Sequence[NDArray[Any]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy all arrays through one pinned buffer; return it on the device, and its parts.

        The caching host allocator keeps the pinned buffer until the copy has run.
        """
        pinned = torch.empty(sum(array.size for array in arrays), dtype=dtype, pin_memory=True)
        flat = pinned.numpy()
        start = 0
        for array in arrays:
            flat[start : start + array.size] = array.reshape(-1)
            start += array.size
        packed = pinned.to(self._device, non_blocking=True)
        pieces = torch.split(packed, [array.size for array in arrays]) if arrays else ()
        # detach: a part that is a view would share version counters with all the others.
        parts = [
            piece.detach().view(array.shape)
            for piece, array in zip(pieces, arrays, strict=True)
        ]
        return packed, parts

    def finish(self, staged: StagedBatch) -> PersiaTrainingBatch:
        """Build the tensors, on the thread and the stream that will use them."""
        if staged.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(staged.event)
            for tensor in staged.uploaded:
                tensor.record_stream(stream)
        trains = staged.ticket is not None
        # The graph of a raw feature begins here, whatever the user's thread has switched off.
        with torch.set_grad_enabled(trains):
            embeddings, leaves = _build(staged, trains)
        names = tuple(output.name for output in staged.outputs)
        return PersiaTrainingBatch(
            staged.host, staged.batch_id, names, embeddings, leaves, staged.ticket
        )


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _build(staged: StagedBatch, trains: bool) -> tuple[list[torch.Tensor | Jagged], list[Leaf]]:
    """Return what the model receives, and the leaves behind it if there is a gradient."""
    embeddings: list[torch.Tensor | Jagged] = []
    leaves: list[Leaf] = []
    indices = iter(staged.indices)
    for output, values in zip(staged.outputs, staged.floats, strict=True):
        if isinstance(output, PooledOutput):
            leaf = Leaf(output.name, values.requires_grad_(trains))
            embeddings.append(values)
        elif isinstance(output, RawOutput):
            index = next(indices)
            picked = values.index_select(0, index).requires_grad_(trains)
            leaf = Leaf(output.name, picked, index, len(values), has_padding=True)
            embeddings.append(_with_mask(picked, index, output.sample_fixed_size))
        else:
            index, offsets = next(indices), next(indices)
            picked = values.index_select(0, index).requires_grad_(trains)
            leaf = Leaf(output.name, picked, index, len(values))
            embeddings.append(Jagged(picked, offsets))
        if trains:
            leaves.append(leaf)
    return embeddings, leaves


def _own(array: NDArray[Any]) -> torch.Tensor:
    """Wrap an array; torch keeps it alive. One that views received bytes is copied."""
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy(order="C")
    return torch.from_numpy(array)


def _with_mask(
    picked: torch.Tensor, index: torch.Tensor, sample_fixed_size: int
) -> torch.Tensor:
    """Return [B, fixed, dim + 1]; the last channel is 1 where there is an id."""
    shape = (-1, sample_fixed_size)
    if picked.shape[0] == 0:  # -1 cannot be inferred from nothing
        shape = (0, sample_fixed_size)
    mask = (index != 0).to(picked.dtype).view(*shape, 1)
    return torch.cat([picked.view(*shape, picked.shape[1]), mask], dim=2)
