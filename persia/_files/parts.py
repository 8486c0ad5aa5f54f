"""Files of rows and of signs: how one is written, read and checked.

A part holds rows of one table, one policy and one range of buckets, with everything that makes
a row: sign, values, optimizer state, place in the order of eviction, uses, age. A server that
loads needs the parts of the buckets that it owns, whatever the number of servers that wrote
them. Nothing of a file is given out before its size and checksum were those of the manifest;
what differs is a ``CheckpointError``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from persia._core.base.hashing import bucket, mix64_array, owners
from persia._core.store.blocks import RowBlock
from persia._core.store.part_rows import all_once, find_stranger
from persia._files.manifest import Deleted, File, Part
from persia._files.storage import AT_ONCE, Buffer, BufferPool, Storage
from persia._files.tensors import CODES, Column, HeaderReader, decode, encode
from persia.errors import CheckpointError

S = TypeVar("S")
T = TypeVar("T")

# What a reader takes; a writer's parts are a sixteenth of it.
MAX_PART_BYTES = 1 << 30
CODE_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_Kind = tuple[str, tuple[int, ...]]  # of an array, as its file has it: dtype and shape
# What a file need not have: nothing was counted, or nothing expires.
OPTIONAL = {"uses", "ages"}
# Parts that are read at the same time: while one waits for the disk, another is checked.
_AHEAD = 2
# Rows that are worked on at a time.
_PIECE_ROWS = 16_384
# Of signs of deleted rows in one file.
_DELETED_PER_FILE = 8 << 20


def take(block: RowBlock, rows: NDArray[Any]) -> RowBlock:
    """Return some rows of a block, by their places or by a mask, copied."""
    places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    return RowBlock(block.policy, block.dtype, *(np.take(a, places, 0) for a in block.arrays))


def split(block: RowBlock) -> Iterator[RowBlock]:
    """Yield a block in pieces, so that work on one of them is soon done, and in the cache."""
    for start in range(0, len(block), _PIECE_ROWS):
        arrays = (one[start : start + _PIECE_ROWS] for one in block.arrays)
        yield RowBlock(block.policy, block.dtype, *arrays)


def filter_owned(block: RowBlock, server: int, num_servers: int) -> RowBlock:
    """Return the rows that one of ``num_servers`` owns."""
    if num_servers == 1:
        return block
    mine = owners(num_servers)[mix64_array(block.signs) >> np.uint64(50)] == server
    return block if mine.all() else take(block, mine)


def num_owned(signs: NDArray[np.uint64], server: int, num_servers: int) -> int:
    """Return how many of the signs one of ``num_servers`` owns."""
    if num_servers == 1:
        return len(signs)
    return int((owners(num_servers)[mix64_array(signs) >> np.uint64(50)] == server).sum())


def write_file(storage: Storage, path: str, buffers: Iterable[Buffer]) -> File:
    """Write a file and return what a manifest says of it; its folder is still to be synced."""
    checksum = xxhash.xxh3_128()
    num_bytes = 0

    def pieces() -> Iterator[Buffer]:
        nonlocal num_bytes
        for buffer in buffers:
            for start in range(0, len(buffer), AT_ONCE):
                piece = buffer[start : start + AT_ONCE]
                checksum.update(piece)
                num_bytes += len(piece)
                yield piece  # while the cache has it

    storage.write(path, pieces())
    return File(path, num_bytes, checksum.hexdigest())


def write_deleted(
    storage: Storage, prefix: str, signs: NDArray[np.uint64], server: int = 0
) -> tuple[Deleted, ...]:
    """Write signs whose rows are gone, durably; returns what a manifest says of them."""
    found = []
    for number, start in enumerate(range(0, len(signs), _DELETED_PER_FILE)):
        piece = signs[start : start + _DELETED_PER_FILE]
        metadata = {"format": "persia-deleted", "version": "1", "server": str(server)}
        path = f"{prefix}/deleted-{number:06}.safetensors"
        written = write_file(storage, path, encode({"signs": Column.of(piece)}, metadata))
        found.append(
            Deleted(**dataclasses.asdict(written), server=server, num_signs=len(piece))
        )
    if found:
        storage.sync(prefix)
    return tuple(found)


# --- reading ------------------------------------------------------------------------------


def read_file(
    storage: Storage,
    file: File,
    max_bytes: int = MAX_PART_BYTES,
    memory: BufferPool | None = None,
) -> NDArray[np.uint8]:
    """Return a file's bytes, which are those that were written."""
    _check_size(storage.at(file.path), file, max_bytes)
    return _stream(storage, file, memory or BufferPool(), keep=True)


def _check_size(name: str, file: File, max_bytes: int) -> None:
    if file.num_bytes > max_bytes:
        raise CheckpointError(
            f"{name}: expected at most {max_bytes} bytes, got {file.num_bytes}"
        )


def check_file(storage: Storage, file: File) -> None:
    """Check a file of any size without keeping it."""
    _stream(storage, file, BufferPool(), keep=False)


def _stream(
    storage: Storage,
    file: File,
    memory: BufferPool,
    *,
    keep: bool,
    see: Callable[[int, NDArray[np.uint8]], object] | None = None,
) -> NDArray[np.uint8]:
    """Read and check a file, whole with ``keep``, else through a window used over and over.

    Each piece is seen with its offset, before the file is known to be what was written.
    """
    name = storage.at(file.path)
    checksum = xxhash.xxh3_128()
    at_once = storage.read_bytes
    with storage.open(file.path) as reader:
        # Before memory is taken.
        if reader.size != file.num_bytes:
            raise CheckpointError(f"{name}: expected {file.num_bytes} bytes, got {reader.size}")
        data = memory.take(file.num_bytes if keep else min(file.num_bytes, at_once))
        for offset in range(0, file.num_bytes, at_once):
            start = offset if keep else 0
            piece = data[start : start + min(at_once, file.num_bytes - offset)]
            reader.read_into(piece, offset)
            checksum.update(piece.data)
            if see is not None:
                see(offset, piece)
            storage.on_progress()
    if checksum.hexdigest() != file.xxh3_128:
        raise CheckpointError(
            f"{name}: expected checksum {file.xxh3_128}, got {checksum.hexdigest()}: "
            "the file is damaged"
        )
    return data


def read_part(storage: Storage, part: Part, memory: BufferPool | None = None) -> RowBlock:
    """Return the rows of a part, checked against what the manifest says of it."""
    name = storage.at(part.path)
    arrays, _ = decode(read_file(storage, part, memory=memory), name)
    wanted = _wanted(part)
    _check_arrays(name, wanted, {key: (code, a.shape) for key, (code, a) in arrays.items()})
    block = RowBlock(
        part.policy,
        part.dtype,
        *(
            arrays[key][1] if key in arrays else np.zeros(shape, CODES[code])
            for key, (code, shape) in wanted.items()
        ),
    )
    _check_buckets(name, part, block.signs)
    return block


def check_part(
    storage: Storage, part: Part, memory: BufferPool | None = None
) -> NDArray[np.uint64]:
    """Check a part as ``read_part`` does, through a window; returns its signs."""
    name = storage.at(part.path)
    _check_size(name, part, MAX_PART_BYTES)
    glance = HeaderReader(name, part.num_bytes, "signs")
    _stream(storage, part, memory or BufferPool(), keep=False, see=glance.see)
    entries, data = glance.seen()
    _check_arrays(name, _wanted(part), {key: (e.code, e.shape) for key, e in entries.items()})
    signs: NDArray[np.uint64] = data.view(CODES["U64"])
    _check_buckets(name, part, signs)
    return signs


def _wanted(part: Part) -> dict[str, _Kind]:
    """Return the arrays of a part, in the order of ``RowBlock``."""
    n = part.num_rows
    return {
        "signs": ("U64", (n,)),
        "values": (CODE_OF_DTYPE[part.dtype], (n, part.dim)),
        "states": ("U32", (n, part.state_words)),
        "orders": ("U64", (n,)),
        "uses": ("U32", (n,)),
        "ages": ("U64", (n,)),
    }


def _check_arrays(name: str, wanted: Mapping[str, _Kind], found: Mapping[str, _Kind]) -> None:
    for key in wanted.keys() - found.keys() - OPTIONAL:
        raise CheckpointError(f"{name}: {key}: the array is missing")
    for key, kind in found.items():
        if key not in wanted:
            raise CheckpointError(f"{name}: {key}: an array that this version does not know")
        if kind != wanted[key]:
            (code, shape), (its_code, its_shape) = wanted[key], kind
            raise CheckpointError(
                f"{name}: {key}: expected {code} {list(shape)}, got {its_code} "
                f"{list(its_shape)}"
            )


def _check_buckets(name: str, part: Part, signs: NDArray[np.uint64]) -> None:
    place = find_stranger(signs, *part.buckets)
    if place >= 0:
        raise CheckpointError(
            f"{name}: signs[{place}]: expected buckets {part.buckets[0]}..{part.buckets[1]}, "
            f"got {signs[place]} of bucket {bucket(int(signs[place]))}"
        )


def run_ahead(
    pool: ThreadPoolExecutor, function: Callable[[S], T], items: Iterable[S], count: int
) -> Iterator[tuple[S, T]]:
    """Yield items with their results, in order; the next ones are under way meanwhile."""
    waiting: deque[tuple[S, Future[T]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > count:
                done, result = waiting.popleft()
                yield done, result.result()
                del result
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:
        for _, result in waiting:
            result.cancel()


def read_ahead(
    storage: Storage, parts: Iterable[Part], memory: BufferPool | None = None
) -> Iterator[tuple[Part, RowBlock]]:
    """Yield parts with their rows; the next ones are read and checked while one is used."""
    memory = memory or BufferPool()
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="persia-read-ahead") as pool:
        yield from run_ahead(pool, lambda part: read_part(storage, part, memory), parts, _AHEAD)


def check_once(arrays: Sequence[NDArray[np.uint64]], name: str) -> None:
    """Check that no sign is twice in what ``name`` names."""
    signs = np.concatenate([np.empty(0, np.uint64), *arrays])
    if all_once(signs):
        return
    ordered = np.sort(signs)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise CheckpointError(f"{name}: signs: {ordered[twice[0]]} comes twice")


class DuplicateFilter:
    """Checks that no two parts of a checkpoint have a row of the same sign.

    Parts come sorted by their buckets, so that only the signs of those that overlap are held.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = 0
        self._held: list[tuple[int, NDArray[np.uint64]]] = []  # with the ends of their buckets

    def add(self, part: Part, signs: NDArray[np.uint64]) -> None:
        if part.buckets[0] > self._first:
            self.close()
            self._first = part.buckets[0]
            self._held = [(end, held) for end, held in self._held if end > self._first]
        self._held.append((part.buckets[1], signs))

    def close(self) -> None:
        """Check those that are still held."""
        check_once([signs for _, signs in self._held], self._name)


def read_deleted(storage: Storage, deleted: Deleted) -> NDArray[np.uint64]:
    name = storage.at(deleted.path)
    arrays, _ = decode(read_file(storage, deleted), name)
    wanted: dict[str, _Kind] = {"signs": ("U64", (deleted.num_signs,))}
    _check_arrays(name, wanted, {key: (code, a.shape) for key, (code, a) in arrays.items()})
    signs: NDArray[np.uint64] = arrays["signs"][1]
    return signs


def parts_for(parts: Sequence[Part], server: int, num_servers: int) -> list[Part]:
    """Return the parts with buckets that one of ``num_servers`` owns; some have others too."""
    mine = np.flatnonzero(owners(num_servers) == server)
    first, last = int(mine[0]), int(mine[-1])  # owners have ranges
    return [part for part in parts if part.buckets[0] <= last and first < part.buckets[1]]
