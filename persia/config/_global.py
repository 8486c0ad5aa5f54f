"""The global config: how servers are set up, one section per role."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from persia.config.document import Document, Expect, InvalidValue, Listed, Section, integer
from persia.errors import ConfigError
from persia.logger import get_logger
from persia.utils import total_memory_bytes

_logger = get_logger("persia.config")

# Bits 49..40 of a sign's hash choose the shard.
_MAX_SHARDS = 1 << 10

# Bits 63..50 choose the server: one beyond their number would own nothing.
_MAX_SERVERS = 1 << 14

# Of rows and of bytes, what the store can count; and its threads.
_MAX_COUNT = (1 << 63) - 1
_MAX_THREADS = 1024

_MEMORY_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}
_MEMORY_LIMIT = (
    "a memory limit: bytes below 2**63, a size such as 8GiB, or a percentage in 0..100 such as "
    "70%"
)


def resolve_memory_limit(limit: int | str | None, total_bytes: int | None = None) -> int:
    """Return a memory limit in bytes; 0 is no limit.

    Args:
        limit: Bytes, ``"8GiB"`` or the like, or a percentage of the memory; None is 70 %.
        total_bytes: The memory; that of this process's cgroup or host if not given.

    Raises:
        ConfigError: If ``limit`` is neither of these.
    """
    if limit is None:
        limit = "70%"
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B|)\s*", limit)
        number, unit = match.groups() if match else ("", None)
        if unit == "%" and 0 < float(number) <= 100:
            total = total_memory_bytes() if total_bytes is None else total_bytes
            return int(total * float(number) / 100)
        if unit in _MEMORY_UNITS:
            num_bytes = float(number) * _MEMORY_UNITS[unit]
            if num_bytes < _MAX_COUNT:
                return int(num_bytes)
    elif type(limit) is int and 0 <= limit <= _MAX_COUNT:
        return limit
    raise ConfigError(f"expected {_MEMORY_LIMIT}, got {limit!r}")


@dataclass(frozen=True, slots=True)
class MetricsConfig(Section):
    """Section ``common_config.metrics_config``."""

    # Whether metrics are sent to the push gateway at ``PERSIA_METRICS_GATEWAY_ADDR``. Each
    # process serves them at a port of its own in any case.
    enable_metrics: bool = False
    job_name: str = "persia_default_jobname"  # name of this job at the gateway
    # Seconds between two times that they are sent.
    push_interval_seconds: Annotated[int, integer(1)] = field(
        default=10, metadata={"aliases": ("push_interval_sec",)}
    )


@dataclass(frozen=True, slots=True)
class InferConfig(Section):
    """Section ``common_config.infer_config``: what job type ``Infer`` starts from."""

    # Folder or URL of the checkpoint that servers load when they start, and of newer ones that
    # they load as they come.
    embedding_checkpoint: str
    # Read because old files hold it: processes find servers by the variables of the job.
    servers: Listed[tuple[str, ...]] = ()
    # ``incremental_dir`` of servers that train: once it is whole, rows are those of training,
    # and follow it. Without it, a checkpoint's.
    incremental_dir: str = ""
    # Seconds between two looks for a newer checkpoint, or for changed rows.
    follow_interval_sec: Annotated[float, Expect("a number of seconds, at least 0.01")] = 1.0
    # How servers hold the values of rows: ``int8`` has a scale and an offset for each row.
    row_dtype: Literal["float32", "float16", "bfloat16", "int8"] = "float32"

    def check(self) -> None:
        if not 0.01 <= self.follow_interval_sec < math.inf:
            raise InvalidValue(
                f"expected a number of seconds, at least 0.01, got {self.follow_interval_sec}",
                "follow_interval_sec",
            )


@dataclass(frozen=True, slots=True)
class CheckpointingConfig(Section):
    """Section ``common_config.checkpointing_config``."""

    # Files of a checkpoint that a server checks at the same time.
    num_workers: Annotated[int, integer(1)] = 4


_FloatName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class WireConfig(Section):
    """Section ``common_config.wire_config``: floats between processes."""

    # How rows of a lookup are sent, and what is pooled of them. How rows are kept is
    # ``group_settings.<group>.dtype``.
    row_dtype: _FloatName = "float32"
    # How gradients are sent. Sums and steps are float32 in any case.
    gradient_dtype: _FloatName = "float32"


@dataclass(frozen=True, slots=True)
class CommonConfig(Section):
    """Section ``common_config``: what every role reads."""

    metrics_config: MetricsConfig = field(default_factory=MetricsConfig)  # metrics
    # What the job does; servers of ``Infer`` load the checkpoint of ``infer_config``.
    job_type: Literal["Train", "Eval", "Infer"] = "Train"
    # Servers and checkpoint of inference; None where nothing is served.
    infer_config: InferConfig | None = None
    # Checkpoints.
    checkpointing_config: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    # What goes between trainer, embedding-workers and parameter servers; nothing does in
    # embedded mode.
    wire_config: WireConfig = field(default_factory=WireConfig)

    @property
    def served_checkpoint(self) -> str:
        """Folder or URL of what servers load when they start; "" for nothing."""
        if self.job_type != "Infer" or self.infer_config is None:
            return ""
        return self.infer_config.embedding_checkpoint


@dataclass(frozen=True, slots=True)
class EmbeddingWorkerConfig(Section):
    """Section ``embedding_worker_config``."""

    # Batches that an embedding-worker holds for one data-loader.
    forward_buffer_size: Annotated[int, integer(1)] = 1000
    # Seconds after which the ids of a batch that is never looked up are counted as lost.
    buffered_data_expired_sec: Annotated[int, integer(1)] = 1000
    # How much of what rows have moved by since their lookup gradients are corrected for, to
    # first order; 1 is all of it, 0 none. Costs a second lookup for each batch. For a mean loss
    # over the batch, where lookups are several updates late. Not for modules of persia.nn.
    delay_compensation: Annotated[float, Expect("a number in 0..10", ge=0, le=10)] = 0.0


@dataclass(frozen=True, slots=True)
class ParameterServerConfig(Section):
    """Section ``embedding_parameter_server_config``."""

    # Rows that one server keeps; beyond it rows are evicted. Costs no memory.
    capacity: Annotated[int, integer(1)] = 1_000_000_000
    # Parts of one server's store, each with its own lock and its own order of use.
    num_hashmap_internal_shards: Annotated[int, integer(1, _MAX_SHARDS)] = 16
    # Memory of one server beyond which rows go as by capacity. Bytes, a size such as ``8GiB``,
    # or a percentage of the cgroup's limit or the host's memory; 70 percent if not given, 0 for
    # none.
    memory_limit: Annotated[int | str | None, Expect(_MEMORY_LIMIT)] = None
    # Memory of one server for the counts of ids that wait for admission by count. 4 bytes a row
    # of ``capacity`` if not given, but no more than 1/32 of the memory limit. Taken only if a
    # group admits by count.
    admission_sketch_bytes: Annotated[int, integer(1)] | None = None
    # Whether a server that is killed and started again has its rows again. In services mode
    # only. Where ``state_dir`` cannot be used, a server says so and goes on without.
    keep_state: bool = True
    # Where rows are then: a tmpfs that outlives the process, and the container if there is one.
    # They take the same memory as otherwise, of this file system.
    state_dir: str = "/dev/shm"
    # Whether each server writes changed rows out as training goes on.
    enable_incremental_update: bool = False
    # Changes of rows after which they are written, once each.
    incremental_buffer_size: Annotated[int, integer(1)] = 1_000_000
    # Seconds after which changes are written though they are fewer.
    incremental_flush_sec: Annotated[
        float, Expect("a number in 0.5..86400", ge=0.5, le=86_400)
    ] = 60.0
    # Seconds for which what was written stays at least, for those who follow it.
    incremental_keep_sec: Annotated[
        float, Expect("a number in 0..604800", ge=0, le=604_800)
    ] = 300.0
    # Where they are written: a folder or a URL, which has a folder of each server.
    incremental_dir: str = "/workspace/incremental_dir/"
    # Whether a server that begins empty, as one whose machine is gone, loads what it has
    # written there in this run (``PERSIA_RUN_ID``) before it serves.
    recovery: bool = False
    # Read because old files hold it; has no effect.
    incremental_channel_capacity: Annotated[int, integer(1)] = 1000

    def check(self) -> None:
        try:
            resolve_memory_limit(self.memory_limit)
        except ConfigError as exc:
            raise InvalidValue(str(exc), "memory_limit") from None
        if self.recovery and not self.enable_incremental_update:
            raise InvalidValue(
                "expected enable_incremental_update: true with it, which writes what is loaded",
                "recovery",
            )

    def sketch_bytes(self) -> int:
        """Return ``admission_sketch_bytes`` or what is taken in its place."""
        if self.admission_sketch_bytes is not None:
            return self.admission_sketch_bytes
        limit = self.memory_limit_bytes() or resolve_memory_limit(None)
        return max(64, min(4 * self.capacity, limit // 32))  # a shard has a line at least

    def memory_limit_bytes(self) -> int:
        """Return ``memory_limit`` in bytes on this machine; 0 is no limit."""
        return resolve_memory_limit(self.memory_limit)


@dataclass(frozen=True, slots=True)
class EmbeddedConfig(Section):
    """Section ``embedded_config``: the servers inside a trainer that has no others."""

    # Parameter servers in the process; each has a capacity of its own.
    num_servers: Annotated[int, integer(1, _MAX_SERVERS)] = 1
    # Threads that one request to a server, or the pooling of one batch, spreads over.
    num_threads: Annotated[int, integer(1, _MAX_THREADS)] = 1


@dataclass(frozen=True, slots=True)
class GlobalConfig(Section):
    """The global config: one section per role."""

    # What every role reads.
    common_config: CommonConfig = field(default_factory=CommonConfig)
    # Embedding-workers.
    embedding_worker_config: EmbeddingWorkerConfig = field(
        default_factory=EmbeddingWorkerConfig
    )
    # Parameter servers.
    embedding_parameter_server_config: ParameterServerConfig = field(
        default_factory=ParameterServerConfig
    )
    # Embedded mode.
    embedded_config: EmbeddedConfig = field(default_factory=EmbeddedConfig)

    @staticmethod
    def load(
        source: str | os.PathLike[str] | Mapping[str, object] | GlobalConfig | None = None,
    ) -> GlobalConfig:
        """Read a YAML file or a mapping of the same shape; None gives the defaults.

        Raises:
            ConfigError: If the file cannot be read, or a key or a value cannot be used.
        """
        if isinstance(source, GlobalConfig):
            return source
        if source is None:
            return GlobalConfig()
        document = Document(source, "global config")
        config = document.read(GlobalConfig)
        common, server = config.common_config, config.embedding_parameter_server_config
        loads = common.job_type == "Infer" and common.infer_config is not None
        unused = []
        if common.job_type != "Train" and not loads:
            unused.append(("common_config", "job_type"))
        if server.incremental_channel_capacity != 1000:
            unused.append(("embedding_parameter_server_config", "incremental_channel_capacity"))
        for keys in unused:
            place = document.place(*keys)
            _logger.warning("%s: %s has no effect in this version", place, ".".join(keys))
        return config
