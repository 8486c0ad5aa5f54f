"""Rows of a checkpoint as tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.checkpoints import TAGS, checkpoint, run
from tests.files.support import block


@pytest.mark.parametrize("form", ["parquet", "safetensors", "npz"])
def test_convert(tmp_path: Path, form: str) -> None:
    checkpoint(tmp_path / "a")
    out = tmp_path / "out"
    ran = run("convert", tmp_path / "a", out, "--to", form, "--group", "tag")
    assert ran.exit_code == 0, ran.output
    assert "50 rows in 1 file in " in ran.output
    (file,) = out.iterdir()
    if form == "parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(file)
        ids = table["id"].to_numpy()
        values = np.array(table["values"].to_pylist(), np.float32)
        assert set(table["group"].to_pylist()) == {"tag"}
    elif form == "npz":
        with np.load(file) as held:
            ids, values = held["id"], held["values"]
            assert set(held["group"].tolist()) == {2}
            assert held["groups"][held["group"][0]] == "tag"
    else:
        held = pytest.importorskip("safetensors.numpy").load_file(file)
        ids, values = held["id"], held["values"]
    want = block(TAGS, dim=3, words=3, dtype="bfloat16")
    widened = (want.values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], np.arange(50))
    np.testing.assert_array_equal(values[order], widened)
    assert run("convert", tmp_path / "a", out, "--to", form).exit_code == 1
    ran = run("convert", tmp_path / "a", tmp_path / "other", "--to", form, "--group", "x")
    assert "feature groups x: known are user, item, tag" in ran.output


def test_a_convert_that_fails_leaves_nothing(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    last = max((tmp_path / "a").rglob("table1*"))
    last.write_bytes(last.read_bytes()[:-1])
    ran = run("convert", tmp_path / "a", tmp_path / "out", "--to", "npz")
    assert ran.exit_code == 1
    assert last.name in ran.output
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    assert run("convert", tmp_path / "a", tmp_path / "empty", "--to", "npz").exit_code == 1
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_vectors_of_a_feature(tmp_path: Path, suffix: str) -> None:
    checkpoint(tmp_path / "a")
    file = tmp_path / f"tags{suffix}"
    ran = run("export", tmp_path / "a", file, "--feature", "tag")
    assert ran.exit_code == 0, ran.output
    assert f"50 vectors of dim 3 in {file}" in ran.output
    if suffix == ".npz":
        with np.load(file, allow_pickle=False) as held:
            ids, vectors = held["id"], held["vector"]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(file)
        ids = table["id"].to_numpy()
        vectors = np.array(table["vector"].to_pylist(), np.float32)
    want = block(TAGS, dim=3, words=3, dtype="bfloat16")
    widened = (want.values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    np.testing.assert_array_equal(ids, np.arange(50))
    np.testing.assert_array_equal(vectors, widened)


def test_vectors_that_cannot_be_exported(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    ran = run("export", tmp_path / "a", tmp_path / "x.npz", "--feature", "tga")
    assert ran.exit_code == 1
    assert "feature 'tga': expected one of item, tag, user, did you mean 'tag'?" in ran.output
    ran = run("export", tmp_path / "a", tmp_path / "x.csv", "--feature", "tag")
    assert "expected a name that ends with .parquet or .npz" in ran.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
