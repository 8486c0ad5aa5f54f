"""Where data-loaders find a rank, and the batches of a pass that they deliver there.

Stream        a receiver, served at an address
ChildStream   the same in embedded mode, where it runs the data-loader's script, too
StreamSource  one pass over a stream, as ``ForwardPipeline`` reads it
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._process_exit import RUN, first_failure
from persia._rpc.methods import embedding_worker, nn_worker
from persia._rpc.server import ServerLimits, serve
from persia._rpc.worker_pool import handle_of
from persia._rpc.zmq_transport import ZmqTransport
from persia._training.forward import Source
from persia._training.inflight import InFlightBatch
from persia._training.loader_streams import LOADER, failure_of_loader
from persia._training.queues import Closed, Finished
from persia._training.receiver import BatchReceiver
from persia.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.batch import DeviceTransfer, PersiaTrainingBatch
    from persia._training.progress import Plain

logger = logging.getLogger(__name__)

# A poll waits in a thread of the server: one for each data-loader, and some for the rest.
_SERVING = ServerLimits(num_threads=256)
# Seconds until a child has to be gone that knows that nothing more is read.
_CHILD_LEAVES_S = 5.0
_STOP_S = 5.0
# Seconds that data-loaders may take to send what no rank will train any more.
DROP_S = 60.0


def check_room(
    worker: EmbeddingWorker, world_size: int, buffer_size: int, num_in_flight: int
) -> None:
    """Raise ConfigError if embedding-workers cannot hold what ranks let data-loaders send.

    With less, batches that no rank can train yet may keep out the one that all wait for.
    ``num_in_flight`` batches of a rank may be between lookup and update.
    """
    stats = worker.stats()
    needed = world_size * (buffer_size + num_in_flight)
    room = stats.get("forward_buffer_size", needed)
    if room < needed and not stats.get("unanswered"):
        raise ConfigError(
            f"embedding_worker_config.forward_buffer_size: the embedding-workers have room for "
            f"{room} batches together, expected at least {needed}, which is {world_size} "
            f"rank(s) times (StreamingDataset's buffer_size {buffer_size} + {num_in_flight} "
            "between lookup and update)"
        )


class Stream:
    """A receiver, served at an address where data-loaders find it."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        capacity: int,
        address: str,
        resumed: Plain | None = None,
    ) -> None:
        self.receiver = BatchReceiver(
            rank, world_size, capacity, env.rpc_timeout_s(), resumed=resumed
        )
        self._transport = ZmqTransport()
        try:
            self.server = serve(
                self._transport, address, nn_worker(), self.receiver, settings=_SERVING
            )
        except BaseException:
            self._transport.close()
            raise
        self.address = self.server.address  # with the true port
        logger.info("nn-worker %d of %d: listens at %s", rank, world_size, self.address)

    def begin_pass(self) -> None:
        """Begin to take batches; ConfigError if another pass is under way."""
        self.receiver.begin_pass()

    def close(self, *, is_back: bool = False) -> None:
        """Announce to data-loaders that nothing more is read, and stop.

        Not where this process ``is_back`` soon: they wait for it.
        """
        self.receiver.close(is_back=is_back)
        self.server.stop(_STOP_S)
        self._transport.close()


class ChildStream(Stream):
    """A stream from a script that runs as a child process, once for each pass; embedded mode.

    The script's DataCtx finds the embedding-worker of this process, and its receiver, at two
    sockets in a directory that no other user can enter.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        capacity: int,
        script: Path,
        resumed: Plain | None = None,
    ) -> None:
        self._script = script
        self._directory = tempfile.mkdtemp(prefix="persia-")
        self._lock = threading.Lock()  # guards the next three
        self._child: subprocess.Popen[bytes] | None = None  # started last; None once closed
        self._watcher: threading.Thread | None = None
        self._is_requested = False  # a pass began while the child of the last one still ran
        try:
            super().__init__(0, 1, capacity, f"ipc://{self._directory}/nn-worker", resumed)
            self._worker_server = serve(
                self._transport,
                f"ipc://{self._directory}/embedding-worker",
                embedding_worker(),
                worker,
            )
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def begin_pass(self) -> None:
        """Start the script, unless it runs still and may open another stream."""
        with self._lock:
            super().begin_pass()
            if self._child is not None and self._child.poll() is None:
                self._is_requested = True
                return
            try:
                self._run()
            except BaseException:
                self.receiver.end_pass()
                raise

    def _run(self) -> None:
        self._is_requested = False
        notes = Path(tempfile.mkdtemp(prefix="end-", dir=self._directory))
        environment = env.of_child(
            **{
                env.is_launched.name: 1,
                env.launcher_pid.name: os.getpid(),
                env.run_directory.name: notes,
                env.feeds_parent.name: 1,
                env.nn_worker_addresses.name: self.address,
                env.embedding_worker_addresses.name: self._worker_server.address,
                "REPLICA_INDEX": 0,
                "REPLICA_SIZE": 1,
            },
            # Embedded mode has one rank; a data-loader has none.
            **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        )
        if self._child is None:
            how = "is the data-loader, in a process of its own"
        else:
            how = (
                "runs again, for one more pass; if it sends several epochs by itself, it calls "
                "ctx.end_epoch() after each"
            )
        logger.info("embedded mode: %s %s", self._script, how)
        command = [sys.executable, "-m", RUN, "script", str(self._script)]
        self._child = subprocess.Popen(command, env=environment)
        self._watcher = threading.Thread(
            target=self._watch,
            args=(self._child, notes),
            name="persia-data-loader",
            daemon=True,
        )
        self._watcher.start()

    def _watch(self, child: subprocess.Popen[bytes], notes: Path) -> None:
        status = child.wait()
        try:
            with self._lock:
                if child is not self._child or not self.receiver.is_waiting():
                    return
                if self._is_requested and not self.receiver.has_streams():
                    self._run()  # it had nothing for the pass that began meanwhile
                    return
        except BaseException as exc:
            self.receiver.fail(exc)
            return
        failure = first_failure(notes)
        if failure is not None and failure.text:
            self.receiver.fail(failure_of_loader(0, failure.text))
            return
        how = f"ended with status {status}" if status >= 0 else f"died of signal {-status}"
        self.receiver.fail(
            ServiceError(
                f"the {LOADER} {self._script} {how} before it had ended its stream: it sends "
                "its batches inside `with DataCtx() as ctx:` by ctx.send_data",
                role=LOADER,
                replica=0,
            )
        )

    def close(self, *, is_back: bool = False) -> None:
        """Stop, and end the child, which ends with this process anyway."""
        with self._lock:
            child, self._child = self._child, None
        try:
            self.receiver.close()
            if child is not None:
                self._end(child)
            self._worker_server.stop(_STOP_S)
            super().close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        for stop in (child.terminate, child.kill):
            try:
                child.wait(_CHILD_LEAVES_S)
                break
            except subprocess.TimeoutExpired:
                logger.warning("the %s %s is being stopped", LOADER, self._script)
                stop()
        else:
            child.wait()
        if self._watcher is not None:
            self._watcher.join()


class StreamSource(Source):
    """Takes what data-loaders deliver, by batch id if it is ``in_order``."""

    def __init__(self, stream: Stream, transfer: DeviceTransfer, in_order: bool) -> None:
        self._stream = stream
        self._receiver = stream.receiver
        self._transfer = transfer
        self._in_order = in_order
        self._is_closed = False
        self._has_begun = False

    def start(self) -> None:
        """Begin a pass; ConfigError if another one is under way."""
        self._stream.begin_pass()
        self._has_begun = True

    def get(self) -> tuple[PersiaTrainingBatch, InFlightBatch]:
        """Take the next batch."""
        if self.failure is not None:
            raise Finished
        receiver = self._receiver
        try:
            stream, batch = receiver.take(self._in_order, lambda: self._is_closed)
        except (Closed, Finished):
            raise
        except BaseException as exc:
            self.failure = exc
            raise Finished from exc
        batch_id = batch.batch_id
        try:
            copied = self._transfer.copy_streamed(batch)
        except BaseException:
            receiver.end(stream, batch_id)
            raise
        return copied, InFlightBatch(
            handle_of(batch.ids),
            batch_id,
            requires_grad=batch.requires_grad,
            num_samples=batch.batch_size,
            register_again=partial(receiver.register_again, stream, batch_id),
            on_done=partial(receiver.mark_done, stream, batch_id),
            on_end=partial(receiver.end, stream, batch_id),
        )

    def position(self) -> Plain | None:
        """Return what is done of every data-loader's batches that are this rank's."""
        return self._receiver.position()

    def end_position(self) -> Plain | None:
        """Return ``position`` for when all that was received is done."""
        return self._receiver.position(at_end=True)

    def next_position(self) -> Plain | None:
        """Return the beginning of the next epoch; None if data-loaders begin from the start."""
        return self._receiver.next_position()

    def describe_wait(self) -> str:
        """Name the data-loaders whose batch is missing."""
        return f"{self._receiver.describe_wait()} (this nn-worker is at {self._stream.address})"

    def describe_missing(self) -> str:
        """Name data-loaders that sent nothing, or this rank if they sent it nothing."""
        return self._receiver.describe_missing()

    def drop_rest(self, on_drop: Callable[[], None]) -> None:
        """Have the receiver acknowledge what comes until data-loaders have ended the epoch."""
        if not self._receiver.drop_rest(on_drop, DROP_S, lambda: self._is_closed):
            logger.warning(
                "another rank has no batch, and the rest of this one's did not come within "
                "%g s: waited for %s",
                DROP_S,
                self._receiver.describe_wait(),
            )

    def close(self) -> list[threading.Thread]:
        """End the pass; what is pending stays for the next one."""
        self._is_closed = True
        if self._has_begun:
            self._has_begun = False
            self._receiver.end_pass()
        return []
