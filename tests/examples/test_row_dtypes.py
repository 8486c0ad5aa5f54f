"""The quickstart with rows of two-byte values: it repeats itself, and learns as much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia._core.base import cpu
from persia.config import EmbeddingSchema
from tests.examples.loading import load, run_quickstart

HALVES = ["float16", "bfloat16"]
SEEDS = range(1, 4)


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Return a function that loads the quickstart with a dtype for all its rows."""

    def load_with(dtype: str) -> Any:
        train = load("quickstart")
        source, target = train.EMBEDDING_CONFIG, tmp_path / f"{dtype}.yml"
        content = yaml.safe_load(Path(source).read_text("utf-8"))
        groups = EmbeddingSchema.load(source).groups
        content["group_settings"] = {group: {"dtype": dtype} for group in groups}
        target.write_text(yaml.safe_dump(content), "utf-8")
        monkeypatch.setattr(train, "EMBEDDING_CONFIG", target)
        return train

    return load_with


@pytest.mark.usefixtures("restored_isa")
def test_runs_of_two_byte_rows_are_bit_equal(configure: Any) -> None:
    train = configure("float16")
    results = []
    for options, isa in (({}, None), ({"servers": 3, "threads": 2}, "baseline")):
        cpu.select(isa)
        report, rows = run_quickstart(
            train, samples=1500, reproducible=True, staleness=1, **options
        )
        results.append((report.auc, report.loss, report.rows, rows))
    assert results[0] == results[1]


def mean_auc_of_quickstart(train: Any) -> float:
    aucs = [float(run_quickstart(train, seed=seed)[0].auc) for seed in SEEDS]
    return sum(aucs) / len(aucs)


@pytest.mark.slow
def test_quickstart_reaches_the_auc_of_f32(configure: Any) -> None:
    wanted = mean_auc_of_quickstart(load("quickstart"))
    for dtype in HALVES:
        auc = mean_auc_of_quickstart(configure(dtype))
        assert abs(auc - wanted) < 0.002, (dtype, auc, wanted)
