"""The two YAML files, and the memory that rows of these settings take."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from persia import env
from persia._cli.checks.findings import Finding, error, ok, warning
from persia._cluster.addresses import TCP, split
from persia._cluster.embedded import build_embedding_worker
from persia._rpc.messages import IDFeatures, OptimizerSettings
from persia.config import (
    EmbeddingSchema,
    GlobalConfig,
    nearest,
    resolve_memory_limit,
    with_line,
)
from persia.config._groups import GroupOptimizer
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID
from persia.errors import ConfigError
from persia.utils import total_memory_bytes

# Rows that are made, and once more so many, to see what one takes.
_NUM_ROWS = 1 << 15
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the rows of one feature take. Features of a group share theirs."""

    feature: str
    group: str
    dim: int
    dtype: str
    optimizer: str
    row_bytes: float  # and what finds it
    fit: int  # rows on one server, if it had no others; 0 is no limit
    rows: int = 0  # expected over all servers, as the command line says


# --- files ------------------------------------------------------------------------------------


def check_files(
    embedding: Path | None, common: Path | None
) -> tuple[list[Finding], EmbeddingSchema | None, GlobalConfig]:
    """Read both files; what cannot be read is a finding, with file and line."""
    found: list[Finding] = []
    schema: EmbeddingSchema | None = None
    config = GlobalConfig()
    if embedding is None:
        text = "no embedding config is named, and there is none here"
        found.append(
            warning("config", text, "--embedding-config FILE, or set PERSIA_EMBEDDING_CONFIG")
        )
    else:
        with _told(found, embedding):
            schema = EmbeddingSchema.load(embedding)
            groups = f"{len(schema.slots)} features in {len(schema.groups)} groups"
            found.append(ok("config", f"{embedding}: {groups}"))
    if common is not None:
        with _told(found, common):
            config = GlobalConfig.load(common)
            found.append(ok("config", f"{common}: can be used"))
    return found, schema, config


@contextmanager
def _told(found: list[Finding], path: Path) -> Iterator[None]:
    """Make findings of what reading a file raises, warns and logs."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(_advice(record.getMessage()))

    def _advice(message: str) -> Finding:
        return warning(
            "config", with_line(message, str(path)), "change that key, or leave it out"
        )

    logger, handler = logging.getLogger("persia.config"), Told(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
        found += [_advice(str(one.message)) for one in warned]
    except ConfigError as exc:
        found.append(error("config", str(exc), _what_to_do(path, str(exc))))
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def _what_to_do(path: Path, message: str) -> str:
    if path.is_dir():
        return "name the file in it"
    if not path.is_file():
        return "correct the path; persia-launcher init DIRECTORY writes both files"
    if message.endswith("are the two swapped?"):
        return "swap the two options, --embedding-config and --global-config"
    if message.startswith(f"{path}:") and message[len(f"{path}:")].isdigit():
        return "correct that line; docs/configuration.md has every key"
    return "docs/configuration.md has every key; persia-launcher init writes an example"


# --- memory -----------------------------------------------------------------------------------


def forecast(
    schema: EmbeddingSchema, config: GlobalConfig, optimizer: str, rows: Mapping[str, int]
) -> list[Forecast]:
    """Return what the rows of each feature take, in a store of this build.

    Args:
        schema: The features.
        config: Whose memory limit is looked at.
        optimizer: Of groups that name none, as the script chooses it.
        rows: Those expected over all servers, by feature.

    Raises:
        ConfigError: If there is no such optimizer, or feature.
    """
    unknown = rows.keys() - schema.slots.keys()
    if unknown:
        name = min(unknown)
        hint = nearest(name, schema.slots)
        raise ConfigError(f"--rows: {name} is no feature of the embedding config{hint}")
    sizes = _row_bytes(schema, optimizer)
    limit = config.embedding_parameter_server_config.memory_limit_bytes()
    found = []
    for slot in schema.slots.values():
        table = schema.tables[slot.table]
        own = table.settings.optimizer
        found.append(
            Forecast(
                *(slot.name, slot.group, slot.dim, table.dtype),
                (own.name if own is not None else None) or optimizer,
                sizes[slot.table],
                int(limit / sizes[slot.table]),
                rows.get(slot.name, 0),
            )
        )
    return found


def _row_bytes(schema: EmbeddingSchema, optimizer: str) -> dict[int, float]:
    """Make rows of each table, and see what they take: of the row, its index and its turn.

    That is what more of them add: the rest, 0.6 MiB, is what any table begins with.
    """
    tables = tuple(
        replace(table, admit_probability=1.0, settings=replace(table.settings, admission=None))
        for table in schema.tables
    )
    # Each id its own row.
    slots = {
        name: replace(slot, hash_stack_rounds=0, hash_stack_size=0)
        for name, slot in schema.slots.items()
    }
    slot_of = {slot.table: slot for slot in reversed(slots.values())}
    plain = replace(schema, tables=tables, slots=slots)
    worker = build_embedding_worker(plain, GlobalConfig())
    try:
        worker.configure(EmbeddingConfig().settings())
        chosen = GroupOptimizer(optimizer, {"lr": 0.1})  # no rate changes what a row takes
        worker.register_optimizer(OptimizerSettings(str(chosen.name), chosen.options))
        sizes = {}
        for number, slot in slot_of.items():
            held = []
            for turn in range(2):
                ids = np.arange(_NUM_ROWS, dtype=np.uint64) + np.uint64(turn * _NUM_ROWS)
                feature = IDTypeFeatureWithSingleID(slot.name, ids).feature_batch
                result = worker.lookup_direct(IDFeatures((feature,), 2 * number + turn, True))
                if result.ref is not None:
                    worker.release(result.ref)
                held.append(_held(worker.server_stats()))
            (few, taken), (more, taken_by_more) = held
            sizes[number] = (taken_by_more - taken) / (more - few)
            worker.clear_embeddings()
        return sizes
    finally:
        worker.close()


def _held(stats: list[Mapping[str, int]]) -> tuple[int, int]:
    return sum(one["rows"] for one in stats), sum(one["bytes"] for one in stats)


def check_memory(config: GlobalConfig, forecasts: list[Forecast]) -> Iterator[Finding]:
    """Yield what is found of the memory limit, and of rows beside it."""
    settings = config.embedding_parameter_server_config
    total, limit = total_memory_bytes(), settings.memory_limit_bytes()
    num_here = _num_servers_here()
    share = resolve_memory_limit("90%") // num_here / _GIB
    if limit == 0:
        yield warning(
            "memory",
            "memory_limit is 0: rows may take more memory than there is",
            "set memory_limit: 70% in embedding_parameter_server_config",
        )
    elif limit * num_here > total:
        yield error(
            "memory",
            f"{num_here} parameter server(s) here may take {limit / _GIB:.1f} GiB each, and "
            f"there are {total / _GIB:.1f} GiB",
            f"set memory_limit to less than {share:.1f} GiB, or start fewer of them here",
        )
    else:
        yield ok("memory", f"rows of a server may take {limit / _GIB:.1f} GiB (memory_limit)")
    if forecasts and limit:
        mean = sum(one.row_bytes for one in forecasts) / len(forecasts)
        at, what = int(limit / mean), "memory_limit"
        if settings.capacity < at:
            at, what = settings.capacity, "capacity"
        yield ok(
            "memory",
            f"a server evicts from about {at:,} rows on, by {what}; a row takes {mean:.0f} "
            "bytes on average over features",
        )
        yield from _expected(forecasts, limit, settings.capacity)
    directory = env.state_directory() or Path(settings.state_dir)
    if settings.keep_state and str(directory) != "off" and limit:
        yield from _state_room(directory, limit * num_here)


def _expected(forecasts: list[Forecast], limit: int, capacity: int) -> Iterator[Finding]:
    rows: dict[str, tuple[int, float]] = {}
    for one in forecasts:  # of a group, whose rows are shared, the most
        rows[one.group] = max(rows.get(one.group, (0, 0.0)), (one.rows, one.row_bytes))
    taken, num = sum(n * size for n, size in rows.values()), sum(n for n, _ in rows.values())
    if not num:
        return
    servers = len(env.parameter_server_addresses())
    text = (
        f"{num:,} rows take {taken / _GIB:.2f} GiB, {taken / servers / _GIB:.2f} GiB on each "
        f"of {servers} server(s)"
    )
    if taken / servers <= limit and num / servers <= capacity:
        yield ok("memory", text)
        return
    needed = max(-(-int(taken) // limit), -(-num // capacity))
    yield warning(
        "memory",
        f"{text}, more than memory_limit or capacity: rows will be evicted",
        f"start {needed} parameter servers, or keep rows in float16 (docs/row-dtypes.md)",
    )


def _num_servers_here() -> int:
    """Return how many of the listed parameter servers are on this machine; at least one."""
    here = [
        address
        for address in env.parameter_server_addresses()
        if ("://" in address and not address.startswith(TCP))
        or split(address)[0].strip("[]") in ("127.0.0.1", "localhost", "::1")
    ]
    return max(1, len(here))


def _state_room(directory: Path, wanted: int) -> Iterator[Finding]:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        yield warning(
            "recovery",
            f"state_dir {directory} cannot be written: a killed server loses its rows",
            "name a tmpfs in state_dir, or set keep_state: false",
        )
        return
    free = shutil.disk_usage(directory).free
    if free >= wanted:
        yield ok("recovery", f"{directory} has room for the rows of a killed server")
        return
    yield warning(
        "recovery",
        f"{directory} has {free / _GIB:.1f} GiB free, and rows may take "
        f"{wanted / _GIB:.1f} GiB: beyond that they end with their server",
        f"mount -o remount,size={wanted // _GIB + 1}G {directory} (docker: --shm-size)",
    )
