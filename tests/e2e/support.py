"""Jobs of real processes: started by persia-launcher, at sockets of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from persia._cluster.connect import connect_embedding_workers
from persia._rpc.stubs import RemoteEmbeddingWorker
from persia._rpc.zmq_transport import ZmqTransport
from tests.support.processes import Cluster
from tests.support.services import SETTINGS, SGD
from tests.support.waiting import PATIENCE_S, until

CONFIG = {"slots_config": {"feature": {"dim": 4}}}

# The launcher, but with Python in torchrun's place: torch takes seconds to load.
WITHOUT_TORCHRUN = (
    "from persia._cli import scripts; scripts.torchrun = lambda *_: []; "
    "from persia.launcher import cli; cli()"
)

SERVERS = ("embedding-parameter-server", "embedding-worker")


class Process(subprocess.Popen[bytes]):
    """One process, and what it and its children print."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            super().__init__(
                words, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def printed(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed this."""
        until(lambda: text in self.printed() or self.poll() is not None, details=self.printed)
        assert text in self.printed(), self.printed()

    def wait(self, timeout: float | None = PATIENCE_S) -> int:
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.printed()}") from None


class Job:
    """Processes that know each other's addresses."""

    def __init__(self, cluster: Cluster) -> None:
        self.directory, self.addresses = cluster.place, cluster.addresses
        self.environment = cluster.environment
        self.processes: list[Process] = []

    def script(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def run(self, *words: str, **changes: str) -> Process:
        """Start Python with these arguments, and a changed environment."""
        log = self.directory / f"{len(self.processes)}.log"
        process = Process([sys.executable, *words], self.environment | changes, log)
        self.processes.append(process)
        return process

    def start(self, role: str, *words: str, **changes: str) -> Process:
        """Start ``persia-launcher role words...``; TORCHRUN=1 for torchrun itself."""
        is_whole = changes.pop("TORCHRUN", "")
        start = ["-m", "persia.launcher"] if is_whole else ["-c", WITHOUT_TORCHRUN]
        return self.run(*start, role, *words, **changes)

    def start_server(self, role: str, number: int = 0, **changes: str) -> Process:
        size = len(self.addresses[role])
        replica = (f"--replica-index={number}", f"--replica-size={size}")
        return self.start(role, *replica, **changes)

    def start_servers(self) -> list[Process]:
        return [self.start_server(role) for role in SERVERS]

    def status(self, script: str, **changes: str) -> int:
        """Run a training script without torch to its end."""
        return self.start("nn-worker", script, **changes).wait()


@contextmanager
def running_job(
    slots: dict[str, Any] = CONFIG,
    settings: dict[str, Any] | None = None,
    num_servers: int = 1,
    **environment: str,
) -> Iterator[Job]:
    """A job of one worker, gone afterwards."""
    environment |= {"PERSIA_RPC_TIMEOUT": str(PATIENCE_S)}
    with Cluster(slots, settings, num_servers=num_servers, environment=environment) as cluster:
        job = Job(cluster)
        try:
            yield job
        finally:
            for process in job.processes:
                with suppress(ProcessLookupError):  # it has ended, and its children with it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory in whose paths sockets fit: those of pytest may be too long."""
    with tempfile.TemporaryDirectory(prefix="persia-test-", dir="/tmp") as directory:
        yield Path(directory)


def transport() -> closing[ZmqTransport]:
    return closing(ZmqTransport())


def processes_with(text: str) -> dict[int, str]:
    """The commands of other processes that know this text from their environment, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has just ended, or another process has its number
                if text.encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes()
                    found[int(entry.name)] = line.replace(b"\0", b" ").decode()
    return found


def wait_until_gone(text: str) -> None:
    """Wait until no process knows this text from its environment."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := processes_with(text):
        for pid in pids:
            with suppress(ProcessLookupError):
                ended = os.pidfd_open(pid)
                try:
                    left = max(0.0, deadline - time.monotonic())
                    assert select.select([ended], [], [], left)[0], processes_with(text)
                finally:
                    os.close(ended)


@contextmanager
def configured_worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    """The worker of a job, whose servers have been started and have settings."""
    job.start_servers()
    addresses = job.addresses["embedding-worker"]
    with transport() as made:
        (found,) = connect_embedding_workers(made, addresses=addresses, timeout_s=PATIENCE_S)
        found.configure(SETTINGS)
        found.register_optimizer(SGD)
        yield found
        found.close()
