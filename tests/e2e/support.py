"""Jobs of real processes: started by persia-launcher, at sockets of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from persia._cluster.connect import connect_embedding_workers
from persia._rpc.stubs import RemoteEmbeddingWorker
from persia._rpc.zmq_transport import ZmqTransport
from tests.meta.sources import ROOT
from tests.support.services import SETTINGS, SGD

# Seconds; nothing here takes long unless it is broken.
PATIENCE_S = 60.0

CONFIG = """
slots_config:
  feature: {dim: 4}
"""

# The launcher, but with Python in torchrun's place: torch takes seconds to load.
WITHOUT_TORCHRUN = (
    "from persia._cli import scripts; scripts.torchrun = lambda *_: []; "
    "from persia.launcher import cli; cli()"
)

SERVERS = ("embedding-parameter-server", "embedding-worker")


class Process:
    """One process, and what it and its children print, which a thread reads."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._changed = threading.Condition()  # guards the next two
        self._output = b""
        self._has_ended = False  # no process can print any more
        self.popen = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as pipe:
            while True:
                came = pipe.read(1 << 16)
                with self._changed:
                    self._output += came
                    self._has_ended = not came
                    self._changed.notify_all()
                if not came:
                    return

    def printed(self) -> str:
        with self._changed:
            return self._output.decode()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed this."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or text.encode() in self._output, PATIENCE_S
            )
            assert text in self._output.decode(), self._output.decode()

    def wait(self) -> int:
        """Wait for its end, and for all that was printed until then."""
        try:
            status = self.popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.printed()}") from None
        self._reader.join(PATIENCE_S)
        return status

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its children with it
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)


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
        process = Process([sys.executable, *start, role, *words], self.environment | changes)
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


def transport() -> closing[ZmqTransport]:
    return closing(ZmqTransport())


def _with(text: str) -> dict[int, str]:
    """Processes but this one that know this text from their environment; their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has just ended, or another process has its number
                if text.encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes()
                    found[int(entry.name)] = line.replace(b"\0", b" ").decode()
    return found


def processes_with(text: str) -> list[str]:
    """The command lines of processes that know this text from their environment."""
    return list(_with(text).values())


def wait_until_gone(text: str) -> None:
    """Wait until no process knows this text from its environment."""
    deadline = time.monotonic() + PATIENCE_S
    while pids := _with(text):
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
