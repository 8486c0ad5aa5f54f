"""A manifest is read whole or not at all, and what is wrong with it is named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia._files.manifest import Manifest, feature_order
from persia._files.storage import LocalStorage
from persia._rpc.messages import FeatureOrder
from persia.errors import CheckpointError
from tests.files.support import written

Change = Callable[[dict[str, Any]], object]


def part(**changes: Any) -> Change:
    """Another value of the first part's."""
    return lambda m: m["parts"][0].update(changes)


# A field that the message has to name, and what to do to it.
WRONG: list[tuple[str, Change]] = [
    ("format", lambda m: m.update(format="other")),
    ("version", lambda m: m.update(version=2)),
    ("step", lambda m: m.update(step=-1)),
    ("step", lambda m: m.update(step=1 << 63)),
    ("kind", lambda m: m.update(kind="half")),
    ("base", lambda m: m.update(base="00000001-00000000")),
    ("base", lambda m: m.update(kind="delta")),
    ("id", lambda m: m.update(id="../00000001-00000000")),
    ("created", lambda m: m.update(created="yesterday")),
    ("servers", lambda m: m.update(servers=0)),
    ("extras", lambda m: m.update(extras=[])),
    ("more", lambda m: m.update(more=1)),
    ("parts", lambda m: m.pop("parts")),
    ("parts", lambda m: m.update(parts={})),
    ("parts[0]", lambda m: m["parts"].__setitem__(0, 3)),
    ("parts[0].table", part(table="table9")),
    ("parts[0].server", part(server=1)),
    ("parts[0]", part(dim=8)),
    ("files", lambda m: m["files"].update({"a/b": m["files"]["dense.pt"]})),
    ("files.dense.pt.path", lambda m: m["files"]["dense.pt"].pop("path")),
    ("deleted", lambda m: m.update(deleted=None)),
    ("schema.prefix_bits", lambda m: m["schema"].update(prefix_bits=64)),
    ("parts[0].path", part(path="../../passwd")),
    ("parts[0].path", part(path="/etc/passwd")),
    ("parts[0].path", part(path="a//b")),
    ("parts[0].path", part(path="a\n")),
    ("parts[0].path", part(path="a" * 201)),
    ("parts[0].bytes", part(bytes=-1)),
    ("parts[0].xxh3_128", part(xxh3_128="00")),
    ("parts[0].rows", part(rows="3")),
    ("parts[0].rows", part(rows=7.0)),
    ("parts[0].buckets", part(buckets=[5, 5])),
    ("parts[0].buckets", part(buckets=[0, 16385])),
    ("parts[0].buckets", part(buckets=[0, True])),
    ("parts[0].buckets", part(buckets=[0])),
    ("parts[0].buckets", part(buckets=None)),
    ("parts[0].dtype", part(dtype="float64")),
    ("parts[0].dim", part(dim=0)),
    ("parts[0].max_order", part(max_order=1 << 64)),
    ("parts[0].server", part(server=1 << 14)),
    ("parts[0].other", part(other=8)),
]


def resealed(content: dict[str, Any]) -> bytes:
    """Return a manifest of this content whose checksum is right."""
    content.pop("xxh3_128", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["xxh3_128"] = xxhash.xxh3_128(text.encode()).hexdigest()
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(LocalStorage(tmp_path_factory.mktemp("catalog"))).encode()


@pytest.mark.parametrize(("field", "change"), WRONG)
def test_a_wrong_field_is_named(content: bytes, field: str, change: Change) -> None:
    parsed = json.loads(content)
    assert Manifest.decode(resealed(parsed), "m.json").step == 7
    change(parsed)
    with pytest.raises(CheckpointError, match=rf"^m.json: {re.escape(field)}: "):
        Manifest.decode(resealed(parsed), "m.json")


def test_w50_other_bytes_are_no_manifest(content: bytes) -> None:
    middle = content.index(b'"step":7')
    changed = content[:middle] + content[middle:].replace(b'"step":7', b'"step":8')
    with pytest.raises(CheckpointError, match=r"^m.json: xxh3_128: expected .* damaged"):
        Manifest.decode(changed, "m.json")
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for data in (
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"PK\x03\x04",
        content[:-1],
        content[: len(content) // 2],
        content + b"}",
        content.replace(b'"step":7', b'"step":NaN'),
        content.replace(b'"rate":0.1', b'"rate":1e999'),
        content.replace(b'"step":7', b'"step":' + b"9" * 10_000),
        content.replace(b'"step":7', b'"step":7,"step":8'),
        deep,
    ):
        with pytest.raises(CheckpointError, match=r"^m\.json: "):
            Manifest.decode(data, "m.json")


def test_w50_a_value_that_is_as_deep_as_can_be_read_is_an_error_too(content: bytes) -> None:
    for depth in range(900, 1000):
        deep = b"[" * depth + b"]" * depth
        with pytest.raises(CheckpointError, match=r"^m\.json: "):
            Manifest.decode(content.replace(b'"rate":0.1', b'"rate":' + deep), "m.json")


def test_text_that_no_message_could_repeat_is_an_error(content: bytes) -> None:
    """JSON has halves of surrogate pairs, which are in no encoding."""
    parsed = json.loads(content)
    parsed["extras"]["name"] = "\U0001f600"
    assert Manifest.decode(resealed(parsed), "m.json").extras["name"] == "\U0001f600"
    parsed["schema"]["features"]["\ud800"] = "user"
    with pytest.raises(CheckpointError, match=r"^m\.json: .*surrogates not allowed"):
        Manifest.decode(resealed(parsed), "m.json")


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value, as its container and its key."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [place for key in keys for place in [(value, key), *leaves(value[key])]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_w71_any_value_anywhere_is_an_error_or_a_manifest(content: bytes, data: Any) -> None:
    parsed = json.loads(content)
    places = leaves(parsed)
    container, key = places[data.draw(st.integers(0, len(places) - 1))]
    container[key] = data.draw(JSON)
    sealed = resealed(parsed)
    with contextlib.suppress(CheckpointError):
        assert isinstance(Manifest.decode(sealed, "m.json"), Manifest)


def test_the_order_of_features_is_lists_of_names_or_absent(tmp_path: Path) -> None:
    manifest = written(LocalStorage(tmp_path))
    assert feature_order(manifest, "here") is None
    lists: dict[str, Any] = {"ids": ["b", "a"], "dense": ["age"], "labels": []}

    def read(**change: Any) -> FeatureOrder | None:
        changed = dataclasses.replace(manifest, extras={"features": {**lists, **change}})
        return feature_order(Manifest.decode(changed.encode(), "m.json"), "here")

    assert read() == FeatureOrder(("b", "a"), ("age",), ())
    for change in ({"ids": "ba"}, {"dense": [1]}, {"labels": None}):
        with pytest.raises(CheckpointError, match=rf"^here: {manifest.id}: extras\.features: "):
            read(**change)
    del lists["dense"]
    with pytest.raises(CheckpointError, match=r"extras\.features: .* ids, dense and labels"):
        read()


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    manifest = written(LocalStorage(tmp_path))
    for extras in ({"x": float("nan")}, {"x": b""}, {"x": {1, 2}}):
        with pytest.raises(CheckpointError, match=f"{manifest.id}: extras: not JSON"):
            dataclasses.replace(manifest, extras=extras).encode()
    with pytest.raises(CheckpointError, match="step: expected an integer"):
        dataclasses.replace(manifest, step=-1).encode()
