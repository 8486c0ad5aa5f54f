"""The embedding config: which features (slots) there are and which of them share rows.

All slots of a group have its ``group_settings``, since they share rows. A new setting is a
field of ``GroupSettings``: it splits tables and is part of the schema's fingerprint.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from persia._core.kernels import initial, native, optim
from persia._core.kernels.optim import MAX_DIM
from persia.config.document import (
    CONFIG_OF,
    PROBABILITY,
    Choice,
    Document,
    Expect,
    InvalidValue,
    Listed,
    Named,
    Section,
    integer,
    show,
)
from persia.errors import ConfigError, did_you_mean
from persia.logger import get_logger

_logger = get_logger("persia.config")

Pooling = Literal["sum", "mean", "sqrt", "max", "raw", "jagged"]
POOLINGS: tuple[Pooling, ...] = typing.get_args(Pooling)
# Where zeros stand in a sample of a raw slot that has fewer ids than its size.
Padding = Literal["back", "front"]

# Arguments of nn.EmbeddingBag and of TorchRec's tables.
_PEERS_WORDS = {
    "embedding_dim": ", write dim",
    "num_embeddings": ": take it out, rows come as ids do; capacity bounds a server",
    "mode": ", write pooling",
    "feature_names": ", write one slot for each, and feature_groups for those that share rows",
}
# Of slots_config, by the original before and in August 2021.
_OLD_SPELLINGS = ("slot_configs", "slot_config")

# Ids of a raw sample whose slot names no size. In the original's files summed ones do.
USUAL_SIZE = 10

# Modes that hand out one vector per id, so that there is nothing to sum over.
_PER_ID: tuple[Pooling, ...] = ("raw", "jagged")

_LIBRARY = f"{native.PREFIX}[A-Za-z_][A-Za-z0-9_]*:[0-9a-f]{{64}}"


@dataclass(frozen=True, slots=True)
class Initialization(Choice):
    """A distribution of initial values: its name and the parameters by name, all of them."""

    # One of those that ``persia._core.kernels.initial`` knows, or the name of a library.
    method: Annotated[str, Expect(f"one of {', '.join(initial.OPTIONS)}")]
    # Parameters; those left out get their defaults, a library's in servers, which load it.
    options: dict[str, Any]

    def __post_init__(self) -> None:
        if native.is_native(self.method):
            if re.fullmatch(_LIBRARY, self.method) is None:
                raise ConfigError(
                    f"expected {native.PREFIX}<name>:<sha256> of a library, got {self.method!r}"
                )
            owner = f"initialization {self.method}"
            options = {name: optim.number(owner, name, x) for name, x in self.options.items()}
        else:
            options = initial.complete(self.method, dict(self.options))
        object.__setattr__(self, "options", options)


# --- how the rows of a group are kept and trained -----------------------------------------

# What peers call it: the name and the options that it stands for.
_ALIASES = {"rowwise_adagrad": ("adagrad", {"vectorwise_shared": True})}

# Options as peers and papers call them.
_PEERS_OPTIONS = {"learning_rate": "lr", "epsilon": "eps", "betas": "beta1 and beta2"}

# Every name that a file may say, and the defaults of its options; None is one without.
OPTIMIZERS: dict[str, dict[str, float | bool | None]] = {
    **optim.OPTIONS,
    **{alias: {**optim.OPTIONS[name], **preset} for alias, (name, preset) in _ALIASES.items()},
}


@dataclass(frozen=True, slots=True)
class GroupOptimizer(Choice):
    """An optimizer of its own for a group, or changes to the one that is registered."""

    # One of those that ``persia._core.kernels.optim`` knows, or ``rowwise_adagrad``, which
    # becomes ``adagrad`` with ``vectorwise_shared``; None for the registered one.
    name: Annotated[str | None, Expect(f"one of {', '.join(OPTIMIZERS)}")]
    # With a name all options of that optimizer; without, those that differ.
    options: dict[str, Any]

    def __post_init__(self) -> None:
        for option in _PEERS_OPTIONS.keys() & self.options.keys():
            todo = f"write {_PEERS_OPTIONS[option]}"
            raise ConfigError(f"no optimizer has an option {option!r}, {todo}")
        if self.name is not None:
            if self.name not in OPTIMIZERS:
                raise optim.unknown("optimizer", self.name, OPTIMIZERS)
            name, preset = _ALIASES.get(self.name, (self.name, {}))
            object.__setattr__(self, "name", name)
            checked = optim.complete(name, {**preset, **self.options})
            object.__setattr__(self, "options", checked)
            return
        known = {key: usual for of in optim.OPTIONS.values() for key, usual in of.items()}
        checked = {}
        for option, value in self.options.items():
            if option not in known:
                hint = did_you_mean(option, known)
                raise ConfigError(f"no optimizer has an option {option!r}{hint}")
            checked[option] = optim.checked("optimizer", option, value, known[option])
        object.__setattr__(self, "options", checked)

    def resolve(
        self, name: str, options: Mapping[str, float | bool]
    ) -> tuple[str, dict[str, float | bool]]:
        """Return name and options of the group's optimizer, given the registered one's."""
        if self.name is not None:
            return self.name, dict(self.options)
        return name, {**options, **self.options}

    @property
    def has_own_lr(self) -> bool:
        """Whether the learning rate is the group's, whatever the registered one's is."""
        return self.name is not None or "lr" in self.options


EVICTION_POLICY = Expect(
    "lru, lfu, or native:<name>:<sha256> of a library", pattern=f"^(lru|lfu|{_LIBRARY})$"
)
ID_HASH = Expect("native:<name>:<sha256> of a library", pattern=f"^{_LIBRARY}$")

# Beyond these a time, in milliseconds, would not fit where it is kept.
_MAX_SECONDS = 1 << 50
_MAX_STEPS = 1 << 60
_TTL_SECONDS = Expect(f"0.001..{_MAX_SECONDS}", ge=0.001, le=_MAX_SECONDS, allow_inf_nan=False)

# Slots that an error lists.
_MAX_NAMED = 16

# Counters of the sketch have eight bits.
_MAX_THRESHOLD = 255


@dataclass(frozen=True, slots=True)
class GroupEviction(Section):
    """Which of a group's rows go first, and after what time one goes in any case."""

    # `lru` is least recently used first, `lfu` least frequently used; or the name of a library
    # with a scorer.
    policy: Annotated[str, EVICTION_POLICY] = "lru"
    # Seconds without a use after which a row expires; None for never.
    ttl_seconds: Annotated[float, _TTL_SECONDS] | None = None
    # The same in training lookups that reach the server, for runs that must repeat.
    ttl_steps: Annotated[int, integer(1, _MAX_STEPS)] | None = None

    def check(self) -> None:
        if self.ttl_steps is not None and self.ttl_seconds is not None:
            raise InvalidValue("a row has one time to live, not ttl_seconds too", "ttl_steps")

    def kind(self) -> tuple[str, str | None, int]:
        """Return policy, clock and time to live as ``EmbeddingStore`` takes them."""
        if self.ttl_seconds is not None:
            return self.policy, "milliseconds", round(self.ttl_seconds * 1000)
        if self.ttl_steps is not None:
            return self.policy, "steps", self.ttl_steps
        return self.policy, None, 0


@dataclass(frozen=True, slots=True)
class GroupAdmission(Section):
    """Which new ids of a group get a row."""

    policy: Literal["probability", "count"]  # by chance, or by how often they appeared
    # Chance at each appearance; with policy ``probability``.
    probability: Annotated[float, PROBABILITY] | None = None
    # The appearance at which an id gets its row; with policy ``count``.
    threshold: Annotated[int, integer(2, _MAX_THRESHOLD)] | None = None

    def check(self) -> None:
        """Check that the policy has its setting and no other."""
        own, other = ("probability", "threshold")[:: -1 if self.policy == "count" else 1]
        if getattr(self, own) is None:
            raise InvalidValue(f"is required with policy {self.policy!r}", own)
        if getattr(self, other) is not None:
            raise InvalidValue(f"has no meaning with policy {self.policy!r}", other)


@dataclass(frozen=True, slots=True)
class GroupSettings(Section):
    """The settings of one group; each None takes what holds for all groups."""

    # How its rows are stepped. With it the group has a learning rate of its own.
    optimizer: GroupOptimizer | None = None
    # Which of its rows go first; None for the least recently used.
    eviction: GroupEviction | None = None
    # Which new ids get a row; None for ``admit_probability``.
    admission: GroupAdmission | None = None
    # How the values of its rows are kept; None for float32. State is float32 in any case.
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


# --- slots ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HashStackKeys(Section):
    # Rows that are summed for one id, each found by a hash of its own; 0 for none.
    hash_stack_rounds: Annotated[int, integer(0, 0xFFFF)]
    embedding_size: Annotated[int, integer()]  # rows of the table that they are found in

    def __post_init__(self) -> None:
        if not self.hash_stack_rounds:
            # Without rounds the size says nothing, and slots cannot disagree about it.
            object.__setattr__(self, "embedding_size", 0)

    def check(self) -> None:
        if self.hash_stack_rounds and not self.embedding_size:
            rounds = self.hash_stack_rounds
            raise InvalidValue(f"{rounds} rounds need at least 1 row, got 0", "embedding_size")


@dataclass(frozen=True, slots=True)
class _SlotKeys(Section):
    """The keys of one slot in the file."""

    dim: Annotated[int, integer(1, MAX_DIM)]  # values of a row
    # What becomes of a sample's rows; the next three keys decide if it is not given. ``raw``
    # and ``jagged`` hand each row out.
    pooling: Pooling | None = None
    # With ``raw``, the ids of a sample that count; ``padding`` says which.
    sample_fixed_size: Annotated[int, integer(1, 0x7FFFFFFF)] = USUAL_SIZE
    # With ``raw``: ``back`` keeps the first ids of a sample, and zeros follow them; ``front``
    # keeps the last, and zeros come before them.
    padding: Padding = "back"
    embedding_summation: bool | None = None  # the original's word for pooling: false is ``raw``
    # The original's word: with true, a sum is divided by the root of the number of ids.
    sqrt_scaling: bool | None = None
    # The name of a library whose hashes stand for ids; None for the ids themselves.
    id_hash: Annotated[str, ID_HASH] | None = None
    # A table of fixed size for a feature with too many ids.
    hash_stack_config: _HashStackKeys = field(default_factory=lambda: _HashStackKeys(0, 0))
    # Read because old files hold it: it is computed from the groups, and must be 0.
    index_prefix: int = 0
    # ``method`` and its options, of the rows that training creates; else the
    # ``EmbeddingConfig``'s.
    initialization: Initialization | None = None
    # Chance that a new id gets a row; else the ``EmbeddingConfig``'s.
    admit_probability: Annotated[float, PROBABILITY] | None = None

    @classmethod
    def prepare(cls, value: object) -> object:
        """Return the mapping by today's keys."""
        if value is None or isinstance(value, int):
            todo = f"write {{dim: {value or 8}}}"
            raise InvalidValue(f"expected a mapping, got {show(value)}; {todo}")
        return super(_SlotKeys, cls).prepare(value)

    @classmethod
    def unknown(cls, key: str, names: Sequence[str]) -> str:
        """Say what a peer's word is here."""
        return _PEERS_WORDS.get(key) or super(_SlotKeys, cls).unknown(key, names)

    def check(self) -> None:
        """Check what the keys of 2021 say beside today's."""
        if self.index_prefix != 0:
            text = f"is computed from the feature groups, got {self.index_prefix}; leave it out"
            raise InvalidValue(text, "index_prefix")
        pooling = self.resolved_pooling()
        if self.padding == "front" and pooling != "raw":
            text = f"'front' has a meaning with pooling 'raw' only, got {pooling!r}"
            raise InvalidValue(text, "padding")
        if self.pooling is None:
            return
        per_id, agrees = self.pooling in _PER_ID, (None, self.pooling == "sqrt")
        for old, contradicts in (
            ("embedding_summation", self.embedding_summation is per_id),
            ("sqrt_scaling", not per_id and self.sqrt_scaling not in agrees),
        ):
            if contradicts:
                value = str(getattr(self, old)).lower()
                raise InvalidValue(f"{self.pooling!r} contradicts {old}: {value}", "pooling")

    def resolved_pooling(self) -> Pooling:
        if self.pooling is not None:
            return self.pooling
        if self.embedding_summation is False:
            return "raw"
        return "sqrt" if self.sqrt_scaling else "sum"


@dataclass(frozen=True, slots=True)
class _EmbeddingKeys(Section):
    """The keys of the embedding config's top level."""

    # Each feature of ids, by name.
    slots_config: Named[_SlotKeys] = field(metadata={"aliases": _OLD_SPELLINGS})
    # Highest bits of a sign that say which group it is of; ids have the others.
    feature_index_prefix_bit: Annotated[int, integer(1, 63)] = 8
    # Slots that share their rows, by the name of the group.
    feature_groups: Named[Listed[tuple[str, ...]]] = field(default_factory=dict)
    # Whether an id that needs more bits than there are is refused, not cut.
    strict_ids: bool = False
    # How the rows of a group are trained and kept.
    group_settings: Named[GroupSettings] = field(default_factory=dict)

    @classmethod
    def prepare(cls, value: object) -> object:
        """Return the mapping by today's keys, if it has the slots under theirs."""
        if isinstance(value, Mapping):
            if isinstance(value.get("slots_config"), list):
                text = "expected a mapping, got a list; write user: {dim: 8}, without a dash"
                raise InvalidValue(text, "slots_config")
            # Without a value where the lines below it are not indented.
            keys = ("slots_config", *_OLD_SPELLINGS)
            has_slots = any(value.get(key) is not None for key in keys)
            if not has_slots and not CONFIG_OF.keys() - keys & value.keys():
                raise InvalidValue(
                    "expected the slots indented below the key slots_config, or "
                    "slots_config: {user: {dim: 8}, item: {dim: 8}}, got "
                    f"{', '.join(map(str, list(value)[:4])) or 'an empty mapping'}"
                )
        return super(_EmbeddingKeys, cls).prepare(value)

    def check(self) -> None:
        if not self.slots_config:
            raise InvalidValue("expected at least one slot, got none", "slots_config")
        for key, names in (("slots", self.slots_config), ("groups", self.feature_groups)):
            if "" in names:
                raise InvalidValue(f"expected names for {key}, got ''")


@dataclass(frozen=True, slots=True)
class TableSettings:
    """One row setting: what decides the shape and the beginning of a row.

    Slots with the same setting share a table, which is only a number for messages between
    roles; whether they share rows is their group's matter.
    """

    number: int  # place in ``EmbeddingSchema.tables``
    dim: int  # floats in an embedding
    # Initial values; None takes those of the EmbeddingConfig.
    initialization: Initialization | None
    # Chance that a new id gets a row; None takes that of the EmbeddingConfig.
    admit_probability: float | None
    # What section ``group_settings`` says of its groups.
    settings: GroupSettings = field(default_factory=GroupSettings)

    @property
    def dtype(self) -> str:
        return self.settings.dtype or "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One feature's entry in the embedding config, with what follows from the others."""

    name: str  # the feature's name in a batch
    dim: int  # floats in an embedding
    pooling: Pooling  # how the vectors of one sample's ids become the model's input
    sample_fixed_size: int = 10  # ids kept of each sample, in ``raw`` pooling only
    padding: Padding = "back"  # where the others' zeros are; ``front`` keeps the last ids
    id_hash: str | None = None  # library whose hashes stand for ids; None: ids do
    # Rows that an id's vector is summed from; 0 for none, where an id has one row.
    hash_stack_rounds: int = 0
    hash_stack_size: int = 0  # rows of each round
    group: str  # name of the group whose slots share rows for equal ids
    table: int  # number of the row setting in ``EmbeddingSchema.tables``
    prefix: int  # feature bits of the group, already shifted to the top of the sign


@dataclass(frozen=True, slots=True)
class EmbeddingSchema:
    """The embedding config: slots, the groups that share rows, and row settings."""

    slots: dict[str, Slot]  # slots by name, in file order
    # Numbers of the groups by name, from 0; a group's prefix is its number + 1, shifted.
    groups: dict[str, int]
    tables: tuple[TableSettings, ...]  # distinct row settings
    # Feature bits at the top of a sign; the other 64 - prefix_bits hold the id.
    prefix_bits: int
    # Whether an id that does not fit is an error; else it is masked and counted.
    strict_ids: bool = False

    def groups_of(self, table: int) -> list[str]:
        """Return the names of the groups whose rows have the settings of a table."""
        members = {slot.group for slot in self.slots.values() if slot.table == table}
        return [group for group in self.groups if group in members]

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
        document = Document(source, "embedding config")
        keys = document.read(_EmbeddingKeys)
        for old in _OLD_SPELLINGS:
            if isinstance(document.content, Mapping) and old in document.content:
                warnings.warn(
                    f"{document.place(old)}: {old} is an old spelling of 'slots_config'",
                    DeprecationWarning,
                    stacklevel=2,
                )
        group_of, groups = _number_groups(keys, document)
        _check_groups_agree(keys, group_of, document)
        for group in keys.group_settings:
            if group not in groups:
                raise document.error(
                    f"unknown group{did_you_mean(group, groups)}; a slot outside any group is "
                    "one of its own name",
                    "group_settings",
                    group,
                )
        return _resolve(keys, group_of, groups, document)


def _number_groups(
    keys: _EmbeddingKeys, document: Document
) -> tuple[dict[str, str], dict[str, int]]:
    """Return each slot's group and each group's number: explicit ones first, in file order."""
    group_of: dict[str, str] = {}
    for group, members in keys.feature_groups.items():
        for slot in members:
            if slot not in keys.slots_config:
                known = list(keys.slots_config)
                listed = f"; slots_config has {', '.join(known[:_MAX_NAMED])}"
                problem = f"unknown slot {slot!r}{did_you_mean(slot, known) or listed}"
                raise document.error(problem, "feature_groups", group)
            if slot in group_of:
                problem = f"slot {slot!r} is already in group {group_of[slot]!r}"
                raise document.error(problem, "feature_groups", group)
            group_of[slot] = group
    groups = {group: number for number, group in enumerate(keys.feature_groups)}
    for slot in keys.slots_config:
        if slot in group_of:
            continue
        if slot in keys.feature_groups:
            raise document.error(
                f"slot {slot!r} is in no group, so its own group would get the same name; "
                "rename the group or put the slot into it",
                "feature_groups",
                slot,
            )
        group_of[slot] = slot
        groups[slot] = len(groups)
    # Number + 1 is stored, so that no group has prefix 0.
    limit = (1 << keys.feature_index_prefix_bit) - 1
    if len(groups) > limit:
        raise document.error(
            f"{keys.feature_index_prefix_bit} bits hold {limit} groups, got {len(groups)}; "
            f"at least {len(groups).bit_length()} bits are needed",
            "feature_index_prefix_bit",
        )
    return group_of, groups


# Keys of a slot that make a row, or say which one is an id's.
_SHARED = ("dim", "initialization", "admit_probability", "id_hash", "hash_stack_config")


def _check_groups_agree(
    keys: _EmbeddingKeys, group_of: Mapping[str, str], document: Document
) -> None:
    """Slots of one group share rows, so they must agree on all that makes a row."""
    first: dict[str, str] = {}
    for name, slot in keys.slots_config.items():
        group = group_of[name]
        other = first.setdefault(group, name)
        theirs = keys.slots_config[other]
        for setting in _SHARED:
            mine, other_value = getattr(slot, setting), getattr(theirs, setting)
            if mine != other_value:
                raise document.error(
                    f"slots of a group share rows, but {setting} of {other!r} is "
                    f"{_plain(other_value)} and of {name!r} is {_plain(mine)}",
                    "feature_groups",
                    group,
                )


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def _warn_of_no_effect(
    name: str,
    slot: _SlotKeys,
    group: str,
    admission: GroupAdmission | None,
    document: Document,
) -> None:
    """Warn of what old files have without effect, and of what only frozen features mean."""
    pooling = slot.resolved_pooling()

    def warn(what: str, *keys: str) -> None:
        _logger.warning("%s", InvalidValue(what, *keys).at(document.place(*keys)))

    of_slot = "slots_config", name

    if slot.sqrt_scaling and pooling in _PER_ID:
        what = f"has no effect with pooling {pooling!r}, which sums nothing"
        warn(what, *of_slot, "sqrt_scaling")
    if pooling != "raw" and slot.sample_fixed_size != USUAL_SIZE:
        what = f"has no effect with pooling {pooling!r}; for one row an id write pooling: raw"
        warn(what, *of_slot, "sample_fixed_size")
    closed = "is 0, so no new id ever gets a row"
    if slot.admit_probability == 0:
        warn(closed, *of_slot, "admit_probability")
    if admission is not None and admission.probability == 0:
        warn(closed, "group_settings", group, "admission", "probability")


def _resolve(
    keys: _EmbeddingKeys,
    group_of: Mapping[str, str],
    groups: dict[str, int],
    document: Document,
) -> EmbeddingSchema:
    id_bits = 64 - keys.feature_index_prefix_bit
    slots: dict[str, Slot] = {}
    kinds: list[object] = []  # of row settings; compared, for options have no hash
    tables: list[TableSettings] = []
    for name, slot in keys.slots_config.items():
        stack = slot.hash_stack_config
        if stack.hash_stack_rounds * stack.embedding_size > 1 << id_bits:
            raise document.error(
                f"{stack.hash_stack_rounds} rounds of {stack.embedding_size} rows do not fit "
                f"into {id_bits} bits",
                *("slots_config", name, "hash_stack_config"),
            )
        pooling = slot.resolved_pooling()
        group = group_of[name]
        settings = keys.group_settings.get(group, GroupSettings())
        _warn_of_no_effect(name, slot, group, settings.admission, document)
        if settings.admission is not None and slot.admit_probability is not None:
            raise document.error(
                f"slot {name!r} has an admit_probability; an id is admitted in one way",
                *("group_settings", group, "admission"),
            )
        # A group with an optimizer entry shares its table with no other, even if the other's
        # is equal: a learning rate set later is a table's, as a new row's values are.
        own = group if settings.optimizer is not None else None
        setting = (slot.dim, slot.initialization, slot.admit_probability, settings)
        kind = (*setting, own)
        if kind not in kinds:
            kinds.append(kind)
            tables.append(TableSettings(len(tables), *setting))
        slots[name] = Slot(
            name=name,
            dim=slot.dim,
            pooling=pooling,
            sample_fixed_size=slot.sample_fixed_size,
            padding=slot.padding,
            id_hash=slot.id_hash,
            hash_stack_rounds=stack.hash_stack_rounds,
            hash_stack_size=stack.embedding_size,
            group=group,
            table=kinds.index(kind),
            prefix=(groups[group] + 1) << id_bits,
        )
    return EmbeddingSchema(
        slots, groups, tuple(tables), keys.feature_index_prefix_bit, keys.strict_ids
    )


def tables_at_rate(schema: EmbeddingSchema, group: str | None) -> tuple[int, ...]:
    """Return the tables that a learning rate of a group, or of all groups, is for.

    None leaves out those whose learning rate the embedding config says.

    Raises:
        ConfigError: If there is no such group, or it shares its table with others.
    """
    if group is None:
        return tuple(
            table.number
            for table in schema.tables
            if table.settings.optimizer is None or not table.settings.optimizer.has_own_lr
        )
    if group not in schema.groups:
        raise ConfigError(f"unknown group {group!r}{did_you_mean(group, schema.groups)}")
    tables = {slot.table for slot in schema.slots.values() if slot.group == group}
    others = [other for table in tables for other in schema.groups_of(table) if other != group]
    if others:
        raise ConfigError(
            f"group {group!r} steps at one learning rate with {', '.join(map(repr, others))}; "
            f"for one of its own write `{group}: {{optimizer: {{}}}}` under group_settings"
        )
    return tuple(tables)
