"""JSON that others may have written is read whole, or is an error that names the key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from persia._files.json_models import Record, read_json
from persia.config import Listed, Named, integer
from persia.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Inner(Record):
    size: Annotated[int, integer(1, 9)] = field(metadata={"key": "bytes"})


@dataclass(frozen=True, slots=True)
class Outer(Record):
    items: Listed[tuple[Inner, ...]]
    more: Named[Inner] = field(default_factory=dict)


WRITTEN: dict[str, Any] = {"items": [{"bytes": 1}], "more": {"a": {"bytes": 9}}}


def test_a_record_is_read_as_it_was_written() -> None:
    record = Outer((Inner(1),), {"a": Inner(9)})
    assert record.to_json() == WRITTEN
    assert read_json(Outer, WRITTEN, "f") == record
    assert read_json(dict[str, Outer], {"x": WRITTEN}, "f") == {"x": record}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "f: expected a mapping, got a list"),
        ({"items": []}, "f: more: the key is required"),
        (WRITTEN | {"x": 1}, "f: x: unknown key"),
        (WRITTEN | {"items": {}}, "f: items: expected a list, got a mapping"),
        (WRITTEN | {"items": [{"bytes": 1}, {}]}, r"f: items\[1\].bytes: the key is required"),
        (WRITTEN | {"more": {"a": {"bytes": 10}}}, r"f: more.a.bytes: .* 1\.\.9, got 10"),
        (WRITTEN | {"more": {"a": {"size": 1}}}, "f: more.a.bytes: the key is required"),
        (WRITTEN | {"more": None}, "f: more: expected a mapping, got nothing"),
    ],
)
def test_another_value_is_an_error(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{message}"):
        read_json(Outer, value, "f")
