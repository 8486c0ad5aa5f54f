"""The meaning of rows is saved by names, and is read only if its parts agree."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from persia._files.json_models import read_json
from persia._files.schema import SavedSchema
from persia.errors import CheckpointError
from tests.files.support import schema


def test_numbers_of_options_are_kept_as_they_were_written() -> None:
    """Canonical JSON is hashed: 1 must not become 1.0."""
    written = schema().to_json()
    written["tables"]["table0"]["options"] = {"lr": 1, "eps": 0.5, "on": True}
    read = read_json(SavedSchema, written, "m.json").to_json()
    assert repr(read["tables"]["table0"]["options"]) == "{'lr': 1, 'eps': 0.5, 'on': True}"


def test_hashes_are_written_where_there_are_some() -> None:
    plain = schema()
    assert "hashes" not in plain.to_json()
    (group, *_) = plain.features.values()
    hashed = replace(plain, hashes={group: "native:one:" + "0" * 64})
    assert read_json(SavedSchema, hashed.to_json(), "m.json") == hashed
    text = f"the hash of ids of feature group {group} is none in the first and native:one:0"
    assert text in plain.differences(hashed)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prefix_bits", lambda s: s.update(prefix_bits=64)),
        ("policies", lambda s: s.update(policies=[])),
        ("policies[0]", lambda s: s.update(policies=[["fifo", None, 0]])),
        ("policies[1]", lambda s: s["policies"].append(["lfu", "days", 0])),
        ("groups[0].table", lambda s: s["groups"][0].update(table="other")),
        ("groups[0].hash_stack", lambda s: s["groups"][0].update(hash_stack=[1])),
        ("groups", lambda s: s["groups"].append(s["groups"][0])),
        ("groups", lambda s: s.update(prefix_bits=1)),
        ("features.user", lambda s: s["features"].update(user="nothing")),
        ("hashes.nothing", lambda s: s.update(hashes={"nothing": "native:one:" + "0" * 64})),
        ("hashes.user", lambda s: s.update(hashes={"user": "md5"})),
        ("tables", lambda s: s["tables"].update({"a/b": s["tables"]["table0"]})),
        ("tables.table0.dim", lambda s: s["tables"]["table0"].update(dim=0)),
        ("tables.table0.policy", lambda s: s["tables"]["table0"].update(policy=1)),
        ("tables.table0.options.lr", lambda s: s["tables"]["table0"]["options"].update(lr="1")),
    ],
)
def test_a_wrong_value_is_named(field: str, change: Callable[[Any], object]) -> None:
    written = copy.deepcopy(schema().to_json())
    change(written)
    with pytest.raises(CheckpointError, match=rf"^m.json: {re.escape(field)}: "):
        read_json(SavedSchema, written, "m.json")
