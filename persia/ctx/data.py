"""The context of a data-loader's script, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from persia import env
from persia._cluster import process_metrics
from persia._metrics.definitions import LOADER
from persia._process_exit import note_served
from persia._rpc.messages import NamedArray
from persia.ctx.base import BaseCtx
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError, DataTypeError, JobFinished

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from persia._loader.sender import BatchSender
    from persia._metrics.registry import MetricSource
    from persia.embedding.data import NdarrayDataBase


class DataCtx(BaseCtx):
    """Sends batches from a data-loader's process to the nn-workers.

    The servers are found by the addresses in the environment; which of the data-loaders this
    is, by ``REPLICA_INDEX`` and ``REPLICA_SIZE``. Leaving the context says that the data has
    ended, and waits until every batch was trained on, or the job has ended. If the script
    fails, the nn-workers raise its traceback. ``threadpool_worker_size`` is without effect;
    ``device_id`` must be usable.

    A job that ends before the data does ends the ``with`` block: silently if it went well,
    and otherwise with its exit status, as ``SystemExit``.

    Example:
        >>> def send_all(batches):
        ...     with DataCtx() as ctx:
        ...         for batch in batches:
        ...             ctx.send_data(batch)
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self._feeder: BatchSender | None = None
        self._last_stats: Mapping[str, int] = {}
        self._sources: list[MetricSource] = []

    _role = LOADER

    def metric_sources(self) -> list[MetricSource]:
        """Return the sources that ``metrics`` reads, also after the context was left."""
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
        from persia._loader import sender

        try:
            self._feeder = feeder = sender.connect()
            number = env.get_replica_index() or 0
            self._sources = [
                process_metrics.of_sender(LOADER, number, feeder),
                process_metrics.of_clients(LOADER, number, feeder.clients, feeder.clients),
            ]
        except JobFinished as exc:
            # No nn-worker will ask for data: end as the job did.
            raise SystemExit(exc.status or 0) from None

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send one batch, once the nn-worker it goes to has room; one thread at a time.

        The batch is copied: its arrays may be refilled. After a ``DataError``, which is the
        batch's own, the next may be sent.

        Raises:
            DataError: If it does not fit the embedding config.
            JobFinished: If the job has ended; let it end the ``with`` block.
            ServiceError: If a server does not answer for too long; names it.
        """
        if not isinstance(persia_batch, PersiaBatch):
            raise DataTypeError(
                f"DataCtx.send_data: expected a PersiaBatch, got {type(persia_batch).__name__}"
            )
        self._sender("send_data").send(
            persia_batch.features,
            _copies(persia_batch.non_id_type_features),
            _copies(persia_batch.labels),
            batch_size=persia_batch.batch_size,
            requires_grad=persia_batch.requires_grad,
            meta=persia_batch.meta,
        )

    def end_epoch(self) -> None:
        """End an epoch, and with it, at the trainer, one loop over the DataLoader.

        Batches sent from here on wait for the next loop, so that the trainer can validate
        between two; the end of the last epoch need not be said. All data-loaders send the same
        number of epochs. A script that leaves batches out by ``seek`` calls it for the epochs
        that it leaves out, too.

        Example:
            >>> def send_epochs(batches, epochs):
            ...     with DataCtx() as ctx:
            ...         for _ in range(epochs):
            ...             for batch in batches:
            ...                 ctx.send_data(batch)
            ...             ctx.end_epoch()
        """
        self._sender("end_epoch").end_epoch()

    @property
    def resume_position(self) -> int:
        """How many of this data-loader's batches the trainer has, once every nn-worker answers.

        It is above 0 where a run continues from a checkpoint, or this data-loader was
        restarted. Such batches may be sent, and are dropped; or ``seek`` leaves them out.
        """
        return self._sender("resume_position").resume_position()

    def seek(self, batch: int) -> None:
        """Let the first ``send_data`` be this data-loader's batch of that number, from 0.

        It is ``resume_position`` or less.

        Example:
            >>> def send_rest(reader):
            ...     with DataCtx() as ctx:
            ...         ctx.seek(ctx.resume_position)
            ...         for batch in reader.batches_from(ctx.resume_position):
            ...             ctx.send_data(batch)
        """
        self._sender("seek").seek(batch)

    def _sender(self, method: str) -> BatchSender:
        if self._feeder is None:
            raise ConfigError(f"DataCtx.{method}: expected inside `with DataCtx() as ctx`")
        return self._feeder

    def stats(self) -> Mapping[str, int]:
        """Return counts of batches since the context was entered; absent ones are zero.

        ``sent``; ``redelivered`` to an nn-worker that was restarted; ``registered_again``
        whose ids an embedding-worker no longer held; ``dropped`` before ``resume_position``;
        ``kept`` until they are trained; ``lost``, not trained when the context was left.
        """
        return self._last_stats if self._feeder is None else self._feeder.stats()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        feeder = self._feeder
        super().__exit__(exc_type, exc, traceback)
        is_end_of_job = isinstance(exc, JobFinished)
        status = None if feeder is None else feeder.job_status
        if status and (exc is None or is_end_of_job):
            # The process that failed has logged why; this one only takes the status over.
            raise SystemExit(status) from None
        return is_end_of_job

    def _exit(self, raised: BaseException | None) -> None:
        feeder, self._feeder = self._feeder, None
        if feeder is None:
            return
        is_asked_to_end = isinstance(raised, SystemExit) and not raised.code
        try:
            if raised is None or is_asked_to_end or isinstance(raised, JobFinished):
                feeder.finish()
                note_served(feeder.peers())
            else:
                feeder.fail(raised)
        finally:
            feeder.close()
            self._last_stats = feeder.stats()


def _copies(items: Iterable[NdarrayDataBase]) -> tuple[NamedArray, ...]:
    return tuple(NamedArray(item.name, np.array(item.data, order="C")) for item in items)
