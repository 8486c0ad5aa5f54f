"""A model that cannot be sent to another process is traced in this one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from persia._serving.export import DenseCut, ExportOptions, model_folder, trace_apart
from persia._serving.program import Layout
from persia.errors import ConfigError
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
