"""Section ``group_settings`` of the embedding config: how the rows of one group are trained.

    group_settings:
      user:                       # a group, or a slot outside any group
        optimizer: {lr: 0.01}
        eviction: {policy: lfu, ttl_seconds: 86400}
        admission: {policy: count, threshold: 3}
        dtype: bfloat16

All slots of a group have its settings, since they share rows. A new setting is a field of
``GroupSettings``: it splits tables and is part of the schema's fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from persia._core.kernels import optim
from persia.config._models import PROBABILITY, Expect, InvalidValue, Section, integer
from persia.errors import ConfigError, did_you_mean
from persia.utils import yaml_number

# What peers call it: the name and the options that it stands for.
_ALIASES = {"rowwise_adagrad": ("adagrad", {"vectorwise_shared": True})}

# Every name that a file may say, and the defaults of its options; None is one without.
OPTIMIZERS: dict[str, dict[str, float | bool | None]] = {
    **optim.OPTIONS,
    **{alias: {**optim.OPTIONS[name], **preset} for alias, (name, preset) in _ALIASES.items()},
}


@dataclass(frozen=True, slots=True)
class GroupOptimizer(Section):
    """An optimizer of its own for a group, or changes to the one that is registered.

    Raises:
        ConfigError: If the name or an option is unknown, or a value cannot be used.
    """

    name: Annotated[str | None, Expect(f"one of {', '.join(OPTIMIZERS)}")]
    """One of those that ``persia._core.kernels.optim`` knows, or ``rowwise_adagrad``, which
    becomes ``adagrad`` with ``vectorwise_shared``; None for the registered one."""

    options: dict[str, Any]
    """With a name all options of that optimizer; without, those that differ."""

    def __post_init__(self) -> None:
        if self.name is not None:
            if self.name not in OPTIMIZERS:
                hint = optim.nearest(self.name, list(OPTIMIZERS))
                raise ConfigError(f"optimizer {self.name!r} is not known; {hint}")
            name, preset = _ALIASES.get(self.name, (self.name, {}))
            object.__setattr__(self, "name", name)
            options = optim.complete(name, {**preset, **self.options})
            object.__setattr__(self, "options", options)
            return
        known: dict[str, float | bool | None] = {}
        for of_one in optim.OPTIONS.values():
            known.update(of_one)
        checked = {}
        for option, value in self.options.items():
            if option not in known:
                hint = did_you_mean(option, known)
                raise ConfigError(f"no optimizer has an option {option!r}{hint}")
            checked[option] = optim.checked("optimizer", option, value, known[option])
        object.__setattr__(self, "options", checked)

    @classmethod
    def prepare(cls, value: object) -> object:
        """Read ``{name: ftrl, lr: 0.1, ...}`` or, without a name, ``{lr: 0.1, ...}``."""
        if not isinstance(value, Mapping):
            return value
        options = dict(value)
        name = options.pop("name", None)
        for option, given in options.items():
            if hint := yaml_number(given):
                raise InvalidValue(f"expected a number, got {given!r}{hint}", option)
        return {"name": name, "options": options}

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


# Beyond these a time, in milliseconds, would not fit where it is kept.
_MAX_SECONDS = 1 << 50
_MAX_STEPS = 1 << 60
_TTL_SECONDS = Expect(f"0.001..{_MAX_SECONDS}", ge=0.001, le=_MAX_SECONDS, allow_inf_nan=False)

# Counters of the sketch have eight bits.
_MAX_THRESHOLD = 255


@dataclass(frozen=True, slots=True)
class GroupEviction(Section):
    """Which of a group's rows go first, and after what time one goes in any case."""

    policy: Literal["lru", "lfu"] = "lru"
    """Least recently used, or least frequently used first."""

    ttl_seconds: Annotated[float, _TTL_SECONDS] | None = None
    """Seconds without a use after which a row expires; None for never."""

    ttl_steps: Annotated[int, integer(1, _MAX_STEPS)] | None = None
    """The same in training lookups that reach the server, for runs that must repeat."""

    def check(self) -> None:
        """Check that there is one time to live."""
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

    policy: Literal["probability", "count"]
    """By chance, or by how often they appeared."""

    probability: Annotated[float, PROBABILITY] | None = None
    """Chance at each appearance; with policy ``probability``."""

    threshold: Annotated[int, integer(1, _MAX_THRESHOLD)] | None = None
    """The appearance at which an id gets its row; with policy ``count``."""

    def check(self) -> None:
        """Check that the policy has its setting and no other."""
        own, other = "probability", "threshold"
        if self.policy == "count":
            own, other = other, own
        if getattr(self, own) is None:
            raise InvalidValue(f"is required with policy {self.policy!r}", own)
        if getattr(self, other) is not None:
            raise InvalidValue(f"has no meaning with policy {self.policy!r}", other)


@dataclass(frozen=True, slots=True)
class GroupSettings(Section):
    """The settings of one group; each None takes what holds for all groups."""

    optimizer: GroupOptimizer | None = None
    """How its rows are stepped. With it the group has a learning rate of its own."""

    eviction: GroupEviction | None = None
    """Which of its rows go first; None for the least recently used."""

    admission: GroupAdmission | None = None
    """Which new ids get a row; None for ``admit_probability``."""

    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """How the values of its rows are kept; None for float32. State is float32 in any case."""
