"""The contexts: where a script says what it trains, and how.

    BaseCtx                 device, nesting
      DataCtx               sends batches (torch-free)
      EmbeddingCtx          embeddings of a batch, in one of three modes
        TrainCtx            backward: dense step here, sparse step at the servers
        InferCtx            no labels, no gradients

Importing this module does not import torch: a data-loader's script needs ``DataCtx`` only.
Torch is imported when the first ``EmbeddingCtx`` is made.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia import env
from persia._metrics import roles
from persia._metrics.catalogue import LOADER, TRAINER
from persia._metrics.registry import Metrics
from persia._older import Renewed, names_of
from persia._rpc import session
from persia._rpc.messages import NamedArray
from persia._services import telling
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Optimizer
from persia.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DataTypeError,
    JobFinished,
    ServiceTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from persia._metrics.frame import Frame, View
    from persia._metrics.registry import Source as MetricSource
    from persia._rpc.messages import EmbeddingWorker, OptimizerSettings
    from persia._rpc.workers import EmbeddingWorkers
    from persia._services.data_context import Feeder
    from persia._training.advice import Form
    from persia._training.channel import Channel
    from persia._training.checkpoints import Loader, Saver
    from persia._training.flight import Book
    from persia._training.gradients import GradientEngine, Update
    from persia._training.halts import Halts
    from persia._training.measures import Measures
    from persia._training.prefetch import Prefetcher
    from persia._training.progress import Plain, Position, Progress
    from persia._training.ranks import Ranks
    from persia._training.recorder import Kept, Recorder, Sink
    from persia._training.stream import Stream
    from persia._training.tensors import Converter, Jagged, PersiaTrainingBatch
    from persia.config import EmbeddingSchema, GlobalConfig
    from persia.embedding.data import NdarrayDataBase

    Features = tuple[list[torch.Tensor], list[torch.Tensor | Jagged], list[torch.Tensor] | None]
    SchemaSource = str | os.PathLike[str] | Mapping[str, object]
    ConfigSource = str | os.PathLike[str] | Mapping[str, object]

__all__ = [
    "BaseCtx",
    "DataCtx",
    "EmbeddingCtx",
    "InferCtx",
    "PreprocessMode",
    "TrainCtx",
    "cnt_ctx",
    "eval_ctx",
]

logger = logging.getLogger(__name__)

if not TYPE_CHECKING:  # where any name would be taken for one
    __getattr__ = names_of(__name__)

# How long to wait for servers before saying that they are not ready.
READY_S = 300.0
# Between two questions whether they are; a server answers in far less.
ASK_AGAIN_S = 0.1


class PreprocessMode(enum.Enum):
    """What a context does with batches.

    TRAIN gives embeddings a gradient and new ids a row. EVAL and INFERENCE read only, and
    INFERENCE gives no labels.
    """

    TRAIN = 1
    EVAL = 2
    INFERENCE = 3


class BaseCtx(Renewed):
    """A context that can be entered; the one entered last is the current one.

    Args:
        threadpool_worker_size: Kept for scripts of the original; PERSIA's threads are set
            where they are used.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.

    Raises:
        ConfigError: If there is no such device.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        self.threadpool_worker_size = threadpool_worker_size
        self.device_id = _usable_device(device_id)
        self.origin_context: object | None = None  # the current context when this was entered
        self._entered = False

    # What it makes of a process, for its metrics.
    _role = TRAINER

    def metric_sources(self) -> list[MetricSource]:
        """Return what is to be told of this context, see ``metrics``."""
        return []

    def metrics(self) -> Metrics:
        """Return the metrics of this context, in a registry of its own.

        ``text()`` is what Prometheus reads, ``value(name, **labels)`` one of them, and
        ``registry`` is for a server of one's own. They can be read at any time, by any thread.

        Example:
            >>> with TrainCtx(...) as ctx:  # doctest: +SKIP
            ...     for batch in loader:
            ...         ...
            ...     ctx.metrics().value("persia_trained_samples_total")
        """
        return Metrics(self.metric_sources, with_process=False)

    def why_not_ready(self) -> str:
        """Say why this context cannot be used now; "" if it can."""
        return ""

    def why_not_healthy(self) -> str:
        """Say which of its threads have ended before their time; "" if none has."""
        return ""

    def _enter(self) -> None:
        """Do what entering means for the class."""

    def _exit(self) -> None:
        """Undo it; called however the body ended."""

    def __enter__(self) -> Self:
        if self._entered:
            raise ConfigError(f"this {type(self).__name__} is entered already")
        self.origin_context = session.current()
        telling.hold(self._role)
        try:
            self._enter()
        except BaseException:
            telling.release()
            raise
        self._entered = True
        session.push(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._entered = False
        try:
            self._exit()
        except BaseException as own:
            if exc is None:
                raise
            # The body's exception is the one that the user must see.
            logger.error("leaving %s also failed: %r", type(self).__name__, own)
        finally:
            session.pop(self)
            telling.release()
        return None


class DataCtx(BaseCtx):
    """Sends batches from a data-loader's process to the nn-workers.

    The servers are found by the addresses in the environment; which of the data-loaders this
    is, by ``REPLICA_INDEX`` and ``REPLICA_SIZE``. Leaving the context says that the data has
    ended, and waits until every batch was trained on, or the job has ended. If the script
    fails, the nn-workers raise its traceback.

    A job that ends before the data does ends the ``with`` block: silently if it went well,
    and otherwise with its exit status, as ``SystemExit``.

    Args:
        threadpool_worker_size: Kept for scripts of the original.
        device_id: Kept for scripts of the original.

    Example:
        >>> def send_all(batches):
        ...     with DataCtx() as ctx:
        ...         for batch in batches:
        ...             ctx.send_data(batch)
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self._feeder: Feeder | None = None
        self._last_stats: Mapping[str, int] = {}
        self._raised: BaseException | None = None  # by the body that is being left
        self._sources: list[MetricSource] = []

    _role = LOADER

    def metric_sources(self) -> list[MetricSource]:
        """Return what is to be told of this context, also after it was left."""
        return self._sources

    def why_not_ready(self) -> str:
        """Say what keeps batches from being sent; "" if nothing does."""
        feeder = self._feeder
        return "it was left" if feeder is None else feeder.why_not_ready()

    def why_not_healthy(self) -> str:
        """Say what has ended a thread of this context."""
        feeder = self._feeder
        return "" if feeder is None else feeder.why_not_healthy()

    def _enter(self) -> None:
        if env.get_mode() == "embedded":
            raise ConfigError(
                "a DataCtx needs servers, and this process runs in embedded mode: name them "
                "in PERSIA_EMBEDDING_WORKERS and PERSIA_NN_WORKERS, or let a StreamingDataset "
                "start this script as its data_loader.py, or feed the TrainCtx from a "
                "persia.data.IterableDataset instead"
            )
        from persia._services import data_context

        try:
            self._feeder = feeder = data_context.connect()
            number = env.get_replica_index() or 0
            self._sources = [
                roles.of_loader(LOADER, number, feeder),
                roles.of_clients(LOADER, number, feeder.clients, feeder.clients),
            ]
        except JobFinished as exc:
            # Nobody will ask for data: this process has nothing to do but to end with the job.
            raise SystemExit(exc.status or 0) from None

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send one batch, once the nn-worker it goes to has room for it.

        The batch is copied: its arrays may be filled anew afterwards. One thread may send at a
        time. After an error that is the batch's own (a ``DataError``) the next may be sent.

        Raises:
            ConfigError: Outside of the ``with`` block.
            DataTypeError: If it is no ``PersiaBatch``.
            DataError: If it does not fit the embedding config.
            JobFinished: If the job has ended; let it end the ``with`` block.
            ServiceUnavailable: If a server that is needed is gone for too long; names it.
            ServiceTimeout: If one does not answer for too long; names it.
        """
        if not isinstance(persia_batch, PersiaBatch):
            raise DataTypeError(
                f"DataCtx.send_data: expected a PersiaBatch, got {type(persia_batch).__name__}"
            )
        if self._feeder is None:
            raise ConfigError("DataCtx.send_data: expected inside `with DataCtx() as ctx`")
        self._feeder.send(
            persia_batch.features,
            _copies(persia_batch.non_id_type_features),
            _copies(persia_batch.labels),
            batch_size=persia_batch.batch_size,
            requires_grad=persia_batch.requires_grad,
            meta=persia_batch.meta,
        )

    @property
    def resume_position(self) -> int:
        """How many of this data-loader's batches the trainer has no need of.

        It is above 0 where a run continues from a checkpoint, or this data-loader was started
        anew. They may be sent all the same: they are dropped and counted. A reader that can
        seek says so with ``seek``, and begins there. Waits until every nn-worker is there.

        Raises:
            ConfigError: Outside of the ``with`` block.
            JobFinished: If the job has ended.
        """
        if self._feeder is None:
            raise ConfigError(
                "DataCtx.resume_position: expected inside `with DataCtx() as ctx`"
            )
        return self._feeder.resume_position()

    def seek(self, batch: int) -> None:
        """Let the next ``send_data`` be for this batch of the data-loader's, counted from 0.

        Args:
            batch: ``resume_position``, or fewer.

        Raises:
            ConfigError: Outside of the ``with`` block.
            DataError: After the first ``send_data``, or if batches before it are needed.

        Example:
            >>> def send_rest(reader):
            ...     with DataCtx() as ctx:
            ...         ctx.seek(ctx.resume_position)
            ...         for batch in reader.batches_from(ctx.resume_position):
            ...             ctx.send_data(batch)
        """
        if self._feeder is None:
            raise ConfigError("DataCtx.seek: expected inside `with DataCtx() as ctx`")
        self._feeder.seek(batch)

    def stats(self) -> Mapping[str, int]:
        """Return counts of batches since the context was entered; absent ones are zero.

        ``sent``; ``redelivered`` once more to an nn-worker that was started anew;
        ``registered_again`` whose ids an embedding-worker no longer held; ``dropped`` as they
        had been received before this data-loader was restarted, or trained before the
        checkpoint that the run continues from; ``kept`` until they are
        trained on; ``lost``, which were not when the context was left.
        """
        return self._last_stats if self._feeder is None else self._feeder.stats()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        feeder, self._raised = self._feeder, exc
        super().__exit__(exc_type, exc, traceback)
        is_end_of_job = isinstance(exc, JobFinished)
        status = None if feeder is None else feeder.job_status
        if status and (exc is None or is_end_of_job):
            # Whoever failed has said why; this process only takes the status over.
            raise SystemExit(status) from None
        return is_end_of_job

    def _exit(self) -> None:
        feeder, self._feeder, raised, self._raised = self._feeder, None, self._raised, None
        if feeder is None:
            return
        is_asked_to_end = isinstance(raised, SystemExit) and not raised.code
        try:
            if raised is None or is_asked_to_end or isinstance(raised, JobFinished):
                feeder.finish()
            else:
                feeder.fail(raised)
        finally:
            feeder.close()
            self._last_stats = feeder.stats()


def _copies(items: Iterable[NdarrayDataBase]) -> tuple[NamedArray, ...]:
    return tuple(NamedArray(item.name, np.array(item.data, order="C")) for item in items)


class _Embeddings:
    """An embedding-worker, and the updates that reads of it must wait for.

    There is one per worker: an evaluation context that is inside a TrainCtx, or is given its
    worker, shares it.
    """

    def __init__(self, worker: EmbeddingWorker, is_untrained: bool = False) -> None:
        self.worker = worker
        self.is_untrained = is_untrained  # built for reading only: it needs no optimizer
        self.engine: GradientEngine | None = None  # while the TrainCtx is entered
        self.halts: Halts | None = None  # of several ranks, while it is
        self.stream: Stream | None = None  # of data-loaders, from the first that is read
        self.reported: Mapping[str, float] = {}  # replaced whole: others read it
        self.recorder: Recorder | None = None  # of a TrainCtx that was asked for a report

    def open_stream(self, capacity: int, resumed: Plain | None = None) -> Stream:
        """Return the batches of data-loaders; there is one stream, whoever reads it.

        Args:
            capacity: Batches held.
            resumed: What a run before this one has trained of its first pass.

        Raises:
            ConfigError: If there can be none: no script, or an address in use.
        """
        if self.stream is None:
            from persia._training.stream import ChildStream, Stream

            if env.get_mode() == "embedded":
                self.stream = ChildStream(self.worker, capacity, data_loader_script(), resumed)
            else:
                from persia._services.addresses import listening_address

                rank, world_size = env.get_rank() or 0, env.get_world_size() or 1
                address = listening_address("nn-worker", rank)
                self.stream = Stream(rank, world_size, capacity, address, resumed)
        return self.stream

    def close(self) -> None:
        """Close the stream."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def flush(self) -> None:
        """Wait until this rank's updates are acknowledged; raise what one of them raised."""
        if self.engine is not None:
            self.engine.flush()

    @contextlib.contextmanager
    def at_step(self) -> Iterator[tuple[int, list[Plain]]]:
        """Hold training between two steps: all updates so far of all ranks are in.

        Yields:
            The step, and the states of the ranks other than this one.
        """
        self.flush()
        step = 0 if self.engine is None else self.engine.steps
        if self.halts is None:
            yield step, []
            return
        with self.halts.at(step) as states:
            yield step, states

    def wait(self) -> None:
        """Wait as ``flush`` does, in a thread where nobody could see what is raised."""
        if self.engine is not None:
            self.engine.wait()


# By id of the worker, which an entry keeps alive: whoever is given a worker that a TrainCtx
# updates must wait for those updates before it reads.
_known: weakref.WeakValueDictionary[int, _Embeddings] = weakref.WeakValueDictionary()
_known_lock = threading.Lock()


def _embeddings_of(worker: EmbeddingWorker, is_untrained: bool = False) -> _Embeddings:
    """Return the one ``_Embeddings`` of a worker."""
    with _known_lock:
        embeddings = _known.get(id(worker))
        if embeddings is None:
            embeddings = _known[id(worker)] = _Embeddings(worker, is_untrained)
        return embeddings


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
        self.embedding_config, self._schema = _split_config(embedding_config)
        self.current_batch: PersiaTrainingBatch | None = None
        self._output: Form | None = None  # of its forward, until its backward
        self._global_config = global_config
        self._embeddings: _Embeddings | None = None
        self._book: Book | None = None
        self._epochs: list[weakref.ref[Prefetcher]] = []  # may still have threads
        self._converters: dict[int | None, Converter] = {}
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
        self._measures: Measures | None = None  # of what it has used last
        self._view: View | None = None
        self._used_at = time.monotonic()  # from then on things are counted
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._owns_stream = False
        if embedding_worker is not None:
            self._use(_embeddings_of(embedding_worker))
        elif env.get_mode() == "embedded" and (self._trains or self._schema is not None):
            self._use(self._build())

    @property
    def _trains(self) -> bool:
        return self.preprocess_mode is PreprocessMode.TRAIN

    def _connect(self) -> _Embeddings:
        """Connect to the embedding-workers of the job."""
        from persia._rpc.workers import EmbeddingWorkers
        from persia._rpc.zmq_transport import ZmqTransport
        from persia._services.addresses import connect_embedding_workers
        from persia._services.plan import SAME_EVERYWHERE, schema_fingerprint, tell_apart
        from persia.config import EmbeddingSchema

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
                    f"{tell_apart(theirs, expected, 'there', 'here')}; {SAME_EVERYWHERE}"
                )
        except BaseException:
            transport.close()
            raise
        self._workers = workers
        return _embeddings_of(workers)

    def _build(self) -> _Embeddings:
        """Build servers in this process."""
        schema, config = _load_configs(self._schema, self._global_config)
        from persia._services.embedded import build_embedding_worker

        embeddings = _embeddings_of(build_embedding_worker(schema, config), not self._trains)
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

    def _use(self, embeddings: _Embeddings) -> None:
        from persia._training.checkpoints import Loader, Saver
        from persia._training.flight import Book
        from persia._training.lookups import Lookups
        from persia._training.measures import Measures
        from persia._training.progress import Progress

        self._progress = Progress()
        self._measures = Measures(env.get_rank() or 0)
        self._view, self._used_at = None, time.monotonic()
        self._embeddings = embeddings
        self._book = Book(embeddings.worker)
        self._lookups = Lookups(
            embeddings.worker,
            self._book,
            self._trains,
            before_evaluation=embeddings.wait,
            rank=env.get_rank() or 0,
            world_size=env.get_world_size() or 1,
            progress=self._progress,
        )
        self._saver = Saver(embeddings.worker)
        self._loader = Loader(embeddings.worker)

    def _connected(self) -> _Embeddings:
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
        from persia._metrics.frame import View, need_rich

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

    def _own_book(self) -> Book:
        self._connected()
        if self._book is None:
            raise ConfigError(f"this {type(self).__name__} has no embeddings yet")
        return self._book

    def _enter(self) -> None:
        if self._embeddings is not None and not self._follows_outer:
            return
        outer = session.current()
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
            from persia._training.advice import explain_loss

            explain_loss(exc, self.current_batch, self._output)
        return super().__exit__(exc_type, exc, traceback)

    def _exit(self) -> None:
        try:
            self._finish()
        finally:
            self._disconnect()

    def _finish(self) -> None:
        """End what is not submitted, and wait for what is written or read behind."""
        from persia._training.flight import Reason

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
    ) -> Prefetcher:
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
        from persia._training.prefetch import Prefetcher
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
            source = DatasetSource(dataset, converter, input_capacity, self._resumed("dataset"))
        epoch = Prefetcher(
            source,
            self._lookups,
            converter,
            output_capacity=output_capacity,
            num_workers=num_workers,
            reproducible=reproducible,
            staleness=staleness,
            timeout_s=timeout_s,
            ranks=self._ranks if keeps_step else None,
        )
        self._epochs = [known for known in self._epochs if known() is not None]
        self._epochs.append(weakref.ref(epoch))
        return epoch

    def _resumed(self, kind: str) -> Plain | None:
        """Return where a pass over this kind of data begins, if not at its beginning."""
        if self._progress is None or not self._trains:
            return None
        return self._progress.resumed(kind)

    def _converter(self, device_id: int | None) -> Converter:
        if device_id not in self._converters:
            from persia._training.tensors import Converter

            self._converters[device_id] = Converter(_torch_device(device_id))
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
        from persia._training import advice

        non_id_type_tensors, embedding_tensors, labels = self.prepare_features(batch)
        self._output = None
        try:
            output = model(non_id_type_tensors, embedding_tensors)
        except Exception as error:
            advice.explain_model(error, batch)
            raise
        self._output = advice.form_of(output)
        return output, labels

    def prepare_features(self, batch: PersiaTrainingBatch) -> Features:
        """Return dense tensors, embeddings in the order of the features, and labels.

        Labels are None if the batch has none, and in INFERENCE mode.
        """
        from persia._training.tensors import PersiaTrainingBatch

        if not isinstance(batch, PersiaTrainingBatch):
            raise DataTypeError(
                "expected a batch with its embeddings, as DataLoader or "
                f"get_embedding_from_data gives it, got {type(batch).__name__}"
            )
        self.current_batch = batch
        if batch.ticket is not None:
            self._prepared[id(batch)] = batch
        return _prepare_feature(batch, self.preprocess_mode)

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
        from persia._training.flight import Reason
        from persia._training.lookups import Item

        device = self.device_id if device_id is None else _usable_device(device_id)
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
        from persia._training import checkpoints

        embeddings, saver = self._connected(), self._saver
        if saver is None or (env.get_rank() or 0) > 0:
            return  # rank 0's is for all
        if keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, got {keep_last}")
        saver.wait()
        self.wait_for_load_embedding()  # half of it is no checkpoint
        write_jit = checkpoints.scripted(self.model) if jit_filename else None
        with embeddings.at_step() as (step, others):

            def write() -> dict[str, bytes]:
                files = {name: checkpoints.state_of(x) for name, x in dense.items()}
                if jit_filename and write_jit is not None:
                    files[jit_filename] = write_jit()
                state = self._trainer_state(others) if dense else None
                if state is not None:
                    files[checkpoints.TRAINER] = checkpoints.serialized(state)
                return files

            frozen = saver.begin(step, write)
        saver.finish(frozen, os.fspath(dst_dir), keep_last, blocking=blocking)

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
        from persia._training import checkpoints, dense_files

        embeddings, loader = self._connected(), self._loader
        if loader is None:
            return
        self._check_between_passes()
        embeddings.flush()
        url = os.fspath(src_dir)
        names = None if features is None else tuple(features)
        speaks = not env.get_rank()  # to the servers, for all ranks
        with self._all_or_none():
            checkpoint = checkpoints.Checkpoint(url)
            # First, as a dense net that does not fit often is what comes of another dim.
            if speaks:
                loader.verify(checkpoint.id, url, names)
            try:
                states = checkpoint.fitting(dense, map_location)
                is_whole = bool(dense) and names is None
                trainer = checkpoint.state(checkpoints.TRAINER) if is_whole else None
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


class TrainCtx(EmbeddingCtx):
    """Trains a model: the dense part here, the embeddings at the parameter servers.

    Args:
        embedding_optimizer: One of ``persia.embedding.optim``.
        dense_optimizer: A torch optimizer over the model's parameters.
        grad_scalar_update_factor: With mixed precision, what the scale of the loss is
            divided by when an embedding gradient is not finite. (The original's spelling.)
        backward_buffer_size: Updates that wait before ``backward`` does.
        backward_workers_size: Updates sent at the same time.
        grad_update_buffer_size: Kept for scripts of the original; gradients are owned by
            their update, so that no buffer has to keep them alive.
        lookup_emb_directly: Kept for scripts of the original.
        mixed_precision: Scale the loss and run the model under autocast. None is True with
            a CUDA device and False without.
        distributed_option: Used with more than one rank.
        model: As of ``EmbeddingCtx``.
        embedding_config: As of ``EmbeddingCtx``.
        threadpool_worker_size: Kept for scripts of the original.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.
        global_config: As of ``EmbeddingCtx``.
        embedding_worker: As of ``EmbeddingCtx``.
        embedding_gradient_reduction: Over ranks, ``"mean"`` (equals synchronous training) or
            ``"sum"``.
        report: Write a report of the run to this HTML file when the context is left; only
            rank 0 does. ``write_report`` writes it before.
        tensorboard: Write loss, speed, rows, norms and what is reported to this folder, as
            TensorBoard's event files; only rank 0 does.

    Attributes:
        world_size: Number of ranks.
        rank_id: This rank.
        mixed_precision: Whether the loss is scaled.
        grad_scaler: The ``torch.amp.GradScaler``, or None.
        update_times: Number of ``backward`` calls.
        dense_optimizer: As given.
        embedding_optimizer: As given.
        backward_engine: Sends the updates, while the context is entered.

    Raises:
        ConfigError: If a setting cannot be used.

    Example:
        >>> with TrainCtx(  # doctest: +SKIP
        ...     model=model,
        ...     embedding_optimizer=Adagrad(lr=0.05),
        ...     dense_optimizer=torch.optim.Adam(model.parameters()),
        ...     embedding_config="embedding_config.yml",
        ... ) as ctx:
        ...     for batch in DataLoader(dataset):
        ...         output, labels = ctx.forward(batch)
        ...         ctx.backward(loss_fn(output, labels[0]))
    """

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        backward_workers_size: int = 8,
        grad_update_buffer_size: int = 60,
        lookup_emb_directly: bool = True,
        mixed_precision: bool | None = None,
        distributed_option: object | None = None,
        model: Any = None,
        embedding_config: EmbeddingConfig | SchemaSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
        embedding_gradient_reduction: str = "mean",
        report: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(embedding_optimizer, Optimizer):
            raise ConfigError(
                "embedding_optimizer: expected one of persia.embedding.optim, got "
                f"{type(embedding_optimizer).__module__}.{type(embedding_optimizer).__name__}"
            )
        for name, given in (("dense_optimizer", dense_optimizer), ("model", model)):
            if given is None:
                raise ConfigError(f"TrainCtx needs {name}=, got None")
        if not grad_scalar_update_factor > 0:
            raise ConfigError(
                f"grad_scalar_update_factor must be above 0, got {grad_scalar_update_factor!r}"
            )
        for name, size in (
            ("backward_buffer_size", backward_buffer_size),
            ("backward_workers_size", backward_workers_size),
        ):
            if size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}")
        if embedding_gradient_reduction not in ("mean", "sum"):
            raise ConfigError(
                "embedding_gradient_reduction must be 'mean' or 'sum', got "
                f"{embedding_gradient_reduction!r}"
            )
        super().__init__(
            PreprocessMode.TRAIN,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config=global_config,
            embedding_worker=embedding_worker,
        )
        self.embedding_optimizer = embedding_optimizer
        self.dense_optimizer: torch.optim.Optimizer = dense_optimizer
        self.grad_scalar_update_factor = grad_scalar_update_factor
        self.backward_buffer_size = backward_buffer_size
        self.backward_workers_size = backward_workers_size
        self.distributed_option = distributed_option
        self.world_size = env.get_world_size() or 1
        self.rank_id = env.get_rank() or 0
        self.mixed_precision = (
            self.device_id is not None if mixed_precision is None else mixed_precision
        )
        self.grad_scaler = _grad_scaler(self.device_id) if self.mixed_precision else None
        self.update_times = 0
        if self.world_size > 1:
            self._join_ranks()
        # Each rank computes the mean over its own batch; the worker divides by the scale.
        self._reduction = self.world_size if embedding_gradient_reduction == "mean" else 1
        self._warned_nans = 0
        self._random: Plain = {}  # of a rank that others ask, after its last step
        if tensorboard is not None:
            from persia._training.tensorboard import need_tensorboard

            need_tensorboard()
        self._report_path, self._tensorboard = report, tensorboard
        self._curves: Kept | None = None  # while it is entered, if a report is to be written

    def _join_ranks(self) -> None:
        """Make the model data-parallel, with the option given or the default one."""
        from persia.distributed import DistributedBaseOption, get_default_distributed_option

        option = self.distributed_option
        if option is None:
            option = get_default_distributed_option(self.device_id)
        if not isinstance(option, DistributedBaseOption):
            raise ConfigError(
                "distributed_option: expected DDPOption or BaguaDistributedOption, got "
                f"{type(option).__name__}"
            )
        self.distributed_option = option
        self.model, optimizer = option.convert2distributed_model(
            self.model,
            self.world_size,
            self.rank_id,
            self.device_id,
            optimizer=self.dense_optimizer,
        )
        if optimizer is not None:
            self.dense_optimizer = optimizer

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what lets a rank without batches answer the others' collectives.

        Raises:
            ConfigError: If not all that the ranks tell each other in a step is DDP's.
        """
        if self.world_size == 1:
            return contextlib.nullcontext()
        if reproducible:
            raise ConfigError(
                "drop_last=False: expected reproducible=False with several ranks, as those "
                "that have a batch update in no order; or keep drop_last=True"
            )
        from torch.nn.parallel import DistributedDataParallel

        from persia._training.uneven import uneven_steps

        if not isinstance(self.model, DistributedDataParallel):
            raise ConfigError(
                "drop_last=False: expected a model that is data-parallel by DDPOption, got "
                f"{type(self.model).__name__}"
            )
        if getattr(self.distributed_option, "needs_equal_batches", False):
            raise ConfigError(
                "drop_last=False: expected an algorithm that does not count steps "
                "(gradient_allreduce or bytegrad), got another; ranks would wait for each other"
            )
        if self.grad_scaler is not None:
            raise ConfigError(
                "drop_last=False: expected mixed_precision=False, as the ranks must agree in "
                "every step whether gradients are finite"
            )
        return uneven_steps(self.model, self.dense_optimizer)

    @property
    def backward_engine(self) -> GradientEngine | None:
        """What sends the updates; None outside the ``with`` block."""
        return self._connected().engine

    @property
    def grad_queue(self) -> Channel[tuple[Update, float]] | None:
        """Updates that wait to be sent; None outside the ``with`` block."""
        engine = self.backward_engine
        return None if engine is None else engine.queue

    def _enter(self) -> None:
        super()._enter()
        try:
            self._begin()
        except BaseException:
            self._disconnect()
            raise

    def _begin(self) -> None:
        from persia._training.gradients import GradientEngine

        embeddings = self._connected()
        if embeddings.engine is not None:
            raise ConfigError("another TrainCtx that shares these embeddings is entered")
        embeddings.worker.configure(self.embedding_config.settings())
        embeddings.worker.register_optimizer(self.embedding_optimizer.settings())
        if self.world_size > 1:
            from persia._training.ranks import Ranks

            self._ranks = Ranks(self.world_size, self.rank_id)
        engine = GradientEngine(
            embeddings.worker,
            self._own_book(),
            client=self._new_client(),
            num_workers=self.backward_workers_size,
            capacity=self.backward_buffer_size,
            device=_torch_device(self.device_id),
            ranks=self._ranks,
        )
        engine.end_step(self.update_times)
        if self._progress is not None:
            engine.is_between_passes = self._progress.is_between_passes
        if self.world_size > 1:
            from persia._training.halts import Halts

            embeddings.halts = Halts.join(
                self.world_size, self.rank_id, engine, self._rank_state, env.rpc_timeout_s()
            )
        engine.start()
        embeddings.engine = engine
        if self.rank_id == 0:
            self._record(embeddings, engine)

    def _record(self, embeddings: _Embeddings, engine: GradientEngine) -> None:
        """Begin to write the run down, if that was asked for."""
        from persia._training.recorder import Kept, Recorder
        from persia._training.tensorboard import TensorBoard

        sinks: list[Sink] = []
        if self._report_path is not None:
            self._curves = Kept()
            sinks.append(self._curves)
        if self._tensorboard is not None:
            sinks.append(TensorBoard(self._tensorboard))
        if sinks:
            embeddings.recorder = Recorder(
                embeddings.worker, self._own_book(), engine, sinks, self.world_size
            )

    def write_report(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the report of the run so far: one HTML file that needs nothing beside it.

        Ranks other than 0 record nothing and write nothing.

        Args:
            path: The file; None is the one that the context was given as ``report``.

        Raises:
            ConfigError: Without ``report=``, or outside the ``with`` block.
            OSError: If the file cannot be written.
        """
        from persia._training import report

        recorder, curves = self._connected().recorder, self._curves
        if self.rank_id > 0:
            return
        if recorder is None or curves is None or self._report_path is None:
            raise ConfigError(
                "TrainCtx.write_report: expected TrainCtx(report='report.html'), which has the "
                "run recorded, and to be called inside its `with`"
            )
        recorder.settle()
        told = report.Told(
            f"Training report: {type(self._bare_model()).__name__}",
            env.get_mode(),
            self.world_size,
            f"{type(self.embedding_optimizer).__name__} for embeddings, "
            f"{type(self.dense_optimizer).__name__} for the dense net",
        )
        page = report.gather(told, recorder, curves, self._own_book(), recorder.worker)
        report.write(self._report_path if path is None else path, page)

    def _bare_model(self) -> Any:
        from persia._training.dense_files import unwrap

        return unwrap(self.model)

    def _end_recording(self, embeddings: _Embeddings) -> None:
        recorder = embeddings.recorder
        if recorder is None:
            return
        try:
            if self._report_path is not None:
                self.write_report()
            else:
                recorder.settle()
        finally:
            embeddings.recorder, self._curves = None, None
            recorder.close()

    def _new_client(self) -> int:
        return secrets.randbits(47) << 16 | self.rank_id

    def _exit(self) -> None:
        embeddings = self._connected()
        engine, embeddings.engine = embeddings.engine, None
        try:
            self._finish()
        finally:
            try:
                if engine is not None:
                    engine.close()
                # Servers of their own processes do so when they end.
                flush = getattr(embeddings.worker, "flush_changes", None)
                if flush is not None:
                    flush()
            finally:
                try:
                    self._end_recording(embeddings)
                finally:
                    self._leave_ranks(embeddings)
                    self._disconnect()

    def _leave_ranks(self, embeddings: _Embeddings) -> None:
        halts, embeddings.halts = embeddings.halts, None
        if halts is not None:
            halts.close()

    def _disconnect(self) -> None:
        ranks, self._ranks = self._ranks, None
        try:
            super()._disconnect()
        finally:
            if ranks is not None:
                ranks.close()

    def dump_checkpoint(  # type: ignore[override]  # the original's arguments
        self,
        dst_dir: str | os.PathLike[str],
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        *,
        keep_last: int = 1,
    ) -> None:
        """Write all that training needs to continue, as it is after the last ``backward``.

        Embeddings with their optimizer's state, the model, the dense optimizer, the scaler,
        the states of random generators, and how far the data is. With several ranks, rank 0's
        call is for all of them, and a call of another does nothing. Training pauses for the
        moment itself; with ``blocking=False`` it goes on while files are written.

        Args:
            dst_dir: As of ``EmbeddingCtx.dump_checkpoint``, as are the others.
            dense_model_filename: Name of the model's state dict.
            jit_dense_model_filename: Name of the scripted model.
            opt_filename: Name of the dense optimizer's state dict.
            blocking: Wait until the checkpoint is there.
            with_jit_model: Write the model as TorchScript too, for serving.
            keep_last: How many checkpoints of this folder to keep.

        Raises:
            CheckpointError: If a file cannot be written.
            ServiceTimeout: If a rank does not come to the end of the step; names it.
            ServiceError: If a server is gone.
            BaseException: What an earlier update raised.

        Example:
            >>> for number, batch in enumerate(loader):  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     ctx.backward(loss_fn(output, labels[0]))
            ...     if number % 10_000 == 9_999:
            ...         ctx.dump_checkpoint("s3://bucket/clicks", blocking=False)
        """
        dense = {dense_model_filename: self._own_model(), opt_filename: self.dense_optimizer}
        jit = jit_dense_model_filename if with_jit_model else None
        self._dump(dst_dir, dense, jit, blocking, keep_last)

    def load_checkpoint(  # type: ignore[override]  # the original's arguments
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        *,
        features: Iterable[str] | None = None,
    ) -> None:
        """Load a checkpoint and continue from it. With several ranks, all of them call this.

        The next pass over a ``DataLoader`` leaves out the batches that were trained;
        ``resume_position`` says how far that is. In reproducible mode the run continues bit
        for bit as if it had not been stopped.

        Args:
            src_dir: As of ``EmbeddingCtx.load_checkpoint``, as are the others.
            map_location: As of ``torch.load``.
            dense_model_filename: Name of the model's state dict.
            opt_filename: Name of the dense optimizer's state dict.
            blocking: Wait until the embeddings are there; with several ranks it always does.
            features: Load the rows of these only; where training was is then not restored.

        Raises:
            CheckpointError: If there is no checkpoint, or a file of it is damaged or does not
                fit; nothing has changed.
            ConfigError: In the middle of a pass over a ``DataLoader``.
            ServiceError: If a server is gone.
        """
        dense = {dense_model_filename: self._own_model(), opt_filename: self.dense_optimizer}
        self._load(src_dir, map_location, dense, blocking, features)

    @property
    def resume_position(self) -> Position:
        """How far the data was in the checkpoint that was loaded: passes, then batches.

        ``passes`` over the data had ended, and of the next one ``batches`` were trained; the
        next pass leaves those out by itself. It counts on from there as passes end.
        """
        self._connected()
        if self._progress is None:
            raise ConfigError("TrainCtx.resume_position: expected a context with embeddings")
        return self._progress.where()

    def _rank_state(self) -> Plain:
        """Return what of this rank belongs into a checkpoint; asked by another thread."""
        progress = self._progress
        return {
            "random": self._random,
            "progress": {} if progress is None else progress.snapshot(),
        }

    def _trainer_state(self, others: list[Plain]) -> Plain:
        from persia._training.progress import merge, of_one_pass, random_states

        self._random = random_states()
        ranks = [self._rank_state(), *others]
        passes, positions = of_one_pass([rank["progress"] for rank in ranks])
        return {
            "step": self.update_times,
            "scaler": None if self.grad_scaler is None else self.grad_scaler.state_dict(),
            "ranks": ranks,
            "passes": passes,
            "stream": merge(positions),
        }

    def _resume(self, trainer: Plain) -> None:
        from persia._training.progress import set_random_states

        ranks, engine = trainer["ranks"], self.backward_engine
        self.update_times = trainer["step"]
        if engine is not None:
            engine.end_step(self.update_times)
            engine.client = self._new_client()
        if self.grad_scaler is not None and trainer["scaler"] is not None:
            self.grad_scaler.load_state_dict(trainer["scaler"])
        is_same = len(ranks) == self.world_size
        mine = ranks[self.rank_id if is_same else 0]
        progress = mine["progress"]
        position, next_number = trainer["stream"], progress["next_number"]
        passes = progress["passes"] if position is None else trainer["passes"]
        if not is_same:
            next_number = max(rank["progress"]["next_number"] for rank in ranks)
            logger.warning(
                "the checkpoint is of %d ranks and there are %d: random numbers begin anew%s",
                len(ranks),
                self.world_size,
                "" if position else ", and so does the pass over the data",
            )
        elif position is None:
            position = progress["position"]
        if self._progress is not None:
            self._progress.resume(passes, position, next_number)
            self._lookups.resume(next_number)
        if is_same:
            set_random_states(mine["random"])
        logger.info("continues after step %d, %s", self.update_times, self.resume_position)

    def wait_servers_ready(self) -> None:
        """Wait until all servers are configured and answer.

        Raises:
            ServiceTimeout: If they are not within 300 s.
        """
        _wait_until_ready(self.embedding_worker)

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output for a batch, and the batch's labels.

        With mixed precision the model runs under autocast.
        """
        if not self.mixed_precision:
            return super().forward(batch)
        import torch

        with torch.autocast(_torch_device(self.device_id).type):
            return super().forward(batch)

    def set_lr(self, lr: float, group: str | None = None) -> None:
        """Set the learning rate of embeddings from the next ``backward`` on.

        Gradients take the rate along under which they were computed, so those on their way
        keep the old one, whatever the staleness. The same rate again costs nothing: call it
        in every step. With several ranks, call it on each of them.

        It holds until the end of the ``with`` block, or until an optimizer is registered.

        Args:
            lr: Learning rate.
            group: A group of the embedding config, or a slot outside any, with an
                ``optimizer`` under ``group_settings``. None is for all groups that have no
                rate of their own, by the config or by an earlier call.

        Raises:
            ConfigError: If the rate cannot be used, the group is unknown or shares its rate
                with others, or outside the ``with`` block.

        Example:
            >>> scheduler = StepLR(dense_optimizer, step_size=1000)  # doctest: +SKIP
            >>> for batch in loader:  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     ctx.backward(loss_fn(output, labels[0]))
            ...     scheduler.step()
            ...     ctx.set_lr(scheduler.get_last_lr()[0])
        """
        engine = self.backward_engine
        if engine is None:
            raise ConfigError("TrainCtx.set_lr must be called inside `with TrainCtx(...)`")
        engine.learning_rates.set(lr, group)

    def keep(self, batch: PersiaTrainingBatch) -> None:
        """Hold a batch over the next ones, to accumulate gradients.

        Its permit stays lent until the next ``backward`` whose loss reaches it, so
        ``embedding_staleness`` bounds how many can be kept.

        Raises:
            DataError: If the batch has ended already.

        Example:
            >>> for number, batch in enumerate(loader, start=1):  # doctest: +SKIP
            ...     output, labels = ctx.forward(batch)
            ...     losses.append(loss_fn(output, labels[0]) / 4)
            ...     if number % 4:
            ...         ctx.keep(batch)
            ...     else:
            ...         ctx.backward(sum(losses))
            ...         losses.clear()
        """
        if batch.ticket is None:
            raise DataError(f"batch {batch.batch_id} has no gradients that could be kept")
        self._own_book().keep(batch.ticket)
        self._prepared[id(batch)] = batch
        self._kept.append(batch)

    def backward(
        self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20
    ) -> torch.Tensor:
        """Run the loss backward, step the dense optimizer, and send embedding gradients.

        Without a GradScaler, the embedding-worker leaves non-finite rows out one by one and
        counts them. With one, any non-finite gradient skips the whole batch, dense and
        sparse alike; every step is checked, for the scaler waits for the device anyway.

        Args:
            loss: A scalar that depends on the current batch, and on those kept.
            embedding_gradient_check_frequency: Without a GradScaler, every how many steps to
                warn of the non-finite rows that were left out since.

        Returns:
            The loss, multiplied with the scale under mixed precision.

        Raises:
            DataError: If no batch was prepared, or the current one had its backward.
            ConfigError: Outside the ``with`` block.
            BaseException: What an earlier update raised.
        """
        engine, book = self.backward_engine, self._own_book()
        if engine is None:
            raise ConfigError("TrainCtx.backward must be called inside `with TrainCtx(...)`")
        engine.raise_failure()
        current = self.current_batch
        if current is None:
            raise DataError(
                "no batch to take gradients of: call ctx.forward(batch) or "
                "ctx.prepare_features(batch) first"
            )
        if current.ticket is not None:
            # Afterwards would be too late: the loss's gradients were in the dense model.
            book.check_open(current.ticket)
        book.release_orphans()
        scaler = self.grad_scaler
        scale = 1.0
        unscaled = loss.detach()
        if scaler is not None:
            loss = scaler.scale(loss)
            scale = scaler.get_scale()
        if self._measures is not None:
            self._measures.note_step(self.update_times + 1, unscaled.item)
        loss.backward()  # type: ignore[no-untyped-call]
        self._output = None
        recorder = self._connected().recorder
        if recorder is not None and recorder.note_step(self.update_times + 1, unscaled):
            groups = self.dense_optimizer.param_groups
            dense = [one for group in groups for one in group["params"]]
            recorder.note_norms(self._prepared.values(), dense, scale)
        updates = engine.collect(list(self._prepared.values()), current)
        self._kept = [batch for batch in self._kept if batch.awaits_backward()]
        for key, batch in list(self._prepared.items()):
            if not batch.awaits_backward():
                del self._prepared[key]
        if scaler is None:
            engine.submit(updates, scale * self._reduction)
            self.dense_optimizer.step()
        else:
            try:
                is_finite = self._scaled_step(scaler, updates, scale)
            except BaseException:
                engine.give_up(updates)
                raise
            if is_finite:
                engine.submit(updates, scale * self._reduction)
            else:
                engine.skip(updates)
        self.dense_optimizer.zero_grad()
        self.update_times += 1
        if self.rank_id:
            from persia._training.progress import random_states

            self._random = random_states()  # before rank 0 can ask for it
        engine.end_step(self.update_times)
        if self.update_times % max(embedding_gradient_check_frequency, 1) == 0:
            self._warn_of_nans(book)
        return loss

    def _scaled_step(
        self, scaler: torch.amp.GradScaler, updates: list[Update], scale: float
    ) -> bool:
        """Step the dense part; False if a gradient, dense or sparse, was not finite."""
        is_finite = all(update.is_finite() for update in updates)
        if self._ranks is not None:
            if getattr(self.distributed_option, "needs_equal_batches", False):
                # Dense gradients may be this rank's own: the scaler would skip a step, and
                # the average that goes with it, on this rank only.
                is_finite = is_finite and self._has_finite_dense()
            is_finite = not self._ranks.any(not is_finite)  # one step, or none, for all
        if not is_finite:
            # The dense gradients are dropped too: no step, and a smaller scale from now on.
            scaler.update(scale / self.grad_scalar_update_factor)
            return False
        if not any(
            parameter.grad is not None
            for group in self.dense_optimizer.param_groups
            for parameter in group["params"]
        ):
            return True  # the scaler refuses an optimizer without any gradient
        scaler.step(self.dense_optimizer)
        scaler.update()
        # The scaler says that it skipped the step by lowering the scale.
        return scaler.get_scale() >= scale

    def _has_finite_dense(self) -> bool:
        import torch

        checks = [
            torch.isfinite(parameter.grad).all()
            for group in self.dense_optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        return not checks or bool(torch.stack(checks).all())

    def _warn_of_nans(self, book: Book) -> None:
        total, by_feature = book.nan_counts()
        if total > self._warned_nans:
            self._warned_nans = total
            logger.warning(
                "%d embedding gradients were not finite so far and were left out: %s",
                total,
                ", ".join(f"{name} {count}" for name, count in sorted(by_feature.items())),
            )


class InferCtx(EmbeddingCtx):
    """Looks embeddings up for serving: no labels, no gradients, nothing configured.

    Args:
        embedding_worker_address_list: ``host:port`` of embedding-workers. Without any, those
            of the job, or in embedded mode the context it is entered in.
        model: As of ``EmbeddingCtx``.
        embedding_config: As of ``EmbeddingCtx``.
        threadpool_worker_size: Kept for scripts of the original.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.
        global_config: As of ``EmbeddingCtx``.
        embedding_worker: As of ``EmbeddingCtx``.

    Raises:
        ConfigError: If a setting cannot be used.
    """

    def __init__(
        self,
        embedding_worker_address_list: list[str] | None = None,
        model: Any = None,
        embedding_config: EmbeddingConfig | SchemaSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
    ) -> None:
        super().__init__(
            PreprocessMode.INFERENCE,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config=global_config,
            embedding_worker=embedding_worker,
        )
        if embedding_worker_address_list:
            self._addresses = list(embedding_worker_address_list)

    def wait_for_serving(self) -> None:
        """Wait until all servers are configured and answer.

        Raises:
            ServiceTimeout: If they are not within 300 s.
        """
        if not self._connected().is_untrained:
            _wait_until_ready(self.embedding_worker)


def cnt_ctx() -> BaseCtx | None:
    """Return the context entered last, or None outside any."""
    ctx = session.current()
    return ctx if isinstance(ctx, BaseCtx) else None


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


def _prepare_feature(batch: PersiaTrainingBatch, preprocess_mode: PreprocessMode) -> Features:
    """Return what a model is called with, and the labels unless in INFERENCE mode."""
    labels = None if preprocess_mode is PreprocessMode.INFERENCE else batch.labels
    return batch.non_id_type_tensors, batch.embedding_tensors, labels


def data_loader_script() -> Path:
    """Return the script that feeds a StreamingDataset in embedded mode.

    Raises:
        ConfigError: If there is none.
    """
    named = env.data_loader_entry()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = Path(main).resolve().parent if main else Path.cwd()
    script = named or beside / "data_loader.py"
    if not script.is_file():
        source = "PERSIA_DATALOADER_ENTRY" if named else "by default"
        raise ConfigError(
            f"StreamingDataset in embedded mode runs a data-loader script, {source} {script}, "
            "which does not exist: write one that sends batches by persia.ctx.DataCtx, or feed "
            "the TrainCtx from a persia.data.IterableDataset in this process"
        )
    return script


def _usable_device(device_id: int | None) -> int | None:
    """Return the device's number, selected in torch, or None for the CPU."""
    if device_id is None or device_id < 0:
        return None
    import torch

    count = torch.cuda.device_count()
    if device_id >= count:
        raise ConfigError(
            f"device_id: expected one of the {count} CUDA devices of this machine, "
            f"got {device_id}"
        )
    torch.cuda.set_device(device_id)
    return device_id


def _torch_device(device_id: int | None) -> torch.device:
    import torch

    return torch.device("cpu") if device_id is None else torch.device("cuda", device_id)


def _grad_scaler(device_id: int | None) -> torch.amp.GradScaler:
    import torch

    return torch.amp.GradScaler(_torch_device(device_id).type)


def _split_config(
    given: EmbeddingConfig | SchemaSource | None,
) -> tuple[EmbeddingConfig, SchemaSource | EmbeddingSchema | None]:
    """Return the run-time settings and, if given, where the slots are."""
    if given is None:
        return get_default_embedding_config(), None
    if isinstance(given, EmbeddingConfig):
        return given, given.schema
    return get_default_embedding_config(), given


def _load_configs(
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


def _wait_until_ready(worker: EmbeddingWorker) -> None:
    deadline = time.monotonic() + READY_S
    pause = threading.Event()  # never set: a wait that Ctrl-C ends
    while not worker.ready_for_serving():
        if time.monotonic() > deadline:
            raise ServiceTimeout(
                f"the embedding-worker and its parameter servers were not ready in "
                f"{READY_S:g} s; they are once a TrainCtx was entered",
                role="embedding-worker",
                method="ready_for_serving",
            )
        pause.wait(ASK_AGAIN_S)
