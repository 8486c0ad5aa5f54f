"""Tables of TorchRec, from folders of torch.distributed.checkpoint, without a process group.

A table is stored as shards: rectangles of it, by rows, by columns, or both. It is read in bands
of rows between two bounds of shards, so that one band and one shard are in memory at a time.

    rows    0 +-------+-------+
              |   a   |       |        bands 0..2 of a and b, 2..4 of a and c
            2 |       +-------+
              +-------+   c   |
            4 +-------+-------+
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from persia._foreign.arrays import rows_of_ids
from persia._foreign.source import BLOCK_ROWS, IDBlock, IDSource, as_vectors
from persia.errors import CheckpointError, DataError, did_you_mean

# Of EmbeddingBagCollection and EmbeddingCollection, whatever the model around them is.
_WEIGHT = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")
_NOTE = "the state of TorchRec's optimizer is not taken over: rows begin with this job's"


def dcp_tables(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the tables of a DCP folder: TorchRec's name of each, and its key in the folder."""
    tensors = _metadata(_reader(folder), folder).state_dict_metadata
    found = ((_WEIGHT.search(key), key) for key in tensors)
    return {match[1]: key for match, key in found if match}


def read_dcp(folder: str | os.PathLike[str], table: str, ids: Any = None) -> IDSource:
    """Read a table that ``torch.distributed.checkpoint`` saved, such as TorchRec's.

    The folder's file ``.metadata`` is a pickle, which torch executes: only read a folder whose
    writer you trust.

    Args:
        folder: What was saved.
        table: TorchRec's name of the table (``dcp_tables`` has all), or the key of any tensor
            [num, dim].
        ids: As of ``read_state_dict``.

    Raises:
        CheckpointError: The folder cannot be read.
        DataError: There is no such table, or the ids do not fit.
    """
    reader = _reader(folder)
    metadata = _metadata(reader, folder)
    tensors = metadata.state_dict_metadata
    key = table if table in tensors else dcp_tables(folder).get(table)
    if key is None:
        known = [*dcp_tables(folder), *map(str, tensors)]
        listed = did_you_mean(table, known) or f"; there are {', '.join(known)}"
        raise DataError(f"{folder}: no table {table!r}{listed:.300}")
    stored = tensors[key]
    where = f"{folder}: {key}"
    if not hasattr(stored, "chunks") or len(stored.size) != 2:
        raise DataError(f"{where}: expected a tensor [num, dim], got {stored!r:.200}")
    num, dim = map(int, stored.size)
    own, rows = rows_of_ids(where, ids, num)
    numbers = np.arange(num) if rows is None else rows

    def read() -> Iterator[IDBlock]:
        for first, last in _bands(stored, num):
            begin, end = np.searchsorted(numbers, (first, last))
            if begin == end:
                continue
            band = _read_band(reader, metadata, key, (first, last), dim, where)
            for start in range(int(begin), int(end), BLOCK_ROWS):
                part = slice(start, min(start + BLOCK_ROWS, int(end)))
                chosen = band[(numbers[part] - first).tolist()]
                yield IDBlock(own[part], as_vectors(where, chosen.float().numpy()))

    return IDSource(where, dim, len(own), read, (_NOTE,))


def _reader(folder: str | os.PathLike[str]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(folder)


def _metadata(reader: Any, folder: str | os.PathLike[str]) -> Any:
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
    except Exception as exc:  # of torch's and pickle's own kinds
        raise CheckpointError(
            f"{folder}: cannot be read as a folder of torch.distributed.checkpoint: {exc}"
        ) from exc
    return metadata


def _bands(stored: Any, num: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows between two bounds of shards."""
    bounds = {0, num}
    for chunk in stored.chunks:
        bounds |= {int(chunk.offsets[0]), int(chunk.offsets[0] + chunk.sizes[0])}
    ordered = sorted(bounds)
    yield from itertools.pairwise(ordered)


def _read_band(
    reader: Any, metadata: Any, key: str, band: tuple[int, int], dim: int, where: str
) -> Any:
    """Return the rows of a band, a tensor [rows, dim], from all shards that have a part."""
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    stored, (first, last) = metadata.state_dict_metadata[key], band
    items, num_values = [], 0
    for number, chunk in enumerate(stored.chunks):
        top, left = map(int, chunk.offsets)
        height, width = map(int, chunk.sizes)
        if not (top <= first and last <= top + height and width):
            continue
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(key),
                dest_offsets=torch.Size((0, left)),
                storage_index=MetadataIndex(key, chunk.offsets, number),
                storage_offsets=torch.Size((first - top, 0)),
                lengths=torch.Size((last - first, width)),
            )
        )
        num_values += (last - first) * width
    if num_values != (last - first) * dim:
        raise CheckpointError(
            f"{where}: rows {first} to {last - 1} are not whole in its shards"
        )
    target = torch.empty(last - first, dim, dtype=stored.properties.dtype)
    try:
        reader.read_data(LoadPlan(items), _Target(target)).wait()
    except Exception as exc:  # of torch's own kinds
        raise CheckpointError(f"{where}: cannot be read: {exc}") from exc
    return target


class _Target:
    """What a reader of torch asks for where a part of a tensor goes: its ``LoadPlanner``."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def resolve_tensor(self, item: Any) -> Any:
        tensor = self._tensor
        for axis, (offset, length) in enumerate(
            zip(item.dest_offsets, item.lengths, strict=True)
        ):
            tensor = tensor.narrow(axis, offset, length)
        return tensor

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """Do nothing: it was written in place."""
