"""Entries of a manifest: what is written is read, and anything else is an error."""

from __future__ import annotations

from typing import Any

import pytest

from persia._files.entries import File, Part, sketch_name
from persia._files.json_models import read_json
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


def test_an_entry_is_read_as_it_was_written() -> None:
    written = PART.to_json()
    assert list(written)[:4] == ["path", "bytes", "xxh3_128", "server"]
    assert (written["rows"], written["buckets"]) == (7, [0, 16384])
    assert read_json(Part, written, "m.json") == PART
    assert File(**PART.as_fields()).to_json().items() <= written.items()
    assert sketch_name(2) == "sketch-2.safetensors"


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
    with pytest.raises(CheckpointError, match=rf"^m.json: {key}(\[1\])?: "):
        read_json(Part, PART.to_json() | change, "m.json")
