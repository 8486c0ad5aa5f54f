"""Everything PERSIA reads from the environment: the only reader of ``os.environ``.

Rank and replica numbers are parsed on first use and kept until ``reload_env`` or ``set_env``,
because a launcher sets them once. Every other variable is read at each call. A variable that is
set to the empty string counts as not set.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, cast

from persia._replica_index import own_number
from persia.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

Mode = Literal["embedded", "services"]
Value = TypeVar("Value")

# --- kinds of values --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[Value]):
    """How the text of a variable is parsed, and what is expected of it."""

    parse: Callable[[str], Value]  # raises ValueError or KeyError
    expected: str


_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def _parse_list(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError(text)
    return items


# host-{0..3}: a range; with leading zeros, {00..11}, every number has as many digits.
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# Addresses that one range may stand for: a mistyped bound is an error and no full memory.
_MAX_RANGE = 100_000


def addresses_of(text: str) -> list[str]:
    """Return the addresses that one with ranges stands for, or the one without.

        ps-{0..2}.job:8888    ps-0.job:8888  ps-1.job:8888  ps-2.job:8888

    Raises:
        ValueError: If a range ends before it begins, or stands for too many addresses.
    """
    found = _RANGE.search(text)
    if found is None:
        return [text]
    low, high = int(found[1]), int(found[2])
    width = len(found[1]) if found[1].startswith("0") else 0
    rest = addresses_of(text[found.end() :])
    if not 0 <= high - low < _MAX_RANGE // len(rest):
        raise ValueError(text)
    before = text[: found.start()]
    return [
        f"{before}{number:0{width}}{tail}" for number in range(low, high + 1) for tail in rest
    ]


def _parse_addresses(text: str) -> list[str]:
    items = [address for item in _parse_list(text) for address in addresses_of(item)]
    for item in items:
        # A path may have spaces in it.
        address, *others = item.split()
        is_path = address.startswith("ipc://") and not any("://" in one for one in others)
        if others and not is_path:
            raise ValueError(text)
    return items


def _parse_copies(text: str) -> list[list[str]]:
    """Return the copies of each server: of a range they are taken number by number.

        a-{0..1}:1|b-{0..1}:1    [[a-0:1, b-0:1], [a-1:1, b-1:1]]

    Raises:
        ValueError: If there are not as many addresses on both sides of a bar.
    """
    return [
        list(copies)
        for part in _parse_list(text)
        for copies in zip(*map(_parse_addresses, part.split("|")), strict=True)
    ]


def _parse_port(text: str) -> int | Literal["off"]:
    if text.strip().lower() == "off":
        return "off"
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise ValueError(text)
    return port


def _parse_replica(text: str) -> int:
    return own_number() if text.strip().lower() == "auto" else int(text)


def _parse_host(text: str) -> str:
    """Return a host; of a list as Slurm writes it, ``gpu[03-05,9],cpu1``, the first one."""
    return re.sub(r"\[(\d+)[-,\d]*\]", r"\1", text).partition(",")[0]


def _parse_level(text: str) -> int:
    level = _LOG_LEVELS.get(text.strip().lower())
    if level is None:  # the variable is not ours alone, so this may be another program's
        names = ", ".join(_LOG_LEVELS)
        logger.warning("LOG_LEVEL %r is not known, info is taken; levels are %s", text, names)
        return logging.INFO
    return level


_TEXT: ValueKind[str] = ValueKind(str, "a text")
_OPTIONAL_TEXT: ValueKind[str | None] = ValueKind(str, "a text")
_PATH: ValueKind[Path | None] = ValueKind(Path, "a path")
_INTEGER: ValueKind[int | None] = ValueKind(int, "an integer")
_COUNT: ValueKind[int] = ValueKind(int, "an integer")
_REPLICA: ValueKind[int] = ValueKind(_parse_replica, "an integer")
_FLAG: ValueKind[bool] = ValueKind(lambda text: _FLAGS[text.strip().lower()], "0 or 1")
_SECONDS: ValueKind[float] = ValueKind(_parse_seconds, "a positive number of seconds")
_PORT: ValueKind[int | Literal["off"] | None] = ValueKind(_parse_port, "a port or off")
_HOST: ValueKind[str | None] = ValueKind(_parse_host, "a host")
_ADDRESSES = ValueKind(
    _parse_addresses,
    "a list of addresses, such as host:8888 or host-{0..3}:8888, separated by commas",
)
_COPIES: ValueKind[list[list[str]] | None] = ValueKind(
    _parse_copies,
    "a list of servers, such as host:8888 or host-{0..3}:8888, separated by commas, with | "
    "between as many addresses of their copies, such as a-{0..3}:8888|b-{0..3}:8888",
)
_FOLDERS: ValueKind[list[str] | None] = ValueKind(_parse_list, "a list of folders with commas")
_LEVEL: ValueKind[int] = ValueKind(_parse_level, "a level")

# --- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable(Generic[Value]):
    """A variable of the environment; calling it returns its value."""

    name: str
    kind: ValueKind[Value]
    doc: str = ""  # of docs/configuration.md; "" for those that PERSIA sets for its processes
    default: str = ""  # text; without one the value is None, as the kind's type says
    fallbacks: tuple[str, ...] = ()  # other variables, of which the first that is set is read

    def __call__(self) -> Value:
        """Return the value; ConfigError if it is set to a text that its kind cannot parse."""
        names = (self.name, *self.fallbacks)
        name = next((one for one in names if os.environ.get(one)), self.name)
        text = os.environ.get(name) or self.default
        if not text:
            return cast("Value", None)
        try:
            return self.kind.parse(text)
        except ConfigError:
            raise
        except (ValueError, KeyError) as exc:
            raise ConfigError(
                f"environment variable {name} must be {self.kind.expected}, got {text!r}"
            ) from exc

    def is_set(self) -> bool:
        """Whether the variable is set to more than the empty string."""
        return bool(os.environ.get(self.name))


# Which process this is; ``get_rank`` and the functions beside it return what was read first.
_world_size = Variable("WORLD_SIZE", _INTEGER, "Number of nn-workers; set by torchrun.")
_rank = Variable("RANK", _INTEGER, "Number of this nn-worker; set by torchrun.")
_local_rank = Variable("LOCAL_RANK", _INTEGER, "Its number on its node; set by torchrun.")
_replica_size = Variable("REPLICA_SIZE", _COUNT, "Number of replicas of this role.", "1")
_replica_index = Variable(
    "REPLICA_INDEX",
    _REPLICA,
    "Number of this replica; `auto`: as Compose or Kubernetes count.",
    "0",
)
# The nodes that nn-workers run on: as torchrun calls them, and Slurm for the tasks of srun.
num_nodes = Variable(
    "PET_NNODES",
    _COUNT,
    "Number of nodes of `persia-launcher nn-worker`, or `SLURM_STEP_NUM_NODES`.",
    "1",
    fallbacks=("SLURM_STEP_NUM_NODES",),
)
node_rank = Variable(
    "PET_NODE_RANK",
    _COUNT,
    "Number of this node, or `SLURM_NODEID`.",
    "0",
    fallbacks=("SLURM_NODEID",),
)
num_ranks_per_node = Variable(
    "PET_NPROC_PER_NODE", _COUNT, "Number of ranks on each node.", "1"
)
max_restarts = Variable(
    "PET_MAX_RESTARTS", _COUNT, "Times that ranks which fail are started again.", "0"
)
# Set by torchrun: how often it has started the ranks again, and that it serves their store.
_restart_count = Variable("TORCHELASTIC_RESTART_COUNT", _COUNT, default="0")
_has_agent_store = Variable("TORCHELASTIC_USE_AGENT_STORE", _FLAG, default="0")
master_address = Variable(
    "MASTER_ADDR",
    _HOST,
    "Host of rank 0, where torch's ranks meet; or `PET_MASTER_ADDR`, or the first host of "
    "`SLURM_STEP_NODELIST`.",
    fallbacks=("PET_MASTER_ADDR", "SLURM_STEP_NODELIST"),
)
master_port = Variable(
    "MASTER_PORT",
    _INTEGER,
    "Port on that host, or `PET_MASTER_PORT`.",
    fallbacks=("PET_MASTER_PORT",),
)

# What a job is.
global_config_path = Variable("PERSIA_GLOBAL_CONFIG", _PATH, "Path of the global config.")
embedding_config_path = Variable(
    "PERSIA_EMBEDDING_CONFIG", _PATH, "Path of the embedding config."
)
nn_worker_entry = Variable("PERSIA_NN_WORKER_ENTRY", _PATH, "Script that nn-workers run.")
data_loader_entry = Variable("PERSIA_DATALOADER_ENTRY", _PATH, "Script of data-loaders.")
data_dir = Variable("PERSIA_DATA_DIR", _PATH, "Folder with data sets, for examples and tests.")
run_id = Variable(
    "PERSIA_RUN_ID",
    _OPTIONAL_TEXT,
    "Name of the run; a server restarted under it keeps its rows.",
)
job_id = Variable(
    "PERSIA_JOB_ID",
    _OPTIONAL_TEXT,
    "Name of the job through all of its starts, as Kubernetes counts them.",
)

# Where processes listen and look for each other.
parameter_server_addresses = Variable(
    "PERSIA_EMBEDDING_PARAMETER_SERVERS",
    _ADDRESSES,
    "Addresses of the embedding-parameter-servers.",
    "127.0.0.1:8888",
)
embedding_worker_service = Variable(
    "EMBEDDING_WORKER_SERVICE",
    _TEXT,
    "`host:port` of the embedding-worker that an InferCtx asks.",
    "embedding_worker:8887",
)
embedding_worker_addresses = Variable(
    "PERSIA_EMBEDDING_WORKERS",
    _ADDRESSES,
    "Addresses of the embedding-workers.",
    "127.0.0.1:8887",
    fallbacks=(embedding_worker_service.name,),
)
serving_replicas = Variable(
    "PERSIA_SERVING_REPLICAS",
    _COPIES,
    "Addresses of the servers of served rows; a bar is between copies of one, or of a range.",
)
nn_worker_addresses = Variable(
    "PERSIA_NN_WORKERS",
    _ADDRESSES,
    "Addresses of the nn-workers: of ranks, or of nodes.",
    "127.0.0.1:23457",
)
# The broker is gone, old deployments that set these are not: they mean that there are servers.
_nats_url = Variable("PERSIA_NATS_URL", _OPTIONAL_TEXT)
_nats_ip = Variable("PERSIA_NATS_IP", _OPTIONAL_TEXT)
listen_host = Variable("PERSIA_LISTEN_HOST", _TEXT, "Host where servers listen.", "127.0.0.1")
keys_directory = Variable("PERSIA_KEYS", _PATH, "Folder of keys; if not set, no encryption.")
may_listen_without_keys = Variable(
    "PERSIA_LISTEN_WITHOUT_KEYS",
    _FLAG,
    "Whether servers without keys may listen beyond this host.",
    "0",
)
rpc_timeout_s = Variable("PERSIA_RPC_TIMEOUT", _SECONDS, "Seconds that a call may take.", "300")

# Files of servers.
state_directory = Variable(
    "PERSIA_STATE_DIRECTORY",
    _PATH,
    "Folder of servers' state files, instead of `state_dir`; `off`: none.",
)
checkpoint_roots = Variable(
    "PERSIA_CHECKPOINT_ROOTS", _FOLDERS, "Folders and URLs below which checkpoints may lie."
)
kernel_roots = Variable(
    "PERSIA_KERNEL_ROOTS", _FOLDERS, "Folders below which servers find kernels of users."
)
# A trainer that is stopped, and started again.
resume_from = Variable(
    "PERSIA_RESUME_FROM",
    _OPTIONAL_TEXT,
    "Folder or URL of a run's checkpoints: a trainer goes on from the newest of them.",
)
grace_period_s = Variable(
    "PERSIA_GRACE_PERIOD",
    _SECONDS,
    "Seconds that a trainer with a folder of checkpoints gets to end after SIGTERM.",
    "25",
)

# What is observed.
metrics_port = Variable(
    "PERSIA_METRICS_PORT", _PORT, "Port of this process's metrics; `0`: any, `off`: none."
)
metrics_host = Variable("PERSIA_METRICS_HOST", _TEXT, "Where metrics are served.", "127.0.0.1")
metrics_gateway = Variable(
    "PERSIA_METRICS_GATEWAY_ADDR",
    _TEXT,
    "`host:port` of the push gateway, if metrics are pushed.",
    "metrics_gateway:9091",
)
log_level = Variable("LOG_LEVEL", _LEVEL, "Level of the log of launched processes.", "info")
launcher_verbose = Variable(
    "PERSIA_LAUNCHER_VERBOSE", _FLAG, "Whether the launcher prints the commands it runs.", "0"
)

# How processes behave.
skip_check_data = Variable(
    "PERSIA_SKIP_CHECK_DATA", _FLAG, "Whether dense data and labels are not checked.", "0"
)
# Servers and data-loaders then exit with 0 once the job has ended, whatever its status: with
# another they would be started again, and wait for a job that is over.
is_supervised = Variable(
    "PERSIA_SUPERVISED", _FLAG, "Whether a supervisor restarts processes that fail.", "0"
)
# ``persia._core.base.cpu.select`` knows the names, and refuses what this machine lacks.
isa = Variable("PERSIA_ISA", _OPTIONAL_TEXT, "Instruction-set variant of the kernels.")

# Native code of users: where it is kept once compiled, and by which compilers.
extension_cache = Variable(
    "CACHED_CPP_EXTENSION_BUILD_DIR",
    _PATH,
    "Folder of compiled native code; `.cached_cpp_extensions` in the working directory if not "
    "set.",
)
c_compiler = Variable("CC", _TEXT, "C compiler for native code, with its options.", "cc")
cxx_compiler = Variable("CXX", _TEXT, "C++ compiler for native code, with its options.", "c++")
cuda_home = Variable("CUDA_HOME", _PATH, "Folder of the CUDA toolkit, which has `bin/nvcc`.")

# Set by persia-launcher and PersiaServiceCtx for the processes that they start.
is_launched = Variable("PERSIA_LAUNCHED", _FLAG, default="0")
run_directory = Variable("PERSIA_RUN_DIRECTORY", _PATH)
launcher_pid = Variable("PERSIA_LAUNCHER_PID", _INTEGER)
# Set by a trainer in embedded mode for the data-loader's script that it starts.
feeds_parent = Variable("PERSIA_FEEDS", _FLAG, default="0")

VARIABLES: dict[str, Variable[object]] = {
    one.name: one for one in list(globals().values()) if isinstance(one, Variable)
}

# Any of these says that there are servers to talk to.
_OF_SERVICES = (
    parameter_server_addresses,
    embedding_worker_addresses,
    embedding_worker_service,
    nn_worker_addresses,
    _nats_url,
    _nats_ip,
)


def named_nats_variable() -> str | None:
    """Return the variable that names a NATS broker, if one does; its value is ignored."""
    return next((one.name for one in (_nats_url, _nats_ip) if one.is_set()), None)


def restart_count() -> int:
    """Return how often torchrun, where it serves the store of ranks, has started them again."""
    return _restart_count() if _has_agent_store() else 0


def run_name() -> str:
    """Return the name of this run in metrics: ``run_id``, or the working directory's name."""
    try:
        return run_id() or Path.cwd().name
    except OSError:  # the directory is gone
        return ""


# --- rank and replica -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Which process this is: an nn-worker has a rank, every other role a replica number."""

    world_size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    replica_size: int | None = None
    replica_index: int | None = None

    def __post_init__(self) -> None:
        for number, count in (("rank", "world_size"), ("replica_index", "replica_size")):
            of = getattr(self, count)
            for name, low in ((count, 1), (number, 0), ("local_rank", 0)):
                value = getattr(self, name)
                if value is not None and value < low:
                    raise ConfigError(f"{name.upper()} must be at least {low}, got {value}")
            if of is not None and (value := getattr(self, number)) is not None and value >= of:
                raise ConfigError(
                    f"{number.upper()} must be below {count.upper()} {of}, got {value}"
                )


_place: _Place | None = None


def replica() -> tuple[int, int]:
    """Return the number of this replica and how many there are, as the environment says.

    The caller checks whether the number is below the count.
    """
    size = _replica_size()
    return _replica_index(), size


def _read_place() -> _Place:
    rank = _rank()
    if rank is None:
        index, size = replica()
        return _Place(replica_size=size, replica_index=index)
    beside = {"LOCAL_RANK": _local_rank(), "WORLD_SIZE": _world_size()}
    missing = [name for name, value in beside.items() if value is None]
    if missing:
        if not _has_services():
            _check_one_rank(beside["WORLD_SIZE"] or 1)
        raise ConfigError(f"RANK is set to {rank}, so {' and '.join(missing)} must be set too")
    return _Place(world_size=beside["WORLD_SIZE"], rank=rank, local_rank=beside["LOCAL_RANK"])


def _current() -> _Place:
    global _place
    if _place is None:
        _place = _read_place()
    return _place


def reload_env() -> None:
    """Read rank and replica numbers from the environment again.

    Raises:
        ConfigError: If a variable is no integer, out of range, or missing beside ``RANK``;
            the numbers known before stay.
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
    """Set the numbers of this process, whatever the environment says; those not given are None.

    Raises:
        ConfigError: If a number is out of range.
    """
    global _place
    _place = _Place(world_size, rank, local_rank, replica_size, replica_index)


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
    """Return where the embeddings are: in this process, or in servers.

    Raises:
        ConfigError: If several ranks would each get a private table.
    """
    if _has_services():
        return "services"
    _check_one_rank(_current().world_size or _world_size() or 1)
    return "embedded"


def _has_services() -> bool:
    return is_launched() or any(one.is_set() for one in _OF_SERVICES)


def _check_one_rank(world_size: int) -> None:
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but embedded mode has one rank: each would train "
            "a table of its own; start servers that the ranks share, and the script with "
            "persia-launcher nn-worker, or name the servers in PERSIA_EMBEDDING_WORKERS"
        )


# --- the environment of processes -------------------------------------------------------------


# Read by compose/stack.yml, not by PERSIA.
_COMPOSE_VARIABLES = {"PERSIA_SOURCE"}
# Similarity from which an unknown variable is taken for a misspelled one; all share a prefix.
_MISSPELLED = 0.8


def own_names() -> list[str]:
    """Return the names of variables that are set and begin with ``PERSIA_``, known or not."""
    return sorted(
        name for name, text in os.environ.items() if name.startswith("PERSIA_") and text
    )


def unknown_names() -> dict[str, str]:
    """Return those of ``own_names`` that are not known, each with the nearest one that is."""
    return {
        name: did_you_mean(name, sorted(VARIABLES), _MISSPELLED)
        for name in own_names()
        if name not in VARIABLES and name not in _COMPOSE_VARIABLES
    }


@functools.cache
def warn_of_misspelled() -> None:
    """Warn, once in a process, of variables that are nearly known; others are not ours."""
    for name, hint in unknown_names().items():
        if hint:
            logger.warning("environment variable %s is not known%s", name, hint)


def of_child(**changes: object) -> dict[str, str]:
    """Return the environment of a child process: this one's, with changes; None removes."""
    values = dict(os.environ) | {name: str(value) for name, value in changes.items()}
    return {name: text for name, text in values.items() if changes.get(name, "") is not None}


def extension_cache_folder() -> Path:
    """Return the folder of compiled native code, and name it to processes started from here.

    Without the name a child in another working directory would compile for itself.
    """
    folder = Path.cwd() / (extension_cache() or ".cached_cpp_extensions")
    os.environ[extension_cache.name] = str(folder)
    return folder


# Read by compilers, linkers and PyTorch's tool chain.
_OF_COMPILERS = (
    *(
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "MACOSX_DEPLOYMENT_TARGET",
    ),
    *("TORCH_CUDA_ARCH_LIST", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "PYTORCH_NVCC"),
)


def of_compilers() -> dict[str, str]:
    """Return the variables that are set and change what a compiler makes of a source."""
    return {name: os.environ[name] for name in _OF_COMPILERS if os.environ.get(name)}


def search_path() -> str:
    """Return PATH, on which programs are looked for."""
    return os.environ.get("PATH", os.defpath)


@contextmanager
def changed(**changes: object) -> Iterator[None]:
    """Change the environment of this process and restore it afterwards; None removes.

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


def __getattr__(name: str) -> bool:
    """Read the two flags at each use; the original PERSIA copied them at import."""
    for flag in (launcher_verbose, skip_check_data):
        if name == flag.name:
            return flag()
    raise AttributeError(f"module 'persia.env' has no attribute {name!r}")
