"""The inbox of a rank, served; in embedded mode with the data-loader as a child process."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia._process_exit import RUN, first_failure
from persia._rpc.methods import embedding_worker, nn_worker
from persia._rpc.server import ServerSettings, serve
from persia._rpc.zmq_transport import ZmqTransport
from persia._training.receiver import LOADER, BatchReceiver, failure_of_loader
from persia.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from persia._rpc.messages import EmbeddingWorker
    from persia._rpc.server import Server
    from persia._training.resume import Plain

logger = logging.getLogger(__name__)

# A poll waits in a thread of the server: one for each data-loader, and some for the rest.
_SERVING = ServerSettings(num_threads=256)
# Seconds until a child that was told that nothing more is read has to be gone.
_CHILD_LEAVES_S = 5.0
_STOP_S = 5.0


def check_room(
    worker: EmbeddingWorker, world_size: int, buffer_size: int, num_in_flight: int
) -> None:
    """Check that the embedding-workers can hold what the ranks let data-loaders send.

    With less, batches that nobody can train yet may keep out the one that all wait for.

    Args:
        worker: All of them.
        world_size: Number of ranks.
        buffer_size: Batches that a rank lets data-loaders send.
        num_in_flight: Most batches of a rank between lookup and update.

    Raises:
        ConfigError: If they cannot.
    """
    stats = worker.stats()
    needed = world_size * (buffer_size + num_in_flight)
    room = stats.get("forward_buffer_size", needed)
    if room < needed and not stats.get("unanswered"):
        raise ConfigError(
            f"embedding_worker_config.forward_buffer_size: the embedding-workers have room for "
            f"{room} batches together, expected at least {needed}, which is {world_size} "
            f"rank(s) times (StreamingDataset's buffer_size {buffer_size} + {num_in_flight} "
            f"between lookup and update); set it to {needed} in the global config of the "
            "embedding-workers, or give StreamingDataset a smaller buffer_size"
        )


class Stream:
    """An inbox at an address.

    Args:
        rank: This nn-worker's.
        world_size: Number of ranks.
        capacity: Batches pending.
        address: Where data-loaders find it.
        resumed: What a run before this one has trained.

    Raises:
        ConfigError: If the address cannot be used.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        capacity: int,
        address: str,
        resumed: Plain | None = None,
    ) -> None:
        self.inbox = BatchReceiver(
            rank, world_size, capacity, env.rpc_timeout_s(), resumed=resumed
        )
        self._transport = ZmqTransport()
        try:
            self._server = serve(
                self._transport, address, nn_worker(), self.inbox, settings=_SERVING
            )
        except BaseException:
            self._transport.close()
            raise
        logger.info("nn-worker %d of %d: listens at %s", rank, world_size, self.address)

    @property
    def address(self) -> str:
        """Where data-loaders find it, with the true port."""
        return self._server.address

    @property
    def server(self) -> Server:
        """What answers data-loaders."""
        return self._server

    def begin_pass(self) -> None:
        """Called before each pass over the batches.

        Raises:
            ConfigError: If another one is under way.
        """
        self.inbox.begin_pass()

    def close(self) -> None:
        """Tell the data-loaders that nothing more is read, and stop."""
        self.inbox.close()
        self._server.stop(_STOP_S)
        self._transport.close()


class ChildStream(Stream):
    """A stream from a script that runs as a child process, for embedded mode.

    The script's DataCtx finds the embedding-worker of this process, and its inbox, at two
    sockets in a directory that nobody else can enter. It runs once for each pass.

    Args:
        worker: This process's.
        capacity: Batches pending.
        script: The data-loader.
        resumed: What a run before this one has trained.
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
        self._is_owed = False  # a pass began while the child of the one before still ran
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
                self._is_owed = True
                return
            try:
                self._run()
            except BaseException:
                self.inbox.end_pass()
                raise

    def _run(self) -> None:
        self._is_owed = False
        notes = Path(tempfile.mkdtemp(prefix="end-", dir=self._directory))
        environment = env.of_child(
            **{
                env.LAUNCHED_VARIABLE: 1,
                env.LAUNCHER_PID_VARIABLE: os.getpid(),
                env.RUN_DIRECTORY_VARIABLE: notes,
                env.FEEDS_VARIABLE: 1,
                env.NN_WORKERS_VARIABLE: self.address,
                env.EMBEDDING_WORKERS_VARIABLE: self._worker_server.address,
                "REPLICA_INDEX": 0,
                "REPLICA_SIZE": 1,
            },
            # Embedded mode has one rank; a data-loader has none.
            **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        )
        logger.info(
            "embedded mode: %s is the data-loader, in a process of its own", self._script
        )
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
                if child is not self._child or not self.inbox.is_waiting():
                    return
                if self._is_owed and not self.inbox.has_streams():
                    self._run()  # it had nothing for the pass that began meanwhile
                    return
        except BaseException as exc:
            self.inbox.fail(exc)
            return
        failure = first_failure(notes)
        if failure is not None and failure.text:
            self.inbox.fail(failure_of_loader(0, failure.text))
            return
        how = f"ended with status {status}" if status >= 0 else f"died of signal {-status}"
        self.inbox.fail(
            ServiceError(
                f"the {LOADER} {self._script} {how} before it had ended its stream: it sends "
                "its batches inside `with DataCtx() as ctx:` by ctx.send_data",
                role=LOADER,
                replica=0,
            )
        )

    def close(self) -> None:
        """Stop, and end the child if it does not end by itself."""
        with self._lock:
            child, self._child = self._child, None
        try:
            self.inbox.close()
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
