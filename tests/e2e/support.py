"""Jobs of real processes: started by persia-launcher, at sockets of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persia._rpc.remote import RemoteEmbeddingWorker
from persia._rpc.zmq_transport import ZmqTransport
from persia._services.addresses import connect_embedding_workers
from tests.meta.sources import ROOT
from tests.services.support import SETTINGS, SGD

# Seconds; nothing here takes long unless it is broken.
PATIENCE_S = 60.0

CONFIG = """
slots_config:
  feature: {dim: 4}
"""

# The launcher, but with Python in torchrun's place: torch takes seconds to load.
WITHOUT_TORCHRUN = (
    "from persia._launch import scripts; scripts.torchrun = lambda *_: []; "
    "from persia.launcher import cli; cli()"
)

SERVERS = ("embedding-parameter-server", "embedding-worker")


class Process:
    """One process, and what it prints."""

    def __init__(self, words: list[str], output: Path, environment: dict[str, str]) -> None:
        self.output = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def printed(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed this."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.printed():
            assert self.popen.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)

    def wait(self) -> int:
        try:
            return self.popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.printed()}") from None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill_group(self) -> None:
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.popen.wait(PATIENCE_S)


class Job:
    """Processes that know each other's addresses."""

    def __init__(self, directory: Path, num_servers: int = 1, num_workers: int = 1) -> None:
        self.directory = directory
        self.num_replicas = dict(zip(SERVERS, (num_servers, num_workers), strict=True))
        self.processes: list[Process] = []
        (directory / "slots.yml").write_text(CONFIG)
        variables = ("PERSIA_EMBEDDING_PARAMETER_SERVERS", "PERSIA_EMBEDDING_WORKERS")
        self.addresses = {
            variable: ",".join(f"ipc://{directory}/{role}-{n}" for n in range(number))
            for variable, (role, number) in zip(
                variables, self.num_replicas.items(), strict=True
            )
        }
        self.addresses["PERSIA_NN_WORKERS"] = f"ipc://{directory}/nn-worker-0"
        self.environment = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith("PERSIA_") and name not in ("RANK", "WORLD_SIZE")
        }
        self.environment |= self.addresses
        self.environment |= {
            "PYTHONPATH": str(ROOT),
            "PERSIA_EMBEDDING_CONFIG": str(directory / "slots.yml"),
            "PERSIA_RPC_TIMEOUT": str(PATIENCE_S),
            "PERSIA_STATE_DIRECTORY": "off",
        }

    def script(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def start(self, role: str, *words: str, **changes: str) -> Process:
        """Start ``persia-launcher role words...``; TORCHRUN=1 for torchrun itself."""
        is_whole = changes.pop("TORCHRUN", "")
        start = ["-m", "persia.launcher"] if is_whole else ["-c", WITHOUT_TORCHRUN]
        output = self.directory / f"{len(self.processes)}-{role}.log"
        process = Process(
            [sys.executable, *start, role, *words], output, self.environment | changes
        )
        self.processes.append(process)
        return process

    def start_server(self, role: str, number: int = 0, *words: str, **changes: str) -> Process:
        size = self.num_replicas[role]
        replica = (f"--replica-index={number}", f"--replica-size={size}")
        return self.start(role, *replica, *words, **changes)

    def start_servers(self) -> list[Process]:
        return [
            self.start_server(role, number)
            for role, size in self.num_replicas.items()
            for number in range(size)
        ]

    def status(self, script: str, *words: str, **changes: str) -> int:
        """Run a training script without torch to its end."""
        return self.start("nn-worker", script, *words, **changes).wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill_group()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory in whose paths sockets fit: those of pytest may be too long."""
    with tempfile.TemporaryDirectory(prefix="persia-test-", dir="/tmp") as directory:
        yield Path(directory)


@contextmanager
def transport() -> Iterator[ZmqTransport]:
    made = ZmqTransport()
    try:
        yield made
    finally:
        made.close()


def processes_with(text: str) -> list[str]:
    """The command lines of processes that know this text from their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if text.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has just ended, or is somebody else's
    return found


@contextmanager
def configured_worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    """The worker of a job, whose servers have been started and have settings."""
    job.start_servers()
    with transport() as made:
        (found,) = connect_embedding_workers(
            made,
            addresses=job.addresses["PERSIA_EMBEDDING_WORKERS"].split(","),
            timeout_s=PATIENCE_S,
        )
        found.configure(SETTINGS)
        found.register_optimizer(SGD)
        yield found
        found.close()
