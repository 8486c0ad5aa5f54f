"""Files of ids and vectors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from persia._files.vectors import check_suffix, write_vectors
from persia.errors import CheckpointError, ConfigError, StoreError
from tests.support.fixtures import Monkey

IDS = np.array([9, 3, 2**63], np.uint64)
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
BLOCKS = [(IDS[:2], ROWS[:2]), (IDS[2:], ROWS[2:])]


def test_a_parquet_file_has_the_blocks_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.parquet"
    assert write_vectors(path, iter(BLOCKS), 2) == 3
    table = pyarrow.parquet.read_table(path)
    assert table.column("id").to_pylist() == IDS.tolist()
    assert table.column("vector").to_pylist() == ROWS.tolist()
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 2)


def test_a_npz_file_is_in_the_order_of_ids(tmp_path: Path) -> None:
    assert write_vectors(tmp_path / "x.npz", BLOCKS, 2) == 3
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        assert file["id"].tolist() == [3, 9, 2**63]
        assert file["vector"].tolist() == ROWS[[1, 0, 2]].tolist()


@pytest.mark.parametrize("name", ["x.parquet", "x.npz"])
def test_no_rows_make_a_file_of_none(tmp_path: Path, name: str) -> None:
    assert write_vectors(tmp_path / name, [], 2) == 0
    assert (tmp_path / name).stat().st_size


def failing(error: Exception) -> Iterator[Any]:
    yield BLOCKS[0]
    raise error


@pytest.mark.parametrize("name", ["x.parquet", "x.npz"])
def test_a_failure_leaves_no_file_and_keeps_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="rows are gone"):
        write_vectors(tmp_path / name, failing(StoreError("rows are gone")), 2)
    with pytest.raises(CheckpointError, match=f"{name} cannot be written: the disk is full"):
        write_vectors(tmp_path / name, failing(OSError("the disk is full")), 2)
    assert not list(tmp_path.iterdir())


def test_other_names_and_no_pyarrow_are_refused(monkeypatch: Monkey) -> None:
    with pytest.raises(ConfigError, match=r"x.csv: expected a name that ends with"):
        check_suffix(Path("x.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="Parquet needs pyarrow: pip install pyarrow"):
        check_suffix(Path("x.parquet"))
    check_suffix(Path("x.npz"))
