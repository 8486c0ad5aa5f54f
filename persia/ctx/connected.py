"""A context with embedding servers: connected, shared with contexts inside it, measured."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from persia import _context_stack, env
from persia._cluster import process_metrics
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import Metrics
from persia._metrics.top_view import View, need_rich
from persia._process_exit import mark_participated
from persia._report.metrics import TrainingMetrics
from persia._rpc.deadlines import within
from persia._training.forward import Lookups
from persia._training.inflight import InFlightTracker, Progress
from persia.config import EmbeddingSchema, load_configs
from persia.ctx.base import BaseCtx, PreprocessMode
from persia.ctx.checkpoints import Checkpoints
from persia.ctx.connection import Connection
from persia.embedding import EmbeddingConfig, get_default_embedding_config
from persia.errors import ConfigError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from persia._metrics.registry import MetricSource
    from persia._metrics.top_view import Frame
    from persia._rpc.messages import EmbeddingWorker, OptimizerSettings
    from persia.config import ConfigSource

logger = logging.getLogger("persia.ctx")

# Seconds that servers get to name the slots, once a model has failed.
_ASK_S = 3.0


class ConnectedCtx(BaseCtx):
    """What ``EmbeddingCtx`` is beside its batches; the arguments are those of it."""

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        embedding_config: EmbeddingConfig | ConfigSource | None,
        threadpool_worker_size: int,
        device_id: int | None,
        global_config: ConfigSource | None,
        embedding_worker: EmbeddingWorker | None,
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self.preprocess_mode = preprocess_mode
        self._schema: ConfigSource | EmbeddingSchema | None
        if isinstance(embedding_config, EmbeddingConfig):
            self.embedding_config, self._schema = embedding_config, embedding_config.schema
        else:
            self.embedding_config = get_default_embedding_config()
            self._schema = embedding_config
        self._global_config = global_config
        self._connection: Connection | None = None
        self._owns_connection = False  # made on entering, closed on leaving
        self._owns_stream = False
        self._follows_outer = False  # reads the context it is entered in
        self._addresses: list[str] | None = None  # of embedding-workers, if not the job's
        self._tracker: InFlightTracker | None = None
        self._view: View | None = None
        if embedding_worker is not None:
            self._use(Connection.of(embedding_worker))
        elif env.get_mode() == "embedded" and (self._trains or self._schema is not None):
            self._use(self._build())

    @property
    def _trains(self) -> bool:
        return self.preprocess_mode is PreprocessMode.TRAIN

    def _build(self) -> Connection:
        """Build servers in this process."""
        schema, config = load_configs(self._schema, self._global_config)
        connection = Connection.in_process(schema, config, is_read_only=not self._trains)
        if not self._trains:
            connection.worker.configure(self.embedding_config.settings())
            logger.warning(
                "this %s context has an embedding store of its own, which begins empty: to "
                "read what a TrainCtx trains, enter it inside that TrainCtx or pass "
                "embedding_worker=",
                self.preprocess_mode.name,
            )
        return connection

    def _use(self, connection: Connection) -> None:
        """Begin to count and to look up at a connection."""
        rank = env.get_rank() or 0
        self._connection = connection
        self._progress = Progress()  # of training, from this connection on
        self._metrics = TrainingMetrics(rank)
        self._view, self._used_at = None, time.monotonic()
        self._tracker = InFlightTracker(connection.worker)
        self._lookups = Lookups(
            connection.worker,
            self._tracker,
            self._trains,
            before_evaluation=connection.wait,
            rank=rank,
            world_size=env.get_world_size() or 1,
            progress=self._progress,
        )
        self._checkpoints = Checkpoints(connection)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConfigError(
                f"this {type(self).__name__} has no embeddings yet: enter it, inside the "
                "TrainCtx whose embeddings it is to read, or pass embedding_config="
            )
        return self._connection

    def _own_tracker(self) -> InFlightTracker:
        self._connected()
        if self._tracker is None:
            raise ConfigError(f"this {type(self).__name__} has no embeddings yet")
        return self._tracker

    # --- entering and leaving ---------------------------------------------------------------

    def _enter(self) -> None:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            stack.callback(self._finish)
            self._on_exit = stack.pop_all()

    def _exit(self) -> None:
        self._on_exit.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Connect, and push what undoes it; if entering fails, the stack is unwound."""
        outer = _context_stack.current()
        stack.callback(self._disconnect)
        if self._connection is not None and not self._follows_outer:
            pass  # made by __init__, or by an earlier entering
        elif self._addresses is not None:
            self._connect()
        elif (
            not self._trains
            and isinstance(outer, ConnectedCtx)
            and outer._connection is not None
        ):
            self._follows_outer = True
            if self._connection is not outer._connection:
                self._use(outer._connection)
        elif env.get_mode() == "services":
            self._connect()
        elif self._connection is None:
            self._use(self._build())

    def _connect(self) -> None:
        schema = None if self._schema is None else EmbeddingSchema.load(self._schema)
        self._use(Connection.to_job(self._addresses, schema))
        self._owns_connection = True

    def _finish(self) -> None:
        """End what is under way, while the servers are still connected."""

    def _disconnect(self) -> None:
        """Close what this context has opened."""
        connection = self._connection
        if connection is None:
            return
        try:
            if self._owns_stream:
                self._owns_stream = False
                connection.close_stream()
        finally:
            if self._owns_connection:
                self._owns_connection, self._connection = False, None
                connection.close()

    # --- servers ----------------------------------------------------------------------------

    @property
    def embedding_worker(self) -> EmbeddingWorker:
        """The embedding-worker that this context asks."""
        return self._connected().worker

    def configure_embedding_parameter_servers(self, embedding_config: EmbeddingConfig) -> None:
        """Replace the settings that the servers were given on entering."""
        mark_participated()
        self._connected().worker.configure(embedding_config.settings())
        self.embedding_config = embedding_config

    def _configure_servers(self, config: EmbeddingConfig) -> None:
        self.configure_embedding_parameter_servers(config)

    def _wait_for_servers(self) -> None:
        connection = self._connected()
        if not connection.is_read_only:
            connection.wait_until_ready()

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Register an embedding optimizer on the servers; ``Optimizer.apply`` calls it."""
        connection = self._connected()
        connection.worker.register_optimizer(settings)
        if connection.backward is not None:
            connection.backward.learning_rates.forget()

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
        connection = self._connected()
        connection.flush()
        return connection.worker

    def _slot_names(self) -> list[str]:
        """Return the slots of the embedding config, if servers still answer."""
        if self._connection is None:
            return []
        try:
            with within(_ASK_S):
                return [one.name for one in self._connection.worker.feature_stats()]
        except Exception as exc:  # the model's error is what the user must see
            logger.debug("no slots to compare a batch with: %r", exc)
            return []

    # --- metrics ----------------------------------------------------------------------------

    def metric_sources(self) -> list[MetricSource]:
        """Return the sources of this context, and of servers in this process."""
        connection, tracker = self._connection, self._tracker
        if connection is None or tracker is None:
            return []
        return [
            *self._metrics.sources(
                connection.worker, tracker, connection.backward, connection.stream
            ),
            process_metrics.of_reports(
                TRAINER, env.get_rank() or 0, connection, lambda: connection.reported
            ),
        ]

    def report(self, **values: float) -> None:
        """Record how well the model does, such as its AUC on held-out data.

        ``persia-launcher top``, ``top()`` and ``/metrics`` (``persia_reported``) show the last
        value of each name; the report of a run and TensorBoard have all of them, over the
        steps. The loss of each ``backward`` is recorded without this. An evaluation context
        inside a TrainCtx reports for that one.

        Args:
            values: Numbers, or tensors of one element.

        Raises:
            DataTypeError: If one is no number.
            ConfigError: Before this context was entered.

        Example:
            >>> with eval_ctx(model=model) as evaluation:  # doctest: +SKIP
            ...     evaluation.report(auc=roc_auc_score(labels, scores))
        """
        connection = self._connected()
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError) as exc:
                raise DataTypeError(
                    f"report: expected a number for {name}, got {type(value).__name__}"
                ) from exc
        connection.reported = {**connection.reported, **numbers}
        if connection.recorder is not None:
            connection.recorder.note_reported(numbers)

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
        need_rich()
        self._connected()
        if self._view is None:
            self._view = View(Metrics(self.metric_sources), self._used_at)
        return self._view.frame(f"{env.get_mode()} mode")

    def why_not_ready(self) -> str:
        """Say why batches cannot be looked up and trained now; "" if they can."""
        connection = self._connection
        if connection is None:
            return "it has no embeddings"
        if connection.is_read_only or connection.worker.ready_for_serving():
            return ""
        return "servers have no settings and optimizer yet, or a load replaces their rows"

    def why_not_healthy(self) -> str:
        """Name the threads of this context that ended too early; "" if none did."""
        backward = None if self._connection is None else self._connection.backward
        return "" if backward is None else backward.why_not_healthy()

    def stats(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return what became of this context's training batches so far.

        ``batches`` were trained, ``abandoned`` had no backward, ``unused`` were looked up
        ahead and never handed out, ``skipped`` had a non-finite gradient under a GradScaler,
        ``failed`` had an update that raised. ``missing`` counts gradients of rows that were
        gone. By feature: ``skipped_slots`` had no gradient, ``nan_samples`` and ``nan_rows``
        were left out as not finite. ``staleness`` is the number in flight now.
        """
        # The counts of a context that was left stay readable.
        return (self._tracker or self._own_tracker()).stats()
