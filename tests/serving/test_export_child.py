"""The process that traces a model."""

from __future__ import annotations

from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import torch

from persia._serving.export_child import main
from persia.errors import ConfigError
from tests.serving.test_program import LAYOUT, SAMPLES


def test_an_error_is_written_for_the_parent(tmp_path: Path) -> None:
    task = torch.nn.Linear(2, 2), LAYOUT, SAMPLES, "export", 1e-5
    (tmp_path / "task").write_bytes(cloudpickle.dumps(task))
    main(tmp_path)
    assert isinstance(cloudpickle.loads((tmp_path / "traced").read_bytes()), ConfigError)
