"""The two YAML files as frozen dataclasses, checked whole before anything uses them.

``GlobalConfig`` says how servers are set up; ``EmbeddingSchema`` says which features (slots)
there are and which of them share rows. One reader walks mappings against dataclass fields, so
that a key nobody knows is an error which names the file, the key's path and the nearest known
name. A key without a value (``capacity:``) counts as not given.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import os
import re
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from persia._core import initial
from persia._core.optim import MAX_DIM
from persia.errors import ConfigError
from persia.logger import get_logger
from persia.utils import load_yaml, total_memory_bytes

_logger = get_logger("persia.config")

T = TypeVar("T")

Pooling = Literal["sum", "mean", "sqrt", "max", "raw", "jagged"]
POOLINGS: tuple[Pooling, ...] = typing.get_args(Pooling)

# Modes that hand out one vector per id, so that there is nothing to sum over.
_PER_ID: tuple[Pooling, ...] = ("raw", "jagged")

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


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the known name nearest to ``name``, or ``""``."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {found[0]!r}?" if found else ""


# --- checks of values -----------------------------------------------------------------------


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    bounds = f"of at least {low}" if high is None else f"in {low}..{high}"
    # bool is an int to Python, and "capacity: yes" is no number to anybody else.
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ConfigError(f"{name}: expected an integer {bounds}, got {value!r}")


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    names = tuple(choices)
    if value not in names:
        hint = nearest(str(value), names)
        raise ConfigError(f"{name}: expected one of {', '.join(names)}, got {value!r}{hint}")


def check_probability(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a probability; NaN and True are none."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: expected a probability in 0..1, got {value!r}")


def resolve_memory_limit(limit: int | str | None, total_bytes: int | None = None) -> int:
    """Return a memory limit in bytes; 0 is no limit.

    Args:
        limit: Bytes, ``"8GiB"`` or the like, a percentage such as ``"70%"``, or None for
            70 percent.
        total_bytes: What a percentage is taken of; the limit of this process's cgroup, or
            else the host's memory, if not given.

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
    raise ConfigError(
        "memory_limit: expected bytes below 2**63, a size such as 8GiB, or a percentage in "
        f"0..100 such as 70%, got {limit!r}"
    )


# --- the reader -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Where:
    """A place in a file, for messages."""

    file: str
    path: str = ""

    def at(self, key: str) -> _Where:
        return _Where(self.file, f"{self.path}.{key}" if self.path else key)

    def error(self, message: str) -> ConfigError:
        return ConfigError(": ".join(part for part in (self.file, self.path, message) if part))


_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _kind(value: object) -> str:
    """Name a value as YAML would, for messages."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"{type(value).__name__} {value!r}"


def _mapping(value: object, where: _Where) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise where.error(
            f"expected a mapping, got {'nothing' if value is None else _kind(value)}"
        )
    for key in value:
        if not isinstance(key, str):
            raise where.error(f"expected names as keys, got {_kind(key)}; put it in quotes")
    return value


def _convert(hint: Any, value: object, where: _Where) -> Any:
    """Return ``value`` as the type ``hint`` says, nested sections included."""
    if hint is Initialization:
        return _read_initialization(value, where)
    if dataclasses.is_dataclass(hint):
        return _read(typing.cast("type[Any]", hint), value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        items = _mapping(value, where).items()
        return {key: _convert(arguments[1], item, where.at(key)) for key, item in items}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise where.error(f"expected a list, got {_kind(value)}")
        return tuple(
            _convert(arguments[0], item, where.at(str(number)))
            for number, item in enumerate(value)
        )
    if origin in (typing.Union, types.UnionType):
        choices = [argument for argument in arguments if argument is not type(None)]
        if len(choices) == 1:
            return _convert(choices[0], value, where)
        if type(value) not in choices:
            names = " or ".join(_TYPES[choice] for choice in choices)
            raise where.error(f"expected {names}, got {_kind(value)}")
        return value
    if origin is Literal:
        if value not in arguments:
            near = nearest(str(value), arguments)
            raise where.error(
                f"expected one of {', '.join(arguments)}, got {_kind(value)}{near}"
            )
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise where.error(f"expected {_TYPES[hint]}, got {_kind(value)}")
    return value


def _read(cls: type[T], value: object, where: _Where) -> T:
    """Build dataclass ``cls`` from a mapping, key by key.

    A field's metadata may list ``aliases``, older spellings of its key.
    """
    mapping = _mapping(value, where)
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(typing.cast("Any", cls))
    field_of = {key: f for f in fields for key in (f.name, *f.metadata.get("aliases", ()))}
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, item in mapping.items():
        if key not in field_of:
            raise where.error(f"unknown key {key!r}{nearest(key, field_of)}")
        f = field_of[key]
        if f.name in spelled:
            raise where.error(f"{spelled[f.name]!r} and {key!r} are the same setting")
        spelled[f.name] = key
        if key in f.metadata.get("deprecated", ()):
            warnings.warn(
                f"{where.at(key).path} in {where.file} is an old spelling of {f.name!r}",
                DeprecationWarning,
                stacklevel=3,  # whoever called load()
            )
        if item is not None:
            given[f.name] = _convert(hints[f.name], item, where.at(key))
    for f in fields:
        required = f.default is f.default_factory is dataclasses.MISSING
        if required and f.name not in given:
            raise where.error(f"key {f.name!r} is required")
    try:
        return cls(**given)
    except ConfigError as exc:
        # __post_init__ starts its message with the field's name.
        raise where.error(str(exc)) from None


def _load(
    source: str | os.PathLike[str] | Mapping[str, object], name: str
) -> tuple[object, str]:
    """Return what ``source`` holds, and what messages call it."""
    if isinstance(source, Mapping):
        return source, name
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"{name}: expected a path or a mapping, got {_kind(source)}")
    path = os.fspath(source)
    try:
        return load_yaml(path), path
    except OSError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


# --- global config --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Section ``common_config.metrics_config``."""

    enable_metrics: bool = False
    """Whether processes serve metrics."""

    job_name: str = "persia_default_jobname"
    """Label of this job in the metrics."""

    push_interval_seconds: int = field(default=10, metadata={"aliases": ("push_interval_sec",)})
    """Seconds between two updates of metrics that cost a walk over the store."""

    def __post_init__(self) -> None:
        _check_integer("push_interval_seconds", self.push_interval_seconds, 1)


@dataclass(frozen=True, slots=True)
class InferConfig:
    """Section ``common_config.infer_config``: what job type ``Infer`` starts from."""

    servers: tuple[str, ...]
    """``host:port`` of every parameter server, in replica order."""

    embedding_checkpoint: str
    """Directory of the embeddings that servers load when they start."""


@dataclass(frozen=True, slots=True)
class CheckpointingConfig:
    """Section ``common_config.checkpointing_config``."""

    num_workers: int = 4
    """Threads that write or read a checkpoint."""

    def __post_init__(self) -> None:
        _check_integer("num_workers", self.num_workers, 1)


@dataclass(frozen=True, slots=True)
class CommonConfig:
    """Section ``common_config``: what every role reads."""

    metrics_config: MetricsConfig = field(default_factory=MetricsConfig)
    """Metrics."""

    job_type: Literal["Train", "Eval", "Infer"] = "Train"
    """What the job does; ``Infer`` starts from ``infer_config``."""

    infer_config: InferConfig | None = None
    """Servers and checkpoint of inference; None where nothing is served."""

    checkpointing_config: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    """Checkpoints."""

    def __post_init__(self) -> None:
        _check_choice("job_type", self.job_type, ("Train", "Eval", "Infer"))


@dataclass(frozen=True, slots=True)
class EmbeddingWorkerConfig:
    """Section ``embedding_worker_config``."""

    forward_buffer_size: int = 1000
    """Batches that an embedding-worker holds for one data-loader."""

    buffered_data_expired_sec: int = 1000
    """Seconds after which the ids of a batch that nobody asks for are counted as lost."""

    def __post_init__(self) -> None:
        _check_integer("forward_buffer_size", self.forward_buffer_size, 1)
        _check_integer("buffered_data_expired_sec", self.buffered_data_expired_sec, 1)


@dataclass(frozen=True, slots=True)
class ParameterServerConfig:
    """Section ``embedding_parameter_server_config``."""

    capacity: int = 1_000_000_000
    """Rows that one server keeps; beyond it the least recently used go. Costs no memory."""

    num_hashmap_internal_shards: int = 16
    """Parts of one server's store, each with its own lock and its own order of use."""

    memory_limit: int | str | None = None
    """Memory of one server beyond which rows go as by capacity.

    Bytes, a size such as ``8GiB``, or a percentage of the cgroup's limit or the host's
    memory; 70 percent if not given, 0 for none.
    """

    enable_incremental_update: bool = False
    """Whether changed rows are written out as training goes on."""

    incremental_buffer_size: int = 1_000_000
    """Distinct rows collected before they are written."""

    incremental_dir: str = "/workspace/incremental_dir/"
    """Where they are written."""

    incremental_channel_capacity: int = 1000
    """Read because old files hold it; has no effect."""

    def __post_init__(self) -> None:
        _check_integer("capacity", self.capacity, 1, _MAX_COUNT)
        _check_integer(
            "num_hashmap_internal_shards", self.num_hashmap_internal_shards, 1, _MAX_SHARDS
        )
        _check_integer("incremental_buffer_size", self.incremental_buffer_size, 1)
        _check_integer("incremental_channel_capacity", self.incremental_channel_capacity, 1)
        resolve_memory_limit(self.memory_limit)

    def memory_limit_bytes(self) -> int:
        """Return ``memory_limit`` in bytes on this machine; 0 is no limit."""
        return resolve_memory_limit(self.memory_limit)


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """Section ``embedded_config``: the servers inside a trainer that has no others."""

    num_servers: int = 1
    """Parameter servers in the process; each has a capacity of its own."""

    num_threads: int = 1
    """Threads that one request to a server, or the pooling of one batch, spreads over."""

    def __post_init__(self) -> None:
        _check_integer("num_servers", self.num_servers, 1, _MAX_SERVERS)
        _check_integer("num_threads", self.num_threads, 1, _MAX_THREADS)


@dataclass(frozen=True, slots=True)
class GlobalConfig:
    """The global config: one section per role."""

    common_config: CommonConfig = field(default_factory=CommonConfig)
    """What every role reads."""

    embedding_worker_config: EmbeddingWorkerConfig = field(
        default_factory=EmbeddingWorkerConfig
    )
    """Embedding-workers."""

    embedding_parameter_server_config: ParameterServerConfig = field(
        default_factory=ParameterServerConfig
    )
    """Parameter servers."""

    embedded_config: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    """Embedded mode."""

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
        content, name = _load(source, "global config")
        config = _read(GlobalConfig, content, _Where(name))
        common, server = config.common_config, config.embedding_parameter_server_config
        unused = {
            "common_config.metrics_config.enable_metrics": common.metrics_config.enable_metrics,
            "common_config.job_type": common.job_type != "Train",
            "embedding_parameter_server_config.enable_incremental_update": (
                server.enable_incremental_update
            ),
            "embedding_parameter_server_config.incremental_channel_capacity": (
                server.incremental_channel_capacity != 1000
            ),
        }
        for key in (key for key, is_set in unused.items() if is_set):
            _logger.warning("%s: %s has no effect in this version", name, key)
        return config


# --- embedding config -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialization:
    """A distribution of initial values: its name and the parameters by name, all of them."""

    method: str
    """One of those that ``persia._core.initial`` knows."""

    options: Mapping[str, float]
    """Parameters; those left out get their defaults."""

    def __post_init__(self) -> None:
        options = initial.complete(self.method, dict(self.options))
        object.__setattr__(self, "options", options)


def _read_initialization(value: object, where: _Where) -> Initialization:
    options = dict(_mapping(value, where))
    method = options.pop("method", None)
    if not isinstance(method, str):
        raise where.error(f"key 'method' is required: one of {', '.join(initial.OPTIONS)}")
    try:
        return Initialization(method, typing.cast("dict[str, float]", options))
    except ConfigError as exc:
        raise where.error(str(exc)) from None


@dataclass(frozen=True, slots=True)
class _HashStackKeys:
    hash_stack_rounds: int
    embedding_size: int

    def __post_init__(self) -> None:
        _check_integer("hash_stack_rounds", self.hash_stack_rounds, 0, 0xFFFF)
        _check_integer("embedding_size", self.embedding_size, 0)
        if self.hash_stack_rounds and not self.embedding_size:
            raise ConfigError(
                f"embedding_size: {self.hash_stack_rounds} rounds need at least 1 row, got 0"
            )
        if not self.hash_stack_rounds:
            # Without rounds the size says nothing, and slots cannot disagree about it.
            object.__setattr__(self, "embedding_size", 0)


@dataclass(frozen=True, slots=True)
class _SlotKeys:
    """The keys of one slot in the file."""

    dim: int
    pooling: Pooling | None = None
    sample_fixed_size: int = 10
    embedding_summation: bool | None = None
    sqrt_scaling: bool | None = None
    hash_stack_config: _HashStackKeys = field(default_factory=lambda: _HashStackKeys(0, 0))
    index_prefix: int = 0
    initialization: Initialization | None = None
    admit_probability: float | None = None

    def __post_init__(self) -> None:
        _check_integer("dim", self.dim, 1, MAX_DIM)
        _check_integer("sample_fixed_size", self.sample_fixed_size, 1, 0x7FFFFFFF)
        if self.index_prefix != 0:
            raise ConfigError(
                f"index_prefix: is computed from the feature groups, got {self.index_prefix}; "
                "leave it out"
            )
        if self.admit_probability is not None:
            check_probability("admit_probability", self.admit_probability)
        if self.pooling is not None:
            self._check_pooling(self.pooling)

    def _check_pooling(self, pooling: Pooling) -> None:
        per_id = pooling in _PER_ID
        if self.embedding_summation is not None and self.embedding_summation is per_id:
            raise ConfigError(
                f"pooling: {pooling!r} contradicts "
                f"embedding_summation: {str(self.embedding_summation).lower()}"
            )
        if not per_id and self.sqrt_scaling not in (None, pooling == "sqrt"):
            raise ConfigError(
                f"pooling: {pooling!r} contradicts "
                f"sqrt_scaling: {str(self.sqrt_scaling).lower()}"
            )

    def resolved_pooling(self) -> Pooling:
        if self.pooling is not None:
            return self.pooling
        if self.embedding_summation is False:
            return "raw"
        return "sqrt" if self.sqrt_scaling else "sum"


@dataclass(frozen=True, slots=True)
class _EmbeddingKeys:
    """The keys of the embedding config's top level."""

    # The older spellings are those of the original before and in August 2021.
    slots_config: dict[str, _SlotKeys] = field(
        metadata={
            "aliases": ("slot_configs", "slot_config"),
            "deprecated": ("slot_configs", "slot_config"),
        }
    )
    feature_index_prefix_bit: int = 8
    feature_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    strict_ids: bool = False

    def __post_init__(self) -> None:
        _check_integer("feature_index_prefix_bit", self.feature_index_prefix_bit, 1, 63)
        if not self.slots_config:
            raise ConfigError("slots_config: expected at least one slot, got none")
        for key, names in (("slots", self.slots_config), ("groups", self.feature_groups)):
            if "" in names:
                raise ConfigError(f"expected names for {key}, got ''")


@dataclass(frozen=True, slots=True)
class Table:
    """One row setting: what decides the shape and the beginning of a row.

    Slots with the same setting share a table, which is only a number for messages between
    roles; whether they share rows is their group's matter.
    """

    number: int
    """Place in ``EmbeddingSchema.tables``."""

    dim: int
    """Floats in an embedding."""

    initialization: Initialization | None
    """Initial values; None takes those of the EmbeddingConfig."""

    admit_probability: float | None
    """Chance that a new id gets a row; None takes that of the EmbeddingConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One feature's entry in the embedding config, with what follows from the others."""

    name: str
    """The feature's name in a batch."""

    dim: int
    """Floats in an embedding."""

    pooling: Pooling
    """How the vectors of one sample's ids become the model's input."""

    sample_fixed_size: int = 10
    """Ids kept of each sample, in ``raw`` pooling only."""

    hash_stack_rounds: int = 0
    """Rows that an id's vector is summed from; 0 for none, where an id has one row."""

    hash_stack_size: int = 0
    """Rows of each round."""

    group: str
    """Name of the group whose slots share rows for equal ids."""

    table: int
    """Number of the row setting in ``EmbeddingSchema.tables``."""

    prefix: int
    """Feature bits of the group, already shifted to the top of the sign."""


@dataclass(frozen=True, slots=True)
class EmbeddingSchema:
    """The embedding config: slots, the groups that share rows, and row settings."""

    slots: dict[str, Slot]
    """Slots by name, in file order."""

    groups: dict[str, int]
    """Numbers of the groups by name, from 0; a group's prefix is its number + 1, shifted."""

    tables: tuple[Table, ...]
    """Distinct row settings."""

    prefix_bits: int
    """Feature bits at the top of a sign; the other 64 - prefix_bits hold the id."""

    strict_ids: bool = False
    """Whether an id that does not fit is an error; else it is masked and counted."""

    @staticmethod
    def load(
        source: str | os.PathLike[str] | Mapping[str, object] | EmbeddingSchema,
    ) -> EmbeddingSchema:
        """Read a YAML file or a mapping of the same shape.

        Raises:
            ConfigError: If the file cannot be read, a key or a value cannot be used, or
                slots of a group disagree.
        """
        if isinstance(source, EmbeddingSchema):
            return source
        content, name = _load(source, "embedding config")
        where = _Where(name)
        keys = _read(_EmbeddingKeys, content, where)
        group_of, groups = _number_groups(keys, where)
        _check_groups_agree(keys, group_of, where)
        return _resolve(keys, group_of, groups, where)


def _number_groups(
    keys: _EmbeddingKeys, where: _Where
) -> tuple[dict[str, str], dict[str, int]]:
    """Return each slot's group and each group's number: explicit ones first, in file order."""
    group_of: dict[str, str] = {}
    for group, members in keys.feature_groups.items():
        here = where.at("feature_groups").at(group)
        for slot in members:
            if slot not in keys.slots_config:
                raise here.error(f"unknown slot {slot!r}{nearest(slot, keys.slots_config)}")
            if slot in group_of:
                raise here.error(f"slot {slot!r} is already in group {group_of[slot]!r}")
            group_of[slot] = group
    groups = {group: number for number, group in enumerate(keys.feature_groups)}
    for slot in keys.slots_config:
        if slot in group_of:
            continue
        if slot in keys.feature_groups:
            raise (
                where.at("feature_groups")
                .at(slot)
                .error(
                    f"slot {slot!r} is in no group, so its own group would get the same name; "
                    "rename the group or put the slot into it"
                )
            )
        group_of[slot] = slot
        groups[slot] = len(groups)
    # Number + 1 is stored, so that no group has prefix 0.
    limit = (1 << keys.feature_index_prefix_bit) - 1
    if len(groups) > limit:
        raise where.at("feature_index_prefix_bit").error(
            f"{keys.feature_index_prefix_bit} bits hold {limit} groups, got {len(groups)}; "
            f"at least {len(groups).bit_length()} bits are needed"
        )
    return group_of, groups


def _check_groups_agree(
    keys: _EmbeddingKeys, group_of: Mapping[str, str], where: _Where
) -> None:
    """Slots of one group share rows, so they must agree on all that makes a row."""
    first: dict[str, str] = {}
    for name, slot in keys.slots_config.items():
        group = group_of[name]
        other = first.setdefault(group, name)
        theirs = keys.slots_config[other]
        for setting in ("dim", "initialization", "admit_probability", "hash_stack_config"):
            mine, other_value = getattr(slot, setting), getattr(theirs, setting)
            if mine != other_value:
                raise (
                    where.at("feature_groups")
                    .at(group)
                    .error(
                        f"slots of a group share rows, but {setting} of {other!r} is "
                        f"{_plain(other_value)} and of {name!r} is {_plain(mine)}"
                    )
                )


def _plain(value: object) -> object:
    """Show a setting as the file spells it."""
    if isinstance(value, Initialization):
        return {"method": value.method, **value.options}
    if isinstance(value, _HashStackKeys):
        return dataclasses.asdict(value)
    return value


def _resolve(
    keys: _EmbeddingKeys,
    group_of: Mapping[str, str],
    groups: dict[str, int],
    where: _Where,
) -> EmbeddingSchema:
    id_bits = 64 - keys.feature_index_prefix_bit
    slots: dict[str, Slot] = {}
    tables: list[Table] = []
    for name, slot in keys.slots_config.items():
        here = where.at("slots_config").at(name)
        stack = slot.hash_stack_config
        if stack.hash_stack_rounds * stack.embedding_size > 1 << id_bits:
            raise here.at("hash_stack_config").error(
                f"{stack.hash_stack_rounds} rounds of {stack.embedding_size} rows do not fit "
                f"into {id_bits} bits"
            )
        pooling = slot.resolved_pooling()
        if slot.sqrt_scaling and pooling in _PER_ID:
            _logger.warning(
                "%s: %s.sqrt_scaling has no effect with pooling %r, which sums nothing",
                here.file,
                here.path,
                pooling,
            )
        setting = (slot.dim, slot.initialization, slot.admit_probability)
        for table in tables:
            if setting == (table.dim, table.initialization, table.admit_probability):
                break
        else:
            table = Table(len(tables), *setting)
            tables.append(table)
        group = group_of[name]
        slots[name] = Slot(
            name=name,
            dim=slot.dim,
            pooling=pooling,
            sample_fixed_size=slot.sample_fixed_size,
            hash_stack_rounds=stack.hash_stack_rounds,
            hash_stack_size=stack.embedding_size,
            group=group,
            table=table.number,
            prefix=(groups[group] + 1) << id_bits,
        )
    return EmbeddingSchema(
        slots, groups, tuple(tables), keys.feature_index_prefix_bit, keys.strict_ids
    )
