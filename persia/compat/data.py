"""The batch of 2021, which was filled piece by piece, and the datasets and loaders of then."""

from __future__ import annotations

import threading
from abc import abstractmethod
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from persia._training.queues import BoundedQueue, Closed, Finished
from persia.data import AUTO, DataLoader, IterableDataset, IterableDatasetBase
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

__all__ = ["Dataloader", "PersiaDataset", "PyPersiaBatchData", "Sender"]

# Seconds in which ``fetch_data`` ends once its batches are not read any more.
LEAVE_S = 5.0


class PyPersiaBatchData(PersiaBatch):
    """A ``PersiaBatch`` that begins empty.

    Each piece is checked as it is added; that they fit together, when the batch is first used.
    Dense features and labels are [B, n], of f32 unless the method's name says another dtype.

    Example:
        >>> import numpy as np
        >>> batch = PyPersiaBatchData()
        >>> batch.add_sparse([("item", [np.array([7], np.uint64), np.array([], np.uint64)])])
        >>> batch.add_target(np.ones((2, 1), np.float32))
        >>> batch.batch_size
        2
    """

    def __init__(self) -> None:
        self._ids: list[IDTypeFeature | IDTypeFeatureWithSingleID] = []
        self._arrays: list[NonIDTypeFeature] = []
        self._targets: list[Label] = []
        self._bytes: bytes | None = None
        self._wants_grad: bool | None = None

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there: the parts of a whole batch, until it is made one.
        if name not in _WHOLE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        wants_grad = bool(self._targets) if self._wants_grad is None else self._wants_grad
        whole = PersiaBatch(
            self._ids, self._arrays, self._targets, None, wants_grad, self._bytes
        )
        self.__dict__.update(vars(whole))
        return getattr(self, name)

    def _add(self, pieces: list[Any], *added: Any) -> None:
        pieces += added
        for name in _WHOLE:
            self.__dict__.pop(name, None)  # what was whole is no more

    # --- the names of July 2021 -----------------------------------------------------------

    def _add_matrix(
        self, data: Any, dtype: DTypeLike = np.float32, name: str | None = None
    ) -> None:
        self._add(self._arrays, NonIDTypeFeature(_matrix(name or "dense", data, dtype), name))

    add_dense_f32 = partialmethod(_add_matrix, dtype=np.float32)
    add_dense_f64 = partialmethod(_add_matrix, dtype=np.float64)
    add_dense_i32 = partialmethod(_add_matrix, dtype=np.int32)
    add_dense_i64 = partialmethod(_add_matrix, dtype=np.int64)

    def add_dense(self, data: Iterable[NDArray[np.float32]]) -> None:
        """Add dense features."""
        for array in data:
            self._add_matrix(array)

    def add_map_dense(self, name: str, data: NDArray[np.float32]) -> None:
        """Add a dense feature with a name."""
        self._add_matrix(data, name=name)

    def add_sparse(
        self,
        data: Iterable[tuple[str, Sequence[NDArray[np.uint64]]]],
        requires_grad: bool | None = None,
    ) -> None:
        """Add id features, each a name and one array u64 per sample.

        ``requires_grad`` None trains embeddings if the batch has a label.
        """
        for name, samples in data:
            self.add_id_type_feature(samples, name)
        self._wants_grad = self._wants_grad if requires_grad is None else requires_grad

    def add_target(self, data: NDArray[np.float32]) -> None:
        """Add a label; once for each."""
        self._add(self._targets, Label(_matrix("target", data, np.float32)))

    def add_map_sparse(self, name: str, data: NDArray[np.uint64], offset: NDArray[Any]) -> None:
        """Add an id feature as ids u64 [N] and where each sample begins among them [B + 1]."""
        self._add(self._ids, IDTypeFeature.from_csr(name, data, offset))

    def add_meta(self, data: bytes) -> None:
        """Add bytes that travel along."""
        if not isinstance(data, bytes):
            raise DataTypeError(f"meta: expected bytes, got {type(data).__name__}")
        self._bytes = data
        self._add([])

    # --- those of November ----------------------------------------------------------------

    def add_non_id_type_feature(
        self,
        data: NDArray[Any] | Sequence[NDArray[Any]],
        dtype: DTypeLike | None = None,
        name: str | None = None,
    ) -> None:
        """Add a dense feature [B, ...] (the tutorial's spelling), or a list (the API's)."""
        for array in [data] if isinstance(data, np.ndarray) else data:
            self._add(self._arrays, NonIDTypeFeature(_of_dtype("", array, dtype), name))

    add_non_id_type_features = add_non_id_type_feature
    add_non_id_type_features_f32 = add_dense_f32
    add_non_id_type_features_f64 = add_dense_f64
    add_non_id_type_features_i32 = add_dense_i32
    add_non_id_type_features_i64 = add_dense_i64
    add_id_type_features = add_sparse

    def add_id_type_feature(self, data: Sequence[NDArray[np.uint64]], name: str) -> None:
        """Add an id feature: one array u64 per sample."""
        self._add(self._ids, IDTypeFeature(name, data))

    def add_id_type_feature_with_single_id(self, data: NDArray[np.uint64], name: str) -> None:
        """Add an id feature u64 [B]."""
        self._add(self._ids, IDTypeFeatureWithSingleID(name, data))

    def add_label(
        self, data: NDArray[Any], dtype: DTypeLike | None = None, name: str | None = None
    ) -> None:
        """Add a label [B, ...]."""
        self._add(self._targets, Label(_of_dtype("", data, dtype), name))

    def converted_id_type_features2embedding_tensor(self, requires_grad: bool = True) -> None:
        """Say whether embeddings are trained by this batch."""
        self._wants_grad = requires_grad
        self._add([])


# What a PersiaBatch consists of, as soon as it is whole.
_WHOLE = ("features", "_dense", "_labels", "_batch_size", "_requires_grad", "_meta", "batch_id")


def _of_dtype(what: str, data: Any, dtype: DTypeLike | None) -> Any:
    is_array = hasattr(data, "dtype")
    got = data.dtype if is_array else type(data).__name__
    if dtype is not None and not (is_array and got == np.dtype(dtype)):
        raise DataTypeError(f"{what}expected an array of {np.dtype(dtype)}, got {got}")
    return data


def _matrix(what: str, data: Any, dtype: DTypeLike) -> Any:
    _of_dtype(f"{what}: ", data, dtype)
    if data.ndim != 2:
        raise DataError(f"{what}: expected 2 dimensions, got {data.ndim}; reshape(-1, 1)?")
    return data


class Sender:
    """Where ``PersiaDataset.fetch_data`` puts its batches."""

    def __init__(self, channel: BoundedQueue[PersiaBatch]) -> None:
        self._channel = channel

    def send(self, batch: PersiaBatch) -> None:
        """Send one batch; it is copied, so its arrays may be reused."""
        self._channel.put(PersiaBatch.from_bytes(batch.to_bytes()))


class PersiaDataset(IterableDataset):
    """A dataset that sends its batches: subclass it and write ``fetch_data``.

    ``async_iterator`` is without effect: batches are always read ahead.
    """

    def __init__(self, buffer_size: int = 10, async_iterator: bool = True) -> None:
        super().__init__(buffer_size)

    @abstractmethod
    def fetch_data(self, persia_sender_channel: Sender) -> None:
        """Send the batches of one epoch."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield what ``fetch_data`` sends, which runs in a thread of its own."""
        channel: BoundedQueue[PersiaBatch] = BoundedQueue(1)

        def fetch() -> None:
            try:
                self.fetch_data(Sender(channel))
                channel.finish()
            except Closed:
                pass
            except BaseException as exc:
                channel.finish(exc)

        thread = threading.Thread(target=fetch, name="persia-fetch-data", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    batch = channel.get()
                except Finished:
                    break
                yield batch
            if channel.failure is not None:
                raise channel.failure
        finally:
            channel.close()
            thread.join(LEAVE_S)


class Dataloader(DataLoader):
    """A ``DataLoader`` with ``is_training``, which is without effect, and ``timeout``."""

    def __init__(
        self,
        dataset: IterableDatasetBase | Iterable[PersiaBatch],
        forward_buffer_size: int = 10,
        is_training: bool = True,
        timeout: int | None = None,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | Literal["auto"] | None = AUTO,
        *,
        timeout_ms: int = 1000 * 60 * 10,
        **options: Any,
    ) -> None:
        super().__init__(
            dataset,
            forward_buffer_size,
            timeout_ms if timeout is None else timeout,
            num_workers,
            reproducible,
            embedding_staleness,
            **options,
        )
