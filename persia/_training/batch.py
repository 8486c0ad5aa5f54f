"""A batch in the trainer: its copies in the host's torch memory and on the device.

A feature has three kinds:

    feature   lookup               leaf (has the gradient)       what the model receives
    -------   ------------------   ---------------------------   --------------------------
    pooled    f32 [B, dim]         the same                      the same
    raw       f32 [D + 1, dim]     rows at index, [B * fixed,    [B, fixed, dim + 1]: the
              i64 [B * fixed]      dim]; row 0 is the padding    last channel is the mask
    jagged    f32 [D, dim]         rows at index, [N, dim]       Jagged(values, offsets)
              i64 [N], [B + 1]

Embeddings are f32 (the original's were f16 on every device). Dense tensors and labels keep
their dtype, bool included.

The dataset's thread copies dense data and labels while the user's generator waits, so that it
may refill its arrays for the next batch. A forward worker then builds the tensors; for a CUDA
device it packs the lookup into one pinned buffer per dtype and starts the copies on a side
stream, and the user's thread makes its own stream wait for their event and builds the tensors
there. Nothing synchronises the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np
import torch

from persia._rpc.messages import JaggedOutput, PooledOutput, RawOutput
from persia._training.inflight import InFlightBatch, Leaf
from persia.embedding.data import Label, NdarrayDataBase, NonIDTypeFeature, PersiaBatch
from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import SlotOutput, StreamedBatch

T = TypeVar("T")

# What arrays are called that were given no name.
_NO_NAMES = frozenset(x.DEFAULT_NAME for x in (NdarrayDataBase, NonIDTypeFeature, Label))


class NamedList(list[T]):
    """A list whose items can be asked by name too, as in ``embedding_tensors["user"]``.

    Attributes:
        names: One of each item, in their order; empty if they have none.
    """

    def __init__(self, items: Iterable[T] = (), names: Iterable[str] = ()) -> None:
        super().__init__(items)
        self.names = tuple(names)

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> list[T]: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> T | list[T]:
        """Return an item by its place or name.

        Raises:
            DataError: If none has that name.
        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        try:
            return super().__getitem__(self.names.index(key))
        except ValueError:
            got = (
                ", ".join(self.names)
                or "no names: give each its own by name= when a batch is made"
            )
            raise DataError(f"{key!r}: expected one of the batch's names, got {got}") from None

    if not TYPE_CHECKING:  # which knows that there is none

        def __getattr__(self, attribute: str) -> NoReturn:
            raise AttributeError(
                f"{attribute!r}: expected a tensor, got a list of {len(self)}; take one by its "
                "place or name, such as labels[0]"
            )


class Jagged(NamedTuple):
    """One vector per id, without padding: sample ``b`` owns rows offsets[b]:offsets[b+1]."""

    values: torch.Tensor  # f32 [N, dim]
    offsets: torch.Tensor  # i64 [B + 1]

    if not TYPE_CHECKING:  # type: ignore[misc]

        def __getattr__(self, attribute: str) -> NoReturn:
            raise AttributeError(
                f"{attribute!r}: expected a tensor, got the Jagged(values, offsets) of a slot "
                "with pooling 'jagged'; use its .values and .offsets"
            )


class Upload(NamedTuple):
    """What the user's thread builds a CUDA batch from, once it has the event."""

    outputs: Sequence[SlotOutput]
    floats: list[torch.Tensor]  # pooled values or rows, one per output
    indices: list[torch.Tensor]  # index, then offsets, of the outputs that have them
    event: torch.cuda.Event  # recorded behind the copies
    storages: tuple[torch.Tensor, ...]  # one per storage that the side stream allocated


class PersiaTrainingBatch:
    """One batch, ready for the model.

    Until its lookup it has no embeddings; ``InFlightBatch`` has its ids.

    Attributes:
        non_id_type_tensors: Dense tensors, by place or name.
        embedding_tensors: One entry per id feature, by place or name; the places are those of
            the first batch that was trained, and so in every batch the same.
        labels: Label tensors, by place or name, or None if the batch has none.
        meta: The bytes that the user attached, or None.
        batch_id: The data-loader's number, or a running one of the context, where batches
            without gradients have a series of their own.
        batch_size: Number of samples.
    """

    def __init__(
        self,
        dense: NamedList[torch.Tensor],
        labels: NamedList[torch.Tensor],
        meta: bytes | None,
        batch_size: int,
    ) -> None:
        self.non_id_type_tensors = dense
        self.embedding_tensors: NamedList[torch.Tensor | Jagged] = NamedList()
        self.labels: NamedList[torch.Tensor] | None = labels or None
        self.meta = meta
        self.batch_id = -1
        self.batch_size = batch_size
        self.absent: frozenset[str] = frozenset()  # features that are zeros in every sample
        self.single: frozenset[str] = frozenset()  # features declared with one id a sample
        self.missing_dense: tuple[str, ...] = ()  # it has none, and the model expects these
        self.leaves: list[Leaf] = []  # of the features with a gradient; empty in evaluation
        self.ticket: InFlightBatch | None = None  # from the lookup on; None in evaluation
        self.upload: Upload | None = None  # copies that are still under way

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the id features, in the order of ``embedding_tensors``."""
        return self.embedding_tensors.names

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


class DeviceTransfer:
    """Brings batches to the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all batches: a stream per tensor costs more than it hides.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, batch: PersiaBatch) -> PersiaTrainingBatch:
        """Copy what the user may overwrite; the ids are PERSIA's own already.

        Raises:
            DataTypeError: If the user's dataset yields something else than a PersiaBatch.
        """
        if not isinstance(batch, PersiaBatch):
            raise DataTypeError(
                f"expected the dataset to yield PersiaBatch, got {type(batch).__name__}; a "
                "torch DataLoader is read by persia.readers.TorchReader(loader, Columns(...))"
            )
        found = PersiaTrainingBatch(
            self._copy_all([(each.name, each.data) for each in batch.non_id_type_features]),
            self._copy_all([(each.name, each.data) for each in batch.labels]),
            batch.meta,
            batch.batch_size,
        )
        found.single = batch.single
        return found

    def copy_streamed(self, batch: StreamedBatch) -> PersiaTrainingBatch:
        """Copy what came in one message, so that its memory is not kept."""
        return PersiaTrainingBatch(
            self._copy_all([(each.name, each.array) for each in batch.non_id_type_features]),
            self._copy_all([(each.name, each.array) for each in batch.labels]),
            None if batch.meta is None else batch.meta.tobytes(),
            batch.batch_size,
        )

    def _copy_all(self, arrays: list[tuple[str, NDArray[Any]]]) -> NamedList[torch.Tensor]:
        names = tuple([name for name, _ in arrays])
        if len(set(names)) < len(names) or not _NO_NAMES.isdisjoint(names):
            names = ()
        return NamedList([self._copy(array) for _, array in arrays], names)

    def _copy(self, array: NDArray[Any]) -> torch.Tensor:
        if self._stream is None:
            return torch.from_numpy(np.array(array, order="C"))
        template = torch.from_numpy(np.empty(0, array.dtype))
        # This thread's device is 0 until it is set, which may be another rank's.
        with torch.cuda.device(self._device):
            pinned = torch.empty(array.shape, dtype=template.dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned

    def stage(self, batch: PersiaTrainingBatch, outputs: Sequence[SlotOutput]) -> None:
        """Give a batch its embeddings; on CUDA, start the copies that ``finish`` waits for."""
        floats: list[NDArray[np.float32]] = []
        indices: list[NDArray[np.int64]] = []
        for output in outputs:
            if isinstance(output, PooledOutput):
                floats.append(output.values)
                continue
            floats.append(output.rows)
            indices.append(output.index)
            if isinstance(output, JaggedOutput):
                indices.append(output.offsets)
        if self._stream is None:
            _build(batch, outputs, _own(floats), _own(indices))
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            packed_floats, float_parts = self._pack(floats, torch.float32)
            packed_indices, index_parts = self._pack(indices, torch.int64)
            dense, labels = self._move(batch.non_id_type_tensors), self._move(batch.labels)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        batch.non_id_type_tensors, batch.labels = dense, labels or None
        storages = packed_floats, packed_indices, *dense, *labels
        batch.upload = Upload(outputs, float_parts, index_parts, event, storages)

    def _move(self, tensors: NamedList[torch.Tensor] | None) -> NamedList[torch.Tensor]:
        """Start the copies of pinned tensors to the device."""
        if tensors is None:
            return NamedList()
        moved = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return NamedList(moved, tensors.names)

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
        # data: a view, detached or not, shares its version counter with all the others, and a
        # model that changes one embedding in place could not run backward for the rest.
        parts = [
            piece.view(array.shape).data for piece, array in zip(pieces, arrays, strict=True)
        ]
        return packed, parts

    def finish(self, batch: PersiaTrainingBatch) -> None:
        """Build the tensors of a CUDA batch, on the thread and stream that will use them."""
        upload, batch.upload = batch.upload, None
        if upload is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(upload.event)
        for tensor in upload.storages:
            tensor.record_stream(stream)
        _build(batch, upload.outputs, upload.floats, upload.indices)


def _build(
    batch: PersiaTrainingBatch,
    outputs: Sequence[SlotOutput],
    floats: list[torch.Tensor],
    indices: list[torch.Tensor],
) -> None:
    """Build what the model receives, and the leaves behind it if there is a gradient."""
    trains = batch.ticket is not None
    if trains != torch.is_grad_enabled():
        # The graph of a raw feature begins here, whatever this thread has switched off.
        with torch.set_grad_enabled(trains):
            _build(batch, outputs, floats, indices)
        return
    embeddings: list[torch.Tensor | Jagged] = []
    parts = iter(indices)
    for output, values in zip(outputs, floats, strict=True):
        embedding: torch.Tensor | Jagged
        if isinstance(output, PooledOutput):
            leaf = Leaf(output.name, values.requires_grad_(trains))
            embedding = values
        else:
            index = next(parts)
            picked = values.index_select(0, index).requires_grad_(trains)
            is_raw = isinstance(output, RawOutput)
            leaf = Leaf(output.name, picked, index, len(values), has_padding=is_raw)
            if isinstance(output, RawOutput):
                embedding = _with_mask(picked, index, output.sample_fixed_size)
            else:
                embedding = Jagged(picked, next(parts))
        embeddings.append(embedding)
        if trains and output.name not in batch.absent:
            batch.leaves.append(leaf)
    names = [output.name for output in outputs]
    batch.embedding_tensors = NamedList(embeddings, names)


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
    num_samples = len(index) // sample_fixed_size
    shape = num_samples, sample_fixed_size
    mask = (index != 0).to(picked.dtype).view(*shape, 1)
    return torch.cat([picked.view(*shape, picked.shape[1]), mask], dim=2)
