"""The quickstart learns what can be learned, and repeats itself bit by bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from persia._core.base import cpu
from persia.config import EmbeddingSchema
from tests.examples.loading import load, run_quickstart
from tests.golden.test_examples import rows_of
from tests.support.fixtures import Monkey, Record

SEEDS = range(1, 6)
SMALL = 6_000  # samples that touch every feature, in a second


def test_log_has_what_a_click_log_has() -> None:
    train = load("quickstart")
    log, other = (train.generate(20_000, seed) for seed in (1, 2))
    assert not np.array_equal(log.single["user"], other.single["user"])
    half = len(log) // 2
    viewed = np.diff(log.ragged["viewed_items"].offsets)
    assert (viewed == 0).any()
    assert 4.5 < viewed.mean() < 5.5
    early, late = log.single["user"][:half], log.single["user"][half:]
    assert len(np.setdiff1d(late, early)) > 1000  # ids that are new in the second half
    assert np.isin(log.single["candidate"], log.ragged["viewed_items"].values).any()
    assert (log.single["url"] >> np.uint64(56)).any()  # wider than the index bits
    assert len(np.unique(log.single["country"])) == 10
    assert 0.8 < log.best_auc() < 0.9


def test_auc_counts_ties_half() -> None:
    auc = load("quickstart").auc
    assert auc(np.array([1.0, 0.0]), np.array([0.5, 0.5])) == 0.5
    assert auc(np.array([1.0, 0.0, 1.0, 0.0]), np.array([4.0, 3.0, 2.0, 2.0])) == 0.625
    with pytest.raises(ValueError, match="both classes"):
        auc(np.ones(3), np.arange(3.0))


VARIANTS: list[dict[str, Any]] = [
    {"servers": 2},
    {"servers": 4},
    {"threads": 2},
    {"servers": 2, "threads": 2},
    *({"isa": name} for name in cpu.available()),
]


def check_bit_equal(train: Any, samples: int, variants: Iterable[dict[str, Any]]) -> None:
    before, found = cpu.selected(), []
    try:
        for variant in variants:
            options = {"reproducible": True, "staleness": 1} | variant
            cpu.select(options.pop("isa", None))
            report, rows = run_quickstart(train, rows_of, samples=samples, **options)
            found.append((report.auc, report.loss, report.rows, rows))
            assert found[-1] == found[0], variant
    finally:
        cpu.select(before)


def test_reproducible_runs_are_bit_equal() -> None:
    check_bit_equal(load("quickstart"), SMALL, ({}, *VARIANTS))


@functools.cache
def _full_run(seed: int, staleness: int) -> Any:
    return run_quickstart(load("quickstart"), id, seed=seed, staleness=staleness)[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staleness", [1, 10])
def test_learns_what_can_be_learned(seed: int, staleness: int) -> None:
    report = _full_run(seed, staleness)
    assert report.best_auc - report.auc <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS[:2])  # what they all show
def test_embeddings_are_what_learns(seed: int) -> None:
    without, _ = run_quickstart(load("quickstart"), id, seed=seed, embeddings=False)
    assert _full_run(seed, 10).auc - without.auc >= 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_staleness_costs_next_to_nothing(record_property: Record) -> None:
    one, ten = ([_full_run(seed, staleness).auc for seed in SEEDS] for staleness in (1, 10))
    difference = float(np.mean(ten) - np.mean(one))
    line = f"mean AUC: staleness 1 {np.mean(one):.5f}, 10 {np.mean(ten):.5f}"
    record_property("measured", line)
    assert abs(difference) <= 0.001, (one, ten)


def test_options_of_the_command_line() -> None:
    train = load("quickstart")
    assert train.parse_args([]) == train.Options()
    assert train.parse_args(["--reproducible"]).staleness == 1
    given = train.parse_args(["--servers", "2", "--no-embeddings", "--json"])
    assert dataclasses.replace(given, servers=1, embeddings=True, json=False) == train.Options()


# --- rows of two-byte values ----------------------------------------------------------------


def load_with(dtype: str, folder: Path, patch: Monkey) -> Any:
    """Return the quickstart with a dtype for all its rows."""
    train = load("quickstart")
    source, target = train.EMBEDDING_CONFIG, folder / f"{dtype}.yml"
    content = yaml.safe_load(Path(source).read_text("utf-8"))
    groups = EmbeddingSchema.load(source).groups
    content["group_settings"] = {group: {"dtype": dtype} for group in groups}
    target.write_text(yaml.safe_dump(content), "utf-8")
    patch.setattr(train, "EMBEDDING_CONFIG", target)
    return train


def test_runs_of_two_byte_rows_are_bit_equal(tmp_path: Path, monkeypatch: Monkey) -> None:
    other = {"servers": 3, "threads": 2, "isa": "baseline"}
    check_bit_equal(load_with("float16", tmp_path, monkeypatch), 1500, [{}, other])


@pytest.mark.slow
def test_quickstart_reaches_the_auc_of_f32(tmp_path: Path, monkeypatch: Monkey) -> None:
    seeds = (1, 2, 3)
    wanted = np.mean([_full_run(seed, 10).auc for seed in seeds])
    for dtype in ("float16", "bfloat16"):
        train = load_with(dtype, tmp_path, monkeypatch)
        auc = np.mean([run_quickstart(train, id, seed=seed)[0].auc for seed in seeds])
        assert abs(auc - wanted) < 0.002, (dtype, auc, wanted)
