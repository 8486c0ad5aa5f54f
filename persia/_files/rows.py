"""The rows of a checkpoint that may be a chain: a full one and the deltas to it.

    full      delta 1    delta 2        read from the latest to the oldest:
    a b c d   b c -a     c e            c e (2)   b (1; c is known, a is gone)   d (0)

A row is yielded once, in its latest state, and not at all if it was deleted after that. Only
the signs of deltas are held in memory, and those of one range of buckets at a time if there
are more than ``_REMEMBERED``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from persia._core.base.hashing import mix64_array
from persia._core.store.blocks import RowBlock
from persia._files.catalog import chain, discard, new_id, publish
from persia._files.manifest import NUM_BUCKETS, File, Manifest, Part, now, sketch_name
from persia._files.part_writer import PartWriter
from persia._files.parts import (
    DuplicateFilter,
    check_file,
    check_once,
    check_part,
    filter_owned,
    parts_for,
    read_ahead,
    read_deleted,
    read_file,
    split,
    take,
    write_file,
)
from persia._files.storage import BufferPool, Storage
from persia.version import __version__

# Signs of deltas held at a time, 8 bytes each, and as much again to sort them.
_REMEMBERED = 16 << 20
# Rows held while a checkpoint is rewritten.
_BUDGET_BYTES = 256 << 20

Progress = Callable[[int], object]
"""Called with the bytes that were read since the last call."""


def no_progress(num_bytes: int) -> None:
    pass


def rows_of(
    storage: Storage,
    manifests: Sequence[Manifest],
    progress: Progress = no_progress,
    *,
    buckets: tuple[int, int] = (0, NUM_BUCKETS),
) -> Iterator[tuple[Part, RowBlock]]:
    """Yield every row of a chain once, in its latest state, and the part that it is from.

    Places in the order of eviction are comparable between rows of one shard and server, here
    too: what changed later goes later.
    """
    changed = sum(part.num_rows for manifest in manifests[1:] for part in manifest.parts)
    gone = [
        [read_deleted(storage, each) for each in manifest.deleted] for manifest in manifests
    ]
    offsets = _offsets(manifests)
    memory = BufferPool()
    passes = -(-changed // _REMEMBERED) or 1
    for number in range(passes):
        width = buckets[1] - buckets[0]
        first = buckets[0] + width * number // passes
        end = buckets[0] + width * (number + 1) // passes
        known = np.empty(0, np.uint64)
        for place in reversed(range(len(manifests))):
            manifest, offset = manifests[place], offsets[place]
            seen = [known, *gone[place]]
            needed = [
                part
                for part in manifest.parts
                if first < part.buckets[1] and part.buckets[0] < end
            ]
            for part, block in read_ahead(storage, needed, memory):
                progress(part.num_bytes)
                if part.buckets[0] < first or end < part.buckets[1]:
                    block = _within(block, first, end)
                if place > 0:
                    seen.append(block.signs)
                for piece in split(block) if len(known) else [block]:
                    left = _without(piece, known)
                    if offset:
                        left = dataclasses.replace(left, orders=left.orders + np.uint64(offset))
                    if len(left):
                        yield part, left
            if place > 0:
                known = np.sort(np.concatenate(seen))


def _offsets(manifests: Sequence[Manifest]) -> list[int]:
    """Return what is added to the orders of each, so that the later go later."""
    offsets, total = [], 0
    for manifest in manifests:
        offsets.append(total)
        total += max((part.max_order + 1 for part in manifest.parts), default=0)
    # Orders that fill 64 bits have no room for an offset; ties are all that is lost.
    return offsets if total < 1 << 64 else [0] * len(offsets)


def _within(block: RowBlock, first: int, end: int) -> RowBlock:
    buckets = mix64_array(block.signs) >> np.uint64(50)
    return take(block, (buckets >= first) & (buckets < end))


def _without(block: RowBlock, known: NDArray[np.uint64]) -> RowBlock:
    """Return rows whose signs are not in ``known``, which is sorted."""
    if not len(known):
        return block
    # In order, each search finds in the cache what the one before has read.
    order = np.argsort(block.signs)
    signs = block.signs[order]
    places = np.minimum(np.searchsorted(known, signs), len(known) - 1)
    is_new = np.empty(len(signs), np.bool_)
    is_new[order] = known[places] != signs
    return block if is_new.all() else take(block, is_new)


def verify(
    storage: Storage, identity: str | None = None, progress: Progress = no_progress
) -> list[Manifest]:
    """Check every file of a checkpoint and of those that it is based on; returns the chain."""
    manifests = chain(storage, identity)
    for manifest in manifests:
        for file in manifest.files.values():
            check_file(storage, file)
            progress(file.num_bytes)
        for deleted in manifest.deleted:
            read_deleted(storage, deleted)
            progress(deleted.num_bytes)
        window = DuplicateFilter(f"parts of {storage.at(manifest.id)}")
        memory = BufferPool()
        for part in sorted(manifest.parts, key=lambda part: part.buckets):
            signs = check_part(storage, part, memory)
            check_once([signs], storage.at(part.path))
            window.add(part, signs)
            progress(part.num_bytes)
        window.close()
    return manifests


def rewrite(
    storage: Storage,
    out: Storage,
    identity: str | None = None,
    *,
    num_servers: int | None = None,
    progress: Progress = no_progress,
) -> Manifest:
    """Write a checkpoint again as a full one, into the same catalog or another one.

    As ``num_servers`` would have written it, the same number by default. If it fails, nothing
    is published.
    """
    manifests = chain(storage, identity)
    last = manifests[-1]
    own = new_id(out)
    count = num_servers or last.num_servers
    # All writers hold rows at the same time, so they share the budget.
    writers = [
        PartWriter(
            out, f"{own}/server{server}", server=server, budget_bytes=_BUDGET_BYTES // count
        )
        for server in range(count)
    ]
    try:
        parts = _write_rows(rows_of(storage, manifests, progress), manifests, writers)
        manifest = _carried_over(storage, out, last, own, count, parts)
        publish(out, manifest)
    except BaseException:
        discard(out, own)
        raise
    return manifest


def _write_rows(
    rows: Iterable[tuple[Part, RowBlock]],
    manifests: Sequence[Manifest],
    writers: Sequence[PartWriter],
) -> list[Part]:
    """Write rows by the server that owns them, a writer each."""
    count = len(writers)
    is_as_written = all(manifest.num_servers == count for manifest in manifests)
    with ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        for part, block in rows:
            if is_as_written:
                writers[part.server].add(part.table, block)
                continue
            for server, writer in enumerate(writers):
                if parts_for([part], server, count):
                    writer.add(part.table, filter_owned(block, server, count))
        return [part for writer in writers for part in writer.finish()]


def _carried_over(
    storage: Storage, out: Storage, last: Manifest, own: str, count: int, parts: list[Part]
) -> Manifest:
    """Copy the files that are no rows, and return the manifest of the whole."""
    names = set(last.files)
    if count != last.num_servers:
        names -= {sketch_name(server) for server in range(last.num_servers)}
    files = {name: _copy(storage, out, last.files[name], own, name) for name in sorted(names)}
    if files:
        out.sync(own)
    return dataclasses.replace(
        last,
        id=own,
        kind="full",
        base=None,
        created=now(),
        writer=__version__,
        num_servers=count,
        parts=tuple(parts),
        deleted=(),
        files=files,
    )


def _copy(storage: Storage, out: Storage, file: File, own: str, name: str) -> File:
    data = read_file(storage, file, max_bytes=file.num_bytes)
    return write_file(out, f"{own}/{name}", [data.data])
