"""Section ``group_settings`` of the embedding config: how the rows of one group are trained.

    group_settings:
      user:                       # a group, or a slot outside any group
        optimizer: {lr: 0.01}

All slots of a group have its settings, since they share rows. A new setting is a field of
``GroupSettings``: it is read by its type (a dataclass key by key, or by ``from_file`` where the
file spells it otherwise), it splits tables, and it is part of the schema's fingerprint.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass

from persia._core import optim
from persia.config._reading import Where, mapping_of, nearest
from persia.errors import ConfigError

# What peers call it: the name and the options that it stands for.
_ALIASES = {"rowwise_adagrad": ("adagrad", {"vectorwise_shared": True})}


@dataclass(frozen=True, slots=True)
class GroupOptimizer:
    """An optimizer of its own for a group, or changes to the one that is registered.

    Raises:
        ConfigError: If the name or an option is unknown, or a value cannot be used.
    """

    name: str | None
    """One of those that ``persia._core.optim`` knows, or ``rowwise_adagrad``, which becomes
    ``adagrad`` with ``vectorwise_shared``; None for the registered one."""

    options: Mapping[str, float | bool]
    """With a name all options of that optimizer; without, those that differ."""

    def __post_init__(self) -> None:
        if self.name is not None:
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
                raise ConfigError(
                    f"no optimizer has an option {option!r}{nearest(option, known)}"
                )
            checked[option] = optim.checked("optimizer", option, value, known[option])
        object.__setattr__(self, "options", checked)

    @staticmethod
    def from_file(value: object, where: Where) -> GroupOptimizer:
        """Read ``{name: ftrl, lr: 0.1, ...}`` or, without a name, ``{lr: 0.1, ...}``."""
        options = dict(mapping_of(value, where))
        name = options.pop("name", None)
        if name is not None and not isinstance(name, str):
            raise where.at("name").error(f"expected one of {', '.join(optim.OPTIONS)}")
        try:
            return GroupOptimizer(name, typing.cast("dict[str, float]", options))
        except ConfigError as exc:
            raise where.error(str(exc)) from None

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


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of one group; each None takes what holds for all groups."""

    optimizer: GroupOptimizer | None = None
    """How its rows are stepped. With it the group has a learning rate of its own."""
