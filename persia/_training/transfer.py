"""Copies of a batch's arrays to the host's torch memory and to the device.

Embeddings are f32 (the original's were f16 on every device). Dense tensors and labels keep
their dtype, bool included.

Two threads work on a batch. The dataset's thread copies dense data and labels while the
user's generator waits, so that a generator may refill its arrays for the next batch. A forward
worker then builds the tensors; for a CUDA device it packs the lookup into one pinned buffer
per dtype and starts the copies on a side stream, and the user's thread makes its own stream
wait for their event and builds the tensors there. Nothing synchronises the device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia._rpc.messages import JaggedOutput, PooledOutput, RawOutput
from persia._training.batch import HostBatch, Jagged, Leaf, PersiaTrainingBatch, StagedBatch
from persia.embedding.data import PersiaBatch
from persia.errors import DataTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import LookupResult, StreamedBatch
    from persia._training.inflight import InFlightBatch

logger = logging.getLogger(__name__)


class DeviceTransfer:
    """Brings batches to one device.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all batches: a stream per tensor costs more than it hides.
        self._stream = _new_stream(device)
        self._wide: set[str] = set()  # float64 arrays that a warning has named

    def copy(self, batch: PersiaBatch) -> HostBatch:
        """Copy what the user may overwrite; the ids are PERSIA's own already.

        Raises:
            DataTypeError: If the user's dataset yields something else than a PersiaBatch.
        """
        if not isinstance(batch, PersiaBatch):
            raise DataTypeError(
                f"expected the dataset to yield PersiaBatch, got {type(batch).__name__}"
            )
        return HostBatch(
            features=batch.features,
            dense=[
                self._copy("dense feature", item.name, item.data)
                for item in batch.non_id_type_features
            ],
            labels=[self._copy("label", item.name, item.data) for item in batch.labels],
            meta=batch.meta,
            batch_size=batch.batch_size,
            requires_grad=batch.requires_grad,
        )

    def copy_streamed(self, batch: StreamedBatch) -> HostBatch:
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
            batch_id=batch.batch_id,
        )

    def _copy(self, what: str, name: str, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.float64 and name not in self._wide:
            # A model may want float64, though it is mostly numpy's default and no choice;
            # torch's own error does not name the array.
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
        self, host: HostBatch, result: LookupResult, ticket: InFlightBatch | None
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
            return self._upload(host, result, floats, indices, ticket)
        return StagedBatch(
            host, host.dense, host.labels, result.outputs, _own(floats), _own(indices), ticket
        )

    def _upload(
        self,
        host: HostBatch,
        result: LookupResult,
        floats: list[NDArray[np.float32]],
        indices: list[NDArray[np.int64]],
        ticket: InFlightBatch | None,
    ) -> StagedBatch:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            packed_floats, float_parts = self._pack(floats, torch.float32)
            packed_indices, index_parts = self._pack(indices, torch.int64)
            dense = [item.to(self._device, non_blocking=True) for item in host.dense]
            labels = [item.to(self._device, non_blocking=True) for item in host.labels]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return StagedBatch(
            host,
            dense,
            labels,
            result.outputs,
            float_parts,
            index_parts,
            ticket,
            event,
            (packed_floats, packed_indices, *dense, *labels),
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
        if trains == torch.is_grad_enabled():
            return _build(staged, trains)
        # The graph of a raw feature begins here, whatever the user's thread has switched off.
        with torch.set_grad_enabled(trains):
            return _build(staged, trains)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _build(staged: StagedBatch, trains: bool) -> PersiaTrainingBatch:
    """Build what the model receives, and the leaves behind it if there is a gradient."""
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
    return PersiaTrainingBatch(staged, embeddings, leaves)


def _own(arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Wrap arrays; torch keeps them alive. Those that view received bytes are copied."""
    return [
        torch.from_numpy(
            array
            if array.flags.writeable and array.flags.c_contiguous
            else array.copy(order="C")
        )
        for array in arrays
    ]


def _with_mask(
    picked: torch.Tensor, index: torch.Tensor, sample_fixed_size: int
) -> torch.Tensor:
    """Return [B, fixed, dim + 1]; the last channel is 1 where there is an id."""
    shape = (-1, sample_fixed_size)
    if picked.shape[0] == 0:  # -1 cannot be inferred from nothing
        shape = (0, sample_fixed_size)
    mask = (index != 0).to(picked.dtype).view(*shape, 1)
    return torch.cat([picked.view(*shape, picked.shape[1]), mask], dim=2)
