"""Rows into parts, as they come and in bounded memory.

    blocks of rows, any order       their rows by 64 ranges       files
    | signs values states .. | ---> | places by range  | -------> table0-00-000000, ranges 0..16

Blocks are held as they came. Once there are enough of a kind, neighbouring ranges become a part
each, and threads beside the caller copy its rows, array by array, into a window of memory in
which they are hashed and from which they are written, over and over: a row is moved once, from
where it lay into the cache. What is held and what is being written stay below the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from persia._core.base.hashing import route
from persia._core.store.blocks import RowBlock
from persia._core.store.part_rows import copy_rows
from persia._files.manifest import NUM_BUCKETS, Part
from persia._files.parts import CODE_OF_DTYPE, OPTIONAL, write_file
from persia._files.schema import NAME
from persia._files.storage import AT_ONCE, Buffer, BufferPool, Storage
from persia._files.tensors import CODES, head
from persia.errors import ConfigError

NUM_RANGES = 64
BUCKETS_OF_RANGE = NUM_BUCKETS // NUM_RANGES
# Of one part: small enough to be read whole, large enough that a disk does not notice its end.
PART_BYTES = 64 << 20
# Neighbouring ranges share a part up to here: each file costs a disk some milliseconds.
_SHARED_BYTES = 8 << 20
# Of the budget, what is held before it is written: one is gathered, others are being written.
_SHARES = 3
# Copied into the window at once.
_STEP_BYTES = 256 << 10
_RANGE_OF_BUCKET = (np.arange(NUM_BUCKETS) // BUCKETS_OF_RANGE).astype(np.uint16)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the rows of one part have in common."""

    table: str
    policy: int
    dtype: str
    dim: int
    state_words: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a file, if all of its arrays are there."""
        width = CODES[CODE_OF_DTYPE[self.dtype]].itemsize
        return 8 + width * self.dim + 4 * self.state_words + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a block; as long as they are held, all of the block is."""

    block: RowBlock
    places: NDArray[np.uint32]
    # Of its arrays those that a file may go without, where they are not all 0.
    extras: tuple[str, ...]


@dataclass(slots=True)
class _Pile:
    """The blocks that are held of one kind, with their rows by range."""

    rows: list[_Rows] = field(default_factory=list)
    # Of each block, where a range begins in its places; and their end.
    starts: list[NDArray[np.int64]] = field(default_factory=list)
    bytes: int = 0

    def of_ranges(self, first: int, end: int, most: int) -> Iterator[list[_Rows]]:
        """Yield the rows of ranges first..end - 1, at most ``most`` at a time."""
        found: list[_Rows] = []
        left = most
        for rows, starts in zip(self.rows, self.starts, strict=True):
            start, stop = int(starts[first]), int(starts[end])
            while start < stop:
                count = min(left, stop - start)
                found.append(_Rows(rows.block, rows.places[start : start + count], rows.extras))
                start, left = start + count, left - count
                if not left:
                    yield found
                    found, left = [], most
        if found:
            yield found


class PartWriter:
    """Writes the rows of one server; one thread calls it.

    A context: leaving it waits for the files that are being written, and keeps what is there.
    Parts are nothing before a manifest names them.

    Args:
        storage: The catalog's.
        prefix: Folder of the parts below it: the checkpoint's id, and more.
        budget_bytes: Of rows held here, gathered or being written.
        server: Which server's rows these are.
        part_bytes: Of one part at most, unless a single row is larger.
        num_threads: That write, beside the caller; each calls ``begin`` first.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        budget_bytes: int = 256 << 20,
        server: int = 0,
        part_bytes: int = PART_BYTES,
        num_threads: int = 4,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._storage, self._prefix, self._server = storage, prefix, server
        self._budget, self._part_bytes = budget_bytes, part_bytes
        self._piles: dict[_Kind, _Pile] = {}
        self._gathered = 0
        self._pool = ThreadPoolExecutor(num_threads, "persia-parts", initializer=begin)
        self._memory = BufferPool()
        # Parts of one pile together: its blocks are held until the last of them is written.
        self._writing: deque[tuple[int, list[Future[Part]]]] = deque()
        self._in_flight = 0
        self._parts: list[Part] = []
        self._numbers = itertools.count()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the files that are being written; nothing more is."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def held_bytes(self) -> int:
        """Bytes of rows held here, gathered or being written."""
        return self._gathered + self._in_flight

    def add(self, table_name: str, block: RowBlock) -> None:
        """Take rows, which must not change any more; returns once they fit into the budget."""
        if not re.fullmatch(NAME, table_name):
            raise ConfigError(
                f"table name: expected letters, digits and ._-, got {table_name!r}"
            )
        if not len(block):
            return
        kind = _Kind(table_name, block.policy, block.dtype, block.dim, block.state_words)
        places, starts = route(block.signs, _RANGE_OF_BUCKET, NUM_RANGES)
        # Plain LRU counts no uses, and only what expires has an age: zeros are not written.
        extras = tuple(name for name in OPTIONAL if getattr(block, name).any())
        pile = self._piles.setdefault(kind, _Pile())
        pile.rows.append(_Rows(block, places, extras))
        pile.starts.append(starts)
        pile.bytes += len(block) * kind.row_bytes
        self._gathered += len(block) * kind.row_bytes
        self._shrink()

    def finish(self) -> tuple[Part, ...]:
        """Write what is left and make all parts durable; returns them."""
        for kind in list(self._piles):
            self._flush(kind)
        while self._writing:
            self._collect()
        if self._parts:
            self._storage.sync(self._prefix)
        self.close()
        return tuple(self._parts)

    def _shrink(self) -> None:
        """Write the largest piles, and wait for files, until the budget is kept."""
        while self._writing and all(part.done() for part in self._writing[0][1]):
            self._collect()
        while self._gathered > self._budget // _SHARES:
            self._flush(max(self._piles, key=lambda kind: self._piles[kind].bytes))
        while self.held_bytes > self._budget:
            self._collect()

    def _flush(self, kind: _Kind) -> None:
        pile = self._piles.pop(kind)
        most = max(1, self._part_bytes // kind.row_bytes)
        parts = [
            self._pool.submit(self._write, kind, first, end, rows, next(self._numbers))
            for first, end in _neighbours(pile)
            for rows in pile.of_ranges(first, end, most)
        ]
        self._gathered -= pile.bytes
        self._in_flight += pile.bytes
        self._writing.append((pile.bytes, parts))

    def _collect(self) -> None:
        num_bytes, parts = self._writing.popleft()
        self._parts += [part.result() for part in parts]
        self._in_flight -= num_bytes

    def _write(self, kind: _Kind, first: int, end: int, rows: list[_Rows], number: int) -> Part:
        path = f"{self._prefix}/{kind.table}-{first:02}-{number:06}.safetensors"
        buckets = (first * BUCKETS_OF_RANGE, end * BUCKETS_OF_RANGE)
        count = sum(len(each.places) for each in rows)
        metadata = {
            "format": "persia-rows",
            "version": "1",
            "table": kind.table,
            "policy": str(kind.policy),
            "server": str(self._server),
            "buckets": f"{buckets[0]}..{buckets[1]}",
        }
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {
            "signs": ("U64", (count,)),
            "orders": ("U64", (count,)),
            "states": ("U32", (count, kind.state_words)),
            "values": (CODE_OF_DTYPE[kind.dtype], (count, kind.dim)),
            "ages": ("U64", (count,)),
            "uses": ("U32", (count,)),
        }
        for name in OPTIONAL - {name for each in rows for name in each.extras}:
            del arrays[name]
        first_bytes, names = head(arrays, metadata)
        window = self._memory.take(AT_ONCE + kind.row_bytes)
        written = write_file(self._storage, path, _pieces(first_bytes, names, rows, window))
        return Part(
            **dataclasses.asdict(written),
            **dataclasses.asdict(kind),
            server=self._server,
            num_rows=count,
            buckets=buckets,
            max_order=max(int(each.block.orders.take(each.places).max()) for each in rows),
        )


def _neighbours(pile: _Pile) -> list[tuple[int, int]]:
    """Return the ranges that become a part together, first and end: as many as is worth a file.

    The same ones wherever rows are spread alike: a reader that takes parts in the order of
    their buckets then compares few of them at a time.
    """
    rows = np.diff(np.sum(pile.starts, axis=0))
    held = np.flatnonzero(rows)
    width = NUM_RANGES
    while width > 1 and pile.bytes >= _SHARED_BYTES * len(np.unique(held // (width // 2))):
        width //= 2
    return [
        (int(mine[0]), int(mine[-1]) + 1)
        for mine in (held[held // width == number] for number in np.unique(held // width))
    ]


def _pieces(
    first_bytes: bytes, names: Sequence[str], rows: Sequence[_Rows], window: NDArray[np.uint8]
) -> Iterator[Buffer]:
    """Yield a file, piece by piece of the window; each is gone once the next is asked for."""
    filled = len(first_bytes)
    window[:filled] = np.frombuffer(first_bytes, np.uint8)
    for name in names:
        for each in rows:
            source = getattr(each.block, name)
            source = source.reshape(len(source), -1).view(np.uint8)
            width = source.shape[1]
            start = 0
            while width and start < len(each.places):
                room = min(AT_ONCE - filled, _STEP_BYTES)
                chosen = each.places[start : start + -(-room // width)]
                end = filled + len(chosen) * width
                copy_rows(source, chosen, window[filled:end])
                start, filled = start + len(chosen), end
                if filled >= AT_ONCE:
                    yield window[:AT_ONCE].data
                    # What a row has beyond the piece.
                    window[: filled - AT_ONCE] = window[AT_ONCE:filled]
                    filled -= AT_ONCE
    yield window[:filled].data
