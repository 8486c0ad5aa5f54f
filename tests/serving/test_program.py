"""Files of programs that hold more than a program are refused; layouts cut and join batches."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from persia._serving import program
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


class Odd(torch.nn.Module):
    """Has weights that are shared, transposed, a view, empty and constant."""

    part: torch.Tensor
    none: torch.Tensor
    low: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(6, 3, generator=rng))
        self.same = self.weight
        self.turned = torch.nn.Parameter(torch.randn(3, 6, generator=rng).t())
        self.register_buffer("part", torch.randn(10, generator=rng)[:3])
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("low", torch.randn(3, generator=rng).bfloat16())

    def forward(self, dense: Any, embeddings: Any) -> Any:
        """Add up."""
        found = embeddings[0] @ self.weight + embeddings[0] @ self.same
        kept = torch.tensor([0.5, 0.25, 0.125])
        sizes = self.part + self.low.float() + self.none.sum() + kept
        return found + embeddings[0] @ self.turned + sizes


class Plain(torch.nn.Module):
    """Has weights of two types, and constants."""

    low: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(6, 3, generator=rng))
        self.register_buffer("low", torch.randn(3, generator=rng).bfloat16())

    def forward(self, dense: Any, embeddings: Any) -> Any:
        """Add up."""
        return embeddings[0] @ self.weight + self.low.float() + torch.tensor([3.0, 2.0, 1.0])


@pytest.mark.parametrize(("kind", "num_graphs"), [(Plain, 1), (Odd, 0)])
def test_programs_of_one_graph_have_their_own_weights(
    kind: Any, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: dict[bytes, Any] = {}
    monkeypatch.setattr(program, "_graphs", graphs)
    layout = Layout(0, (), ("feature",), ("pooled",))
    sample = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
    models = [kind(seed).eval().requires_grad_(False) for seed in range(3)]
    files = [
        # A program knows how many samples it was traced with, which changes nothing in it.
        trace(model, layout, (torch.cat([sample[0], sample[0][:more]]),), "export").data
        for more, model in enumerate(models)
    ]
    graphs.clear()
    programs = [load_program(data, "export") for data in files]
    assert len(graphs) == num_graphs
    for model, one, data in zip(models, programs, files, strict=True):
        expected = model(*layout.build(sample))
        assert torch.equal(one(*sample)[0], expected)
        graphs.clear()
        assert torch.equal(load_program(data, "export")(*sample)[0], expected)


def test_programs_are_read_by_several_threads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a server begins that serves several models."""
    graphs: dict[bytes, Any] = {}
    monkeypatch.setattr(program, "_graphs", graphs)
    layout = Layout(0, (), ("feature",), ("pooled",))
    sample = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
    models = [kind(1).eval().requires_grad_(False) for kind in (Plain, Odd)]
    files = [trace(model, layout, sample, "export").data for model in models] * 2
    begin = Barrier(len(files))

    def read(data: bytes) -> list[Any]:
        begin.wait(60.0)
        found = []
        for _ in range(4):
            graphs.clear()
            found.append(load_program(data, "export"))
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(len(files)) as pool:
            programs = list(pool.map(read, files))
    finally:
        sys.setswitchinterval(before)
    for model, read_ones in zip(models * 2, programs, strict=True):
        expected = model(*layout.build(sample))
        assert all(torch.equal(one(*sample)[0], expected) for one in read_ones)


def test_a_weight_of_another_size_is_no_weight_of_a_known_graph() -> None:
    layout = Layout(0, (), ("feature",), ("pooled",))
    data = trace(Plain(1).eval(), layout, (torch.randn(4, 6),), "export").data
    load_program(data, "export")
    with pytest.raises(CheckpointError):
        load_program(changed(data, "data/weights/weight_0", b"\0" * 4), "export")
