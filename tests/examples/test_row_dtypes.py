"""The examples with rows of two-byte values: they repeat themselves, and learn as much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from persia import env
from persia._core.base import cpu
from persia.config import EmbeddingSchema
from tests.examples.loading import EXAMPLES, digest, load

HALVES = ["float16", "bfloat16"]
SEEDS = range(1, 4)


def write_config(example: str, dtype: str, directory: Path) -> None:
    """Copy an example's config, with that dtype for each of its groups."""
    for source in (EXAMPLES / example / "config").glob("*.yml"):
        content = yaml.safe_load(source.read_text("utf-8"))
        if "slots_config" in content:
            groups = EmbeddingSchema.load(source).groups
            content["group_settings"] = {group: {"dtype": dtype} for group in groups}
        (directory / source.name).write_text(yaml.safe_dump(content), "utf-8")


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that loads an example with a dtype for all its rows."""

    def load_with(example: str, dtype: str) -> Any:
        train = load(example)
        write_config(example, dtype, tmp_path)
        if example == "quickstart":
            monkeypatch.setattr(train, "EMBEDDING_CONFIG", tmp_path / "embedding_config.yml")
        else:
            monkeypatch.setattr(train, "CONFIG", tmp_path)
        return train

    return load_with


def run_quickstart(train: Any, **options: Any) -> tuple[Any, str]:
    chosen = train.Options(quiet=True, **options)
    log = train.generate(chosen.samples, chosen.seed)
    with train.build_ctx(chosen) as ctx:
        report = train.run(ctx, log, chosen)
        return report, digest(ctx)


@pytest.mark.usefixtures("restored_isa")
def test_runs_of_two_byte_rows_are_bit_equal(configure: Any) -> None:
    train = configure("quickstart", "float16")
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
        auc = mean_auc_of_quickstart(configure("quickstart", dtype))
        assert abs(auc - wanted) < 0.002, (dtype, auc, wanted)


def mean_auc_of_adult(train: Any, data: Any) -> float:
    aucs = []
    for seed in SEEDS:
        options = train.Options(seed=seed, staleness=1, reproducible=True, quiet=True)
        with train.build_ctx(options) as ctx:
            aucs.append(float(train.run(ctx, data, options).auc))
    return sum(aucs) / len(aucs)


@pytest.mark.slow
@pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR names no data")
def test_adult_income_reaches_the_auc_of_f32(configure: Any) -> None:
    train = load("adult_income")
    data = train.load()
    wanted = mean_auc_of_adult(train, data)
    for dtype in HALVES:
        auc = mean_auc_of_adult(configure("adult_income", dtype), data)
        assert abs(auc - wanted) < 0.002, (dtype, auc, wanted)
