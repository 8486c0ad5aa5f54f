"""Files of ids and vectors, as searches for nearest neighbours read them: Parquet and .npz."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._files.storage import write_atomic
from persia.errors import ConfigError

SUFFIXES = (".parquet", ".npz")

Blocks = Iterable[tuple[NDArray[np.uint64], NDArray[np.float32]]]


def check_suffix(path: Path) -> None:
    """Raise a ConfigError unless files of this name can be written."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: expected a name that ends with {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        arrow()


def write_vectors(path: Path, blocks: Blocks, dim: int) -> int:
    """Write ids u64 [n] and vectors f32 [n, dim] into one file; returns n.

    A Parquet file is written block by block, in their order; a .npz file at once, by ascending
    id. The file appears whole or not at all.

    Raises:
        ConfigError: Of another suffix, or without pyarrow.
        CheckpointError: The file cannot be written.
    """
    check_suffix(path)
    write = _write_npz if path.suffix == ".npz" else _write_parquet
    num_rows = 0

    def write_aside(aside: Path) -> None:
        nonlocal num_rows
        num_rows = write(aside, blocks, dim)

    write_atomic(path, write_aside)
    return num_rows


def _write_npz(path: Path, blocks: Blocks, dim: int) -> int:
    parts = list(blocks)
    ids = np.concatenate([np.empty(0, np.uint64), *(one for one, _ in parts)])
    rows = np.concatenate([np.empty((0, dim), np.float32), *(one for _, one in parts)])
    order = np.argsort(ids)
    with path.open("wb") as file:
        np.savez(file, id=ids[order], vector=rows[order])
    return len(ids)


def _write_parquet(path: Path, blocks: Blocks, dim: int) -> int:
    pa, parquet = arrow()
    vectors = pa.list_(pa.float32(), dim)
    schema = pa.schema([("id", pa.uint64()), ("vector", vectors)])
    num_rows = 0
    with parquet.ParquetWriter(str(path), schema) as writer:
        for ids, rows in blocks:
            flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
            lists = pa.FixedSizeListArray.from_arrays(flat, dim)
            writer.write_table(pa.table([pa.array(ids), lists], schema=schema))
            num_rows += len(ids)
    return num_rows


def arrow() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet, or raise a ConfigError that says how to get them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise ConfigError(f"Parquet needs pyarrow: pip install pyarrow ({exc})") from exc
    return pyarrow, pyarrow.parquet
