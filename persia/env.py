"""Everything PERSIA reads from the environment: the only reader of ``os.environ``.

Who this process is (rank or replica) is parsed on first use and kept until ``reload_env`` or
``set_env``, because a launcher sets it once. Everything else is read at each call.

A variable that is set to the empty string counts as not set.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from persia._replica_index import own_number
from persia.errors import ConfigError

Mode = Literal["embedded", "services"]

DEFAULT_EMBEDDING_WORKER_SERVICE = "embedding_worker:8887"
DEFAULT_RPC_TIMEOUT_S = 300.0

# Where the services of a job on one machine listen; the ports of the first two are the
# original's.
DEFAULT_PARAMETER_SERVERS = "127.0.0.1:8888"
DEFAULT_EMBEDDING_WORKERS = "127.0.0.1:8887"
DEFAULT_NN_WORKERS = "127.0.0.1:23457"
DEFAULT_LISTEN_HOST = "127.0.0.1"
DEFAULT_METRICS_GATEWAY = "metrics_gateway:9091"

PARAMETER_SERVERS_VARIABLE = "PERSIA_EMBEDDING_PARAMETER_SERVERS"
EMBEDDING_WORKERS_VARIABLE = "PERSIA_EMBEDDING_WORKERS"
NN_WORKERS_VARIABLE = "PERSIA_NN_WORKERS"

# Set by persia-launcher and PersiaServiceCtx for the processes they start.
LAUNCHED_VARIABLE = "PERSIA_LAUNCHED"

# Set by a trainer in embedded mode for the data-loader's script that it starts.
FEEDS_VARIABLE = "PERSIA_FEEDS"

# Set by them too: where a script's end is noted, and the process that reads the note.
RUN_DIRECTORY_VARIABLE = "PERSIA_RUN_DIRECTORY"
LAUNCHER_PID_VARIABLE = "PERSIA_LAUNCHER_PID"

# Any of these says that there are servers to talk to. The values of the two NATS names are
# ignored: the broker is gone, the old deployments that set them are not.
_NATS_VARIABLES = ("PERSIA_NATS_URL", "PERSIA_NATS_IP")
_SERVICES_VARIABLES = (
    PARAMETER_SERVERS_VARIABLE,
    EMBEDDING_WORKERS_VARIABLE,
    "EMBEDDING_WORKER_SERVICE",
    NN_WORKERS_VARIABLE,
    *_NATS_VARIABLES,
)

_LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_PREFIX = "PERSIA_"
_FLAGS = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True, slots=True)
class _Place:
    """Who this process is: an nn-worker has a rank, every other role a replica number."""

    world_size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    replica_size: int | None = None
    replica_index: int | None = None

    def __post_init__(self) -> None:
        for name, value, low in (
            ("WORLD_SIZE", self.world_size, 1),
            ("RANK", self.rank, 0),
            ("LOCAL_RANK", self.local_rank, 0),
            ("REPLICA_SIZE", self.replica_size, 1),
            ("REPLICA_INDEX", self.replica_index, 0),
        ):
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")
        for name, number, of, count in (
            ("RANK", self.rank, "WORLD_SIZE", self.world_size),
            ("REPLICA_INDEX", self.replica_index, "REPLICA_SIZE", self.replica_size),
        ):
            if number is not None and count is not None and number >= count:
                raise ConfigError(f"{name} must be below {of} {count}, got {number}")


_place: _Place | None = None


def _text(name: str) -> str | None:
    return os.environ.get(name) or None


def _integer(name: str) -> int | None:
    text = _text(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as exc:
        raise ConfigError(
            f"environment variable {name} must be an integer, got {text!r}"
        ) from exc


def _flag(name: str) -> bool:
    text = _text(name)
    if text is None:
        return False
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError as exc:
        raise ConfigError(f"environment variable {name} must be 0 or 1, got {text!r}") from exc


def _path(name: str) -> Path | None:
    text = _text(name)
    return None if text is None else Path(text)


def replica() -> tuple[int, int]:
    """Return the number of this replica, and how many there are, as the environment says.

    ``REPLICA_INDEX=auto`` is the number that Compose, a StatefulSet or a JobSet gave to the
    container. Whether the number fits is for the caller to check.

    Raises:
        ConfigError: If a variable is no integer, or ``auto`` finds no number.
    """
    size = _integer("REPLICA_SIZE")
    if (_text("REPLICA_INDEX") or "").strip().lower() == "auto":
        index: int | None = own_number()
    else:
        index = _integer("REPLICA_INDEX")
    return 0 if index is None else index, 1 if size is None else size


def _read_place() -> _Place:
    rank = _integer("RANK")
    if rank is None:
        index, size = replica()
        return _Place(replica_size=size, replica_index=index)
    local_rank, world_size = _integer("LOCAL_RANK"), _integer("WORLD_SIZE")
    missing = [
        name
        for name, value in (("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size))
        if value is None
    ]
    if missing:
        if not _has_services():
            _check_one_rank(world_size or 1)
        raise ConfigError(f"RANK is set to {rank}, so {' and '.join(missing)} must be set too")
    return _Place(world_size=world_size, rank=rank, local_rank=local_rank)


def _current() -> _Place:
    global _place
    if _place is None:
        _place = _read_place()
    return _place


def reload_env() -> None:
    """Read rank and replica numbers from the environment again.

    Raises:
        ConfigError: If a variable is no integer, out of range, or missing beside ``RANK``;
            what was known before stays.
    """
    global _place
    _place = _read_place()


def set_env(
    replica_size: int | None = None,
    replica_index: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
) -> None:
    """Say who this process is, whatever the environment says; what is not given is None.

    Raises:
        ConfigError: If a number is out of range.
    """
    global _place
    _place = _Place(
        world_size=world_size,
        rank=rank,
        local_rank=local_rank,
        replica_size=replica_size,
        replica_index=replica_index,
    )


def get_world_size() -> int | None:
    """Return the number of nn-workers, or None outside one."""
    return _current().world_size


def get_rank() -> int | None:
    """Return this nn-worker's number over all nodes, or None outside one."""
    return _current().rank


def get_local_rank() -> int | None:
    """Return this nn-worker's number on its node, or None outside one."""
    return _current().local_rank


def get_replica_size() -> int | None:
    """Return the number of replicas of this role, or None in an nn-worker."""
    return _current().replica_size


def get_replica_index() -> int | None:
    """Return this replica's number, or None in an nn-worker."""
    return _current().replica_index


def get_mode() -> Mode:
    """Say where the embeddings live: in this process, or in servers.

    Raises:
        ConfigError: If several ranks would each get a private table, which nobody means.
    """
    if _has_services():
        return "services"
    _check_one_rank(_current().world_size or _integer("WORLD_SIZE") or 1)
    return "embedded"


def _has_services() -> bool:
    return _flag(LAUNCHED_VARIABLE) or any(_text(name) for name in _SERVICES_VARIABLES)


def _check_one_rank(world_size: int) -> None:
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but embedded mode has one rank: each would train "
            "a table of its own; start servers that the ranks share, and the script with "
            "persia-launcher nn-worker, or name the servers in PERSIA_EMBEDDING_WORKERS"
        )


def feeds_parent() -> bool:
    """Whether this process is the child of a trainer in embedded mode, and feeds it."""
    return _flag(FEEDS_VARIABLE)


def skip_check_data() -> bool:
    """Whether checks of the dtypes and values of dense data and labels are skipped."""
    return _flag("PERSIA_SKIP_CHECK_DATA")


def launcher_verbose() -> bool:
    """Whether the launcher prints the commands it runs."""
    return _flag("PERSIA_LAUNCHER_VERBOSE")


def global_config_path() -> Path | None:
    """Return the path of the global config, if one is named."""
    return _path("PERSIA_GLOBAL_CONFIG")


def embedding_config_path() -> Path | None:
    """Return the path of the embedding config, if one is named."""
    return _path("PERSIA_EMBEDDING_CONFIG")


def nn_worker_entry() -> Path | None:
    """Return the script that nn-workers run, if one is named."""
    return _path("PERSIA_NN_WORKER_ENTRY")


def data_loader_entry() -> Path | None:
    """Return the script that data-loaders run, if one is named."""
    return _path("PERSIA_DATALOADER_ENTRY")


def data_dir() -> Path | None:
    """Return the directory where examples and tests look for data sets, if one is named."""
    return _path("PERSIA_DATA_DIR")


def isa() -> str | None:
    """Return the instruction-set variant of the kernels that is asked for, if any.

    ``persia._core.base.cpu.select`` knows the names and refuses what this machine lacks.
    """
    return _text("PERSIA_ISA")


def rpc_timeout_s() -> float:
    """Return the seconds that a call to another process may take, 300 if nothing is said.

    Raises:
        ConfigError: If ``PERSIA_RPC_TIMEOUT`` is no positive number.
    """
    text = _text("PERSIA_RPC_TIMEOUT")
    if text is None:
        return DEFAULT_RPC_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise ConfigError(
            f"environment variable PERSIA_RPC_TIMEOUT must be a positive number of seconds, "
            f"got {text!r}"
        )
    return seconds


def _listed(name: str, what: str) -> list[str] | None:
    text = _text(name)
    if text is None:
        return None
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ConfigError(
            f"environment variable {name} must be a list of {what} with commas between "
            f"them, got {text!r}"
        )
    return items


def _addresses(names: tuple[str, ...], default: str) -> list[str]:
    for name in names:
        addresses = _listed(name, "addresses")
        if addresses is not None:
            return addresses
    return [default]


def parameter_server_addresses() -> list[str]:
    """Return the addresses of the embedding-parameter-servers, as they are written.

    Raises:
        ConfigError: If the list in the environment has an empty entry.
    """
    return _addresses((PARAMETER_SERVERS_VARIABLE,), DEFAULT_PARAMETER_SERVERS)


def embedding_worker_addresses() -> list[str]:
    """Return the addresses of the embedding-workers, as they are written.

    Raises:
        ConfigError: If the list in the environment has an empty entry.
    """
    names = (EMBEDDING_WORKERS_VARIABLE, "EMBEDDING_WORKER_SERVICE")
    return _addresses(names, DEFAULT_EMBEDDING_WORKERS)


def nn_worker_addresses() -> list[str]:
    """Return the addresses of the nn-workers, as they are written: of ranks, or of nodes.

    Raises:
        ConfigError: If the list in the environment has an empty entry.
    """
    return _addresses((NN_WORKERS_VARIABLE,), DEFAULT_NN_WORKERS)


def state_directory() -> Path | None:
    """Return the directory of the servers' state files, if one is said.

    It comes before the configuration's ``state_dir``. ``off`` is a path too: whoever reads it
    has to know that it means none.
    """
    return _path("PERSIA_STATE_DIRECTORY")


def run_id() -> str | None:
    """Return the name of this run of a job, if it has one.

    A server that is started again under the same name has its rows again.
    """
    return _text("PERSIA_RUN_ID")


def run_name() -> str:
    """Return what this run of a job is called to those who watch: ``run_id``, or its folder."""
    try:
        return run_id() or Path.cwd().name
    except OSError:  # the folder is gone
        return ""


def run_directory() -> Path | None:
    """Return the directory where a launched script's end is noted, if there is a launcher."""
    return _path(RUN_DIRECTORY_VARIABLE)


def launcher_pid() -> int | None:
    """Return the process that launched this one, without which it makes no sense."""
    return _integer(LAUNCHER_PID_VARIABLE)


def own_names() -> list[str]:
    """Return the names of what is set that begin as ours do, whether or not they are."""
    return sorted(name for name, text in os.environ.items() if name[:7] == _PREFIX and text)


def of_child(**changes: object) -> dict[str, str]:
    """Return the environment of a child process: this one's, with changes; None removes."""
    values = dict(os.environ) | {name: str(value) for name, value in changes.items()}
    return {name: text for name, text in values.items() if changes.get(name, "") is not None}


@contextmanager
def changed(**changes: object) -> Iterator[None]:
    """Change this process's own environment, and put it back afterwards; None removes.

    Rank and replica numbers are not read again.
    """
    before = {name: os.environ.get(name) for name in changes}

    def put(values: Mapping[str, object]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = str(value)

    put(changes)
    try:
        yield
    finally:
        put(before)


def log_level() -> int:
    """Return the level of the log of a process that persia-launcher started; INFO by default.

    The names are those of the original's ``LOG_LEVEL``. Another value is INFO: the variable is
    not ours alone.
    """
    return _LOG_LEVELS.get((_text("LOG_LEVEL") or "info").strip().lower(), logging.INFO)


def is_supervised() -> bool:
    """Whether something starts anew what fails.

    Servers and data-loaders then exit with 0 once the job has ended, whatever its status: with
    another they would be started again, and wait for a job that is over.
    """
    return _flag("PERSIA_SUPERVISED")


def listen_host() -> str:
    """Return the host at which servers listen, 127.0.0.1 if nothing is said."""
    return _text("PERSIA_LISTEN_HOST") or DEFAULT_LISTEN_HOST


def keys_directory() -> Path | None:
    """Return the directory of this process's keys; without one nothing is encrypted."""
    return _path("PERSIA_KEYS")


def may_listen_without_keys() -> bool:
    """Whether servers without keys may listen where other machines can reach them."""
    return _flag("PERSIA_LISTEN_WITHOUT_KEYS")


def metrics_port() -> int | Literal["off"] | None:
    """Return where this process serves its metrics, if something is said; 0 is any port.

    Raises:
        ConfigError: If ``PERSIA_METRICS_PORT`` is neither a port nor ``off``.
    """
    text = (_text("PERSIA_METRICS_PORT") or "").strip().lower()
    if text in ("", "off"):
        return "off" if text else None
    port = _integer("PERSIA_METRICS_PORT")
    if port is None or not 0 <= port < 1 << 16:
        raise ConfigError(
            f"environment variable PERSIA_METRICS_PORT must be a port or off, got {text!r}"
        )
    return port


def metrics_host() -> str:
    """Return the host at which metrics are served, 127.0.0.1 if nothing is said."""
    return _text("PERSIA_METRICS_HOST") or DEFAULT_LISTEN_HOST


def metrics_gateway() -> str:
    """Return ``host:port`` of the push gateway, which gets metrics if a config says so."""
    return _text("PERSIA_METRICS_GATEWAY_ADDR") or DEFAULT_METRICS_GATEWAY


def checkpoint_roots() -> list[str] | None:
    """Return below which folders and URLs a server reads and writes checkpoints, if said.

    Raises:
        ConfigError: If the list has an empty entry.
    """
    return _listed("PERSIA_CHECKPOINT_ROOTS", "folders")


def named_nats_variable() -> str | None:
    """Return the variable that names a NATS broker, if one does; its value is ignored."""
    return next((name for name in _NATS_VARIABLES if _text(name)), None)


def embedding_worker_service() -> str:
    """Return ``host:port`` of the embedding-worker that inference asks."""
    return _text("EMBEDDING_WORKER_SERVICE") or DEFAULT_EMBEDDING_WORKER_SERVICE


def master_address() -> str | None:
    """Return the host where the ranks of torch.distributed meet, if one is named."""
    return _text("MASTER_ADDR")


def master_port() -> int | None:
    """Return the port where the ranks of torch.distributed meet, if one is named.

    Raises:
        ConfigError: If ``MASTER_PORT`` is no integer.
    """
    return _integer("MASTER_PORT")


def __getattr__(name: str) -> bool:
    """Read PERSIA's two flags, which the original copied once at import, at each use."""
    if name == "PERSIA_LAUNCHER_VERBOSE":
        return launcher_verbose()
    if name == "PERSIA_SKIP_CHECK_DATA":
        return skip_check_data()
    raise AttributeError(f"module 'persia.env' has no attribute {name!r}")
