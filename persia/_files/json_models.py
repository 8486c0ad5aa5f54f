"""Models of JSON that others may have written: every key is required, and no other is taken.

A file is checked whole before it is used. A file of a later version says so by its version
number, not by keys that are passed over. A key that is ``optional`` is written only where its
value is not the usual one: an earlier version refuses such a file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

from persia.config.document import InvalidValue, Model, validate
from persia.errors import CheckpointError

T = TypeVar("T")


class Record(Model):
    """Base of the dataclasses that JSON objects are read as."""

    __slots__ = ()
    requires_all: ClassVar = True

    def to_json(self) -> dict[str, Any]:
        """Return what ``read_json`` takes, keys in the order of the fields."""
        return {
            field.metadata.get("key", field.name): _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if "optional" not in field.metadata or getattr(self, field.name)
        }


def _plain(value: object) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def read_json(cls: type[T], value: object, name: str) -> T:
    """Return a parsed JSON value as ``cls``, a record or a type of records."""
    try:
        return validate(cls, value)
    except InvalidValue as exc:
        raise CheckpointError(exc.at(name)) from None


def parse(data: bytes, name: str) -> Any:
    """Return the JSON value that ``data`` is; keys may not repeat, numbers are finite."""

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise CheckpointError(f"{name}: a key comes twice in one JSON object")
        return found

    def refuse(constant: str) -> NoReturn:
        raise CheckpointError(f"{name}: expected finite numbers, got {constant}")

    def finite(text: str) -> float:
        return number if math.isfinite(number := float(text)) else refuse(text)

    try:
        found = json.loads(
            data.decode(), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite
        )
        if b"\\u" in data:  # half of a surrogate pair, which no message could repeat
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise CheckpointError(f"{name}: expected JSON, got a value nested too deeply") from None
    except ValueError as exc:  # of UTF-8, of JSON, or an integer of too many digits
        raise CheckpointError(f"{name}: expected JSON in UTF-8: {exc}") from None
