"""The contexts that look embeddings up, dump and load them: for evaluation and for serving."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from persia import _context_stack, env
from persia._cluster.embedded import build_embedding_worker
from persia._metrics.registry import Metrics
from persia._metrics.top_view import View, need_rich
from persia._process_exit import mark_participated
from persia._training import checkpoint, error_hints
from persia._training.batch import PersiaTrainingBatch
from persia._training.feature_order import check_names
from persia._training.queues import Closed, Finished
from persia.config import EmbeddingSchema, load_configs
from persia.ctx.base import PreprocessMode, usable_device
from persia.ctx.connection import Connection
from persia.ctx.saving import SavingCtx
from persia.ctx.session import Session
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from persia._metrics.registry import MetricSource
    from persia._metrics.top_view import Frame
    from persia._rpc.messages import EmbeddingWorker, OptimizerSettings
    from persia._serving.publish import Publisher
    from persia._training.batch import Jagged, NamedList
    from persia._training.forward import ForwardPipeline, PassOptions
    from persia._training.inflight import InFlightTracker
    from persia._training.ranks import Ranks
    from persia.config import ConfigSource
    from persia.tables import Table

    Features = tuple[
        NamedList[torch.Tensor],
        NamedList[torch.Tensor | Jagged],
        NamedList[torch.Tensor] | None,
    ]


logger = logging.getLogger("persia.ctx")


class EmbeddingCtx(SavingCtx):
    """Looks embeddings up for the batches of a model.

    In EVAL and INFERENCE mode a context that is entered inside another one reads the outer
    one's embeddings, unless it is given an embedding config or worker of its own. It
    configures nothing, and its lookups see every update before them.

    Args:
        preprocess_mode: What batches are for.
        model: Called as ``model(non_id_type_tensors, embedding_tensors)``.
        embedding_config: ``EmbeddingConfig``, or the slots as a mapping or the path of a
            YAML file. Without slots, ``PERSIA_EMBEDDING_CONFIG`` names the file.
        threadpool_worker_size: Without effect, as of every context.
        device_id: Number of the CUDA device of the model; below 0 is the CPU. None is the CPU
            too, but in EVAL and INFERENCE mode that of the context it is entered in, if any.
        global_config: Settings of the servers, as a mapping or the path of a YAML file;
            None reads the file named by ``PERSIA_GLOBAL_CONFIG``, if any.
        embedding_worker: Another context's, to use instead of building servers.
        features: Names of the id features in the order in which the model receives them. None
            is the order of the first batch that is trained, which checkpoints keep. Every batch
            is put into that order by name, and its dense tensors and labels too, if they were
            given names.
        allow_missing: Of these features, the names of those that a batch need not have: the
            model then receives what it does of samples without an id.

    Attributes:
        embedding_config: What servers are configured with on entering TrainCtx.
        current_batch: The batch prepared last.
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
        features: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self._features = None if features is None else _names("features", features)
        self._allow_missing = _names("allow_missing", allow_missing)
        self.preprocess_mode = preprocess_mode
        self._trains = preprocess_mode is PreprocessMode.TRAIN
        self.model = model
        self.current_batch: PersiaTrainingBatch | None = None
        self._schema: ConfigSource | EmbeddingSchema | None
        if isinstance(embedding_config, EmbeddingConfig):
            self.embedding_config, self._schema = embedding_config, embedding_config.schema
        else:
            self.embedding_config = get_default_embedding_config()
            self._schema = embedding_config
        self._global_config = global_config
        self._session: Session | None = None
        self._has_checked_mode = False  # of the model's modules, in evaluation
        self._follows_outer = False  # reads the context it is entered in
        self._addresses: list[str] | None = None  # of embedding-workers, if not the job's
        self._tracker: InFlightTracker | None = None  # of the session, or of the last one
        self._view: View | None = None
        # Labels of its forward, and the output's dtype and shape, until its backward.
        self._output: tuple[list[torch.Tensor] | None, Any, Any] | None = None
        # Those that may take part in the next backward, in the order of preparation, by id().
        # Weak, or a loop without backward would fill the memory.
        self._prepared: weakref.WeakValueDictionary[int, PersiaTrainingBatch] = (
            weakref.WeakValueDictionary()
        )
        self._kept: list[PersiaTrainingBatch] = []  # strong references to those of ``keep``
        self._ranks: Ranks | None = None
        self._publisher: Publisher | None = None  # of versions, while a TrainCtx is entered
        if embedding_worker is not None:
            self._use(Connection.of(embedding_worker))
        elif env.get_mode() == "embedded" and (self._trains or self._schema is not None):
            self._build()

    def _use(self, connection: Connection, owns_connection: bool = False) -> None:
        self._session = Session(
            connection, self._trains, owns_connection, self._features, self._allow_missing
        )
        self._tracker, self._view = self._session.tracker, None

    def _build(self) -> None:
        """Use servers in this process."""
        if not self._trains:
            _check_source(self._schema)
        worker = build_embedding_worker(*load_configs(self._schema, self._global_config))
        if not self._trains:
            worker.configure(self.embedding_config.settings())
        self._use(Connection(worker, is_read_only=not self._trains))

    def _connected(self) -> Session:
        if self._session is None:
            raise ConfigError(
                f"this {type(self).__name__} has no embeddings yet: enter it, `with ... as "
                "ctx:`, inside a TrainCtx, or pass embedding_config="
            )
        return self._session

    # --- entering and leaving ---------------------------------------------------------------

    def _enter(self) -> None:
        self._has_checked_mode = False
        with contextlib.ExitStack() as stack:
            self._open(stack)
            stack.callback(self._finish)
            self._on_exit = stack.pop_all()

    def _exit(self, raised: BaseException | None) -> None:
        if raised is not None and self._output is not None and self.current_batch is not None:
            error_hints.explain_loss(raised, self.current_batch, *self._output)
        self._on_exit.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Connect, and push what undoes it; if entering fails, the stack is unwound."""
        outer = _context_stack.current()
        session = outer._session if isinstance(outer, EmbeddingCtx) else None
        if self._is_device_open and not self._trains:
            self.device_id = getattr(outer, "device_id", None)
        stack.callback(self._disconnect)
        if self._session is not None and not self._follows_outer:
            pass  # made by __init__, or by an earlier entering
        elif self._addresses is None and not self._trains and session is not None:
            self._follows_outer = True
            if self._session is None or self._session.connection is not session.connection:
                self._use(session.connection)
        elif self._addresses is not None or env.get_mode() == "services":
            schema = None if self._schema is None else EmbeddingSchema.load(self._schema)
            self._use(_connect(self, schema), owns_connection=True)
        elif self._session is None:
            self._build()

    def _finish(self) -> None:
        """End what is under way, while the servers are still connected."""
        prepared = list(self._prepared.values())
        self._prepared.clear()
        self._kept.clear()
        self.current_batch = None
        self._connected().finish(prepared)

    def _disconnect(self) -> None:
        """Close what this context has opened."""
        session = self._session
        if session is not None:
            if session.owns_connection:
                self._session = None
            session.close()

    # --- servers ----------------------------------------------------------------------------

    @property
    def embedding_worker(self) -> EmbeddingWorker:
        """The embedding-worker that this context asks."""
        return self._connected().connection.worker

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Replace the settings that the servers were given on entering."""
        mark_participated()
        self.embedding_worker.configure(embedding_config.settings())
        self.embedding_config = embedding_config

    def _wait_for_servers(self) -> None:
        self._connected().connection.wait_until_ready()

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Register an embedding optimizer on the servers; ``Optimizer.apply`` calls it."""
        connection = self._connected().connection
        connection.worker.register_optimizer(settings)
        if connection.backward is not None:
            connection.backward.learning_rates.forget()

    def table(self, feature: str) -> Table:
        """Return the rows of a feature by id, the same object each time.

        An InferCtx reads only. DataError: the embedding config has no such feature.
        """
        connection = self._connected().connection
        is_read_only = self.preprocess_mode is PreprocessMode.INFERENCE
        return connection.table(feature, is_read_only=is_read_only)

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows on each parameter server."""
        return self._flushed().get_embedding_size()

    def server_stats(self) -> list[Mapping[str, int]]:
        """Return what each parameter server counts: ``rows``, ``bytes``, ``evicted``, ..."""
        return self._flushed().server_stats()

    def clear_embeddings(self) -> None:
        """Remove all rows."""
        self._flushed().clear_embeddings()

    def _flushed(self) -> EmbeddingWorker:
        """Return the worker, once every update of this rank is acknowledged."""
        connection = self._connected().connection
        connection.flush()
        return connection.worker

    # --- metrics ----------------------------------------------------------------------------

    def metric_sources(self) -> list[MetricSource]:
        """Return the sources of this context, and of servers in this process."""
        return [] if self._session is None else self._session.metric_sources()

    def report(self, **values: float) -> None:
        """Record how well the model does, such as its AUC on held-out data.

        Values are numbers, or tensors of one element. ``top`` and ``/metrics``
        (``persia_reported``) show the last one of each name, a run's report and TensorBoard
        all of them. An evaluation context inside a TrainCtx reports for that one.
        """
        self._connected().connection.report(values)

    def top(self) -> Frame:
        """Return what ``persia-launcher top`` shows of this process; ``str()`` is plain text.

        Rates are of the time since the last call, or since this context was entered.
        """
        need_rich()
        session = self._connected()
        if self._view is None:
            self._view = View(Metrics(self.metric_sources), session.began_at)
        return self._view.frame(f"{env.get_mode()} mode")

    def why_not_ready(self) -> str:
        """Say why batches cannot be looked up and trained now; "" if they can."""
        if self._session is None:
            return "it has no embeddings"
        connection = self._session.connection
        if connection.is_read_only or connection.worker.ready_for_serving():
            return ""
        return "servers have no settings and optimizer yet, or a load replaces their rows"

    def why_not_healthy(self) -> str:
        """Name the threads of this context that ended too early; "" if none did."""
        backward = None if self._session is None else self._session.connection.backward
        return "" if backward is None else backward.why_not_healthy()

    def stats(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return what became of this context's training batches so far.

        ``batches`` were trained, ``abandoned`` had no backward, ``unused`` were never handed
        out, ``skipped`` had a non-finite gradient under a GradScaler, ``failed`` an update
        that raised. ``missing`` counts gradients of rows that were gone. By feature:
        ``skipped_slots`` had no gradient, ``nan_samples`` and ``nan_rows`` were left out as
        not finite. ``staleness`` is the number in flight now.
        """
        # The counts of a context that was left stay readable.
        return (self._tracker or self._connected().tracker).stats()

    # --- batches ----------------------------------------------------------------------------

    def open_pass(
        self, dataset: Iterable[PersiaBatch] | None, options: PassOptions
    ) -> ForwardPipeline:
        """Prepare a pass over a dataset, or without one over what data-loaders send."""
        return self._connected().open_pass(dataset, options, self.device_id, self._ranks)

    def join_ranks(self, *, reproducible: bool) -> AbstractContextManager[Any]:
        """Return what surrounds a pass in which ranks may have unequal numbers of batches."""
        return contextlib.nullcontext()

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Return the model's output for a batch, and the batch's labels."""
        model = self.model
        if model is None:
            raise ConfigError(f"{type(self).__name__}.forward needs model=, got None")
        if not self._trains:
            # A data-parallel wrapper communicates with other ranks, which may not evaluate now.
            model = checkpoint.unwrap(model)
        non_id_type_tensors, embedding_tensors, labels = self.prepare_features(batch)
        if batch.ticket is None and not self._has_checked_mode:
            self._has_checked_mode = _warn_of_training_mode(model)
        self._output = None
        try:
            output = model(non_id_type_tensors, embedding_tensors)
        except Exception as error:
            error_hints.explain_model(error, batch)
            raise
        self._output = labels, getattr(output, "dtype", None), getattr(output, "shape", None)
        return output, labels

    def prepare_features(self, batch: PersiaTrainingBatch) -> Features:
        """Return dense tensors, embeddings in the order of the features, and labels.

        Labels are None if the batch has none, and in INFERENCE mode.
        """
        _check_batch(batch, self._tracker if self._trains else None)
        self.current_batch = batch
        if batch.ticket is not None:
            self._prepared[id(batch)] = batch
        return _prepare_feature(batch, self.preprocess_mode)

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Look one batch up now, outside any loader and its staleness bound.

        In TRAIN mode with ``requires_grad`` it can take one backward, and is released when it
        is dropped without. Tensors go to the device; None is the context's, below 0 the CPU.
        """
        _check_raw(persia_batch)
        device = self.device_id if device_id is None else usable_device(device_id)
        return self._connected().look_up(persia_batch, device)

    def get_embedding_from_bytes(
        self, data: bytes, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Look up a batch that ``PersiaBatch.to_bytes`` wrote."""
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)


class InferCtx(EmbeddingCtx):
    """Looks embeddings up for serving: no labels, no gradients, nothing configured.

    With addresses it need not be entered: it connects when it is first used, by any
    thread, until ``close``. One of them that answers is enough. A lookup goes to another one
    if that which has it dies, and the dead one is avoided until it answers again.

    Args:
        embedding_worker_address_list: ``host:port`` of embedding-workers. Without any, those
            of the job, or in embedded mode the context it is entered in.
        model: As of ``EmbeddingCtx``, as are the others.
        timeout_s: Seconds that a lookup may take over all embedding-workers; then it raises a
            ``ServiceError``. None is ``PERSIA_RPC_TIMEOUT``.
    """

    __module__ = "persia.ctx"

    def __init__(
        self,
        embedding_worker_address_list: list[str] | None = None,
        model: Any = None,
        embedding_config: EmbeddingConfig | ConfigSource | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        global_config: ConfigSource | None = None,
        embedding_worker: EmbeddingWorker | None = None,
        features: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
        timeout_s: float | None = 10.0,
    ) -> None:
        super().__init__(
            PreprocessMode.INFERENCE,
            model,
            embedding_config,
            threadpool_worker_size,
            device_id,
            global_config=global_config,
            embedding_worker=embedding_worker,
            features=features,
            allow_missing=allow_missing,
        )
        if isinstance(embedding_worker_address_list, str):
            raise ConfigError(
                "embedding_worker_address_list: expected a list of addresses, got a str; write "
                f"[{embedding_worker_address_list!r}]"
            )
        if embedding_worker_address_list:
            self._addresses = list(embedding_worker_address_list)
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(
                f"timeout_s: expected seconds above 0, or None, got {timeout_s!r}"
            )
        self._timeout_s = timeout_s
        self._connecting = threading.Lock()
        self._end: weakref.finalize[Any, InferCtx] | None = None  # of what it opened unentered

    def wait_for_serving(self) -> None:
        """Wait, up to 300 s, until all parameter servers are configured and answer."""
        self._wait_for_servers()

    def close(self) -> None:
        """End the connections; a later use makes new ones."""
        with self._connecting:
            session = self._session
            if session is not None and session.owns_connection:
                self._disconnect()

    def _disconnect(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.detach()
        super()._disconnect()

    def _connected(self) -> Session:
        if self._session is not None or self._addresses is None:
            return super()._connected()
        # Threads of a server may all make their first request at once.
        with self._connecting:
            if self._session is None:
                schema = None if self._schema is None else EmbeddingSchema.load(self._schema)
                connection = _connect(self, schema)
                self._use(connection, owns_connection=True)
                # When it is dropped, or the process ends.
                self._end = weakref.finalize(self, connection.close)
        return super()._connected()


def _connect(ctx: EmbeddingCtx, schema: EmbeddingSchema | None) -> Connection:
    """Return a connection of its own to the embedding-workers of a job."""
    if isinstance(ctx, InferCtx):
        return Connection.to_serve(ctx._addresses, schema, ctx._timeout_s)
    return Connection.to_job(ctx._addresses, schema)


def eval_ctx(
    model: Any = None,
    embedding_config: EmbeddingConfig | ConfigSource | None = None,
    threadpool_worker_size: int = 10,
    device_id: int | None = None,
    *,
    global_config: ConfigSource | None = None,
    embedding_worker: EmbeddingWorker | None = None,
    features: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
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
        features=features,
        allow_missing=allow_missing,
    )


eval_ctx.__module__ = "persia.ctx"


def _names(what: str, given: object) -> tuple[str, ...]:
    """Return a list of names as a tuple, each once."""
    names = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    if what == "features" and isinstance(given, set | frozenset):
        is_list = False  # its order differs from process to process
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{what}: expected a list of feature names, got {given!r:.200}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{what}: expected each name once, got {twice!r} twice")
    return names


# Models that were warned of. Contexts of an evaluation are often made once for each epoch.
_forgotten: weakref.WeakSet[Any] = weakref.WeakSet()


def _warn_of_training_mode(model: Any) -> bool:
    """Warn, once, of modules that act as in training; False if no evaluation is entered."""
    current = _context_stack.current()
    if not isinstance(current, EmbeddingCtx) or current._trains:
        return False
    if not isinstance(model, torch.nn.Module) or model in _forgotten:
        return True
    drops, norms = torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm
    acting = [
        name
        for name, module in model.named_modules()
        if module.training
        and (isinstance(module, norms) or (isinstance(module, drops) and module.p > 0))
    ]
    if acting:
        _forgotten.add(model)
        logger.warning(
            "this evaluation calls a model in training mode, in which dropout is active and "
            "BatchNorm changes its statistics (%s): call model.eval() before, and "
            "model.train() after (said once)",
            ", ".join(acting[:4]) + ", ..." * (len(acting) > 4),
        )
    return True


def _check_source(schema: object) -> None:
    """Refuse a context that reads, is entered in no other, and has no config."""
    if schema is None and env.embedding_config_path() is None:
        raise ConfigError(
            "this context has no embeddings to read: enter it inside the `with TrainCtx(...)` "
            "that trains them; or to read a checkpoint, pass embedding_config=, or set "
            "PERSIA_EMBEDDING_CONFIG, and load_checkpoint()"
        )


def _check_raw(batch: object) -> None:
    """Refuse what is no batch yet."""
    if not isinstance(batch, PersiaBatch):
        raise DataTypeError(
            f"get_embedding_from_data: expected a PersiaBatch, got {type(batch).__name__}; "
            "persia.readers.Columns(...).batch(values) makes one of a request's mapping"
        )


def _check_batch(batch: object, tracker: InFlightTracker | None) -> None:
    """Refuse what a model cannot be called with; ``tracker`` is of a context that trains."""
    if not isinstance(batch, PersiaTrainingBatch):
        raise DataTypeError(
            "expected a batch with its embeddings, as DataLoader or "
            f"get_embedding_from_data gives it, got {type(batch).__name__}"
        )
    if batch.missing_dense:
        check_names("dense feature", (), batch.missing_dense)
    ticket = batch.ticket
    if tracker is not None and ticket is not None and ticket.owner not in (0, id(tracker)):
        raise ConfigError(
            "TrainCtx: expected a batch that was looked up in it, got one of another TrainCtx; "
            "a DataLoader belongs to the context that is entered last: train it in its own "
            "`with`, one after the other, or both nets as one model"
        )


def _prepare_feature(batch: PersiaTrainingBatch, preprocess_mode: PreprocessMode) -> Features:
    """Return what a model is called with, and the labels unless in INFERENCE mode."""
    labels = None if preprocess_mode is PreprocessMode.INFERENCE else batch.labels
    return batch.non_id_type_tensors, batch.embedding_tensors, labels


def batches_of(
    epoch: ForwardPipeline,
    joining: AbstractContextManager[Any],
    context: weakref.ref[EmbeddingCtx],
) -> Iterator[PersiaTrainingBatch]:
    """Yield the batches of a pass; threads start with the first one asked for.

    A generator that is dropped before that never runs its ``finally`` block.
    """
    try:
        with joining:
            epoch.start()
            while True:
                try:
                    batch = epoch.next()
                except Finished:
                    ctx = context()
                    if ctx is not None:
                        ctx._connected().note_pass_end()
                    return
                except Closed:
                    raise ConfigError(
                        "this pass was ended before its data: the same DataLoader was iterated "
                        "again (make two for two passes), or the context was left"
                    ) from None
                yield batch
                del batch
                ctx = context()
                if ctx is not None:
                    ctx._output = None  # errors from now on do not come from its batch
                del ctx
    finally:
        epoch.close()
