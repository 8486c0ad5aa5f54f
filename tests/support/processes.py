"""Real processes for tests: servers, embedding-workers and data-loaders of one job."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from persia import env as variables
from tests.support.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
# Variables that list the addresses of each role.
LISTS = {
    "embedding-parameter-server": variables.parameter_server_addresses.name,
    "embedding-worker": variables.embedding_worker_addresses.name,
    "nn-worker": variables.nn_worker_addresses.name,
}
SERVERS = ("embedding-parameter-server", "embedding-worker")
# Seconds. PyTorch takes long to load where many tests run, and some jobs load it four times.
# Below pytest's timeout, in pyproject.toml, which says nothing of what a job has printed.
DEADLINE_S = 240.0
# The launcher; a job's end reaches servers however long they have no processor.
PATIENT = (
    "-c",
    f"from persia._cli import scripts; scripts._ANNOUNCE_S = {PATIENCE_S}; "
    "from persia.launcher import cli; cli()",
)


def run(
    *words: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its status; with an option first it is Python's."""
    command = list(map(str, words))
    if command[0].startswith("-"):
        command.insert(0, sys.executable)
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def why_no_compose() -> str:
    """Say what is missing: docker, or its plugin; empty where both are installed.

    A docker without the plugin refuses ``compose`` in words that differ by version, and by what
    follows it, so only the plain question after its version is asked.
    """
    if shutil.which("docker") is None:
        return "docker is not installed"
    asked = run("docker", "compose", "version")
    return "docker has no Compose plugin" if asked.returncode else ""


_HOSTS = 3  # of a process: more and there would be too few for every pid
_jobs = itertools.count()


def loopback_host(which: int = 0) -> str:
    """Return an address of this machine that no other test process uses, whatever the port."""
    number = _HOSTS * os.getpid() + which % _HOSTS
    return f"127.{1 + number % 250}.{number // 250 % 250}.{1 + number // 62500 % 250}"


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started and that live, youngest last."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [inner for child in children for inner in (*_children(int(child)), int(child))]


def opened(pids: Iterable[int]) -> list[int]:
    """Return descriptors of those that live; one can be read when its process has ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


class Process(subprocess.Popen[str]):
    """One process, and what it and its children print."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            super().__init__(
                words,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
                text=True,
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


class Cluster:
    """The processes of one job but the trainer, which is the test or another process.

    ``slots`` and ``settings`` are the embedding config, which may be a path, and the global
    one; ``transport`` is ``ipc`` or ``tcp``; of nn-workers there are addresses alone.
    """

    launcher: Sequence[str] = ("-m", "persia.launcher")

    def __init__(
        self,
        slots: Mapping[str, Any] | Path,
        settings: Mapping[str, Any] | None = None,
        *,
        transport: str = "ipc",
        num_servers: int = 1,
        num_workers: int = 1,
        num_ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Not the one of the job before, of which something may still be ending.
        self.host = loopback_host(1 + next(_jobs) % (_HOSTS - 1))
        self._directory = tempfile.TemporaryDirectory(prefix="persia-")
        self.place = Path(self._directory.name)
        counts = (num_servers, num_workers, num_ranks)
        self.addresses = {
            role: [self._address(transport, place, role, number) for number in range(count)]
            for place, (role, count) in enumerate(zip(LISTS, counts, strict=True))
        }
        if isinstance(slots, Mapping):
            path = self.place / "slots.yml"
            path.write_text(yaml.safe_dump(dict(slots), sort_keys=False))
        else:
            path = slots
        (self.place / "global.yml").write_text(yaml.safe_dump(dict(settings or {})))
        self.variables = {
            "PERSIA_EMBEDDING_CONFIG": str(path),
            "PERSIA_GLOBAL_CONFIG": str(self.place / "global.yml"),
            **{LISTS[role]: ",".join(each) for role, each in self.addresses.items()},
            **({"PERSIA_LISTEN_HOST": self.host} if transport == "tcp" else {}),
            # Rows end with their server, unless a test wants something else.
            "PERSIA_STATE_DIRECTORY": "off",
            **(environment or {}),
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.prefixes: dict[str, list[str]] = {}  # words before a process's command, by name

    def _address(self, transport: str, place: int, role: str, number: int) -> str:
        if transport == "tcp":
            return f"{self.host}:{21000 + 100 * place + number}"
        return f"ipc://{self.place}/{role}-{number}"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process that belongs to the job."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def start(
        self,
        name: str,
        *arguments: str,
        launcher: Sequence[str] | None = None,
        **changes: str,
    ) -> Process:
        """Run ``persia-launcher`` with these arguments, in a changed environment."""
        launcher = self.launcher if launcher is None else launcher
        words = [*self.prefixes.get(name, ()), sys.executable, *launcher, *arguments]
        log = self.place / f"{name}.log"
        process = self.processes[name] = Process(words, self.environment | changes, log)
        return process

    def start_replica(self, role: str, number: int = 0, **changes: str) -> Process:
        size = len(self.addresses[role])
        replica = (f"--replica-index={number}", f"--replica-size={size}")
        return self.start(f"{role}-{number}", role, *replica, **changes)

    def start_servers(self) -> list[Process]:
        """Start every server and embedding-worker."""
        replicas = [(role, n) for role in SERVERS for n in range(len(self.addresses[role]))]
        return [self.start_replica(role, number) for role, number in replicas]

    def start_loaders(self, script: Path, count: int, *arguments: str) -> None:
        for number in range(count):
            replica = (f"--replica-index={number}", f"--replica-size={count}")
            name, words = f"data-loader-{number}", (*replica, str(script), *arguments)
            self.start(name, "data-loader", *words)

    def start_trainer(self, *arguments: str, **changes: str) -> Process:
        """Run the nn-worker, at whose end all others end."""
        words = ("nn-worker", "nn-worker", *arguments)
        return self.start(*words, launcher=PATIENT, **changes)

    def kill(self, name: str) -> None:
        """Kill a process and what it has started, the latter first, as a machine that dies."""
        process = self.processes[name]
        for pid in [*_children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return what a process has printed since it was started last."""
        return (self.place / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)

    def wait(self, timeout_s: float = DEADLINE_S) -> dict[str, int]:
        """Wait for every process to end by itself; returns their exit statuses."""
        deadline = time.monotonic() + timeout_s
        return {
            name: process.wait(max(0.0, deadline - time.monotonic()))
            for name, process in self.processes.items()
        }

    def stop(self) -> None:
        """End every process that lives and what it has started; addresses are free then."""
        inner = []
        for process in self.processes.values():
            if process.poll() is None:
                inner += opened(_children(process.pid))
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                process.wait(15.0)
            with contextlib.suppress(ProcessLookupError):  # no child of it is left either
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for descriptor in inner:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], DEADLINE_S)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is not None:
            print(self.logs())
        self._directory.cleanup()
