"""Rows and manifests to write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._files.catalog import chain, ids, keep_last, latest, new_id, publish
from persia._files.manifest import Deleted, Manifest, Part
from persia._files.part_writer import PartWriter
from persia._files.parts import filter_owned, write_deleted, write_file
from persia._files.rows import rewrite, verify
from persia._files.rows import rows_of as rows_of_chain
from persia._files.schema import SavedSchema
from persia._files.storage import BufferPool, Storage
from persia.config import EmbeddingSchema
from persia.errors import CheckpointError

SETTINGS: dict[str, Any] = {
    "slots_config": {"user": {"dim": 4}, "item": {"dim": 4}, "tag": {"dim": 3}},
    "group_settings": {"tag": {"dtype": "bfloat16"}},
}


def schema(settings: dict[str, Any] = SETTINGS) -> SavedSchema:
    config = EmbeddingSchema.load(settings)
    return SavedSchema.of(config, [RowOptimizer("adagrad") for _ in config.tables])


def block(
    signs: Iterable[int],
    *,
    dim: int = 4,
    words: int = 4,
    dtype: str = "float32",
    policy: int = 0,
    seed: int = 0,
) -> RowBlock:
    """Return rows of these signs, of chance otherwise."""
    rng = np.random.default_rng(seed)
    keys = np.array(list(signs), np.uint64)
    n = len(keys)
    values: Any = rng.normal(size=(n, dim)).astype(np.float32)
    if dtype != "float32":
        values = rng.integers(0, 1 << 16, (n, dim), dtype=np.uint16)
    return RowBlock(
        policy,
        dtype,
        keys,
        values,
        rng.integers(0, 1 << 32, (n, words), dtype=np.uint32),
        rng.permutation(n).astype(np.uint64),
        rng.integers(0, 9, n, dtype=np.uint32) * np.uint32(policy > 0),
        rng.integers(0, 9, n, dtype=np.uint64) * np.uint64(policy > 0),
    )


def joined(blocks: Iterable[RowBlock]) -> RowBlock:
    """Return blocks of one kind as one."""
    held = list(blocks)
    arrays = zip(*(each.arrays for each in held), strict=True)
    return RowBlock(held[0].policy, held[0].dtype, *map(np.concatenate, arrays))


def rows_of(blocks: Iterable[RowBlock]) -> dict[int, tuple[bytes, ...]]:
    """Return the rows by sign, as bytes; the order of eviction is left out."""
    found: dict[int, tuple[bytes, ...]] = {}
    for each in blocks:
        for place, sign in enumerate(each.signs.tolist()):
            assert sign not in found
            found[sign] = (
                bytes([each.policy]),
                each.dtype.encode(),
                each.values[place].tobytes(),
                each.states[place].tobytes(),
                each.uses[place].tobytes(),
                each.ages[place].tobytes(),
            )
    return found


Rows = dict[int, tuple[bytes, ...]]


SCHEMA = schema()


def parts_of(
    storage: Storage, rows: RowBlock, prefix: str = "id", **options: Any
) -> tuple[Part, ...]:
    """Write rows of table 0; returns their parts."""
    with PartWriter(storage, prefix, **options) as writer:
        writer.add("table0", rows)
        return writer.finish()


def manifest(identity: str, base: str | None = None, **changes: Any) -> Manifest:
    values: dict[str, Any] = {"step": 1, "num_servers": 1, "schema": SCHEMA}
    values["kind"] = "full" if base is None else "delta"
    return Manifest(id=identity, base=base, **(values | changes))


def dump(
    storage: Storage,
    rows: dict[int, RowBlock],
    *,
    base: str | None = None,
    deleted: set[int] | None = None,
    num_servers: int = 2,
    is_published: bool = True,
    **changes: Any,
) -> Manifest:
    """Write and publish a checkpoint as servers do."""
    identity = new_id(storage)
    parts: list[Part] = []
    gone: list[Deleted] = []
    for server in range(num_servers):
        prefix = f"{identity}/server{server}"
        with PartWriter(storage, prefix, server=server, num_threads=1) as writer:
            if rows:
                every = joined(rows[sign] for sign in sorted(rows))
                writer.add("table0", filter_owned(every, server, num_servers))
            parts += writer.finish()
        signs = np.array(sorted(deleted or ()), np.uint64)
        gone += write_deleted(storage, prefix, signs[server::num_servers], server)
    dense = write_file(storage, f"{identity}/dense.pt", [identity.encode()])
    storage.sync(identity)
    made = manifest(
        identity,
        base=base,
        num_servers=num_servers,
        parts=tuple(parts),
        deleted=tuple(gone),
        files={"dense.pt": dense},
        **changes,
    )
    if is_published:
        publish(storage, made)
    return made


def loaded(storage: Storage, identity: str | None = None) -> Rows:
    manifests = chain(storage, identity)
    return rows_of(rows for _, rows in rows_of_chain(storage, manifests))


def row(sign: int, seed: int) -> RowBlock:
    return block([sign], seed=seed)


def content(storage: Storage, path: str) -> bytes:
    return storage.read(path, 1 << 20).tobytes()


def check_promises(storage: Storage) -> None:
    assert storage.list() == []
    data = np.arange(70_000, dtype=np.uint8)
    storage.write("a/b/c", [b"head", data[:0].data, data.data, memoryview(b"tail")])
    storage.sync("a/b")
    assert content(storage, "a/b/c") == b"head" + data.tobytes() + b"tail"
    assert storage.size("a/b/c") == 70_008
    storage.write("empty", [])
    assert content(storage, "empty") == b""
    assert [storage.list(x) for x in ("", "a", "no")] == [["a", "empty"], ["b"], []]
    storage.publish("m.json", b"1")
    storage.publish("m.json", b"22")
    assert content(storage, "m.json") == b"22"
    assert storage.list() == ["a", "empty", "m.json"]
    with pytest.raises(CheckpointError, match=r"m\.json: expected at most 1 bytes, got 2"):
        storage.read("m.json", 1)
    with storage.open("a/b/c") as reader:
        piece = np.empty(6, np.uint8)
        reader.read_into(piece, 3)
        assert piece.tobytes() == b"d" + bytes(range(5))
        with pytest.raises(CheckpointError, match="a/b/c: "):
            reader.read_into(piece, 70_005)
    with pytest.raises(CheckpointError, match="gone: cannot read"):
        storage.size("gone")
    storage.remove("m.json")
    storage.remove("m.json")
    storage.remove_folder("a")
    storage.remove_folder("a")
    assert storage.list() == ["empty"]


def check_large(storage: Storage) -> None:
    """A file that begins with a block in memory, and one that does not, read either way."""
    memory = BufferPool()
    data = memory.take(600_123)
    data[:] = np.random.default_rng(1).integers(0, 256, len(data), dtype=np.uint8)
    for first in (0, 1):
        storage.write(f"large{first}", [data[first:300_000].data, data[300_000:].data])
        want = data[first:].tobytes()
        assert content(storage, f"large{first}") == want
        for start in (0, 1):
            target = memory.take(700_000)[start : start + len(want)]
            with storage.open(f"large{first}") as reader:
                reader.read_into(target, 0)
            assert target.tobytes() == want


def check_catalog(storage: Storage) -> None:
    """A base, a delta with a deletion, compaction, the last one kept."""
    rows = {sign: row(sign, 1) for sign in range(20)}
    base = dump(storage, rows)
    rows[3] = row(3, 2)
    del rows[4]
    delta = dump(storage, {3: rows[3]}, base=base.id, deleted={4})
    assert loaded(storage) == rows_of(rows.values())
    whole = rewrite(storage, storage)
    assert keep_last(storage, 1) == [base.id, delta.id]
    assert latest(storage) == whole.id
    assert ids(storage) == [whole.id]
    assert loaded(storage) == rows_of(rows.values())
    verify(storage)
    # W-20: other files come back byte by byte, from wherever they are.
    assert content(storage, whole.files["dense.pt"].path) == delta.id.encode()
    assert len(storage.list(whole.id)) == 3


def written(storage: Storage) -> Manifest:
    """Write the files of a checkpoint; it is not published."""
    extras = {"loaders": {"0": 7}, "big": 2**64 - 1, "rate": 0.1}
    rows = {sign: row(sign, 1) for sign in range(200)}
    return dump(storage, rows, num_servers=1, is_published=False, step=7, extras=extras)
