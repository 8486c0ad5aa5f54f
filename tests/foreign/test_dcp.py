"""Folders of torch.distributed.checkpoint, with shards as TorchRec's planner cuts tables."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.state_dict_saver import save

from persia._foreign import dcp
from persia._foreign.dcp import dcp_tables, read_dcp
from persia.errors import CheckpointError, DataError
from tests.support.fixtures import Monkey

NUM, DIM = 10, 6
WEIGHT = torch.arange(NUM * DIM, dtype=torch.float32).reshape(NUM, DIM)
PREFIX = "model.sparse.embedding_bag_collection.embedding_bags"
# Row, column, number of rows and of columns of each shard.
CUTS = {
    "whole": [(0, 0, 10, 6)],
    "by_rows": [(0, 0, 4, 6), (4, 0, 4, 6), (8, 0, 2, 6)],
    "by_columns": [(0, 0, 10, 2), (0, 2, 10, 4)],
    "by_both": [(0, 0, 3, 2), (3, 0, 7, 2), (0, 2, 6, 4), (6, 2, 4, 4)],
    # TorchRec has empty shards where there are more ranks than rows.
    "with_none": [(0, 0, 10, 6), (10, 0, 0, 6)],
}


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A process group of one, to save with; reading needs none."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(cuts: list[tuple[int, int, int, int]]) -> Any:
    shards = [
        Shard(
            WEIGHT[top : top + height, left : left + width].clone(),
            ShardMetadata([top, left], [height, width], "rank:0/cpu"),
        )
        for top, left, height, width in cuts
    ]
    return init_from_local_shards(shards, NUM, DIM)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp")
    with process_group():
        state: dict[str, Any] = {
            f"{PREFIX}.t_{name}.weight": sharded(cuts) for name, cuts in CUTS.items()
        }
        plain = {"model.over.weight": torch.ones(2, 3), "model.bias": torch.ones(3), "step": 7}
        save(state | plain, checkpoint_id=path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rows_of(folder: Path, table: str, ids: Any = None) -> dict[int, list[float]]:
    source = read_dcp(folder, table, ids)
    found: dict[int, list[float]] = {}
    for block in source.blocks():
        assert len(block.ids) <= 3
        found.update(zip(block.ids.tolist(), block.vectors.tolist(), strict=True))
    assert len(found) == source.num_rows
    return found


@pytest.mark.parametrize("name", CUTS)
def test_each_row_is_read_however_it_was_sharded(
    folder: Path, name: str, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(dcp, "BLOCK_ROWS", 3)
    rows = WEIGHT.tolist()
    assert rows_of(folder, f"t_{name}") == dict(enumerate(rows))
    key = f"{PREFIX}.t_{name}.weight"
    ids = np.arange(NUM)[::-1] * 7 + 2**40
    assert rows_of(folder, key, ids) == dict(zip(ids.tolist(), rows, strict=True))
    some = {99: 7, 98: 0, 97: 9}
    assert rows_of(folder, key, some) == {x: rows[row] for x, row in some.items()}


def test_only_shards_with_rows_that_are_wanted_are_read(
    folder: Path, monkeypatch: Monkey
) -> None:
    bands = []
    read_band = dcp._read_band

    def noted(*arguments: Any) -> Any:
        bands.append(arguments[3])
        return read_band(*arguments)

    monkeypatch.setattr(dcp, "_read_band", noted)
    (block,) = read_dcp(folder, "t_by_rows", {1: 9}).blocks()
    assert block.ids.tolist() == [1]
    assert bands == [(8, 10)]


def test_tables_have_the_names_that_torchrec_gives_them(folder: Path) -> None:
    assert dcp_tables(folder) == {f"t_{name}": f"{PREFIX}.t_{name}.weight" for name in CUTS}
    source = read_dcp(folder, "model.over.weight")
    assert (source.dim, source.num_rows) == (3, 2)
    assert "state of TorchRec's optimizer" in source.notes[0]


def test_what_is_no_table_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no table 't_whol', did you mean 't_whole'"):
        read_dcp(folder, "t_whol")
    for key in ("step", "model.bias"):
        with pytest.raises(DataError, match=rf"{key}: expected a tensor \[num, dim\]"):
            read_dcp(folder, key)
    with pytest.raises(DataError, match="expected a vector for each of 3 ids, got 10"):
        read_dcp(folder, "t_whole", [1, 2, 3])
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "none", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="cannot be read as a folder of torch"):
            read_dcp(path, "t_whole")


def test_a_folder_that_lacks_a_file_is_refused(folder: Path) -> None:
    for path in folder.glob("*.distcp"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"t_whole.weight: cannot be read"):
        list(read_dcp(folder, "t_whole").blocks())
