"""The folder that Triton serves, without Triton; tests/serving/conformance has one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from persia._serving.triton import write_triton
from persia.errors import ConfigError

ABOUT: dict[str, Any] = {
    "name": "clicks",
    "inputs": [
        {"name": "item", "datatype": "INT64", "shape": [-1]},
        {"name": "batch", "datatype": "BYTES", "shape": [1]},
    ],
    "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1]}],
}


def test_folder(tmp_path: Path) -> None:
    kept = tmp_path / "clicks" / "3" / "persia-model.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    folder = write_triton(tmp_path, ABOUT, version=3, python_path=["/a b", 'c"'], instances=2)
    assert folder == tmp_path / "clicks"
    assert kept.exists()
    model = (folder / "3" / "model.py").read_text()
    ast.parse(model)
    assert 'PYTHON_PATH = ["/a b", "c\\""]' in model
    config = (folder / "config.pbtxt").read_text().splitlines()
    assert 'name: "clicks"' in config
    assert "instance_group { kind: KIND_CPU count: 2 }" in config
    assert 'input { name: "batch" data_type: TYPE_STRING dims: [1] optional: true }' in config
    assert 'output { name: "score" data_type: TYPE_FP32 dims: [-1] }' in config


def test_a_bundle_and_the_forms_of_its_inputs(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    (bundle / "rows").mkdir(parents=True)
    (bundle / "rows" / "a").write_bytes(b"row")
    ids = {"name": "user", "datatype": "INT64", "shape": [-1, -1], "parameters": {"kind": "id"}}
    about = {**ABOUT, "inputs": [ids], "parameters": {"batch_input": "batch"}}
    folder = write_triton(tmp_path / "models", about, version=2, bundle=bundle)
    assert (folder / "2" / "rows" / "a").read_bytes() == b"row"
    assert (folder / "2" / "model.py").exists()
    assert sorted(one.name for one in folder.iterdir()) == ["2", "config.pbtxt"]
    config = (folder / "config.pbtxt").read_text()
    for name, kind, dims in (
        ("user", "INT64", "[-1, -1]"),
        ("user.offsets", "INT64", "[-1]"),
        ("user.weights", "FP32", "[-1]"),
        ("batch", "STRING", "[1]"),
    ):
        line = f'input {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} optional: true }}'
        assert line in config
    with pytest.raises(ConfigError, match="replaced"):
        write_triton(tmp_path / "models", about, version=2, bundle=bundle)
    with pytest.raises(ConfigError, match="written"):
        write_triton(tmp_path / "models", about, version=3, bundle=tmp_path / "none")
    assert sorted(one.name for one in folder.iterdir()) == ["2", "config.pbtxt"]


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"name": "../clicks"}, {}),
        ({"inputs": [{"name": "x", "datatype": "FP31", "shape": [1]}]}, {}),
        ({}, {"version": 0}),
        ({}, {"instances": 0}),
        ({}, {"factory": "persia.serving"}),
    ],
)
def test_what_triton_cannot_have(
    tmp_path: Path, changed: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        write_triton(tmp_path, {**ABOUT, **changed}, **options)
    assert not [*tmp_path.iterdir()]
