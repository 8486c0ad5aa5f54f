"""Reading JSON that others may have written: every field is asked for by name, kind and range.

A file is checked whole before anything is done with it. What is wrong with it is told as
``path: field: expected this, got that``, and a field that nobody asked for is an error too: a
file of a later version says so by its version number, not by fields that are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from persia.errors import CheckpointError

# Characters of a value that a message repeats.
_TOLD = 80


class FieldPath:
    """A place in a file, for messages: the file's path and the field's."""

    __slots__ = ("field", "file")

    def __init__(self, file: str, field: str = "") -> None:
        self.file = file
        self.field = field

    def at(self, step: str | int) -> FieldPath:
        """Return the place of a field, or of an element, of this one."""
        if isinstance(step, int):
            return FieldPath(self.file, f"{self.field}[{step}]")
        return FieldPath(self.file, f"{self.field}.{step}" if self.field else step)

    def error(self, message: str) -> CheckpointError:
        """Return an error that names this place."""
        return CheckpointError(": ".join(filter(None, (self.file, self.field, message))))

    def expected(self, what: str, got: object) -> CheckpointError:
        """Return an error that says what was expected and what came."""
        return self.error(f"expected {what}, got {told(got)}")


def told(value: object) -> str:
    """Show a value that may be of any size."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}..."


def parse(data: bytes, where: FieldPath) -> Any:
    """Return the JSON value that ``data`` is; keys may not repeat, numbers are finite.

    Raises:
        CheckpointError: If it is not JSON, or nested too deeply.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise where.error("a key comes twice in one JSON object")
        return found

    def constant(name: str) -> NoReturn:
        raise where.error(f"expected finite numbers, got {name}")

    def finite(text: str) -> float:
        return number if math.isfinite(number := float(text)) else constant(text)

    try:
        found = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_float=finite
        )
        if b"\\u" in data:  # half of a surrogate pair, which no message could repeat
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise where.error("expected JSON, got a value nested too deeply") from None
    except ValueError as exc:  # of UTF-8, of JSON, or an integer of too many digits
        raise where.error(f"expected JSON in UTF-8: {exc}") from None


class Fields:
    """The fields of one JSON object, each read once.

    Args:
        value: What was parsed.
        where: Its place.

    Raises:
        CheckpointError: If it is no object.
    """

    def __init__(self, value: object, where: FieldPath) -> None:
        if not isinstance(value, dict):
            raise where.expected("an object", value)
        self.where = where
        self._left: dict[str, Any] = dict(value)

    def names(self) -> list[str]:
        """Return the names of the fields not read yet."""
        return list(self._left)

    def any(self, name: str) -> Any:
        """Return a field of any kind."""
        if name not in self._left:
            raise self.where.at(name).error("the field is missing")
        return self._left.pop(name)

    def integer(self, name: str, low: int = 0, high: int = (1 << 63) - 1) -> int:
        """Return an integer in ``low..high``."""
        return integer(self.any(name), self.where.at(name), low, high)

    def text(self, name: str) -> str:
        """Return a string."""
        value = self.any(name)
        if not isinstance(value, str):
            raise self.where.at(name).expected("a string", value)
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a string or null."""
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise self.where.at(name).expected("a string or null", value)
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """Return a string that is one of ``choices``."""
        value = self.any(name)
        if value not in choices or not isinstance(value, str):
            raise self.where.at(name).expected(f"one of {', '.join(choices)}", value)
        return value

    def array(self, name: str, length: int | None = None) -> list[Any]:
        """Return an array, of ``length`` elements if that is given."""
        value = self.any(name)
        if not isinstance(value, list) or (length is not None and len(value) != length):
            kind = "an array" if length is None else f"an array of {length}"
            raise self.where.at(name).expected(kind, value)
        return value

    def object(self, name: str) -> dict[str, Any]:
        """Return an object, as it is."""
        value = self.any(name)
        if not isinstance(value, dict):
            raise self.where.at(name).expected("an object", value)
        return value

    def fields(self, name: str) -> Fields:
        """Return the fields of an object."""
        return Fields(self.any(name), self.where.at(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the fields of each object of an array."""
        for place, value in enumerate(self.array(name)):
            yield Fields(value, self.where.at(name).at(place))

    def done(self) -> None:
        """Check that every field was read."""
        for name in self._left:
            raise self.where.at(name).error("a field that this version does not know")


def integer(value: object, where: FieldPath, low: int, high: int) -> int:
    """Return ``value`` if it is an integer in ``low..high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise where.expected(f"an integer in {low}..{high}", value)
    return value
