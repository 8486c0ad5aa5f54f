"""Files of programs that hold more than a program are refused; layouts cut and join batches."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from typing import Any

import pytest
import torch

from persia._serving.program import Layout, load_program, trace
from persia.errors import CheckpointError, ConfigError

LAYOUT = Layout(1, ("x",), ("j",), ("jagged",))
SAMPLES = (torch.arange(8.0).view(4, 2), torch.ones(3, 2), torch.tensor([0, 1, 1, 3, 3]))


class Linear(torch.nn.Module):
    def forward(self, dense: object, embeddings: object) -> torch.Tensor:
        return dense[0] * 2 + 1  # type: ignore[index, no-any-return]


class OfAll(torch.nn.Module):
    def forward(self, dense: object, embeddings: object) -> torch.Tensor:
        return dense[0] - dense[0].mean(0)  # type: ignore[index, no-any-return]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


def changed(data: bytes, name: str, content: bytes) -> bytes:
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for one in source.infolist():
            if not one.filename.endswith(name):
                archive.writestr(one.filename, source.read(one))
        archive.writestr(f"archive/{name}", content)
    return target.getvalue()


def test_only_programs_are_read() -> None:
    traced = trace(Linear(), LAYOUT, SAMPLES, "export")
    assert traced.is_batch_independent
    assert traced.max_difference == 0
    program = load_program(traced.data, "export")
    assert torch.equal(program(*SAMPLES)[0], SAMPLES[0] * 2 + 1)
    evil = pickle.dumps(Evil())
    config = {"config": {"x": {"path_name": "weight_0", "use_pickle": True}}}
    symbol = {"a": [{"expr_str": "__import__('os').system('true')"}]}
    for name, content in (
        ("data/constants/custom_obj_0", evil),
        ("data/sample_inputs/model.pt", evil),
        ("data/weights/model_weights_config.json", json.dumps(config).encode()),
        ("models/model.json", json.dumps(symbol).encode()),
        ("models/model.json", json.dumps({"guards_code": ["x"]}).encode()),
        ("data/aotinductor/model.so", b"code"),
        ("../x", b""),
    ):
        with pytest.raises(CheckpointError):
            load_program(changed(traced.data, name, content), "export")
    for data in (b"", evil, traced.data[:-9]):
        with pytest.raises(CheckpointError):
            load_program(data, "export")


def test_a_model_of_the_whole_batch_is_found() -> None:
    assert not trace(OfAll(), LAYOUT, SAMPLES, "export").is_batch_independent


def test_torchscript_and_errors() -> None:
    traced = trace(Linear(), LAYOUT, SAMPLES, "torchscript")
    program = load_program(traced.data, "torchscript")
    assert torch.equal(program(*SAMPLES)[0], SAMPLES[0] * 2 + 1)
    with pytest.raises(ConfigError, match="cannot be called"):
        trace(torch.nn.Linear(2, 2), LAYOUT, SAMPLES, "export")


def test_batches_are_cut_and_doubled() -> None:
    middle = LAYOUT.cut(SAMPLES, 1, 3)
    assert (len(middle[0]), len(middle[1])) == (2, 2)
    assert middle[2].tolist() == [0, 0, 2]
    assert LAYOUT.double(middle)[2].tolist() == [0, 0, 2, 2, 4]
