"""A model that cannot be sent to another process is traced in this one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from persia._serving.bundle import ServedTensor
from persia._serving.export import (
    DenseCut,
    ExportOptions,
    _named,
    model_folder,
    sample_of,
    trace_apart,
)
from persia._serving.program import Layout
from persia.errors import ConfigError, DataError
from tests.serving.test_program import LAYOUT, SAMPLES, Linear


class Locked(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def cut_of(model: torch.nn.Module, layout: Layout = LAYOUT) -> DenseCut:
    return DenseCut(model, SAMPLES, (), (), layout)


@pytest.mark.slow
def test_both_ways_give_the_same(caplog: pytest.LogCaptureFixture) -> None:
    apart = trace_apart(cut_of(Linear()), ExportOptions())
    assert not caplog.text
    here = trace_apart(cut_of(Locked()), ExportOptions())
    assert "cannot be pickled" in caplog.text
    assert here.outputs == apart.outputs
    with pytest.raises(ConfigError, match="cannot be called"):
        trace_apart(cut_of(torch.nn.Linear(2, 2)), ExportOptions())


def test_the_folder_is_a_models(tmp_path: Path) -> None:
    assert model_folder(tmp_path / "clicks").name == "clicks"
    with pytest.raises(ConfigError):
        model_folder("s3://bucket/clicks")


@pytest.mark.parametrize(
    ("count", "names", "text"),
    [
        (1, ("a", "b"), "a list of 1 name,"),
        (2, "ab", "2 different"),
        (2, ("a", "a"), "'a', 'a'"),
    ],
)
def test_names_of_outputs_that_do_not_fit(count: int, names: tuple[str], text: str) -> None:
    with pytest.raises(ConfigError, match=f"outputs: expected .*{text}"):
        _named((ServedTensor("output", "float32", ()),) * count, names)


def test_a_context_without_a_batch_is_told_to_give_one() -> None:
    with pytest.raises(DataError, match="inputs=, a PersiaBatch"):
        sample_of(None)
