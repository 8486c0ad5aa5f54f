"""JSON that others may have written is read whole, or is an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest

from persia._files.json_models import parse, read_json
from persia._files.manifest import Part
from persia.errors import CheckpointError

PART = Part(
    path="00000001-00000000/server0/table0-00-000000.safetensors",
    num_bytes=100,
    xxh3_128="0" * 32,
    server=3,
    table="table0",
    policy=0,
    dtype="float16",
    dim=4,
    state_words=0,
    num_rows=7,
    buckets=(0, 16384),
    max_order=(1 << 64) - 1,
)


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../../passwd"},
        {"path": "/etc/passwd"},
        {"path": "a//b"},
        {"path": "a\n"},
        {"path": "a" * 201},
        {"bytes": -1},
        {"xxh3_128": "00"},
        {"rows": "3"},
        {"rows": 7.0},
        {"buckets": [5, 5]},
        {"buckets": [0, 16385]},
        {"buckets": [0, True]},
        {"buckets": [0]},
        {"buckets": None},
        {"dtype": "float64"},
        {"dim": 0},
        {"max_order": 1 << 64},
        {"server": 1 << 14},
        {"other": 8},
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any]) -> None:
    (key,) = change
    named = {"x": PART.to_json() | change}
    with pytest.raises(CheckpointError, match=rf"^m.json: x\.{key}(\[1\])?: "):
        read_json(dict[str, Part], named, "m.json")
    with pytest.raises(CheckpointError, match=rf"^m.json: {key}(\[1\])?: "):
        read_json(Part, PART.to_json() | change, "m.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected JSON in UTF-8"),
        (b'{"a": 1, "a": 2}', "a key comes twice"),
        (b"[1e999]", "expected finite numbers, got 1e999"),
        (b"[" * 100_000, "a value nested too deeply"),
    ],
)
def test_other_bytes_are_an_error(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^f: .*{message}"):
        parse(data, "f")
