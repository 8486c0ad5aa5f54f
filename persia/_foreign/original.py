"""Rows from a checkpoint of the original PERSIA.

    <folder>/embedding_dump_done            YAML: num_shards, num_internal_shards
    <folder>/s<k>/embedding_dump_done       of each of its servers
    <folder>/s<k>/replica_<k>_shard_<i>.emb

A file is the array behind one shard's order of use, little-endian, without a header:

    count u64 | first u32 | last u32 | free u32 | end u32 | number of nodes u32 | nodes
    node:   next u32 | previous u32 | has an entry u8 | entry
    entry:  number of floats u32 | values f32 x dim, then state | dim u64 | sign u64

``next`` and ``first`` count nodes from 1, and 0 is none; nodes without an entry are room for
others. From ``first`` on, ``next`` leads from the row that was used longest ago to the newest.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._foreign.source import BLOCK_ROWS, IDBlock, IDSource
from persia.config import ConfigSource, EmbeddingSchema
from persia.errors import CheckpointError, ConfigError, DimMismatch, did_you_mean
from persia.utils import load_yaml

MARKER = "embedding_dump_done"
_HEAD = struct.Struct("<QIIIII")
_NODE = struct.Struct("<IIB")
_FLOATS = struct.Struct("<I")
_TAIL = struct.Struct("<QQ")  # dim and sign
# Optimizers whose state of a row is the same here.
_SAME_STATE = ("sgd", "adagrad", "rowwise_adagrad")


def read_original(
    folder: str | os.PathLike[str],
    embedding_config: ConfigSource | EmbeddingSchema,
    feature: str,
    optimizer: str | None = None,
) -> IDSource:
    """Read the rows of one feature from a checkpoint of the original PERSIA.

    The least recently used row of each file comes first, so that the order of use is kept.

    Args:
        folder: The ``dst_dir`` of its ``dump_checkpoint``, on a local disk.
        embedding_config: The embedding config of that job, whose groups its signs count.
        feature: A slot of it; rows of a group are those of all its features.
        optimizer: What that job trained with, if this one does too: ``"adagrad"``,
            ``"rowwise_adagrad"`` (``vectorwise_shared``) or ``"sgd"``. Then the state of rows
            is taken over; with None it begins again. Adam's cannot be: the original does not
            save how many steps a row has had.

    Raises:
        CheckpointError: The dump is not whole, or a file is not what it should be.
        ConfigError: The feature is unknown, or has a hash stack or a hash of ids; another hash
            found its rows.
        DimMismatch: Its rows have another dim, or another state than ``optimizer`` keeps.
    """
    path = Path(folder)
    schema = EmbeddingSchema.load(embedding_config)
    slot = schema.slots.get(feature)
    if slot is None:
        hint = did_you_mean(feature, schema.slots)
        raise ConfigError(f"feature {feature!r} is not in the embedding config{hint}")
    if slot.hash_stack_rounds:
        raise ConfigError(
            f"feature {feature!r}: its hash stack was filled by the original's hash, so that "
            "no id finds its rows here: train them again"
        )
    if slot.id_hash is not None:
        raise ConfigError(
            f"feature {feature!r}: expected the embedding config of the original's job, which "
            f"knew no id_hash, got {slot.id_hash}: leave it out there"
        )
    if optimizer is not None and optimizer not in _SAME_STATE:
        known = ", ".join(_SAME_STATE)
        raise ConfigError(f"optimizer: expected one of {known}, or None, got {optimizer!r}")
    files = _files(path)
    words = None
    if optimizer is not None:
        words = {"sgd": 0, "adagrad": slot.dim, "rowwise_adagrad": 1}[optimizer]
    shift, mask = 64 - schema.prefix_bits, (1 << (64 - schema.prefix_bits)) - 1
    prefix = slot.prefix >> shift

    def read() -> Iterator[IDBlock]:
        for file in files:
            yield from _read_file(file, prefix, shift, mask, slot.dim, words)

    notes = () if optimizer else ("the state of the optimizer begins again",)
    return IDSource(f"{path}: {feature}", slot.dim, None, read, notes)


def _files(folder: Path) -> list[Path]:
    """Return the files of all servers, if every one of them has finished."""
    facts = _marker(folder)
    files = []
    for server in range(facts["num_shards"]):
        own = folder / f"s{server}"
        shards = _marker(own)["num_internal_shards"]
        files += [own / f"replica_{server}_shard_{shard}.emb" for shard in range(shards)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: expected a file of the dump, got none")
    return files


def _marker(folder: Path) -> dict[str, Any]:
    path = folder / MARKER
    if not path.is_file():
        raise CheckpointError(f"{path}: expected the file that ends a dump, got none")
    content = load_yaml(path)
    facts: dict[str, Any] = content if isinstance(content, dict) else {}
    for key in ("num_shards", "num_internal_shards"):
        value = facts.get(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: {key}: expected a number from 1 on, got {value!r}")
    return facts


class _Bytes:
    """A mapped file; what it does not have is a CheckpointError."""

    def __init__(self, path: Path, content: mmap.mmap | bytes) -> None:
        self._path, self._content = path, content

    def __len__(self) -> int:
        return len(self._content)

    def unpack(self, form: struct.Struct, at: int) -> tuple[Any, ...]:
        try:
            return form.unpack_from(self._content, at)
        except struct.error:
            raise self.damaged(
                f"it ends at byte {len(self)}, within what begins at {at}"
            ) from None

    def floats(self, count: int, at: int) -> NDArray[np.uint32]:
        if at + 4 * count > len(self):
            raise self.damaged(f"it ends at byte {len(self)}, within {count} floats at {at}")
        # A slice copies: an array over the mapping would keep it open.
        return np.frombuffer(self._content[at : at + 4 * count], "<u4")

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: not a whole file of a dump: {what}")


def _read_file(
    path: Path, prefix: int, shift: int, mask: int, dim: int, words: int | None
) -> Iterator[IDBlock]:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path}: not a whole file of a dump: it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield from _read_nodes(_Bytes(path, content), prefix, shift, mask, dim, words)


def _read_nodes(
    file: _Bytes, prefix: int, shift: int, mask: int, dim: int, words: int | None
) -> Iterator[IDBlock]:
    """Walk the order of use; blocks copy, as the file is closed behind them."""
    first, following, entries = _index(file)
    width = dim + (words or 0)
    signs: list[int] = []
    rows: list[NDArray[np.uint32]] = []
    node, num_seen = first, 0
    while node:
        if node > len(entries) or not entries[node - 1] or num_seen == len(entries):
            raise file.damaged(f"its order of use leads to node {node}, which is no row of it")
        num_seen += 1
        at = int(entries[node - 1])
        node = int(following[node - 1])
        (count,) = file.unpack(_FLOATS, at)
        own_dim, sign = file.unpack(_TAIL, at + 4 + 4 * count)
        if sign >> shift != prefix:
            continue
        if own_dim != dim or count < width or (words is not None and count != width):
            raise DimMismatch(
                f"{file._path}: id {sign & mask}: expected {dim} values"
                + (f" and {words} of state" if words is not None else "")
                + f", got {own_dim} and {count - own_dim} of state"
            )
        signs.append(sign & mask)
        rows.append(file.floats(count, at + 4)[:width])
        if len(signs) == BLOCK_ROWS:
            yield _block(signs, rows, dim, words)
            signs, rows = [], []
    if num_seen != np.count_nonzero(entries):
        raise file.damaged(f"its order of use has {num_seen} rows, and the file others")
    if signs:
        yield _block(signs, rows, dim, words)


def _block(
    signs: list[int], rows: list[NDArray[np.uint32]], dim: int, words: int | None
) -> IDBlock:
    bits = np.stack(rows).astype(np.uint32)
    states = np.ascontiguousarray(bits[:, dim:]) if words else None
    vectors = np.ascontiguousarray(bits[:, :dim]).view(np.float32)
    return IDBlock(np.array(signs, np.uint64), vectors, states)


def _index(file: _Bytes) -> tuple[int, NDArray[np.uint32], NDArray[np.int64]]:
    """Return the first node, and by node the next one and where its entry is; 0 is none."""
    count, first, _, _, _, num_nodes = file.unpack(_HEAD, 0)
    if num_nodes * _NODE.size > len(file):
        raise file.damaged(f"it says that it has {num_nodes} nodes, in {len(file)} bytes")
    following = np.zeros(num_nodes, np.uint32)
    entries = np.zeros(num_nodes, np.int64)
    at = _HEAD.size
    for node in range(num_nodes):
        following[node], _, has_entry = file.unpack(_NODE, at)
        at += _NODE.size
        if has_entry:
            entries[node] = at
            (num_floats,) = file.unpack(_FLOATS, at)
            at += _FLOATS.size + 4 * num_floats + _TAIL.size
    if at != len(file):
        raise file.damaged(f"its nodes end at byte {at} of {len(file)}")
    if count != np.count_nonzero(entries):
        raise file.damaged(f"it says that it has {count} rows, and has others")
    return first, following, entries
