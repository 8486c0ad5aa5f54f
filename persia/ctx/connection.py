"""What a context asks: an embedding-worker, and all that contexts share which ask the same one.

An evaluation context inside a TrainCtx, or with its embedding-worker, has the same Connection:
its reads wait for the updates in flight. What each of them does there is a Session.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._cluster.connect import (
    connect_embedding_workers,
    listening_address,
    serving_addresses,
)
from persia._rpc.deadlines import Retry
from persia._rpc.serving_pool import SILENCE_S, ServingWorkers
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._rpc.zmq_transport import ZmqTransport
from persia._training.feature_order import SharedOrder
from persia._training.stream_source import ChildStream, Stream
from persia.config import SAME_EVERYWHERE, describe_differences, schema_fingerprint
from persia.errors import ConfigError, DataTypeError, ServiceTimeout
from persia.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from persia._files.writer_lock import JobFolders
    from persia._report.recorder import Recorder
    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.progress import Plain
    from persia._training.ranks import StepBarrier
    from persia.config import EmbeddingSchema

logger = logging.getLogger("persia.ctx")

# Seconds that servers have to become ready, and between two requests whether they are.
READY_S = 300.0
ASK_AGAIN_S = 0.1

# By id of the worker, which a connection keeps alive. Weak: it ends with its last context.
_connections: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()


class Connection:
    """An embedding-worker, in this process or all of the job's, and what contexts share there.

    ``is_read_only``: no TrainCtx configures its servers, which need no optimizer.
    """

    def __init__(self, worker: EmbeddingWorker, *, is_read_only: bool = False) -> None:
        self.worker = worker
        self.is_read_only = is_read_only
        self._is_looked_at = False
        self.has_trained_model = False  # an earlier TrainCtx has trained this one's model
        _connections[id(worker)] = self
        self.order = SharedOrder(worker)  # of features, as models receive them
        self.stream: Stream | None = None  # of data-loaders, from the first that is read
        self.num_loads = 0  # of rows, so far
        self.load_lock = threading.RLock()  # held by loads, and by lookups beside training
        self.is_back = False  # in another process, that goes on where this one ends
        self._tables: dict[tuple[str, bool], Table] = {}
        self.reported: Mapping[str, float] = {}  # replaced, not changed: other threads read it
        # While a TrainCtx is entered:
        self.backward: BackwardPipeline | None = None
        self.barrier: StepBarrier | None = None  # of several ranks
        self.folders: JobFolders | None = None  # that it has dumped into
        self.recorder: Recorder | None = None  # if it was asked for a report

    @classmethod
    def of(cls, worker: EmbeddingWorker) -> Connection:
        """Return the connection that other contexts have to this worker, or a new one."""
        if not hasattr(worker, "lookup_direct"):
            raise ConfigError(
                "embedding_worker: expected another context's, ctx.embedding_worker, got "
                f"{type(worker).__name__}; addresses are in PERSIA_EMBEDDING_WORKERS"
            )
        return _connections.get(id(worker)) or cls(worker)

    @classmethod
    def to_job(
        cls, addresses: Sequence[str] | None, schema: EmbeddingSchema | None
    ) -> Connection:
        """Connect to embedding-workers; None takes those that the environment names."""
        here = None if schema is None else schema_fingerprint(schema)
        transport = ZmqTransport()
        try:
            workers = EmbeddingWorkers(
                transport,
                lambda on_restart: connect_embedding_workers(
                    transport, addresses=addresses, on_restart=on_restart
                ),
            )
            there = workers.schema_fingerprint
            if here is not None and here != there:
                raise ConfigError(
                    "embedding_config: the servers have another one: "
                    f"{describe_differences(there, here, 'there', 'here')}; {SAME_EVERYWHERE}"
                )
        except BaseException:
            transport.close()
            raise
        return cls(workers)

    @classmethod
    def to_serve(
        cls,
        addresses: Sequence[str] | None,
        schema: EmbeddingSchema | None,
        timeout_s: float | None,
    ) -> Connection:
        """Connect to those embedding-workers that answer; others are found when they do.

        A lookup takes at most ``timeout_s`` seconds; None is ``PERSIA_RPC_TIMEOUT``.
        """
        look_up, has_names = serving_addresses(addresses)
        transport = ZmqTransport(silence_s=SILENCE_S)
        try:
            workers = ServingWorkers(
                transport,
                look_up,
                has_names=has_names,
                timeout_s=timeout_s,
                schema_fingerprint=None if schema is None else schema_fingerprint(schema),
            )
        except BaseException:
            transport.close()
            raise
        return cls(workers)

    def warn_if_empty(self, trains: bool) -> None:
        """Warn, once, of lookups in a store without rows, where there should be some.

        That is in an evaluation, in a store of its own or a TrainCtx's, and in training where
        the model has been trained already: its rows ended with the TrainCtx that had them.
        """
        is_of_training = self.backward is not None
        if not (self.is_read_only or (is_of_training and not trains) or self.has_trained_model):
            return
        if self._is_looked_at:
            return
        self._is_looked_at = True
        if sum(self.worker.get_embedding_size()):
            return
        if self.is_read_only:
            logger.warning(
                "this evaluation looks up in an embedding store of its own, which is empty: "
                "every row is zeros. To read what a TrainCtx trains, enter the context inside "
                "that TrainCtx or pass embedding_worker=; to serve a checkpoint, "
                "load_checkpoint() first"
            )
        else:
            logger.warning(
                "%s, and this TrainCtx has no rows: an evaluation reads zeros. Rows end with "
                "the TrainCtx that trained them, and a state dict has none: stay in one "
                "`with`, enter the same TrainCtx again, or dump_checkpoint() there and "
                "load_checkpoint() here first",
                "the model was trained in an earlier TrainCtx"
                if self.has_trained_model
                else "this is an evaluation before any training",
            )

    def report(self, values: Mapping[str, float]) -> None:
        """Keep what a script reported, and record it."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                raise DataTypeError(
                    f"report: expected a number for {name}, got {type(value).__name__}"
                ) from None
        self.reported = {**self.reported, **numbers}
        if self.recorder is not None:
            self.recorder.note_reported(numbers)

    def close(self) -> None:
        """Close the sockets to the embedding-workers of a job."""
        if isinstance(self.worker, EmbeddingWorkers | ServingWorkers):
            self.worker.close()

    def wait_until_ready(self) -> None:
        """Wait, up to 300 s, until all servers are configured, if they will be, and answer."""
        if self.is_read_only:
            return
        for _ in Retry(READY_S, first_s=ASK_AGAIN_S, longest_s=ASK_AGAIN_S):
            if self.worker.ready_for_serving():
                return
        raise ServiceTimeout(
            f"servers were not ready in {READY_S:g} s; they are once a TrainCtx was entered",
            role="embedding-worker",
            method="ready_for_serving",
        )

    # --- batches of data-loaders ------------------------------------------------------------

    def open_stream(self, capacity: int, resumed: Plain | None = None) -> Stream:
        """Return the stream of all contexts; ``resumed`` was trained of its first pass."""
        if self.stream is None and env.get_mode() == "embedded":
            self.stream = ChildStream(self.worker, capacity, data_loader_script(), resumed)
        elif self.stream is None:
            rank, world_size = env.get_rank() or 0, env.get_world_size() or 1
            address = listening_address("nn-worker", rank)
            self.stream = Stream(rank, world_size, capacity, address, resumed)
        return self.stream

    def close_stream(self) -> None:
        """Close the stream of data-loaders, if it was opened."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close(is_back=self.is_back)

    def table(self, feature: str, *, is_read_only: bool) -> Table:
        """Return the rows of a feature, the same object each time."""
        known = self._tables.get((feature, is_read_only))
        if known is None:
            known = Table(self.worker, feature, flush=self.flush, is_read_only=is_read_only)
            self._tables[feature, is_read_only] = known
        return known

    # --- updates in flight ------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until this rank's updates are acknowledged; raise what one of them raised."""
        backward = self.backward
        if backward is not None:
            backward.flush()

    def wait(self) -> None:
        """Wait as ``flush`` does, but leave what an update raised to the user's thread."""
        backward = self.backward
        if backward is not None:
            backward.wait()

    def end_recording(self, write_report: Callable[[], None] | None) -> None:
        """Settle what is recorded, and write the report if there is to be one."""
        recorder = self.recorder
        if recorder is None:
            return
        try:
            if write_report is None:
                recorder.settle()
            else:
                write_report()
        finally:
            self.recorder = None
            recorder.close()

    def end_updates(self, backward: BackwardPipeline) -> None:
        """Send what is queued, and let no other context queue an update."""
        self.backward, self.folders = None, None
        backward.close()
        # Servers of their own processes write their changes when they end.
        flush_changes = getattr(self.worker, "flush_changes", None)
        if flush_changes is not None:
            flush_changes()

    def leave_barrier(self) -> None:
        """Let checkpoints of other ranks go without this one."""
        barrier, self.barrier = self.barrier, None
        if barrier is not None:
            barrier.close()

    @contextlib.contextmanager
    def at_step(self) -> Iterator[tuple[int, list[Plain]]]:
        """Hold all ranks between two steps; yield the step, and the others' states."""
        self.flush()
        step = 0 if self.backward is None else self.backward.steps
        if self.barrier is None:
            yield step, []
            return
        with self.barrier.hold_at(step) as states:
            yield step, states


def data_loader_script() -> Path:
    """Return the script that feeds a StreamingDataset in embedded mode."""
    named = env.data_loader_entry()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = Path(main).resolve().parent if main else Path.cwd()
    script = named or beside / "data_loader.py"
    if not script.is_file():
        source = "PERSIA_DATALOADER_ENTRY" if named else "by default"
        raise ConfigError(
            f"StreamingDataset in embedded mode runs a data-loader script, {source} {script}, "
            "which does not exist: write one that sends batches by persia.ctx.DataCtx, or give "
            "the DataLoader an IterableDataset; where ensure_persia_service() starts the "
            "servers, make the StreamingDataset inside its `with`"
        )
    return script
