"""Small tables whose rows say who they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from persia.embedding.data import PersiaBatch
from persia.readers import Columns

# ``row`` numbers all rows; ids follow from it.
COLUMNS = Columns(ids=["user", "items"], dense=["price"], labels=["row"])


def table(first: int, count: int) -> pa.Table:
    """Rows from a number on."""
    rows = np.arange(first, first + count)
    offsets = np.concatenate([[0], np.cumsum(rows % 4)]).astype(np.int32)
    items = np.repeat(rows, rows % 4).astype(np.int64)
    return pa.table(
        {
            "row": rows,
            "user": rows.astype(np.uint64) * 3,
            "items": pa.ListArray.from_arrays(offsets, items),
            "price": rows.astype(np.float32) / 8,
        }
    )


def write_folder(folder: Path, sizes: Iterable[int]) -> int:
    """Write Parquet files in a hive-partitioned folder; returns all rows."""
    first = 0
    for number, size in enumerate(sizes):
        path = folder / f"day={number}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(table(first, size), path, row_group_size=7)
        first += size
    return first


def rows_of(batches: Iterable[PersiaBatch]) -> list[int]:
    """The numbers of all rows, in the order read."""
    return [int(row) for batch in batches for row in batch.labels[0].data[:, 0]]


def bytes_of(batches: Iterable[PersiaBatch]) -> list[bytes]:
    return [batch.to_bytes() for batch in batches]


def check_exact(reader: Any) -> list[bytes]:
    """A run that continues gets exactly the rest, from every batch on; returns all of them."""
    whole = bytes_of(reader)
    for first in range(len(whole) + 2):
        assert bytes_of(reader.iter_from(first)) == whole[first:]
    return whole


def ids_of(batch: PersiaBatch, name: str) -> list[list[int]]:
    """The ids of each sample of a feature."""
    (feature,) = (each for each in batch.features if each.name == name)
    values = feature.distinct[feature.inverse]
    return [ids.tolist() for ids in np.split(values, np.cumsum(feature.lengths())[:-1])]
