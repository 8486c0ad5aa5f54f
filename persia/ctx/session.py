"""What one context does at its connection; a connection may be shared, a session is not."""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

import torch

from persia import env
from persia._cluster import process_metrics
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import MetricSource, Sample
from persia._rpc.serving_pool import ServingWorkers
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._training.batch import DeviceTransfer
from persia._training.feature_order import Arranger
from persia._training.forward import DatasetSource, ForwardPipeline, Lookups
from persia._training.inflight import InFlightBatch, InFlightTracker, Reason
from persia._training.progress import BEGINNING, count_done
from persia._training.stream_source import Stream, StreamSource, check_room
from persia.ctx.checkpoints import Checkpoints
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from persia._training.batch import PersiaTrainingBatch
    from persia._training.forward import PassOptions, Source
    from persia._training.progress import Plain
    from persia._training.ranks import Ranks
    from persia.ctx.connection import Connection
    from persia.embedding.data import PersiaBatch

logger = logging.getLogger("persia.ctx")


class Session:
    """What one context does at a connection: passes, lookups, checkpoints, metrics."""

    def __init__(
        self,
        connection: Connection,
        trains: bool,
        owns_connection: bool = False,
        features: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
    ) -> None:
        self._rank = env.get_rank() or 0
        self.connection = connection
        self.owns_connection = owns_connection
        self.checkpoints = Checkpoints(connection, trains, features)
        self.tracker = InFlightTracker(connection.worker)
        self.lookups = Lookups(
            connection.worker,
            self.tracker,
            trains,
            before_evaluation=connection.wait,
            arranger=Arranger(connection.worker, connection.order, features, allow_missing),
            rank=self._rank,
            world_size=env.get_world_size() or 1,
        )
        self.progress = self.lookups.progress  # of training, from this session on
        self.began_at = time.monotonic()
        # How many steps there were, and the loss of the last: computed when it is read.
        self.last_step: tuple[int, Callable[[], float] | None] = (0, None)
        self._owns_stream = False
        self._transfers: dict[int | None, DeviceTransfer] = {}  # by device
        self._passes: list[weakref.ref[ForwardPipeline]] = []  # may still have threads
        # A source keeps what it was read last, for ratios since then: it lives as long as
        # the component that it reads. By that one's id; it keeps it.
        self._sources: dict[int, MetricSource] = {}

    # --- batches ----------------------------------------------------------------------------

    def check_between_passes(self) -> None:
        """Refuse to load a checkpoint in the middle of a pass."""
        if not all(one.is_closed for one in self._referenced()):
            raise ConfigError(
                "a checkpoint is loaded between two passes over a DataLoader, not in the "
                "middle of one: what was looked up ahead would be of the rows before"
            )

    def _referenced(self) -> list[ForwardPipeline]:
        return [one for reference in self._passes if (one := reference()) is not None]

    def open_pass(
        self,
        dataset: Iterable[PersiaBatch] | None,
        options: PassOptions,
        device_id: int | None,
        ranks: Ranks | None,
    ) -> ForwardPipeline:
        """Prepare the pipeline of a pass; see ``EmbeddingCtx.open_pass``."""
        if self.lookups.trains and self.connection.recorder is not None:
            self.connection.recorder.note_pass(options)
        self.checkpoints.reader.wait()
        self.connection.warn_if_empty(self.lookups.trains)
        self.connection.flush()  # no lookup of this pass may overtake an update of the last one
        transfer = self.transfer(device_id)
        kind = "stream" if dataset is None else "dataset"
        resumed = self.progress.resumed(kind) if self.lookups.trains else None
        source: Source
        if dataset is None:
            stream = self._stream(options, resumed)
            source = StreamSource(stream, transfer, options.reproducible)
        else:
            source = DatasetSource(dataset, transfer, options.input_capacity, resumed)
        num_resumed = 0 if resumed is None else count_done(resumed)
        if num_resumed:
            logger.info(
                "this pass begins behind batch %d, where the checkpoint was made", num_resumed
            )
        pipeline = ForwardPipeline(
            source, self.lookups, transfer, options, ranks=ranks, num_resumed=num_resumed
        )
        # Replaced whole: another thread may read it.
        self._passes = [weakref.ref(one) for one in (*self._referenced(), pipeline)]
        return pipeline

    def note_pass_end(self) -> None:
        """Note that the loop has come to the end of a pass."""
        if self.lookups.trains and self.connection.recorder is not None:
            self.connection.recorder.note_mark("end of a pass")

    def _stream(self, options: PassOptions, resumed: Plain | None) -> Stream:
        connection, world_size = self.connection, env.get_world_size() or 1
        is_open = connection.stream is not None
        if is_open and resumed is not None:
            logger.warning(
                "data-loaders continue where they are: this process has read from them before "
                "it loaded a checkpoint"
            )
        if not is_open and (options.reproducible or world_size > 1):
            in_flight = options.output_capacity + options.num_workers
            if self.lookups.trains and options.staleness is not None:
                in_flight = options.staleness
            check_room(connection.worker, world_size, options.input_capacity, in_flight)
        if not is_open and resumed is None and self.lookups.trains and env.resume_from():
            # Data-loaders may have sent to a trainer before this one, which left no checkpoint
            # of this pass.
            resumed = BEGINNING
        self._owns_stream |= not is_open
        return connection.open_stream(options.input_capacity, resumed)

    def transfer(self, device_id: int | None) -> DeviceTransfer:
        """Return what brings batches to a device; None is the CPU."""
        if device_id not in self._transfers:
            self._transfers[device_id] = DeviceTransfer(torch_device(device_id))
        return self._transfers[device_id]

    def look_up(self, batch: PersiaBatch, device_id: int | None) -> PersiaTrainingBatch:
        """Look one batch up now; it is released when it is dropped without a backward."""
        tracker = self.tracker
        tracker.release_orphans()
        self.connection.warn_if_empty(self.lookups.trains)
        transfer = self.transfer(device_id)
        found = transfer.copy(batch)
        ticket = InFlightBatch(
            features=batch.features,
            requires_grad=batch.requires_grad,
            num_samples=batch.batch_size,
        )
        if not self.lookups.has_gradients(ticket):
            self.connection.flush()
        self.lookups.number(found, ticket)
        outputs = self.lookups.lookup(found, ticket)
        try:
            transfer.stage(found, outputs)
            transfer.finish(found)
        except BaseException:
            if found.ticket is not None:
                tracker.release(found.ticket, Reason.UNUSED)
            raise
        if found.ticket is not None:
            # A finalizer runs inside any allocation: it may append, but not take a lock.
            finalizer = weakref.finalize(found, tracker.orphans.append, ticket)
            finalizer.atexit = False
        return found

    # --- its end ----------------------------------------------------------------------------

    def finish(self, prepared: list[PersiaTrainingBatch]) -> None:
        """Release what has no update, and wait for dumps and loads in the background."""
        passes, self._passes = self._referenced(), []
        for one in passes:
            one.close()
        for batch in prepared:
            if batch.ticket is not None:
                self.tracker.release(batch.ticket, Reason.ABANDONED)
        self.tracker.release_orphans()
        self.checkpoints.writer.wait()
        self.checkpoints.reader.wait()

    def close(self) -> None:
        """Close what this session has opened: the stream of data-loaders, the connection."""
        try:
            if self._owns_stream:
                self._owns_stream = False
                self.connection.close_stream()
        finally:
            if self.owns_connection:
                self.connection.close()

    # --- metrics ----------------------------------------------------------------------------

    def metric_sources(self) -> list[MetricSource]:
        """Return what there is to be read now, also of servers in this process."""
        rank, connection, tracker = self._rank, self.connection, self.tracker
        worker, stream = connection.worker, connection.stream
        found: dict[int, MetricSource] = {}

        def add(of: object, make: Callable[[], MetricSource]) -> None:
            found[id(of)] = self._sources.get(id(of)) or make()

        add(tracker, lambda: process_metrics.of_inflight(TRAINER, rank, tracker))
        add(self, lambda: MetricSource(TRAINER, rank, "steps", self, self._read_steps))
        if stream is not None:
            receiver, server = stream.receiver, stream.server
            add(receiver, lambda: process_metrics.of_receiver(TRAINER, rank, receiver))
            add(server, lambda: process_metrics.of_rpc_server(TRAINER, rank, server))
        if isinstance(worker, EmbeddingWorkers | ServingWorkers):
            clients = worker.clients
            add(worker, lambda: process_metrics.of_clients(TRAINER, rank, worker, clients))
        else:
            for of, make in process_metrics.of_embedded(worker):
                add(of, make)
        self._sources = found
        reported = process_metrics.of_reports(
            TRAINER, rank, connection, lambda: connection.reported
        )
        return [*found.values(), reported]

    def _read_steps(self) -> Iterator[Sample]:
        steps, loss = self.last_step
        yield Sample("persia_steps", steps)
        if loss is not None:
            yield Sample("persia_loss", loss())
        backward = self.connection.backward
        num_waiting, num_bytes = (0, 0) if backward is None else backward.measure()
        yield Sample("persia_update_queue_batches", num_waiting)
        yield Sample("persia_update_queue_bytes", num_bytes)


def new_scaler(device_id: int | None) -> torch.amp.GradScaler:
    """Return what scales losses on a device."""
    return torch.amp.GradScaler(torch_device(device_id).type)


def torch_device(device_id: int | None) -> torch.device:
    """Return the CPU for None, and otherwise the CUDA device."""
    return torch.device("cpu") if device_id is None else torch.device("cuda", device_id)
