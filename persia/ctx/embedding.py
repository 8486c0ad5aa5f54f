"""The context that looks embeddings up, dumps and loads them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from persia import env
from persia._training import checkpoint, error_hints
from persia._training.batch import DeviceTransfer, PersiaTrainingBatch
from persia._training.forward import DatasetSource, ForwardPipeline
from persia._training.inflight import InFlightBatch, Reason, count_done
from persia._training.receiver import StreamSource, check_room
from persia.ctx.base import PreprocessMode, usable_device
from persia.ctx.connected import ConnectedCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError, DataTypeError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.batch import Jagged
    from persia._training.forward import PassOptions, Source
    from persia._training.inflight import Plain
    from persia._training.ranks import Ranks
    from persia.config import ConfigSource
    from persia.ctx.connection import Connection

    Features = tuple[list[torch.Tensor], list[torch.Tensor | Jagged], list[torch.Tensor] | None]

logger = logging.getLogger("persia.ctx")


class EmbeddingCtx(ConnectedCtx):
    """Looks embeddings up for the batches of a model.

    In EVAL and INFERENCE mode a context that is entered inside another one reads the outer
    one's embeddings, unless it is given an embedding config or worker of its own. It
    configures nothing, and its lookups see every update before them.

    Args:
        preprocess_mode: What batches are for.
        model: Called as ``model(non_id_type_tensors, embedding_tensors)``.
        embedding_config: ``EmbeddingConfig``, or the slots as a mapping or the path of a
            YAML file. Without slots, ``PERSIA_EMBEDDING_CONFIG`` names the file.
        threadpool_worker_size: Kept for scripts of the original.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.
        global_config: Settings of the servers, as a mapping or the path of a YAML file;
            None reads the file named by ``PERSIA_GLOBAL_CONFIG``, if any.
        embedding_worker: Use this one instead of building servers, such as another
            context's ``embedding_worker``.

    Attributes:
        model: As given.
        embedding_config: What servers are configured with on entering TrainCtx.
        preprocess_mode: As given.
        current_batch: The batch prepared last.

    Raises:
        ConfigError: If a setting cannot be used.
    """

    __module__ = "persia.ctx"

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: Any = None,
        embedding_config: EmbeddingConfig | ConfigSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
    ) -> None:
        super().__init__(
            preprocess_mode,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config,
            embedding_worker,
        )
        self.model = model
        self.current_batch: PersiaTrainingBatch | None = None
        self._output: error_hints.Form | None = None  # of its forward, until its backward
        self._passes: list[weakref.ref[ForwardPipeline]] = []  # may still have threads
        self._transfers: dict[int | None, DeviceTransfer] = {}  # by device
        # Batches with gradients that were prepared and may take part in the next backward,
        # in that order, by id(). Weak, or a loop without backward would fill the memory.
        self._prepared: weakref.WeakValueDictionary[int, PersiaTrainingBatch] = (
            weakref.WeakValueDictionary()
        )
        self._kept: list[PersiaTrainingBatch] = []  # strong references to those of ``keep``
        self._ranks: Ranks | None = None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if exc is not None and self._output is not None and self.current_batch is not None:
            error_hints.explain_loss(exc, self.current_batch, self._output)
        return super().__exit__(exc_type, exc, traceback)

    def _finish(self) -> None:
        """Release what has no update, and wait for dumps and loads in the background."""
        tracker = self._own_tracker()
        prepared = list(self._prepared.values())
        self._prepared.clear()
        self._kept.clear()
        self.current_batch = None
        passes, self._passes = self._passes, []
        for reference in passes:
            one = reference()
            if one is not None:
                one.close()
        for batch in prepared:
            if batch.ticket is not None:
                tracker.release(batch.ticket, Reason.ABANDONED)
        tracker.release_orphans()
        self._checkpoints.wait_for_dump()
        self._checkpoints.wait_for_load()

    # --- what a loader needs ----------------------------------------------------------------

    def open_pass(
        self, dataset: Iterable[PersiaBatch] | None, options: PassOptions
    ) -> ForwardPipeline:
        """Prepare the pipeline of one pass over a dataset; for ``DataLoader``.

        Args:
            dataset: None takes what data-loaders send.
            options: How it runs.

        Raises:
            ConfigError: If no data-loader can send anything, or the embedding-workers have no
                room for what they would.
            BaseException: What an update of the last pass raised, or a load in the background.
        """
        connection = self._connected()
        self.wait_for_load_embedding()
        connection.flush()  # no lookup of this pass may overtake an update of the last one
        transfer = self._transfer(self.device_id)
        kind = "stream" if dataset is None else "dataset"
        resumed = self._progress.resumed(kind) if self._trains else None
        source: Source
        if dataset is None:
            source = self._stream_source(connection, transfer, options, resumed)
        else:
            source = DatasetSource(dataset, transfer, options.input_capacity, resumed)
        num_resumed = 0 if resumed is None else count_done(resumed)
        if num_resumed:
            logger.info(
                "this pass begins behind batch %d, where the checkpoint was made", num_resumed
            )
        pipeline = ForwardPipeline(
            source,
            self._lookups,
            transfer,
            options,
            ranks=self._ranks,
            num_resumed=num_resumed,
        )
        self._passes = [one for one in self._passes if one() is not None]
        self._passes.append(weakref.ref(pipeline))
        return pipeline

    def _stream_source(
        self,
        connection: Connection,
        transfer: DeviceTransfer,
        options: PassOptions,
        resumed: Plain | None,
    ) -> StreamSource:
        world_size = env.get_world_size() or 1
        is_open = connection.stream is not None
        if is_open and resumed is not None:
            logger.warning(
                "data-loaders continue where they are: this process has read from them before "
                "it loaded a checkpoint"
            )
        if not is_open and (options.reproducible or world_size > 1):
            in_flight = options.output_capacity + options.num_workers
            if self._trains and options.staleness is not None:
                in_flight = options.staleness
            check_room(connection.worker, world_size, options.input_capacity, in_flight)
        self._owns_stream |= not is_open
        stream = connection.open_stream(options.input_capacity, resumed)
        return StreamSource(stream, transfer, options.reproducible)

    def _transfer(self, device_id: int | None) -> DeviceTransfer:
        if device_id not in self._transfers:
            self._transfers[device_id] = DeviceTransfer(torch_device(device_id))
        return self._transfers[device_id]

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what surrounds a pass in which ranks may have unequal numbers of batches."""
        return contextlib.nullcontext()

    def forget_output(self) -> None:
        """Forget the last output: errors from now on do not come from its batch."""
        self._output = None

    # --- batches ----------------------------------------------------------------------------

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output for a batch, and the batch's labels.

        Raises:
            ConfigError: If the context has no model.
        """
        model = self.model
        if model is None:
            raise ConfigError(f"{type(self).__name__}.forward needs model=, got None")
        if not self._trains:
            # A data-parallel wrapper communicates with other ranks, which may not evaluate now.
            model = checkpoint.unwrap(model)
        non_id_type_tensors, embedding_tensors, labels = self.prepare_features(batch)
        self._output = None
        try:
            output = model(non_id_type_tensors, embedding_tensors)
        except Exception as error:
            error_hints.explain_model(error, batch, self._slot_names)
            raise
        self._output = error_hints.form_of(output)
        return output, labels

    def prepare_features(self, batch: PersiaTrainingBatch) -> Features:
        """Return dense tensors, embeddings in the order of the features, and labels.

        Labels are None if the batch has none, and in INFERENCE mode.
        """
        if not isinstance(batch, PersiaTrainingBatch):
            raise DataTypeError(
                "expected a batch with its embeddings, as DataLoader or "
                f"get_embedding_from_data gives it, got {type(batch).__name__}"
            )
        self.current_batch = batch
        if batch.ticket is not None:
            self._prepared[id(batch)] = batch
        return prepare_feature(batch, self.preprocess_mode)

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Look one batch up now, outside any loader and its staleness bound.

        Args:
            persia_batch: The batch. In TRAIN mode with ``requires_grad`` it can take one
                backward; it is released when it is dropped without, unless ``TrainCtx.keep``
                holds it.
            device_id: Where the tensors go; None is the context's device, below 0 the CPU.
        """
        device = self.device_id if device_id is None else usable_device(device_id)
        tracker = self._own_tracker()
        tracker.release_orphans()
        transfer = self._transfer(device)
        batch = transfer.copy(persia_batch)
        ticket = InFlightBatch(
            features=persia_batch.features,
            requires_grad=persia_batch.requires_grad,
            num_samples=persia_batch.batch_size,
        )
        if not self._lookups.has_gradients(ticket):
            self._connected().flush()
        self._lookups.number(ticket)
        outputs = self._lookups.lookup(batch, ticket)
        try:
            transfer.stage(batch, outputs)
            transfer.finish(batch)
        except BaseException:
            if batch.ticket is not None:
                tracker.release(batch.ticket, Reason.UNUSED)
            raise
        if batch.ticket is not None:
            # A finalizer runs inside any allocation: it may append, but not take a lock.
            finalizer = weakref.finalize(batch, tracker.orphans.append, ticket)
            finalizer.atexit = False
        return batch

    def get_embedding_from_bytes(
        self, data: bytes, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Look up a batch that ``PersiaBatch.to_bytes`` wrote.

        Raises:
            DataError: If these are no such bytes.
        """
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)

    # --- checkpoints ------------------------------------------------------------------------

    def dump_checkpoint(
        self,
        dst_dir: str | os.PathLike[str],
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        *,
        keep_last: int = 1,
    ) -> None:
        """Write the embeddings and the model, all of one moment.

        The folder holds one checkpoint afterwards, in place of the one before, which is there
        until the new one is. Every server writes its share itself, so the folder must be the
        same for all of them: shared between machines, or an object store.

        Args:
            dst_dir: Folder, or a URL that fsspec knows, such as ``s3://bucket/folder``.
            dense_filename: Name of the model's state dict.
            jit_dense_filename: Name of the scripted model.
            blocking: Wait until the checkpoint is there. Otherwise this returns as soon as
                its moment has passed; ``wait_for_dump_embedding`` waits, and raises what went
                wrong, as does leaving the context.
            with_jit_model: Write the model as TorchScript too, for serving.
            keep_last: How many checkpoints of this folder to keep.

        Raises:
            CheckpointError: If a file cannot be written, or there is nothing to write.
            ConfigError: If the context has no model.
            ServiceError: If a server is gone.
        """
        jit = jit_dense_filename if with_jit_model else None
        self._dump(dst_dir, {dense_filename: self._own_model()}, jit, blocking, keep_last)

    def load_checkpoint(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
        *,
        features: Iterable[str] | None = None,
    ) -> None:
        """Load embeddings and model, in place of those held, if all of it can be loaded.

        Everything is read and checked before anything changes. The number of servers may be
        another than when it was written, and so may the order of features and groups in the
        embedding config: rows are found by the features' names.

        Args:
            src_dir: Folder or URL; its latest checkpoint.
            map_location: As of ``torch.load``.
            dense_filename: Name of the model's state dict.
            blocking: Wait until the embeddings are there; if not, call
                ``wait_for_load_embedding`` before they are used.
            features: Load the rows of these only, and keep all others.

        Raises:
            CheckpointError: If there is no checkpoint, or a file of it is damaged or does not
                fit; nothing has changed.
            ConfigError: In the middle of a pass over a ``DataLoader``.
            ServiceError: If a server is gone.
        """
        dense = {dense_filename: self._own_model()}
        self._load(src_dir, map_location, dense, blocking, features)

    def dump_embedding(
        self, dst_dir: str | os.PathLike[str], blocking: bool = True, *, keep_last: int = 1
    ) -> None:
        """Write the embeddings alone; otherwise as ``dump_checkpoint``."""
        self._dump(dst_dir, {}, None, blocking, keep_last)

    def load_embedding(
        self,
        src_dir: str | os.PathLike[str],
        blocking: bool = True,
        *,
        features: Iterable[str] | None = None,
    ) -> None:
        """Load the embeddings alone; otherwise as ``load_checkpoint``."""
        self._load(src_dir, None, {}, blocking, features)

    def wait_for_dump_embedding(self) -> None:
        """Wait for a dump with ``blocking=False``; raise what it raised, once."""
        self._connected()
        self._checkpoints.wait_for_dump()

    def wait_for_load_embedding(self) -> None:
        """Wait for a load with ``blocking=False``; raise what it raised, once."""
        self._connected()
        self._checkpoints.wait_for_load()

    def _own_model(self) -> Any:
        if self.model is None:
            raise ConfigError(
                f"{type(self).__name__}: a checkpoint has a model, and model= is None; "
                "dump_embedding and load_embedding do without"
            )
        return self.model

    def _dump(
        self,
        dst_dir: str | os.PathLike[str],
        dense: Mapping[str, Any],
        jit_filename: str | None,
        blocking: bool,
        keep_last: int,
    ) -> None:
        self._connected()
        to_script = {} if jit_filename is None else {jit_filename: self.model}
        self._checkpoints.dump(
            dst_dir,
            dense,
            to_script,
            self._trainer_state,
            blocking=blocking,
            keep_last=keep_last,
        )

    def _trainer_state(self, others: list[Plain]) -> Plain | None:
        """Return what a checkpoint keeps beside the model, to continue from it."""
        return None

    def _load(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any,
        dense: Mapping[str, Any],
        blocking: bool,
        features: Iterable[str] | None,
    ) -> None:
        self._connected()
        for reference in self._passes:
            one = reference()
            if one is not None and not one.is_closed:
                raise ConfigError(
                    "a checkpoint is loaded between two passes over a DataLoader, not in the "
                    "middle of one: what was looked up ahead would be of the rows before"
                )
        trainer = self._checkpoints.load(
            src_dir,
            map_location,
            dense,
            blocking=blocking,
            features=features,
            ranks=self._ranks,
        )
        if trainer is not None:
            self._resume(trainer)

    def _resume(self, trainer: Plain) -> None:
        """Continue where the checkpoint was made; TrainCtx does."""

    def dump_torch_state_dict(
        self,
        torch_instance: Any,
        dst_dir: str | os.PathLike[str],
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Write the state dict of a model or optimizer, or with ``is_jit`` a scripted model.

        A data-parallel wrapper is left out. The file appears whole or not at all.

        Raises:
            CheckpointError: If it cannot be written.
        """
        checkpoint.save_dense(torch_instance, dst_dir, file_name, is_jit)

    def load_torch_state_dict(
        self,
        torch_instance: Any,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
    ) -> None:
        """Load a state dict into a model or optimizer.

        Args:
            torch_instance: What receives it.
            src_dir: Path of the file; the name is the original's.
            map_location: As of ``torch.load``.

        Raises:
            CheckpointError: If the file is missing, unreadable, or does not fit.
        """
        checkpoint.load_dense(torch_instance, src_dir, map_location)


def eval_ctx(
    model: Any = None,
    embedding_config: EmbeddingConfig | ConfigSource | None = None,
    threadpool_worker_size: int = 10,
    device_id: int | None = None,
    *,
    global_config: ConfigSource | None = None,
    embedding_worker: EmbeddingWorker | None = None,
) -> EmbeddingCtx:
    """Return an ``EmbeddingCtx`` in EVAL mode; the arguments are its own."""
    return EmbeddingCtx(
        PreprocessMode.EVAL,
        model,
        embedding_config,
        threadpool_worker_size,
        device_id,
        global_config=global_config,
        embedding_worker=embedding_worker,
    )


eval_ctx.__module__ = "persia.ctx"


def prepare_feature(batch: PersiaTrainingBatch, preprocess_mode: PreprocessMode) -> Features:
    """Return what a model is called with, and the labels unless in INFERENCE mode."""
    labels = None if preprocess_mode is PreprocessMode.INFERENCE else batch.labels
    return batch.non_id_type_tensors, batch.embedding_tensors, labels


def torch_device(device_id: int | None) -> torch.device:
    """Return the CPU for None, and otherwise the CUDA device."""
    return torch.device("cpu") if device_id is None else torch.device("cuda", device_id)
