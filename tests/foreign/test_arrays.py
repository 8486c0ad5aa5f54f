"""Rows from NumPy, Parquet and state dicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from persia._files.vectors import write_vectors
from persia._foreign import arrays
from persia._foreign.arrays import read_numpy, read_parquet, read_state_dict
from persia._foreign.source import IDSource
from persia.errors import CheckpointError, ConfigError, DataError, DataTypeError
from tests.support.fixtures import Monkey

IDS = np.array([5, 3, 2**63, 9, 7], np.uint64)
VECTORS = np.arange(15, dtype=np.float32).reshape(5, 3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(arrays, "BLOCK_ROWS", 2)


def assert_same(source: IDSource, ids: Any = IDS, vectors: Any = VECTORS) -> None:
    blocks = list(source.blocks())
    assert all(len(block.ids) <= 2 for block in blocks)
    assert source.dim == vectors.shape[1]
    assert source.num_rows == len(ids)
    assert np.concatenate([block.ids for block in blocks]).tolist() == ids.tolist()
    found = np.concatenate([block.vectors for block in blocks])
    assert found.tobytes() == vectors.astype(np.float32).tobytes()
    assert all(block.states is None for block in blocks)


# --- NumPy -----------------------------------------------------------------------------------


def test_arrays_and_their_files_are_read(tmp_path: Path) -> None:
    assert_same(read_numpy(IDS, VECTORS))
    assert_same(read_numpy(IDS.tolist(), VECTORS.astype(np.float64)))
    np.save(tmp_path / "ids.npy", IDS)
    np.save(tmp_path / "vectors.npy", VECTORS)
    assert_same(read_numpy(tmp_path / "ids.npy", str(tmp_path / "vectors.npy")))
    assert_same(read_numpy(IDS, tmp_path / "vectors.npy"))
    np.savez(tmp_path / "both.npz", ids=IDS, vectors=VECTORS)
    assert_same(read_numpy(tmp_path / "both.npz"))
    write_vectors(tmp_path / "own.npz", [(IDS, VECTORS)], 3)
    order = np.argsort(IDS)
    assert_same(read_numpy(tmp_path / "own.npz"), IDS[order], VECTORS[order])


def test_what_is_no_file_of_arrays_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("no array")
    np.savez(tmp_path / "other.npz", x=IDS)
    np.save(tmp_path / "ids.npy", IDS)
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: read_numpy(tmp_path / "no.npy", VECTORS), CheckpointError, "no.npy: cannot"),
        (
            lambda: read_numpy(tmp_path / "text.npy", VECTORS),
            CheckpointError,
            "text.npy: cannot",
        ),
        (lambda: read_numpy(tmp_path / "other.npz"), CheckpointError, "id and vector, got x"),
        (lambda: read_numpy(tmp_path / "no.npz"), CheckpointError, "no.npz: cannot be read"),
        (lambda: read_numpy(tmp_path / "ids.npy"), CheckpointError, "ids.npy: cannot be read"),
        (
            lambda: read_numpy(tmp_path / "other.npz", VECTORS),
            CheckpointError,
            "one of several",
        ),
        (lambda: read_numpy(IDS), ConfigError, "expected ids and vectors, or the path"),
        (lambda: read_numpy(IDS[1:], VECTORS), DataError, "each of 4 ids, got 5"),
        (lambda: read_numpy(IDS * 0.5, VECTORS), DataTypeError, "expected ids as integers"),
        (lambda: read_numpy(IDS, IDS), DataTypeError, "expected vectors of floats"),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


# --- Parquet ---------------------------------------------------------------------------------


def write_table(path: Path, ids: Any, vectors: Any, names: Any = ("id", "vector")) -> Path:
    pyarrow.parquet.write_table(pa.table([ids, vectors], names=list(names)), str(path))
    return path


def test_parquet_of_any_list_and_integer_type_is_read(tmp_path: Path) -> None:
    lists = VECTORS.tolist()
    for number, (ids, vectors) in enumerate(
        [
            (pa.array(IDS), pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.ravel()), 3)),
            (pa.array(IDS.view(np.int64)), pa.array(lists, pa.list_(pa.float64()))),
            (pa.array(IDS), pa.array(lists, pa.large_list(pa.float16()))),
        ]
    ):
        assert_same(read_parquet(write_table(tmp_path / f"{number}.parquet", ids, vectors)))
    own = tmp_path / "own.parquet"
    assert write_vectors(own, [(IDS[:2], VECTORS[:2]), (IDS[2:], VECTORS[2:])], 3) == 5
    assert_same(read_parquet(own))
    named = write_table(
        tmp_path / "named.parquet", pa.array(IDS), pa.array(lists), ("item", "embedding")
    )
    assert_same(read_parquet(named, "item", "embedding"))


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    for number in range(5):
        part = slice(number, number + 1)
        write_vectors(tmp_path / f"{number}.parquet", [(IDS[part], VECTORS[part])], 3)
    assert_same(read_parquet(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"none: expected files that end with \.parquet"):
        read_parquet(tmp_path / "none")


def test_an_empty_parquet_file_has_a_dim(tmp_path: Path) -> None:
    write_vectors(tmp_path / "none.parquet", [], 3)
    source = read_parquet(tmp_path / "none.parquet")
    assert (source.dim, source.num_rows, list(source.blocks())) == (3, 0, [])


def test_what_is_no_such_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(CheckpointError, match=r"text.parquet: cannot be read as Parquet"):
        read_parquet(tmp_path / "text.parquet")
    ids = pa.array(IDS)
    path = write_table(tmp_path / "x.parquet", ids, pa.array(VECTORS.tolist()), ("id", "v"))
    with pytest.raises(CheckpointError, match="expected a column vector, got id, v"):
        read_parquet(path)
    lists: Any
    for lists, text in (
        ([[1.0], [1.0, 2.0]], "expected vectors of 1 values, got one of 2"),
        ([[1.0], None], "expected vectors of 1 values, got a null"),
        ([[1.0], [None]], "expected numbers in each vector, got a null"),
    ):
        path = write_table(tmp_path / "x.parquet", ids[:2], pa.array(lists))
        with pytest.raises(DataError, match=text):
            list(read_parquet(path).blocks())
    path = write_table(tmp_path / "x.parquet", pa.array([1, None]), pa.array([[1.0], [2.0]]))
    with pytest.raises(DataError, match="expected an id in each row, got a null"):
        list(read_parquet(path).blocks())


# --- state dicts -----------------------------------------------------------------------------


def test_a_weight_is_read_row_by_row(tmp_path: Path) -> None:
    bag = torch.nn.EmbeddingBag(5, 3, _weight=torch.tensor(VECTORS))
    state = torch.nn.ModuleDict({"user": bag}).state_dict()
    torch.save(state, tmp_path / "dense.pt")
    for given in (state, tmp_path / "dense.pt", str(tmp_path / "dense.pt")):
        assert_same(read_state_dict(given, "user.weight"), np.arange(5))
        assert_same(read_state_dict(given, "user.weight", IDS))
        assert_same(
            read_state_dict(given, "user.weight", torch.arange(5) * 3), np.arange(5) * 3
        )
        some = {700: 3, 100: 0, 400: 1}
        rows = [0, 1, 3]
        assert_same(
            read_state_dict(given, "user.weight", some),
            np.array([100, 400, 700]),
            VECTORS[rows],
        )
    halves = {"w": torch.tensor(VECTORS, dtype=torch.bfloat16)}
    assert_same(read_state_dict(halves, "w"), np.arange(5))


def test_what_is_no_weight_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no tensors")
    state = {"user.weight": torch.ones(5, 3), "bias": torch.ones(3), "step": 7}
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: read_state_dict(state, "user.wait"), DataError, "did you mean 'user.weight'"),
        (lambda: read_state_dict(state, "x"), DataError, "there are user.weight, bias, step"),
        (lambda: read_state_dict(state, "bias"), DataTypeError, r"\[num, dim\], got \[3\]"),
        (lambda: read_state_dict(state, "step"), DataTypeError, "got int"),
        (lambda: read_state_dict([1], "x"), DataTypeError, "a state dict, got list"),
        (
            lambda: read_state_dict(tmp_path / "text.pt", "x"),
            CheckpointError,
            "text.pt: cannot",
        ),
        (lambda: read_state_dict(tmp_path / "no.pt", "x"), CheckpointError, "no.pt: cannot"),
        (
            lambda: read_state_dict(state, "user.weight", [1, 2]),
            DataError,
            "each of 2 ids, got 5",
        ),
        (
            lambda: read_state_dict(state, "user.weight", {1: 0, 2: 5}),
            DataError,
            r"rows in 0\.\.4, got 5 for id 2",
        ),
        (
            lambda: read_state_dict(state, "user.weight", {1: -1}),
            DataTypeError,
            "expected numbers of rows",
        ),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()
    assert not list(read_state_dict(state, "user.weight", {}).blocks())
