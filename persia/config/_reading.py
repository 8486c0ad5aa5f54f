"""How a mapping from a file becomes a frozen dataclass, key by key.

One reader walks mappings against dataclass fields, so that a key nobody knows is an error which
names the file, the key's path and the nearest known name. A key without a value (``capacity:``)
counts as not given. A class that is spelled otherwise in the file has a static method
``from_file``, which is called in place of the walk.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import os
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from persia.errors import ConfigError
from persia.utils import load_yaml, yaml_number

T = TypeVar("T")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``", did you mean 'x'?"`` for the known name nearest to ``name``, or ``""``.

    Args:
        name: What was written.
        known: What could be meant.
        cutoff: How alike they are at least, from 0 to 1; for names that all begin alike, more.
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean {found[0]!r}?" if found else ""


# --- checks of values -----------------------------------------------------------------------


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    bounds = f"of at least {low}" if high is None else f"in {low}..{high}"
    # bool is an int to Python, and "capacity: yes" is no number to anybody else.
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ConfigError(f"{name}: expected an integer {bounds}, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    names = tuple(choices)
    if value not in names:
        hint = nearest(str(value), names)
        raise ConfigError(f"{name}: expected one of {', '.join(names)}, got {value!r}{hint}")


def check_probability(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a probability; NaN and True are none."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: expected a probability in 0..1, got {value!r}")


# --- the reader -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file, for messages."""

    file: str
    path: str = ""

    def at(self, key: str) -> Where:
        return Where(self.file, f"{self.path}.{key}" if self.path else key)

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


def mapping_of(value: object, where: Where) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise where.error(
            f"expected a mapping, got {'nothing' if value is None else _kind(value)}"
        )
    for key in value:
        if not isinstance(key, str):
            raise where.error(f"expected names as keys, got {_kind(key)}; put it in quotes")
    return value


def convert(hint: Any, value: object, where: Where) -> Any:
    """Return ``value`` as the type ``hint`` says, nested sections included."""
    if hasattr(hint, "from_file"):
        return hint.from_file(value, where)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast("type[Any]", hint), value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        items = mapping_of(value, where).items()
        return {key: convert(arguments[1], item, where.at(key)) for key, item in items}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise where.error(f"expected a list, got {_kind(value)}")
        return tuple(
            convert(arguments[0], item, where.at(str(number)))
            for number, item in enumerate(value)
        )
    if origin in (typing.Union, types.UnionType):
        choices = [argument for argument in arguments if argument is not type(None)]
        if len(choices) == 1:
            return convert(choices[0], value, where)
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
        raise where.error(f"expected {_TYPES[hint]}, got {_kind(value)}{yaml_number(value)}")
    return value


def read(cls: type[T], value: object, where: Where) -> T:
    """Build dataclass ``cls`` from a mapping, key by key.

    A field's metadata may list ``aliases``, older spellings of its key.
    """
    mapping = mapping_of(value, where)
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(typing.cast("Any", cls))
    field_of = {key: f for f in fields for key in (f.name, *f.metadata.get("aliases", ()))}
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, item in mapping.items():
        if key not in field_of:
            known = [f.name for f in fields]
            raise where.error(f"unknown key {key!r}{nearest(key, known)}")
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
            given[f.name] = convert(hints[f.name], item, where.at(key))
    for f in fields:
        required = f.default is f.default_factory is dataclasses.MISSING
        if required and f.name not in given:
            raise where.error(f"key {f.name!r} is required")
    try:
        return cls(**given)
    except ConfigError as exc:
        # __post_init__ starts its message with the field's name.
        raise where.error(str(exc)) from None


# By which each of the two files is known; the older spellings are the original's.
_SECTIONS = {
    "embedding config": ("slots_config", "slot_configs", "slot_config"),
    "global config": (
        *("common_config", "embedding_worker_config"),
        *("embedding_parameter_server_config", "embedded_config"),
    ),
}


def load_source(
    source: str | os.PathLike[str] | Mapping[str, object], name: str
) -> tuple[object, str]:
    """Return what ``source`` holds, and what messages call it.

    Args:
        source: A path, or a mapping.
        name: ``embedding config`` or ``global config``.

    Raises:
        ConfigError: If it cannot be read, or is the other one of the two.
    """
    if isinstance(source, Mapping):
        _check_not_swapped(source, name, name)
        return source, name
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"{name}: expected a path or a mapping, got {_kind(source)}")
    path = os.fspath(source)
    try:
        content = load_yaml(path)
    except OSError as exc:
        raise ConfigError(f"{name}: {exc}") from exc
    _check_not_swapped(content, name, path)
    return content, path


def _check_not_swapped(content: object, name: str, where: str) -> None:
    if not isinstance(content, Mapping) or not content.keys().isdisjoint(_SECTIONS[name]):
        return
    for other, sections in _SECTIONS.items():
        for key in sections:
            if key in content:
                raise ConfigError(
                    f"{where}: expected the {name}, got one with {key!r}, which is in the "
                    f"{other}: are the two swapped?"
                )
