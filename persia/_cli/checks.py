"""What ``persia-launcher doctor`` checks: machine, settings, data, Procfile, network.

Each check returns findings. None raises for what it finds, and each wait has a deadline.
"""

from __future__ import annotations

import errno
import importlib
import logging
import logging.handlers
import os
import pkgutil
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from persia import _core, _rpc, env
from persia._cluster.addresses import TCP, is_name, resolve, resolved, split
from persia._cluster.connect import current_lists
from persia._core.base import cpu
from persia._core.kernels.optim import RowOptimizer
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.endpoint import default_port
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role, embedding_worker, nn_worker, parameter_server
from persia._rpc.zmq_transport import ZmqTransport, is_local
from persia.config import (
    EmbeddingSchema,
    GlobalConfig,
    describe_differences,
    resolve_memory_limit,
)
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError, DataError, PersiaError, did_you_mean
from persia.utils import total_memory_bytes
from persia.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Self

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Literal["ok", "warning", "error"]
    text: str
    todo: str = ""  # of a warning or an error


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, todo: str) -> Finding:
    return Finding(check, "warning", text, todo)


def error(check: str, text: str, todo: str) -> Finding:
    return Finding(check, "error", text, todo)


# --- machine ----------------------------------------------------------------------------------

# Seconds that PyTorch gets to load; a quiet machine needs a few.
_TORCH_S = 120.0
_TORCH = (
    "import torch; print(torch.__version__, torch.version.cuda or '-', "
    "torch.cuda.device_count() if torch.cuda.is_available() else 0)"
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _run_python(code: str, *arguments: str, timeout_s: float) -> tuple[str, str]:
    """Run a program in a process of its own; returns what it printed, and why it failed."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env.of_child(REPLICA_INDEX=0, REPLICA_SIZE=1, RANK=None),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if ran.returncode == 0:
        return ran.stdout, ""
    said = ran.stderr.strip().splitlines()
    return ran.stdout, said[-1] if said else f"it ended with status {ran.returncode}"


def check_machine(*, huge_pages: Path = _HUGE_PAGES) -> Iterator[Finding]:
    """Yield findings on the build, the processor, PyTorch and huge pages."""
    yield _check_build()
    yield _check_kernels()
    yield _check_torch()
    yield _check_huge_pages(huge_pages)
    yield ok("memory", f"{total_memory_bytes() / _GIB:.1f} GiB that a process here may use")


def _check_build() -> Finding:
    num_loaded = 0
    for package in (_core, _rpc):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                module = importlib.import_module(found.name)
            except ImportError as exc:
                return error("build", f"{found.name}: {exc}", "build again: pip install .")
            num_loaded += (module.__file__ or "").endswith(tuple(EXTENSION_SUFFIXES))
    version = ".".join(map(str, sys.version_info[:3]))
    text = f"PERSIA {__version__} on Python {version}, {num_loaded} compiled modules load"
    return ok("build", text)


def _check_kernels() -> Finding:
    available, asked = cpu.available(), env.isa()
    try:
        if asked is not None:
            cpu.select(asked)
    except ConfigError as exc:
        return error("processor", f"PERSIA_ISA: {exc}", "correct or unset PERSIA_ISA")
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chosen = cpu.selected()
    text = f"{num} processors; kernels for {chosen} ({', '.join(available)} are available)"
    if asked is not None and chosen != available[-1]:
        return warning("processor", text, "unset PERSIA_ISA: same results, faster")
    return ok("processor", text)


def _check_torch() -> Finding:
    # In a process of its own: servers and this command never load PyTorch.
    try:
        printed, why = _run_python(_TORCH, timeout_s=_TORCH_S)
    except subprocess.TimeoutExpired:
        text = f"did not load within {_TORCH_S:g} s"
        return warning("torch", text, "check the load of this machine and its disk")
    if why:
        todo = "pip install torch; nn-workers need it, others do not"
        return warning("torch", f"cannot be used: {why}", todo)
    version, cuda, num = printed.split()[-3:]
    devices = f"{num} CUDA devices" if int(num) else "no CUDA device, trains on the processor"
    built = "" if cuda == "-" else f", built for CUDA {cuda}"
    return ok("torch", f"{version}{built}; {devices}")


def _check_huge_pages(setting: Path) -> Finding:
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ok("huge pages", "not offered by this system; rows use pages of the usual size")
    if chosen == "never":
        text = f"{setting}: never; large tables miss the processor's page cache more often"
        return warning("huge pages", text, f"echo madvise | sudo tee {setting}")
    return ok("huge pages", f"{chosen}: rows use huge pages where the kernel has some")


# --- environment variables --------------------------------------------------------------------


def check_variables() -> Iterator[Finding]:
    """Yield findings on the variables that begin with ``PERSIA_``."""
    names, unknown, found = env.own_names(), env.unknown_names(), []
    for name in names:
        if name in unknown:
            text = f"{name}: unknown variable{unknown[name]}"
            found.append(warning("variables", text, "correct the name, or unset it"))
        try:
            env.VARIABLES.get(name, str)()
        except ConfigError as exc:
            todo = "correct it, see docs/configuration.md"
            found.append(error("variables", str(exc), todo))
    if names and not found:
        found.append(ok("variables", f"{', '.join(names)}: can be read"))
    yield from found


# --- configuration files ----------------------------------------------------------------------


def check_files(
    embedding: Path | None, common: Path | None
) -> tuple[list[Finding], EmbeddingSchema | None, GlobalConfig]:
    """Read both configuration files; what cannot be read is a finding with file and line."""
    found: list[Finding] = []
    schema: EmbeddingSchema | None = None
    config = GlobalConfig()
    if embedding is None:
        todo = "--embedding-config FILE, or set PERSIA_EMBEDDING_CONFIG"
        found.append(warning("config", "no embedding config is given or found here", todo))
    else:
        with _as_findings(found, embedding):
            schema = EmbeddingSchema.load(embedding)
            counts = f"{len(schema.slots)} features in {len(schema.groups)} groups"
            found.append(ok("config", f"{embedding}: {counts}"))
    if common is not None:
        with _as_findings(found, common):
            config = GlobalConfig.load(common)
            found.append(ok("config", f"{common}: can be used"))
    return found, schema, config


@contextmanager
def _as_findings(found: list[Finding], path: Path) -> Iterator[None]:
    """Turn errors, warnings and log records of reading a file into findings."""
    logger = logging.getLogger("persia.config")
    records = logging.handlers.BufferingHandler(capacity=1 << 20)
    logger.addHandler(records)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
        messages = [one.getMessage() for one in records.buffer]
        for message in (*messages, *(str(one.message) for one in warned)):
            found.append(warning("config", message, "change that key, or leave it out"))
    except ConfigError as exc:
        todo = "see docs/configuration.md; persia-launcher init DIRECTORY writes an example"
        found.append(error("config", str(exc), todo if path.is_file() else "correct the path"))
    finally:
        logger.removeHandler(records)


# --- memory -----------------------------------------------------------------------------------

# Bytes of a row beside values and state: sign, position and stamp in the row itself, and its
# share of the index and of the order of use (measured, see docs/operations.md).
_HEADER_BYTES = 16
_INDEX_BYTES = 12


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory of the rows of one feature; features of a group share theirs."""

    feature: str
    group: str
    dim: int
    dtype: str
    optimizer: str
    row_bytes: float  # with index and order of use
    fit: int  # rows on one server that holds no others; 0 is no limit
    rows: int = 0  # expected over all servers, from the command line


def _row_bytes(dim: int, optimizer: str, dtype: str) -> int:
    value_words = dim if dtype == "float32" else (dim + 1) // 2
    state_words = RowOptimizer(optimizer, lr=0.1).state_words(dim)
    stride = _HEADER_BYTES + 4 * (value_words + state_words)
    return -(-stride // 8) * 8 + _INDEX_BYTES


def forecast(
    schema: EmbeddingSchema, config: GlobalConfig, optimizer: str, rows: Mapping[str, int]
) -> list[Forecast]:
    """Return the memory that the rows of each feature need.

    Args:
        schema: The features.
        config: Has the memory limit.
        optimizer: Of groups that name none, as the script chooses it.
        rows: Rows expected over all servers, by feature.

    Raises:
        ConfigError: If there is no such optimizer, or feature.
    """
    for name in sorted(rows.keys() - schema.slots.keys()):
        hint = did_you_mean(name, schema.slots)
        raise ConfigError(f"--rows: {name} is no feature of the embedding config{hint}")
    limit = config.embedding_parameter_server_config.memory_limit_bytes()
    found = []
    for slot in schema.slots.values():
        table = schema.tables[slot.table]
        own = table.settings.optimizer
        chosen = (own.name if own is not None else None) or optimizer
        size = _row_bytes(slot.dim, chosen, table.dtype)
        of_slot = (slot.name, slot.group, slot.dim, table.dtype, chosen)
        found.append(Forecast(*of_slot, size, limit // size, rows.get(slot.name, 0)))
    return found


def check_memory(config: GlobalConfig, forecasts: list[Forecast]) -> Iterator[Finding]:
    """Yield findings on the memory limit and on the rows expected."""
    settings = config.embedding_parameter_server_config
    total, limit = total_memory_bytes(), settings.memory_limit_bytes()
    # At least one, as where the list names hosts.
    num_here = max(1, sum(map(is_local, current_lists()[parameter_server().name].addresses)))
    if limit == 0:
        text = "memory_limit is 0: rows may take more memory than there is"
        todo = "set memory_limit: 70% in embedding_parameter_server_config"
        yield warning("memory", text, todo)
    elif limit * num_here > total:
        share = resolve_memory_limit("90%") // num_here / _GIB
        yield error(
            "memory",
            f"{num_here} parameter server(s) here may take {limit / _GIB:.1f} GiB each, of "
            f"{total / _GIB:.1f} GiB in all",
            f"set memory_limit to less than {share:.1f} GiB, or start fewer of them here",
        )
    else:
        yield ok("memory", f"rows of a server may take {limit / _GIB:.1f} GiB (memory_limit)")
    if forecasts:
        mean = sum(one.row_bytes for one in forecasts) / len(forecasts)
        at, what = settings.capacity, "capacity"
        if 0 < limit < at * mean:
            at, what = int(limit / mean), "memory_limit"
        text = f"a server evicts from about {at:,} rows on, by {what}, and needs "
        text += f"{at * mean / _GIB:.1f} GiB for them; a row takes {mean:.0f} bytes on average"
        yield ok("memory", text)
    if limit == 0:
        return
    yield from _check_rows(forecasts, limit, settings.capacity)
    directory = env.state_directory() or Path(settings.state_dir)
    if settings.keep_state and str(directory) != "off":
        yield _check_state_room(directory, limit * num_here)


def _check_rows(forecasts: list[Forecast], limit: int, capacity: int) -> Iterator[Finding]:
    rows: dict[str, tuple[int, float]] = {}
    for one in forecasts:  # rows of a group are shared: the most of its features
        rows[one.group] = max(rows.get(one.group, (0, 0.0)), (one.rows, one.row_bytes))
    taken, num = sum(n * size for n, size in rows.values()), sum(n for n, _ in rows.values())
    if not num:
        return
    servers = len(env.parameter_server_addresses())
    needed = max(-(-int(taken) // limit), -(-num // capacity))
    text = f"{num:,} rows take {taken / _GIB:.2f} GiB, on {servers} server(s)"
    if needed <= servers:
        yield ok("memory", text)
        return
    text += ", more than memory_limit or capacity: rows will be evicted"
    todo = f"start {needed} parameter servers, or keep rows in float16 (docs/row-dtypes.md)"
    yield warning("memory", text, todo)


def _check_state_room(directory: Path, wanted: int) -> Finding:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        text = f"state_dir {directory} cannot be written: a killed server loses its rows"
        return warning("recovery", text, "name a tmpfs in state_dir, or set keep_state: false")
    free = shutil.disk_usage(directory).free
    if free >= wanted:
        return ok("recovery", f"{directory} has room for the rows of a killed server")
    return warning(
        "recovery",
        f"{directory} has {free / _GIB:.1f} GiB free, and rows may take "
        f"{wanted / _GIB:.1f} GiB: rows beyond that are lost with their server",
        f"mount -o remount,size={wanted // _GIB + 1}G {directory} (docker: --shm-size)",
    )


# --- sample of the data -----------------------------------------------------------------------

# Seconds that a script gets to send its first batch.
_SCRIPT_S = 60.0


@dataclass(frozen=True, slots=True)
class DataSample:
    ids: Mapping[str, NDArray[np.uint64]]  # integers; texts are hashed as ParquetReader does
    others: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    is_batch: bool = False  # all ids are features; a column of a file may be anything


def read_sample(path: Path) -> DataSample:
    """Read a sample of the data; ``docs/doctor.md`` says of which files.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as held:
                arrays = dict(held)
            others = {k: one for k, one in arrays.items() if one.dtype.kind not in "iu"}
            ids = {k: arrays[k].astype(np.uint64) for k in arrays.keys() - others.keys()}
            return DataSample(ids, others)
        if path.suffix in (".parquet", ".pq"):
            return _of_parquet(path)
        content = _first_batch(path) if path.suffix == ".py" else path.read_bytes()
        batch = PersiaBatch.from_bytes(content)
        ids = {one.name: one.distinct for one in batch.id_type_features}
        others = {one.name: one.data for one in (*batch.non_id_type_features, *batch.labels)}
        return DataSample(ids, others, is_batch=True)
    except (OSError, ValueError, zipfile.BadZipFile, PersiaError) as exc:
        raise DataError(f"{path}: {exc}") from exc


def _of_parquet(path: Path) -> DataSample:
    try:
        from pyarrow import parquet

        from persia.readers import _columns
    except ImportError as exc:
        raise DataError("to read Parquet, pip install pyarrow") from exc
    table = parquet.ParquetFile(path).read_row_group(0)
    ids, others = {}, {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if _columns.are_ids(column.type):
            ids[name] = _columns.id_feature(name, name, column, "hash").feature_batch.distinct
            continue
        try:
            while hasattr(column.type, "value_field"):  # lists, and of lists
                column = column.flatten()
            others[name] = column.drop_null().to_numpy(zero_copy_only=False)
        except Exception as exc:  # pyarrow's own classes, for types that numpy lacks
            raise DataError(f"column {name}: {exc}") from exc
    return DataSample(ids, others)


def _first_batch(script: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="persia-") as directory:
        target = Path(directory) / "batch"
        code = f"import sys, {__name__} as checks; checks.run_to_first_batch(*sys.argv[1:])"
        try:
            _, why = _run_python(code, str(target), str(script), timeout_s=_SCRIPT_S)
        except subprocess.TimeoutExpired as exc:
            raise DataError(f"it sent no batch within {_SCRIPT_S:g} s") from exc
        if target.exists():
            return target.read_bytes()
        raise DataError(why or "it ended without sending a batch")


def run_to_first_batch(target: str, script: str) -> None:
    """Run a script with a ``DataCtx`` that writes its first batch to a file, and ends there."""
    import persia.ctx

    class FirstBatchCtx(persia.ctx.DataCtx):
        resume_position = 0

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *raised: object) -> Literal[False]:
            return False

        def seek(self, batch: int) -> None:
            pass

        def send_data(self, persia_batch: PersiaBatch) -> None:
            part = Path(target).with_suffix(".part")
            part.write_bytes(persia_batch.to_bytes())
            part.rename(target)
            os._exit(0)

    setattr(persia.ctx, "DataCtx", FirstBatchCtx)  # noqa: B010  (mypy: a class is replaced)
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def check_sample(schema: EmbeddingSchema, sample: DataSample, name: str) -> Iterator[Finding]:
    """Yield findings on a sample, of that name in messages, beside the embedding config."""
    missing = [slot for slot in schema.slots if slot not in sample.ids]
    others = sample.ids.keys() - schema.slots.keys()
    for slot in missing:
        there = sample.others.get(slot)
        if there is not None and not sample.is_batch:
            text = f"{name}: {slot} is {there.dtype}, expected integers"
            yield error("data", text, "number them, or hash texts by persia.readers.hash_text")
        else:
            todo = f"send it, or take {slot} out of slots_config"
            text = f"{name}: feature {slot} of the config is not in the data"
            yield error("data", f"{text}{did_you_mean(slot, sorted(others))}", todo)
    unknown = [one for one in sample.ids if one not in schema.slots and sample.is_batch]
    for one in unknown:
        todo = f"add {one}: {{dim: 8}} to slots_config, or do not send it"
        yield error("data", f"{name}: feature {one} is not in the config", todo)
    limit = 1 << (64 - schema.prefix_bits)
    for one in schema.slots.keys() & sample.ids.keys():
        largest = int(sample.ids[one].max(initial=0))
        if largest >= limit and schema.slots[one].id_hash is None:
            text = f"{name}: {one} has ids up to {largest}, and {limit - 1} is the largest"
            todo = "hash them to fewer bits, or lower feature_index_prefix_bit"
            yield (error if schema.strict_ids else warning)("data", text, todo)
    for other, values in sample.others.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            todo = "fill missing values: their loss is NaN"
            yield warning("data", f"{name}: {other} holds values that are not finite", todo)
    if not missing and not unknown:
        yield ok("data", f"{name}: all {len(schema.slots)} features are there, and known")


# --- Procfile ---------------------------------------------------------------------------------

# Options of env are not looked up.
_COMMAND = re.compile(r"([\w-]+):\s*(?:exec\s+)?(?:env\s+)?(?:\w+=\S*\s+)*([^\s;]+).*")


def check_procfile(path: Path) -> Iterator[Finding]:
    """Yield an error for each line whose command does not exist."""
    is_good = True
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = _COMMAND.fullmatch(text.strip())
        if line is None or re.search(r"[$`(]", text):  # what only a shell can expand
            continue
        role, command = line.groups()
        if command.startswith("-"):
            continue
        words = ["sh", "-c", 'command -v -- "$1"', "sh", command]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            is_good = False
            text = f"{path}:{number}: {role}: no such command: {command}"
            todo = "install it, activate its environment, or correct the line"
            yield error("procfile", text, todo)
    if is_good:
        yield ok("procfile", f"{path}: its commands exist")


def file_in_procfile(path: Path, option: str) -> Path | None:
    """Return the first existing file that an option in a Procfile names."""
    names = re.findall(rf"{re.escape(option)}[=\s]+(\S+)", path.read_text(encoding="utf-8"))
    return next((Path(name) for name in names if Path(name).is_file()), None)


# --- network ----------------------------------------------------------------------------------

# Seconds for resolving a name, and for the answer of a server.
_NAMES_S, _ANSWER_S = 3.0, 3.0
# Of a server elsewhere: a node starts processes for each connection that is forwarded.
_FORWARDED_S = 20.0


def check_network(fingerprint: str) -> Iterator[Finding]:
    """Yield findings on the addresses of the job: names, ports, versions, metrics.

    Args:
        fingerprint: Of the embedding config that running servers should have; "" if unknown.
    """
    try:
        lists = current_lists()
    except ConfigError as exc:
        todo = "write host:port, or ipc:///path, with commas between"
        yield error("addresses", str(exc), todo)
        return
    yield from _check_keys()
    for role in _server_roles():
        listed = lists[role.name]
        for name in filter(is_name, listed.addresses):
            try:
                resolve(name)
            except OSError as exc:
                text = f"{listed.variable}: {split(name)[0]} cannot be resolved: {exc.strerror}"
                todo = "correct the name; in containers it is a service's, on the same network"
                yield error("names", text, todo)
        for address in resolved(listed.addresses, _NAMES_S):
            yield _check_address(role, listed.variable, address, fingerprint)
    yield from _check_metrics_ports()


def _server_roles() -> tuple[Role, ...]:
    return parameter_server(), embedding_worker(), nn_worker()


def _check_keys() -> Iterator[Finding]:
    host = env.listen_host()
    if is_local(f"{host}:0") or env.keys_directory() is not None:
        return
    if env.may_listen_without_keys():
        text = f"PERSIA_LISTEN_HOST={host}, and nothing is encrypted"
        yield warning("keys", text, "use a trusted network only, see docs/security.md")
    else:
        text = f"PERSIA_LISTEN_HOST={host}: servers refuse to listen there without keys"
        todo = "persia-launcher keys keys/, and PERSIA_KEYS=keys/ for every process"
        yield error("keys", text, todo)


def _check_address(role: Role, variable: str, address: str, fingerprint: str) -> Finding:
    who = f"{role.name} at {address}"
    taken = _listen_errno(address)
    if taken in (errno.EACCES, errno.ENOENT):
        text = f"{who}: cannot listen there: {os.strerror(taken)}"
        return error("addresses", text, f"write another address into {variable}")
    # Without a failing bind there is no server; a bare connection would be logged by one.
    hello: Hello | None = None
    if taken > 0:
        try:
            hello = _say_hello(role, address)
        except PersiaError as exc:
            if address.startswith(TCP) and taken == errno.EADDRINUSE:
                text = f"{who}: another program listens there: {exc}"
                return error("ports", text, f"end it, or write another port into {variable}")
    if hello is None:
        return ok("addresses", f"{who}: not running yet")
    return _check_hello(who, hello, fingerprint)


def check_servers(
    servers: Iterable[tuple[str, str, str]], fingerprint: str
) -> Iterator[Finding]:
    """Yield findings on servers elsewhere, which are all asked at the same time.

    Args:
        servers: Of each its role, what messages call it, and the address of this machine that
            leads to it.
        fingerprint: Of the embedding config that they should have; "" if unknown.
    """
    roles = {one.name: one for one in _server_roles()}
    with closing(ZmqTransport()) as transport, ExitStack() as stack:
        calls = []
        for role, who, address in servers:
            client = Client(transport, address, roles[role], timeout_s=_FORWARDED_S)
            stack.callback(client.close)
            calls.append((role, who, address, client.begin("hello")))
        for role, who, address, call in calls:
            try:
                yield _check_hello(who, call.result(), fingerprint)
            except PersiaError as exc:
                # A trainer listens once its script reads from data-loaders, if it does.
                found = warning if role == TRAINER else error
                why = str(exc).rpartition(f"{address}: ")[2]
                text = f"{who} does not answer: {why}"
                yield found("servers", text, "it may be starting; else its log says why")


def _check_hello(who: str, hello: Hello, fingerprint: str) -> Finding:
    if hello.version != __version__:
        text = f"{who} is PERSIA {hello.version}, and this is {__version__}"
        return error("versions", text, "install the same version everywhere")
    theirs = hello.schema_fingerprint
    if fingerprint and theirs and theirs != fingerprint:
        differences = describe_differences(fingerprint, theirs, "here", "there")
        text = f"{who} has another embedding config: {differences}"
        return error("versions", text, "start it with the same --embedding-config")
    replica = f"replica {hello.replica_index} of {hello.replica_size}"
    return ok("versions", f"{who} runs: {replica}, PERSIA {hello.version}")


def _listen_errno(address: str) -> int:
    """Return the errno of listening at an address; 0 if free, negative if unresolved."""
    if not address.startswith(TCP):
        path = Path(address.removeprefix("ipc://"))
        if path.is_socket():
            return errno.EADDRINUSE
        return 0 if path.parent.is_dir() else errno.ENOENT
    host, port = split(address)
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        with closing(socket.socket(family)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host.strip("[]"), port))
    except OSError as exc:  # of a name that cannot be resolved it is negative
        return exc.errno or -1
    return 0


def _say_hello(role: Role, address: str) -> Hello:
    with (
        closing(ZmqTransport()) as transport,
        closing(Client(transport, address, role, timeout_s=_ANSWER_S)) as client,
    ):
        return client.hello()


def _check_metrics_ports() -> Iterator[Finding]:
    port, host = env.metrics_port(), env.metrics_host()
    if port == "off":
        text = "PERSIA_METRICS_PORT=off: persia-launcher top and Prometheus see nothing"
        yield warning("metrics", text, "unset PERSIA_METRICS_PORT")
    if port is not None:
        return
    ports = [default_port(role, 0) for role in (LOADER, WORKER, SERVER, TRAINER)]
    refused = (errno.EADDRINUSE, errno.EACCES)
    taken = [str(one) for one in ports if _listen_errno(f"{TCP}{host}:{one}") in refused]
    if taken:
        text = f"ports {', '.join(taken)} of {host} are taken: the kernel will choose others"
        todo = "if another job has them: set PERSIA_METRICS_PORT, or name the ports to top"
        yield warning("metrics", text, todo)
    else:
        yield ok("metrics", f"the default ports of {host} are free")
