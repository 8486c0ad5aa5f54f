"""Rows into parts, as they come and in bounded memory.

    blocks of rows, any order        64 ranges of 256 buckets          files
    +------------------------+       +------------------------+
    | signs values states .. | --->  | range 0 | chunk chunk  | ---> table0-00-000003
    +------------------------+       | range 1 | chunk        |
                                     | ...                    |

Rows of a block are gathered once, into pieces of their own range, which ``writev`` takes as
they are. Parts are hashed, written and fsynced by threads beside the caller, which gathers
the next ones: what is gathered and what is being written stay below the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from persia._core.blocks import RowBlock
from persia._core.hashing import route
from persia._files.entries import NAME, NUM_BUCKETS, Part
from persia._files.parts import CODE_OF_DTYPE, take, write_columns
from persia._files.storage import Storage
from persia._files.tensors import CODES, Column
from persia.errors import ConfigError

NUM_RANGES = 64
BUCKETS_OF_RANGE = NUM_BUCKETS // NUM_RANGES
# Of one part: small enough to be read whole, large enough that a disk does not notice its end.
PART_BYTES = 64 << 20
# Neighbouring ranges share a part up to here, or a small checkpoint would be all small files.
_SHARED_BYTES = 8 << 20
_RANGE_OF_BUCKET = (np.arange(NUM_BUCKETS) // BUCKETS_OF_RANGE).astype(np.uint16)


@dataclass(slots=True)
class _Range:
    """What is gathered of one range of one kind of rows."""

    blocks: list[RowBlock] = field(default_factory=list)
    bytes: int = 0


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
        num_threads: That write, beside the caller.
        begin: Called by each of these when it begins.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        budget_bytes: int = 256 << 20,
        server: int = 0,
        part_bytes: int = PART_BYTES,
        num_threads: int = 2,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._budget = budget_bytes
        self._server = server
        self._part_bytes = part_bytes
        self._ranges: dict[_Kind, list[_Range]] = {}
        self._gathered = 0
        self._pool = ThreadPoolExecutor(num_threads, "persia-parts", initializer=begin)
        self._writing: deque[tuple[int, Future[Part]]] = deque()
        self._in_flight = 0
        self._parts: list[Part] = []
        self._number = 0

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

    @property
    def bytes_written(self) -> int:
        """Bytes of the parts that are done."""
        return sum(part.file.num_bytes for part in self._parts)

    def add(self, table_name: str, block: RowBlock) -> None:
        """Take rows; returns once what is held fits into the budget.

        Raises:
            CheckpointError: A part could not be written, this one or an earlier one.
        """
        if not NAME.fullmatch(table_name):
            raise ConfigError(
                f"table name: expected letters, digits and ._-, got {table_name!r}"
            )
        kind = _Kind(table_name, block.policy, block.dtype, block.dim, block.state_words)
        order, starts = route(block.signs, _RANGE_OF_BUCKET, NUM_RANGES)
        places = order.astype(np.intp)
        room = max(1, self._part_bytes // kind.row_bytes)
        ranges = self._ranges.setdefault(kind, [_Range() for _ in range(NUM_RANGES)])
        for number in range(NUM_RANGES):
            start, end = int(starts[number]), int(starts[number + 1])
            while start < end:
                target = ranges[number]
                count = min(end - start, room - target.bytes // kind.row_bytes)
                target.blocks.append(take(block, places[start : start + count]))
                target.bytes += count * kind.row_bytes
                self._gathered += count * kind.row_bytes
                start += count
                if target.bytes // kind.row_bytes >= room:
                    self._flush(kind, [number])
        self._shrink()

    def finish(self) -> tuple[Part, ...]:
        """Write what is left and make all parts durable; returns them.

        Raises:
            CheckpointError: A part could not be written.
        """
        for kind in list(self._ranges):
            for numbers in self._neighbours(kind):
                self._flush(kind, numbers)
                self._shrink()
        while self._writing:
            self._collect()
        if self._parts:
            self._storage.sync(self._prefix)
        self.close()
        return tuple(self._parts)

    def _shrink(self) -> None:
        """Write the fullest ranges, and wait for files, until the budget is kept."""
        while self._writing and self._writing[0][1].done():
            self._collect()
        while self.held_bytes > self._budget:
            if self._gathered > self._budget // 2 or not self._writing:
                kind, number = max(
                    ((kind, n) for kind in self._ranges for n in range(NUM_RANGES)),
                    key=lambda place: self._ranges[place[0]][place[1]].bytes,
                )
                self._flush(kind, [number])
            else:
                self._collect()
        while self._in_flight > self._budget // 2:
            self._collect()

    def _neighbours(self, kind: _Kind) -> Iterator[list[int]]:
        """Yield numbers of ranges that share a part."""
        together: list[int] = []
        total = 0
        for number, held in enumerate(self._ranges[kind]):
            if together and total + held.bytes > min(_SHARED_BYTES, self._part_bytes):
                yield together
                together, total = [], 0
            if held.blocks:
                together.append(number)
                total += held.bytes
        if together:
            yield together

    def _flush(self, kind: _Kind, numbers: list[int]) -> None:
        ranges = self._ranges[kind]
        blocks = [block for number in numbers for block in ranges[number].blocks]
        num_bytes = sum(ranges[number].bytes for number in numbers)
        for number in numbers:
            ranges[number] = _Range()
        path = f"{self._prefix}/{kind.table}-{numbers[0]:02}-{self._number:06}.safetensors"
        self._number += 1
        buckets = (numbers[0] * BUCKETS_OF_RANGE, (numbers[-1] + 1) * BUCKETS_OF_RANGE)
        self._gathered -= num_bytes
        self._in_flight += num_bytes
        future = self._pool.submit(self._write, path, kind, blocks, buckets)
        self._writing.append((num_bytes, future))

    def _collect(self) -> None:
        num_bytes, future = self._writing.popleft()
        self._parts.append(future.result())
        self._in_flight -= num_bytes

    def _write(
        self, path: str, kind: _Kind, blocks: list[RowBlock], buckets: tuple[int, int]
    ) -> Part:
        rows = sum(len(block.signs) for block in blocks)
        metadata = {
            "format": "persia-rows",
            "version": "1",
            "table": kind.table,
            "policy": str(kind.policy),
            "server": str(self._server),
            "buckets": f"{buckets[0]}..{buckets[1]}",
        }
        file = write_columns(self._storage, path, _columns(kind, blocks, rows), metadata)
        return Part(
            file,
            self._server,
            kind.table,
            kind.policy,
            kind.dtype,
            kind.dim,
            kind.state_words,
            rows,
            buckets,
            max(int(block.orders.max()) for block in blocks),
        )


def _columns(kind: _Kind, blocks: list[RowBlock], rows: int) -> dict[str, Column]:
    columns = {
        "signs": Column("U64", (rows,), [block.signs for block in blocks]),
        "orders": Column("U64", (rows,), [block.orders for block in blocks]),
        "states": Column("U32", (rows, kind.state_words), [block.states for block in blocks]),
        "values": Column(
            CODE_OF_DTYPE[kind.dtype], (rows, kind.dim), [block.values for block in blocks]
        ),
    }
    # Plain LRU counts no uses, and only what expires has an age: zeros are not written.
    if any(block.ages.any() for block in blocks):
        columns["ages"] = Column("U64", (rows,), [block.ages for block in blocks])
    if any(block.uses.any() for block in blocks):
        columns["uses"] = Column("U32", (rows,), [block.uses for block in blocks])
    return columns
