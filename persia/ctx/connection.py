"""What a context asks: an embedding-worker, and all that contexts share which ask the same one.

A TrainCtx has one Connection. An evaluation context that is entered inside it, or is given its
embedding-worker, uses the same object: its reads wait for the updates in flight.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._cluster.connect import connect_embedding_workers, listening_address
from persia._cluster.embedded import build_embedding_worker
from persia._rpc.deadlines import Retry
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._rpc.zmq_transport import ZmqTransport
from persia._training.receiver import ChildStream, Stream
from persia.config import (
    SAME_EVERYWHERE,
    EmbeddingSchema,
    GlobalConfig,
    describe_differences,
    schema_fingerprint,
)
from persia.errors import ConfigError, ServiceTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from persia._files.writer_lock import JobFolders
    from persia._report.recorder import Recorder
    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.inflight import Plain
    from persia._training.ranks import StepBarrier

# Seconds that servers have to become ready, and between two requests whether they are.
READY_S = 300.0
ASK_AGAIN_S = 0.1


# By id of the worker, which a connection keeps alive. Weak: it ends with its last context.
_connections: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()


class Connection:
    """An embedding-worker with its updates in flight, its stream of batches and its folders.

    Args:
        worker: In this process, or all embedding-workers of the job.
        is_read_only: Whether no TrainCtx configures its servers: they need no optimizer.
    """

    def __init__(self, worker: EmbeddingWorker, *, is_read_only: bool = False) -> None:
        self.worker = worker
        self.is_read_only = is_read_only
        _connections[id(worker)] = self
        self.stream: Stream | None = None  # of data-loaders, from the first that is read
        self.reported: Mapping[str, float] = {}  # replaced, not changed: other threads read it
        # While a TrainCtx is entered:
        self.backward: BackwardPipeline | None = None
        self.barrier: StepBarrier | None = None  # of several ranks
        self.folders: JobFolders | None = None  # that it has dumped into
        self.recorder: Recorder | None = None  # if it was asked for a report

    @classmethod
    def of(cls, worker: EmbeddingWorker) -> Connection:
        """Return the connection that other contexts have to this worker, or a new one."""
        return _connections.get(id(worker)) or cls(worker)

    @classmethod
    def to_job(
        cls, addresses: Sequence[str] | None, schema: EmbeddingSchema | None
    ) -> Connection:
        """Connect to the embedding-workers of the job.

        Args:
            addresses: Of embedding-workers; None takes those that the environment names.
            schema: What the servers are expected to have, if it is known here.

        Raises:
            ConfigError: If the servers have another schema.
            ServiceUnavailable: If one does not answer; names it.
        """
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
    def in_process(
        cls, schema: EmbeddingSchema, config: GlobalConfig, *, is_read_only: bool
    ) -> Connection:
        """Build servers in this process."""
        return cls(build_embedding_worker(schema, config), is_read_only=is_read_only)

    def close(self) -> None:
        """Close the sockets to the embedding-workers of a job."""
        if isinstance(self.worker, EmbeddingWorkers):
            self.worker.close()

    def wait_until_ready(self) -> None:
        """Wait until all servers are configured and answer.

        Raises:
            ServiceTimeout: If they are not within 300 s.
        """
        for _ in Retry(READY_S, first_s=ASK_AGAIN_S, longest_s=ASK_AGAIN_S):
            if self.worker.ready_for_serving():
                return
        raise ServiceTimeout(
            f"the embedding-worker and its parameter servers were not ready in {READY_S:g} s; "
            "they are once a TrainCtx was entered",
            role="embedding-worker",
            method="ready_for_serving",
        )

    # --- batches of data-loaders ------------------------------------------------------------

    def open_stream(self, capacity: int, resumed: Plain | None = None) -> Stream:
        """Return the stream of data-loaders' batches; all contexts read the same one.

        Args:
            capacity: Batches held.
            resumed: What a run before this one has trained of its first pass.

        Raises:
            ConfigError: If there is no data-loader script, or the address is in use.
        """
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
            stream.close()

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
        """Hold training between two steps: all updates so far of all ranks are applied.

        Yields:
            The step, and the states of the ranks other than this one.
        """
        self.flush()
        step = 0 if self.backward is None else self.backward.steps
        if self.barrier is None:
            yield step, []
            return
        with self.barrier.hold_at(step) as states:
            yield step, states


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
