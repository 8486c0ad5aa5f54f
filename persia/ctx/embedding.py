"""The context that looks embeddings up, dumps and loads them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from persia import _context_stack, env
from persia._metrics import roles
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import Metrics
from persia._process_exit import note_part
from persia._rpc.deadlines import within
from persia.ctx.base import BaseCtx, PreprocessMode
from persia.ctx.connection import embeddings_of
from persia.ctx.devices import torch_device, usable_device
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.data import PersiaBatch
from persia.errors import (
    CheckpointError,
    ConfigError,
    DataTypeError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch

    from persia._metrics.registry import Source as MetricSource
    from persia._metrics.top_view import Frame, View
    from persia._report.metrics import TrainingMetrics
    from persia._rpc.messages import EmbeddingWorker, OptimizerSettings
    from persia._rpc.worker_pool import EmbeddingWorkers
    from persia._training.checkpoint import CheckpointReader, CheckpointWriter
    from persia._training.error_hints import Form
    from persia._training.forward import ForwardPipeline
    from persia._training.inflight import InFlightTracker
    from persia._training.ranks import Ranks
    from persia._training.resume import Plain, Progress
    from persia._training.transfer import DeviceTransfer, Jagged, PersiaTrainingBatch
    from persia.config import EmbeddingSchema, GlobalConfig
    from persia.ctx.connection import Embeddings

    Features = tuple[list[torch.Tensor], list[torch.Tensor | Jagged], list[torch.Tensor] | None]
    SchemaSource = str | os.PathLike[str] | Mapping[str, object]
    ConfigSource = str | os.PathLike[str] | Mapping[str, object]

logger = logging.getLogger("persia.ctx")

# Seconds that servers get to say which slots there are, once a model has failed.
_ASK_S = 3.0


class EmbeddingCtx(BaseCtx):
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
        embedding_config: What servers are told on entering TrainCtx.
        preprocess_mode: As given.
        current_batch: The batch prepared last.

    Raises:
        ConfigError: If a setting cannot be used.
    """

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: Any = None,
        embedding_config: EmbeddingConfig | SchemaSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self.preprocess_mode = preprocess_mode
        self.model = model
        self.embedding_config, self._schema = split_config(embedding_config)
        self.current_batch: PersiaTrainingBatch | None = None
        self._output: Form | None = None  # of its forward, until its backward
        self._global_config = global_config
        self._embeddings: Embeddings | None = None
        self._book: InFlightTracker | None = None
        self._epochs: list[weakref.ref[ForwardPipeline]] = []  # may still have threads
        self._converters: dict[int | None, DeviceTransfer] = {}
        # Batches with gradients that were prepared and may take part in the next backward,
        # in that order, by id(). Weak: who prepares and never steps must not fill the memory.
        self._prepared: weakref.WeakValueDictionary[int, PersiaTrainingBatch] = (
            weakref.WeakValueDictionary()
        )
        self._kept: list[PersiaTrainingBatch] = []  # what keeps those of ``keep``
        self._follows_outer = False  # reads the context it is entered in
        self._addresses: list[str] | None = None  # of embedding-workers, if not the job's
        self._workers: EmbeddingWorkers | None = (
            None  # connected by this context, while entered
        )
        self._ranks: Ranks | None = None
        self._progress: Progress | None = None  # of training, from the first connection on
        self._measures: TrainingMetrics | None = None  # of what it has used last
        self._view: View | None = None
        self._used_at = time.monotonic()  # from then on things are counted
        self._saver: CheckpointWriter | None = None
        self._loader: CheckpointReader | None = None
        self._owns_stream = False
        if embedding_worker is not None:
            self._use(embeddings_of(embedding_worker))
        elif env.get_mode() == "embedded" and (self._trains or self._schema is not None):
            self._use(self._build())

    @property
    def _trains(self) -> bool:
        return self.preprocess_mode is PreprocessMode.TRAIN

    def _connect(self) -> Embeddings:
        """Connect to the embedding-workers of the job."""
        from persia._cluster.connect import connect_embedding_workers
        from persia._rpc.worker_pool import EmbeddingWorkers
        from persia._rpc.zmq_transport import ZmqTransport
        from persia.config import (
            SAME_EVERYWHERE,
            EmbeddingSchema,
            describe_differences,
            schema_fingerprint,
        )

        expected = None
        if self._schema is not None:
            expected = schema_fingerprint(EmbeddingSchema.load(self._schema))
        transport = ZmqTransport()
        try:
            workers = EmbeddingWorkers(
                transport,
                lambda on_restart: connect_embedding_workers(
                    transport, addresses=self._addresses, on_restart=on_restart
                ),
            )
            theirs = workers.schema_fingerprint
            if expected is not None and expected != theirs:
                raise ConfigError(
                    "embedding_config: the servers have another one: "
                    f"{describe_differences(theirs, expected, 'there', 'here')}; {SAME_EVERYWHERE}"
                )
        except BaseException:
            transport.close()
            raise
        self._workers = workers
        return embeddings_of(workers)

    def _build(self) -> Embeddings:
        """Build servers in this process."""
        schema, config = load_configs(self._schema, self._global_config)
        from persia._cluster.embedded import build_embedding_worker

        embeddings = embeddings_of(build_embedding_worker(schema, config), not self._trains)
        if not self._trains:
            # A store of its own, which nobody else has configured or will.
            embeddings.worker.configure(self.embedding_config.settings())
            logger.warning(
                "this %s context has an embedding store of its own, which begins empty: to "
                "read what a TrainCtx trains, enter it inside that TrainCtx or pass "
                "embedding_worker=",
                self.preprocess_mode.name,
            )
        return embeddings

    def _use(self, embeddings: Embeddings) -> None:
        from persia._report.metrics import TrainingMetrics
        from persia._training.checkpoint import CheckpointReader, CheckpointWriter
        from persia._training.inflight import InFlightTracker
        from persia._training.lookups import Lookups
        from persia._training.resume import Progress

        self._progress = Progress()
        self._measures = TrainingMetrics(env.get_rank() or 0)
        self._view, self._used_at = None, time.monotonic()
        self._embeddings = embeddings
        self._book = InFlightTracker(embeddings.worker)
        self._lookups = Lookups(
            embeddings.worker,
            self._book,
            self._trains,
            before_evaluation=embeddings.wait,
            rank=env.get_rank() or 0,
            world_size=env.get_world_size() or 1,
            progress=self._progress,
        )
        self._saver = CheckpointWriter(embeddings.worker)
        self._loader = CheckpointReader(embeddings.worker)

    def _connected(self) -> Embeddings:
        if self._embeddings is None:
            raise ConfigError(
                f"this {type(self).__name__} has no embeddings yet: enter it, inside the "
                "TrainCtx whose embeddings it is to read, or pass embedding_config="
            )
        return self._embeddings

    def metric_sources(self) -> list[MetricSource]:
        """Return what is to be told of this context, and of servers in this process."""
        embeddings, book, measures = self._embeddings, self._book, self._measures
        if embeddings is None or book is None or measures is None:
            return []
        return [
            *measures.sources(embeddings.worker, book, embeddings.engine, embeddings.stream),
            roles.of_reports(TRAINER, env.get_rank() or 0, embeddings),
        ]

    def report(self, **values: float) -> None:
        """Tell how well the model does, such as its AUC on held-out data.

        The value of each name that was reported last is what ``persia-launcher top``,
        ``top()`` and ``/metrics`` (``persia_reported``) show; the report of a run and
        TensorBoard have all of them, over the steps. The loss of the last
        ``backward`` they show without being told. An evaluation context inside a TrainCtx
        reports for that one.

        Args:
            values: Numbers, or tensors of one element.

        Raises:
            DataTypeError: If one is no number.
            ConfigError: Before this context was entered.

        Example:
            >>> with eval_ctx(model=model) as evaluation:  # doctest: +SKIP
            ...     evaluation.report(auc=roc_auc_score(labels, scores))
        """
        embeddings = self._connected()
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError) as exc:
                raise DataTypeError(
                    f"report: expected a number for {name}, got {type(value).__name__}"
                ) from exc
        embeddings.reported = {**embeddings.reported, **numbers}
        if embeddings.recorder is not None:
            embeddings.recorder.note_reported(numbers)

    def top(self) -> Frame:
        """Return what ``persia-launcher top`` shows of this process, servers in it included.

        Rates are of the time since the last call, or since this context was entered.
        ``str()`` of it is plain text.

        Raises:
            ConfigError: Before this context was entered, or without rich, which draws it.

        Example:
            >>> with TrainCtx(...) as ctx:  # doctest: +SKIP
            ...     for step, batch in enumerate(loader):
            ...         ...
            ...         if step % 1000 == 0:
            ...             print(ctx.top())
        """
        from persia._metrics.top_view import View, need_rich

        need_rich()
        self._connected()
        if self._view is None:
            self._view = View(Metrics(self.metric_sources), self._used_at)
        return self._view.frame(f"{env.get_mode()} mode")

    def why_not_ready(self) -> str:
        """Say why batches cannot be looked up and trained now; "" if they can."""
        embeddings = self._embeddings
        if embeddings is None:
            return "it has no embeddings"
        if embeddings.is_untrained or embeddings.worker.ready_for_serving():
            return ""
        return "servers have no settings and optimizer yet, or a load replaces their rows"

    def why_not_healthy(self) -> str:
        """Say which of its threads have ended before their time; "" if none has."""
        engine = None if self._embeddings is None else self._embeddings.engine
        return "" if engine is None else engine.why_not_healthy()

    def _own_book(self) -> InFlightTracker:
        self._connected()
        if self._book is None:
            raise ConfigError(f"this {type(self).__name__} has no embeddings yet")
        return self._book

    def _enter(self) -> None:
        if self._embeddings is not None and not self._follows_outer:
            return
        outer = _context_stack.current()
        if self._addresses is not None:
            self._use(self._connect())
        elif (
            not self._trains
            and isinstance(outer, EmbeddingCtx)
            and outer._embeddings is not None
        ):
            self._follows_outer = True
            if self._embeddings is not outer._embeddings:
                self._use(outer._embeddings)
        elif env.get_mode() == "services":
            self._use(self._connect())
        elif self._embeddings is None:
            self._use(self._build())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if exc is not None and self._output is not None and self.current_batch is not None:
            from persia._training.error_hints import explain_loss

            explain_loss(exc, self.current_batch, self._output)
        return super().__exit__(exc_type, exc, traceback)

    def _exit(self) -> None:
        try:
            self._finish()
        finally:
            self._disconnect()

    def _finish(self) -> None:
        """End what is not submitted, and wait for what is written or read behind."""
        from persia._training.inflight import Reason

        book = self._own_book()
        prepared = list(self._prepared.values())
        self._prepared.clear()
        self._kept.clear()
        self.current_batch = None
        self._close_epochs()
        for batch in prepared:
            if batch.ticket is not None:
                book.release(batch.ticket, Reason.ABANDONED)
        book.release_orphans()
        if self._saver is not None and self._loader is not None:
            self._saver.wait()
            self._loader.wait()

    def _disconnect(self) -> None:
        """Close what this context opened; TrainCtx does so after its last update."""
        embeddings = self._embeddings
        try:
            if self._owns_stream and embeddings is not None:
                self._owns_stream = False
                embeddings.close()
        finally:
            workers, self._workers = self._workers, None
            if workers is not None:
                self._embeddings = None
                workers.close()

    def _close_epochs(self) -> None:
        epochs, self._epochs = self._epochs, []
        for reference in epochs:
            epoch = reference()
            if epoch is not None:
                epoch.close()

    # --- what a loader needs --------------------------------------------------------------

    def open_epoch(
        self,
        dataset: Iterable[PersiaBatch] | None,
        *,
        input_capacity: int,
        output_capacity: int,
        num_workers: int,
        reproducible: bool,
        staleness: int | None,
        timeout_s: float,
        keeps_step: bool = True,
    ) -> ForwardPipeline:
        """Prepare the pipeline of one pass over a dataset; for ``DataLoader``.

        Args:
            dataset: None takes what data-loaders send.
            input_capacity: Batches read ahead of the lookups.
            output_capacity: Batches looked up ahead of the user.
            num_workers: Lookups at the same time.
            reproducible: Keep the order.
            staleness: Bound on batches in flight, or None.
            timeout_s: How long the user waits for a batch.
            keeps_step: Hand a batch out only when every rank has one.

        Raises:
            ConfigError: If no data-loader can send anything, or the embedding-workers have no
                room for what they would.
            BaseException: What an update of the last epoch raised, or a load in the background.
        """
        from persia._training.forward import ForwardPipeline
        from persia._training.resume import count_done
        from persia._training.sources import DatasetSource, Source, StreamSource
        from persia._training.stream import check_room

        embeddings = self._connected()
        self.wait_for_load_embedding()
        # No lookup of this epoch may overtake an update of the last one.
        embeddings.flush()
        converter = self._converter(self.device_id)
        source: Source
        if dataset is None:
            world_size = env.get_world_size() or 1
            if embeddings.stream is None and (reproducible or world_size > 1):
                ahead = output_capacity + num_workers
                bound = staleness if self._trains and staleness is not None else ahead
                check_room(embeddings.worker, world_size, input_capacity, bound)
            resumed = self._resumed("stream")
            if resumed is not None and embeddings.stream is not None:
                logger.warning(
                    "data-loaders go on where they are: this process has read from them before "
                    "it loaded a checkpoint"
                )
            self._owns_stream |= embeddings.stream is None
            stream = embeddings.open_stream(input_capacity, resumed)
            source = StreamSource(stream, converter, reproducible)
        else:
            resumed = self._resumed("dataset")
            source = DatasetSource(dataset, converter, input_capacity, resumed)
        num_resumed = 0 if resumed is None else count_done(resumed)
        if num_resumed:
            logger.info(
                "this pass begins behind batch %d, where the checkpoint was made", num_resumed
            )
        epoch = ForwardPipeline(
            source,
            self._lookups,
            converter,
            output_capacity=output_capacity,
            num_workers=num_workers,
            reproducible=reproducible,
            staleness=staleness,
            timeout_s=timeout_s,
            ranks=self._ranks if keeps_step else None,
            num_resumed=num_resumed,
        )
        self._epochs = [known for known in self._epochs if known() is not None]
        self._epochs.append(weakref.ref(epoch))
        return epoch

    def _resumed(self, kind: str) -> Plain | None:
        """Return where a pass over this kind of data begins, if not at its beginning."""
        if self._progress is None or not self._trains:
            return None
        return self._progress.resumed(kind)

    def _converter(self, device_id: int | None) -> DeviceTransfer:
        if device_id not in self._converters:
            from persia._training.transfer import DeviceTransfer

            self._converters[device_id] = DeviceTransfer(torch_device(device_id))
        return self._converters[device_id]

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what surrounds a pass in which ranks may have unequal numbers of batches."""
        return contextlib.nullcontext()

    # --- public -----------------------------------------------------------------------------

    @property
    def embedding_worker(self) -> EmbeddingWorker:
        """The embedding-worker that this context asks."""
        return self._connected().worker

    @property
    def common_context(self) -> EmbeddingWorker:
        """The original's name for what ``embedding_worker`` is."""
        return self.embedding_worker

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Tell the servers other settings than those given at first."""
        note_part()
        self._connected().worker.configure(embedding_config.settings())
        self.embedding_config = embedding_config

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Register an embedding optimizer on the servers; ``Optimizer.apply`` calls it."""
        embeddings = self._connected()
        embeddings.worker.register_optimizer(settings)
        if embeddings.engine is not None:
            embeddings.engine.learning_rates.forget()

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output for a batch, and the batch's labels.

        Raises:
            ConfigError: If the context has no model.
        """
        model = self.model
        if model is None:
            raise ConfigError(f"{type(self).__name__}.forward needs model=, got None")
        if not self._trains:
            from persia._training.dense_files import unwrap

            # A data-parallel one speaks to the other ranks, which may not evaluate now.
            model = unwrap(model)
        from persia._training import error_hints

        non_id_type_tensors, embedding_tensors, labels = self.prepare_features(batch)
        self._output = None
        try:
            output = model(non_id_type_tensors, embedding_tensors)
        except Exception as error:
            error_hints.explain_model(error, batch, self._slot_names)
            raise
        self._output = error_hints.form_of(output)
        return output, labels

    def _slot_names(self) -> list[str]:
        """Return the slots of the embedding config, if servers still say so."""
        if self._embeddings is None:
            return []
        try:
            with within(_ASK_S):
                return [one.name for one in self._embeddings.worker.feature_stats()]
        except Exception as exc:  # the model's error is what the user must see
            logger.debug("no slots to compare a batch with: %r", exc)
            return []

    def forget_output(self) -> None:
        """Forget the last output: an error from now on has nothing to do with its batch."""
        self._output = None

    def prepare_features(self, batch: PersiaTrainingBatch) -> Features:
        """Return dense tensors, embeddings in the order of the features, and labels.

        Labels are None if the batch has none, and in INFERENCE mode.
        """
        from persia._training.transfer import PersiaTrainingBatch

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
        from persia._training.inflight import Reason
        from persia._training.lookups import Item

        device = self.device_id if device_id is None else usable_device(device_id)
        book = self._own_book()
        book.release_orphans()
        converter = self._converter(device)
        host = converter.host(persia_batch)
        if not self._lookups.has_gradients(host):
            self._connected().flush()
        item = Item(host)
        self._lookups.number(item)
        result, ticket = self._lookups.lookup(item)
        try:
            batch = converter.finish(converter.stage(host, result, item.batch_id, ticket))
        except BaseException:
            if ticket is not None:
                book.release(ticket, Reason.UNUSED)
            raise
        if ticket is not None:
            finalizer = weakref.finalize(batch, book.orphans.append, ticket)
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

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows on each parameter server."""
        embeddings = self._connected()
        embeddings.flush()
        return embeddings.worker.get_embedding_size()

    def server_stats(self) -> list[Mapping[str, int]]:
        """Return what each parameter server counts: ``rows``, ``bytes``, ``evicted``, ..."""
        embeddings = self._connected()
        embeddings.flush()
        return embeddings.worker.server_stats()

    def clear_embeddings(self) -> None:
        """Remove all rows."""
        embeddings = self._connected()
        embeddings.flush()
        embeddings.worker.clear_embeddings()

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
        """Wait for a dump with ``blocking=False``.

        Raises:
            BaseException: What it raised, once.
        """
        self._connected()
        if self._saver is not None:
            self._saver.wait()

    def wait_for_load_embedding(self) -> None:
        """Wait for a load with ``blocking=False``.

        Raises:
            BaseException: What it raised, once.
        """
        self._connected()
        if self._loader is not None:
            self._loader.wait()

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
        from persia._files.storage import place_of
        from persia._training import checkpoint

        embeddings, saver = self._connected(), self._saver
        if saver is None or (env.get_rank() or 0) > 0:
            return  # rank 0's is for all
        keep_last = checkpoint.check_keep_last(keep_last)
        url = place_of(dst_dir, "dst_dir")
        saver.wait()
        self.wait_for_load_embedding()  # half of it is no checkpoint
        write_jit = checkpoint.scripted(self.model) if jit_filename else None
        with embeddings.at_step() as (step, others):

            def write() -> dict[str, bytes]:
                files = {name: checkpoint.state_of(x) for name, x in dense.items()}
                if jit_filename and write_jit is not None:
                    files[jit_filename] = write_jit()
                state = self._trainer_state(others) if dense else None
                if state is not None:
                    files[checkpoint.TRAINER] = checkpoint.serialized(state)
                return files

            frozen = saver.begin(step, write)
        job = embeddings.folders
        saver.finish(frozen, url, keep_last, blocking=blocking, job=job)

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
        from persia._files.storage import place_of
        from persia._training import checkpoint, dense_files

        embeddings, loader = self._connected(), self._loader
        if loader is None:
            return
        self._check_between_passes()
        embeddings.flush()
        url = place_of(src_dir, "src_dir")
        names = checkpoint.names_of(features)
        speaks = not env.get_rank()  # to the servers, for all ranks
        with self._all_or_none():
            opened = checkpoint.Checkpoint(url)
            # First, as a dense net that does not fit often is what comes of another dim.
            if speaks:
                loader.verify(opened.id, url, names)
            try:
                states = opened.fitting(dense, map_location)
                is_whole = bool(dense) and names is None
                trainer = opened.trainer() if is_whole else None
            except BaseException:
                loader.drop()
                raise
        with self._all_or_none():
            if speaks:
                loader.commit(blocking=blocking or self._ranks is not None)
        for name, state in states.items():
            dense_files.put(dense[name], state, name)
        if trainer is not None:
            self._resume(trainer)

    def _resume(self, trainer: Plain) -> None:
        """Continue where the checkpoint was made; TrainCtx does."""

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Surround what has to succeed on every rank before any of them goes on."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            failure = exc
        has_failed = self._ranks is not None and self._ranks.any(failure is not None)
        if failure is not None:
            raise failure
        if has_failed:
            raise CheckpointError(
                "another rank could not load the checkpoint; its own output says why"
            )

    def _check_between_passes(self) -> None:
        for reference in self._epochs:
            epoch = reference()
            if epoch is not None and not epoch.is_closed:
                raise ConfigError(
                    "a checkpoint is loaded between two passes over a DataLoader, not in the "
                    "middle of one: what was looked up ahead would be of the rows before"
                )

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
        from persia._training import dense_files

        dense_files.save(torch_instance, dst_dir, file_name, is_jit)

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
        from persia._training import dense_files

        dense_files.load(torch_instance, src_dir, map_location)

    def stats(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return what became of this context's training batches so far.

        ``batches`` were trained, ``abandoned`` had no backward, ``unused`` were looked up
        ahead and never handed out, ``skipped`` had a non-finite gradient under a GradScaler,
        ``failed`` had an update that raised. ``missing`` counts gradients of rows that were
        gone. By feature: ``skipped_slots`` had no gradient, ``nan_samples`` and ``nan_rows``
        were left out as not finite. ``staleness`` is the number in flight now.
        """
        # A context that was left knows what it has counted.
        return (self._book or self._own_book()).stats()


def eval_ctx(
    model: Any = None,
    embedding_config: EmbeddingConfig | SchemaSource | None = None,
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


def prepare_feature(batch: PersiaTrainingBatch, preprocess_mode: PreprocessMode) -> Features:
    """Return what a model is called with, and the labels unless in INFERENCE mode."""
    labels = None if preprocess_mode is PreprocessMode.INFERENCE else batch.labels
    return batch.non_id_type_tensors, batch.embedding_tensors, labels


def split_config(
    given: EmbeddingConfig | SchemaSource | None,
) -> tuple[EmbeddingConfig, SchemaSource | EmbeddingSchema | None]:
    """Return the run-time settings and, if given, where the slots are."""
    if given is None:
        return get_default_embedding_config(), None
    if isinstance(given, EmbeddingConfig):
        return given, given.schema
    return get_default_embedding_config(), given


def load_configs(
    schema: SchemaSource | EmbeddingSchema | None, config: ConfigSource | None
) -> tuple[EmbeddingSchema, GlobalConfig]:
    from persia.config import EmbeddingSchema, GlobalConfig

    if schema is None:
        schema = env.embedding_config_path()
    if schema is None:
        raise ConfigError(
            "no embedding config: pass embedding_config= (a mapping, the path of a YAML "
            "file, or an EmbeddingConfig with schema=), or set PERSIA_EMBEDDING_CONFIG"
        )
    if config is None:
        config = env.global_config_path()
    return EmbeddingSchema.load(schema), GlobalConfig.load(config)
