"""A whole job in one ``with``: the servers, and the user's functions in processes of their own.

    with ensure_persia_service(
        data_loader_func=send_batches, embedding_config_path="embedding_config.yml"
    ):
        with TrainCtx(...) as ctx:
            ...

Without ``nn_worker_func`` this process is the nn-worker, and leaving the ``with`` ends the job.
With it, leaving waits until the training has ended. Afterwards every process is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia import env
from persia._cli.run import UNWIND_S, Child, dump_call
from persia._cluster.connect import connect_embedding_workers, connect_parameter_servers
from persia._cluster.job import announce_job_end
from persia._process_exit import RUN, End
from persia._rpc.zmq_transport import ZmqTransport
from persia.config import EmbeddingSchema, GlobalConfig
from persia.errors import ConfigError, PersiaError, RemoteError, ServiceTimeout
from persia.utils import dump_yaml

Config = Mapping[str, object] | str | os.PathLike[str]

logger = logging.getLogger(__name__)

_MAX_NPROC = 8
# Seconds that processes get to end by themselves once the job has, and that the announcement
# of the end may take: less after a failure.
_LEAVE_S = 10.0
_ANNOUNCE_S, _ANNOUNCE_SOON_S = 3.0, 0.5
# A path of ipc has 107 bytes at most, and a file's name comes behind.
_MAX_DIRECTORY = 80

_SERVER_ROLES = ("embedding-parameter-server", "embedding-worker")


@dataclass(slots=True)
class _Process:
    """One process of the job."""

    role: str
    number: int
    child: Child
    end: End | None = None  # set once, when it has ended

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


class PersiaServiceCtx:
    """Runs the services of a job while its ``with`` lasts.

    Args:
        data_loader_func: Runs in each data-loader, a process of its own.
        nn_worker_func: Runs in each nn-worker, a process of its own with torchrun's
            environment; without it, this process is the nn-worker.
        embedding_config: The embedding config, as a mapping or a path.
        embedding_config_path: The same, as a path.
        global_config: The global config, as a mapping or a path.
        global_config_path: The same, as a path.
        data_loader_replica_num: Number of data-loaders.
        nproc_per_node: Number of nn-workers, 1 to 8.
        embedding_worker_replica_num: Number of embedding-workers.
        embedding_parameter_replica_num: Number of parameter servers.
        embedding_worker_port: TCP port of the first embedding-worker, the others follow; if
            not given, sockets in a private directory.
        embedding_parameter_server_port: The same for the parameter servers.
        nats_server_port: Taken for old code's sake; there is no broker.

    Raises:
        ConfigError: If a number or a config cannot be used.
    """

    def __init__(
        self,
        data_loader_func: Callable[[], object] | None = None,
        nn_worker_func: Callable[[], object] | None = None,
        embedding_config: Config | None = None,
        embedding_config_path: str | os.PathLike[str] | None = None,
        global_config: Config | None = None,
        global_config_path: str | os.PathLike[str] | None = None,
        data_loader_replica_num: int = 1,
        nproc_per_node: int = 1,
        embedding_worker_replica_num: int = 1,
        embedding_parameter_replica_num: int = 1,
        embedding_worker_port: int | None = None,
        embedding_parameter_server_port: int | None = None,
        nats_server_port: int | None = None,
    ) -> None:
        if not 1 <= nproc_per_node <= _MAX_NPROC:
            raise ConfigError(
                f"nproc_per_node must be in 1..{_MAX_NPROC}, got {nproc_per_node}"
            )
        self._data_loader_func = data_loader_func
        self._nn_worker_func = nn_worker_func
        slots = _one_of("embedding_config", embedding_config, embedding_config_path)
        self._embedding_config = env.embedding_config_path() if slots is None else slots
        self._global_config = _one_of("global_config", global_config, global_config_path)
        if self._embedding_config is None:
            raise ConfigError("expected embedding_config or embedding_config_path, got neither")
        # Read here too, as the output of a child process may not be seen.
        EmbeddingSchema.load(self._embedding_config)
        GlobalConfig.load(self._global_config)
        self._num_replicas = {
            "embedding-parameter-server": embedding_parameter_replica_num,
            "embedding-worker": embedding_worker_replica_num,
            "data-loader": data_loader_replica_num,
            "nn-worker": nproc_per_node,
        }
        self._ports = {
            "embedding-parameter-server": embedding_parameter_server_port,
            "embedding-worker": embedding_worker_port,
        }
        for role, number in self._num_replicas.items():
            if number < 1:
                raise ConfigError(f"number of {role}s must be at least 1, got {number}")
        self._stack = ExitStack()
        self._changed = threading.Condition()  # guards the ends of processes, and the next
        self._processes: list[_Process] = []
        self._failures: list[RemoteError] = []  # in the order of time
        self._is_ending = False

    # --- from enter to exit -------------------------------------------------------------------

    def __enter__(self) -> PersiaServiceCtx:
        """Start every process, and return when all servers answer."""
        try:
            self._start()
        except BaseException as exc:
            self._end(1, _time_to_unwind(exc))
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the job: with the training if that runs elsewhere, else now."""
        try:
            if error is None and self._nn_worker_func is not None:
                self.wait()
        except BaseException as exc:
            self._end(1, _time_to_unwind(exc))
            raise
        self._end(0 if error is None else 1, _time_to_unwind(error))
        if not self._failures:
            return
        if error is None:
            raise self._failures[0]
        if isinstance(error, PersiaError):
            # What the body met is what the failure of that process looks like from here.
            raise self._failures[0] from error
        logger.error("%s", self._failures[0])

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the nn-workers have ended, or without any, the data-loaders.

        Args:
            timeout_s: Seconds; as long as they run, if not given.

        Raises:
            RemoteError: If a process fails, with what ended it.
            ServiceTimeout: If they have not ended in time.
        """
        role = "data-loader" if self._nn_worker_func is None else "nn-worker"
        awaited = [process for process in self._processes if process.role == role]
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._failures or all(p.end is not None for p in awaited),
                timeout_s,
            )
        if self._failures:
            raise self._failures[0]
        if not is_over:
            running = ", ".join(str(process) for process in awaited if process.end is None)
            raise ServiceTimeout(f"{running}: not ended within {timeout_s:g} s", role=role)

    # --- starting -----------------------------------------------------------------------------

    def _start(self) -> None:
        directory = self._directory()
        addresses = self._addresses(directory)
        self._stack.enter_context(env.changed(**addresses))
        for role in _SERVER_ROLES:
            for number in range(self._num_replicas[role]):
                self._start_process(role, number, self._server_words(role, number, directory))
        self._wait_for_servers()
        if self._data_loader_func is not None:
            words = self._call_words(directory, "data_loader", self._data_loader_func)
            size = self._num_replicas["data-loader"]
            for number in range(size):
                changes = {"REPLICA_INDEX": number, "REPLICA_SIZE": size}
                self._start_process("data-loader", number, words, **changes)
        if self._nn_worker_func is not None:
            words = self._call_words(directory, "nn_worker", self._nn_worker_func)
            of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "GROUP_RANK": 0}
            size = self._num_replicas["nn-worker"]
            of_all |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            for rank in range(size):
                of_rank = {"RANK": rank, "LOCAL_RANK": rank}
                self._start_process("nn-worker", rank, words, **of_rank, **of_all)

    def _directory(self) -> Path:
        parent = tempfile.gettempdir()
        if len(parent.encode()) > _MAX_DIRECTORY:
            parent = "/tmp"
        made = tempfile.TemporaryDirectory(prefix="persia-", dir=parent)
        return Path(self._stack.enter_context(made))

    def _addresses(self, directory: Path) -> dict[str, str]:
        listed = {}
        for role, variable in (
            ("embedding-parameter-server", env.parameter_server_addresses.name),
            ("embedding-worker", env.embedding_worker_addresses.name),
            ("nn-worker", env.nn_worker_addresses.name),
        ):
            port, places = self._ports.get(role), range(self._num_replicas[role])
            addresses = [f"ipc://{directory}/{role}-{place}" for place in places]
            if port is not None:
                addresses = [f"127.0.0.1:{port + place}" for place in places]
            listed[variable] = ",".join(addresses)
        if env.metrics_port() not in (None, "off"):
            listed["PERSIA_METRICS_PORT"] = "0"  # it is this process's; they are on one host
        return listed

    def _server_words(self, role: str, number: int, directory: Path) -> list[str]:
        words = ["-m", "persia.launcher", role]
        words += [f"--replica-index={number}", f"--replica-size={self._num_replicas[role]}"]
        for name, config in (
            ("embedding-config", self._embedding_config),
            ("global-config", self._global_config),
        ):
            if isinstance(config, Mapping):
                path = directory / f"{name}.yml"
                dump_yaml(dict(config), path)
                config = path
            if config is not None:
                words.append(f"--{name}={os.fspath(config)}")
        return words

    def _call_words(
        self, directory: Path, name: str, function: Callable[[], object]
    ) -> list[str]:
        path = directory / f"{name}.pkl"
        path.write_bytes(dump_call(function))
        return ["-m", RUN, "call", str(path)]

    def _start_process(
        self, role: str, number: int, words: list[str], **changes: object
    ) -> None:
        unset: dict[str, object] = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        process = _Process(role, number, Child(words, **(unset | changes)))
        self._processes.append(process)
        name = f"persia-watch {process}"
        threading.Thread(None, self._watch, name, (process,), daemon=True).start()

    def _watch(self, process: _Process) -> None:
        """Note the end of a process, and whether it has failed."""
        end = process.child.end()
        with self._changed:
            # At the end by our signal, or with the job's status, unless it says what is wrong.
            failed = bool(end.text)
            if not self._is_ending:
                failed = end.status != 0 or process.role in _SERVER_ROLES
            if failed:
                how = f"ended with status {end.status} before the job did"
                text = f"{process} failed:\n{end.text}" if end.text else f"{process} {how}"
                failure = RemoteError(text, role=process.role, replica=process.number)
                self._failures.append(failure)
            process.end = end
            self._changed.notify_all()
        if failed:
            logger.error("%s of this job has failed, with status %d", process, end.status)

    def _wait_for_servers(self) -> None:
        def has_failed() -> bool:
            return bool(self._failures)

        with closing(ZmqTransport()) as transport:
            try:
                found = [
                    *connect_parameter_servers(transport, should_stop=has_failed),
                    *connect_embedding_workers(transport, should_stop=has_failed),
                ]
            except PersiaError as error:
                if not self._failures:
                    raise
                raise self._failures[0] from error
            for server in found:
                server.close()

    # --- ending -------------------------------------------------------------------------------

    def _end(self, status: int, unwind_s: float) -> None:
        """End every process, and put everything back as it was."""
        with self._changed:
            self._is_ending = True
        try:
            status = 1 if self._failures else status
            if any(p.end is None for p in self._processes):
                with closing(ZmqTransport()) as transport:
                    timeout_s = _ANNOUNCE_SOON_S if status else _ANNOUNCE_S
                    announce_job_end(transport, status, timeout_s)
            others = [p for p in self._processes if p.role not in _SERVER_ROLES]
            if status == 0:
                self._wait_for_end(others, _LEAVE_S)
            self._stop(others, unwind_s)
            self._stop(self._processes, _LEAVE_S / 2)
        finally:
            for process in self._processes:
                process.child.send_signal(signal.SIGKILL)
            self._wait_for_end(self._processes, _LEAVE_S)
            for process in self._processes:
                process.child.close()
            self._stack.close()

    def _wait_for_end(self, processes: list[_Process], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(p.end is not None for p in processes), timeout_s)

    def _stop(self, processes: list[_Process], timeout_s: float) -> None:
        """Signal those that still run, and kill them if they do not end in time."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                if process.end is None:
                    process.child.send_signal(number)
            self._wait_for_end(processes, timeout_s)


def ensure_persia_service(*args: Any, **kwargs: Any) -> PersiaServiceCtx:
    """Return a ``PersiaServiceCtx`` with these arguments."""
    return PersiaServiceCtx(*args, **kwargs)


def _time_to_unwind(error: BaseException | None) -> float:
    """Return the seconds that functions get to end once they are signalled."""
    return UNWIND_S if isinstance(error, KeyboardInterrupt) else _LEAVE_S / 2


def _one_of(name: str, config: Config | None, path: Config | None) -> Config | None:
    if config is not None and path is not None:
        raise ConfigError(f"expected one of {name} and {name}_path, got both")
    return config if path is None else path


def _free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
