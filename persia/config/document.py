"""Documents of YAML and JSON, and the models that they are read as: frozen dataclasses.

    @dataclass(frozen=True, slots=True)
    class Server(Model):
        capacity: Annotated[int, integer(1)] = 1000

pydantic checks types, ranges and choices. No value is converted, except an integer where a
float is expected; a key that is not a field is an error, which names the file and the line.
pydantic is imported with the first document, so that a command which reads none starts without.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import yaml

from persia.errors import ConfigError, did_you_mean
from persia.utils import load_yaml

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

T = TypeVar("T")

# Characters of a value that an error shows; it may be of any size.
_MAX_SHOWN = 80
# What pydantic calls an error, and the words for what it expected.
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "an integer",
    "string_type": "a string",
    "tuple_type": "a list",
}


def check_probability(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a probability; NaN and True are none."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: expected a probability in 0..1, got {value!r}")


class InvalidValue(ValueError):
    """A value of a document cannot be used; ``keys`` lead to it from the top."""

    def __init__(self, message: str, *keys: str | int) -> None:
        super().__init__(message)
        self.keys = keys

    @property
    def path(self) -> str:
        """The keys as ``slots_config.age.dim`` or ``parts[0].path``."""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)
        return "".join(steps).removeprefix(".")

    def at(self, place: str) -> str:
        """Return the whole message, of a file or a line in it."""
        return ": ".join(filter(None, (place, self.path, str(self))))


class Expect:
    """What is expected of a field beside its type, in the words that errors use.

    ``constraints`` are keys of the type's schema in ``pydantic_core``, such as ``ge``.
    """

    def __init__(self, words: str, **constraints: Any) -> None:
        self._words, self.constraints = words, constraints

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {
            "type": "custom-error",
            "schema": {**handler(source), **self.constraints},
            "custom_error_type": "expected",
            "custom_error_message": "expected {words}",
            "custom_error_context": {"words": self._words},
        }


def integer(low: int = 0, high: int = (1 << 63) - 1) -> Expect:
    """Return the constraint of an integer in ``low..high``."""
    return Expect(f"an integer in {low}..{high}", ge=low, le=high)


PROBABILITY = Expect("a probability in 0..1", ge=0.0, le=1.0, allow_inf_nan=False)


class _Lax:
    """Takes any list for a tuple and any mapping for a dict; what is in it stays strict.

    Validation stops at the first wrong element: a hostile list of millions would otherwise
    become as large a list of errors.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "strict": False, "fail_fast": True}


Listed = Annotated[T, _Lax()]
"""A tuple that a document has as a list."""
Named = Annotated[dict[str, T], _Lax()]
"""A mapping with names of the user's as keys."""


class Model:
    """Base of the dataclasses that documents are read as.

    A field's metadata may give ``key``, its name in documents, and ``optional``.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}
    requires_all: ClassVar = False
    """Whether a document has to give fields with a default too, but ``optional`` ones."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        schema: Any = handler(source)
        if schema["type"] != "dataclass":
            return schema  # the one below: pydantic keeps it for the second field of this class
        reference = schema.pop("ref", None)
        schema["strict"] = False  # takes a mapping, not only an instance
        fields = zip(schema["schema"]["fields"], dataclasses.fields(source), strict=True)
        for field, own in fields:
            if "key" in own.metadata:
                field["validation_alias"] = own.metadata["key"]
            is_optional = not cls.requires_all or "optional" in own.metadata
            if not is_optional and field["schema"]["type"] == "default":
                field["schema"] = field["schema"]["schema"]
        schema = core_schema.no_info_before_validator_function(cls.prepare, schema)
        return core_schema.no_info_after_validator_function(_checked, schema, ref=reference)

    @classmethod
    def prepare(cls, value: object) -> object:
        """Return what is validated in place of a value of the document."""
        return value

    def check(self) -> None:
        """Check the fields against each other; an ``InvalidValue`` names the field."""


def _checked(model: Model) -> Model:
    model.check()
    return model


# Of the keys by which each of the two files is known.
CONFIG_OF = {
    **dict.fromkeys(("slots_config", "slot_configs", "slot_config"), "embedding"),
    **dict.fromkeys(("common_config", "embedded_config", "embedding_worker_config"), "global"),
    "embedding_parameter_server_config": "global",
}


class Section(Model):
    """A mapping of a YAML file: a key without a value counts as not given.

    A field's metadata may give ``aliases``, older spellings of its key.
    """

    __slots__ = ()

    @classmethod
    def unknown(cls, key: str, names: Sequence[str]) -> str:
        """Say what may have been meant by a key that is none of ``names``."""
        of = CONFIG_OF.get(key, "")
        swapped = f": it is of the {of} config; are the two swapped?" if of else ""
        return swapped or did_you_mean(key, names)

    @classmethod
    def prepare(cls, value: object) -> object:
        """Return the mapping by today's keys, without those that have no value."""
        if not isinstance(value, Mapping):
            return value
        fields: tuple[Any, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
        key_of = {old: one.name for one in fields for old in one.metadata.get("aliases", ())}
        names = [one.name for one in fields]
        found: dict[str, object] = {}
        spelled: dict[str, str] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidValue(f"expected names as keys, got {key!r}; put it in quotes")
            name = key_of.get(key, key)
            if name not in names:
                raise InvalidValue(f"unknown key{cls.unknown(key, names)}", key)
            if name in spelled:
                raise InvalidValue(f"{spelled[name]!r} and {key!r} are the same setting")
            spelled[name] = key
            if item is not None:
                found[name] = item
        return found


class Choice(Section):
    """A name with options, ``{method: normal, mean: 0.0}``, which are its two fields."""

    __slots__ = ()

    @classmethod
    def prepare(cls, value: object) -> object:
        """Return the mapping with its options in one field."""
        name = dataclasses.fields(cls)[0].name  # type: ignore[arg-type]
        if isinstance(value, str):
            todo = f"write {{{name}: {value}}}"
            raise InvalidValue(f"expected a mapping, got {show(value)}; {todo}")
        if not isinstance(value, Mapping):
            return value
        options = dict(value)
        return {name: options.pop(name, None), "options": options}


def validate(cls: type[T], value: object) -> T:
    """Return a value of plain data as ``cls``, a model or a type of models.

    Raises:
        InvalidValue: The first error that was found.
    """
    from pydantic import ValidationError

    adapted: Any = cls
    try:
        found: T = _adapter(adapted).validate_python(value)
        return found
    except ValidationError as exc:
        error: Any = exc.errors(include_url=False)[0]
    raise _invalid(error["type"], error["loc"], error["input"], error.get("ctx", {}))


@functools.cache
def _adapter(cls: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _invalid(
    kind: str, keys: tuple[str | int, ...], value: object, context: Mapping[str, Any]
) -> InvalidValue:
    """Return pydantic's error in the words of a document."""
    if kind == "value_error":
        cause = context["error"]
        # Some name themselves what the key names.
        text = str(cause).removeprefix(f"{keys[-1]}: " if keys else "")
        return InvalidValue(text, *keys, *getattr(cause, "keys", ()))
    if kind == "missing":
        return InvalidValue("the key is required", *keys)
    if kind == "unexpected_keyword_argument":
        return InvalidValue("unknown key: this version has none of that name", *keys)
    if keys[-1:] == ("[key]",):  # of a mapping, not its value
        return InvalidValue(
            f"expected names as keys, got {show(value)}; put it in quotes", *keys[:-2]
        )
    expected = context.get("words") or context.get("expected") or _EXPECTED.get(kind, kind)
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, str(expected).split("'")[1::2])
    return InvalidValue(f"expected {expected}, got {show(value)}{hint}", *keys)


def show(value: object) -> str:
    """Show a value of a document in an error, without what is in it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping | list | tuple):
        return "a list" if isinstance(value, list | tuple) else "a mapping"
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# --- documents -------------------------------------------------------------------------------


class Document:
    """A YAML file, or a mapping of the same shape; ``config`` names it in errors."""

    def __init__(
        self, source: str | os.PathLike[str] | Mapping[str, object], config: str
    ) -> None:
        self.content: object = source
        self._path: Path | None = None
        self._name = config
        if isinstance(source, Mapping):
            return
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(f"{config}: expected a path or a mapping, got {show(source)}")
        self._path, self._name = Path(source), os.fspath(source)
        try:
            self.content = load_yaml(source)
        except OSError as exc:
            raise ConfigError(f"{config}: {exc}") from exc

    def read(self, cls: type[T]) -> T:
        """Return the content as a model; a ConfigError names file, line and key."""
        try:
            return validate(cls, self.content)
        except InvalidValue as exc:
            error = self.error(str(exc), *exc.keys)
        raise error

    def error(self, message: str, *keys: str | int) -> ConfigError:
        """Return an error of the value that ``keys`` lead to."""
        return ConfigError(InvalidValue(message, *keys).at(self.place(*keys)))

    def place(self, *keys: str | int) -> str:
        """Return the name and, of a file, the line of the deepest of ``keys`` in it."""
        if self._path is None:
            return self._name
        try:
            text = self._path.read_text(encoding="utf-8")
            line = _line_of(yaml.compose(text, Loader=yaml.SafeLoader), keys)
        except (OSError, ValueError, yaml.YAMLError):  # the file has changed since
            return self._name
        return f"{self._name}:{line}" if line else self._name


def _line_of(node: yaml.Node | None, keys: tuple[str | int, ...]) -> int:
    """Return the line of the deepest key below a node; 0 if the first one is not there."""
    line = 0
    for wanted in keys:
        found: tuple[yaml.Node, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == wanted), None)
        elif isinstance(node, yaml.SequenceNode) and wanted in range(len(node.value)):
            found = (node.value[wanted], node.value[wanted])
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
