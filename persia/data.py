"""Datasets, and the loader that turns their batches into tensors with embeddings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sized
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from persia import _context_stack, env
from persia._deprecated import names_of
from persia.errors import ConfigError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from persia._training.batch import PersiaTrainingBatch
    from persia._training.forward import ForwardPipeline
    from persia.embedding.data import PersiaBatch

__all__ = ["DataLoader", "IterableDataset", "IterableDatasetBase", "StreamingDataset"]

logger = logging.getLogger(__name__)

# As few batches in flight as cost no time.
AUTO: Literal["auto"] = "auto"

if not TYPE_CHECKING:  # where any name would be taken for one
    __getattr__ = names_of(__name__)


class IterableDatasetBase(ABC):
    """What a ``DataLoader`` iterates; ``buffer_size`` batches are read ahead of the lookups."""

    buffer_size: int = 10

    def __init__(self, buffer_size: int = 10) -> None:
        if buffer_size < 1:
            raise ConfigError(f"buffer_size must be at least 1, got {buffer_size}")
        self.buffer_size = buffer_size

    @abstractmethod
    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one epoch."""


class IterableDataset(IterableDatasetBase):
    """A dataset in this process: subclass it and yield batches.

    ``__iter__`` runs in a thread of its own, once per epoch. A batch is copied while the
    generator stands still, so its arrays may be refilled for the next one.

    Example:
        >>> class Clicks(IterableDataset):
        ...     def __init__(self, batches):
        ...         super().__init__(buffer_size=20)
        ...         self.batches = batches
        ...
        ...     def __iter__(self):
        ...         yield from self.batches
        ...
        ...     def iter_from(self, first):  # optional: continue without reading all before
        ...         yield from self.batches[first:]
    """

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        """Yield the batches of one epoch from number ``first`` on, to continue a run.

        Override it where the data can be sought; this reads what comes before as well.
        """
        yield from itertools.islice(self, first, None)


class StreamingDataset(IterableDatasetBase):
    """Batches that data-loader processes send by ``DataCtx``.

    A pass ends when every data-loader has left its ``DataCtx``, or called its ``end_epoch``;
    what they send then is the next pass. In embedded mode a pass runs the data-loader's script
    in a child process, unless it still runs: ``PERSIA_DATALOADER_ENTRY``, or
    ``data_loader.py`` beside the main script.

    Args:
        buffer_size: Batches held for each rank, of all data-loaders; each may have one there.
    """

    def __init__(self, buffer_size: int = 10) -> None:
        super().__init__(buffer_size)
        if env.get_mode() == "embedded":
            from persia.ctx.connection import data_loader_script  # loads torch

            data_loader_script()

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Refuse: streams are read by the loader only."""
        raise NotImplementedError("a StreamingDataset is read by DataLoader, not iterated")


class _Numbered(IterableDataset):
    """Batches that are had by number, as those of torch's map-style datasets.

    Python iterates such an object until an IndexError, which they do not raise.
    """

    def __init__(self, batches: Any) -> None:
        super().__init__(getattr(batches, "buffer_size", 10))
        self._batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[PersiaBatch]:
        for number in range(first, len(self._batches)):
            yield self._batches[number]


def _check_staleness(value: Any) -> None:
    is_number = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
    if value is not None and value != AUTO and not is_number:
        raise ConfigError(
            "embedding_staleness must be a whole number, at least 1, 'auto' or None, got "
            f"{value!r:.80}"
        )


class DataLoader:
    """Iterates a dataset inside a context, with embeddings looked up ahead.

    Each pass begins at the first batch and ends the one before it, which then raises. An
    exception in the dataset is raised in the loop after the batches before it, one in a lookup
    at once.

    A batch that had no backward when the next one is asked for is released and counted as
    abandoned (``ctx.stats()``), unless ``ctx.keep`` holds it.

    Args:
        dataset: An ``IterableDataset``, or any iterable of ``PersiaBatch``. One that has only
            ``__getitem__`` and ``__len__`` is read by number, once in their order.
        forward_buffer_size: Batches looked up ahead of the loop.
        timeout_ms: How long the loop waits for a batch, in milliseconds.
        num_workers: Lookups at the same time.
        reproducible: Look up and update by a schedule that repeats, so that two runs give the
            same bits; with several ranks only at a staleness of 1.
        embedding_staleness: Most batches between lookup and acknowledged update: a lookup
            misses one update fewer at most, those of other ranks apart. 1 is as synchronous
            as torch. ``"auto"`` is as few as cost no time, 10 at most, beginning with 1; with
            ``reproducible`` it is 1. None is no bound but that of all buffers together.
        drop_last: With several ranks, what happens when one of them has no batch for a round:
            True ends the pass for all and counts what the others had as ``incomplete``; False
            lets them go on alone, by torch's ``Join``; not with ``reproducible``.
        allow_untrained: Without it a pass is a DataError in which no batch came, in any
            context, or in which batches came and no row was trained: none had a backward,
            none of the backwards reached an embedding, or all gradients since the context was
            made, in 10 steps or more, were zero.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase | Iterable[PersiaBatch],
        forward_buffer_size: int = 10,
        timeout_ms: int = 1000 * 60 * 10,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | Literal["auto"] | None = AUTO,
        *,
        drop_last: bool = True,
        allow_untrained: bool = False,
    ) -> None:
        for name, value in (
            ("forward_buffer_size", forward_buffer_size),
            ("timeout_ms", timeout_ms),
            ("num_workers", num_workers),
        ):
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ConfigError(f"{name} must be a whole number, at least 1, got {value!r}")
        _check_staleness(embedding_staleness)
        if reproducible and embedding_staleness is None:
            logger.info(
                "reproducible=True alone keeps the order of lookups and updates; for runs with "
                "the same bits it needs a bound, such as embedding_staleness=1; it is None"
            )
        is_iterable = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
        if not is_iterable or isinstance(dataset, type | str):
            todo = "call it, and give what it returns"
            if not callable(dataset):
                is_path = isinstance(dataset, str)
                todo = "persia.readers read files" if is_path else "give a dataset"
            raise DataTypeError(
                "DataLoader: expected an IterableDataset or an iterable of PersiaBatch, got "
                f"{getattr(dataset, '__name__', None) or type(dataset).__name__}; {todo}"
            )
        self.dataset = dataset
        self.forward_buffer_size = forward_buffer_size
        self.timeout_ms = timeout_ms
        self.num_workers = num_workers
        self.reproducible = reproducible
        self.embedding_staleness = embedding_staleness
        self.drop_last = drop_last
        self.allow_untrained = allow_untrained
        # Weak: a loader that outlives its context must not keep the rows of the servers.
        self._epoch: weakref.ref[ForwardPipeline] | None = None

    def __len__(self) -> int:
        """Return how many batches a whole pass has, where the dataset knows it.

        Raises:
            TypeError: If it does not.
        """
        if not isinstance(self.dataset, Sized):
            raise TypeError(
                f"this DataLoader has no len: its {type(self.dataset).__name__} has none"
            )
        return len(self.dataset)

    def __bool__(self) -> bool:
        """Return True: a loader without a len can be asked for all the same."""
        return True

    def __iter__(self) -> Iterator[PersiaTrainingBatch]:
        """Start one pass, in the mode of the current context."""
        # Here, as they load torch: a data-loader's script imports its dataset without it.
        from persia._training.forward import PassOptions
        from persia._training.staleness import MOST
        from persia.ctx.embedding import EmbeddingCtx, batches_of

        ctx = _context_stack.current()
        if not isinstance(ctx, EmbeddingCtx):
            what = (
                "there is none" if ctx is None else f"the current one is {type(ctx).__name__}"
            )
            raise ConfigError(
                "a DataLoader is iterated inside a context, such as `with TrainCtx(...)`; "
                f"{what}"
            )
        last = None if self._epoch is None else self._epoch()
        if last is not None:
            last.close()
        joining: AbstractContextManager[Any] = contextlib.nullcontext()
        if not self.drop_last:
            joining = ctx.join_ranks(reproducible=self.reproducible)
        dataset: Any = self.dataset
        if not hasattr(dataset, "__iter__") and isinstance(dataset, Sized):
            dataset = _Numbered(dataset)
        epoch = ctx.open_pass(
            None if isinstance(dataset, StreamingDataset) else dataset,
            PassOptions(
                input_capacity=getattr(dataset, "buffer_size", 10),
                output_capacity=self.forward_buffer_size,
                num_workers=self.num_workers,
                reproducible=self.reproducible,
                staleness=MOST
                if self.embedding_staleness == AUTO
                else self.embedding_staleness,
                is_adaptive=self.embedding_staleness == AUTO,
                timeout_s=self.timeout_ms / 1000,
                keeps_step=self.drop_last,
                allow_untrained=self.allow_untrained,
            ),
        )
        self._epoch = weakref.ref(epoch)
        return batches_of(epoch, joining, weakref.ref(ctx))
