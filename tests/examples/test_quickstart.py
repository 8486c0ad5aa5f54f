"""The quickstart learns what can be learned, and repeats itself bit by bit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from persia._core.base import cpu
from tests.examples.loading import load, run_quickstart

SEEDS = range(1, 6)
SMALL = 6_000  # samples that touch every feature, in a second


def _run(**options: Any) -> tuple[Any, str]:
    return run_quickstart(load("quickstart"), **options)


def test_log_is_a_function_of_its_seed() -> None:
    train = load("quickstart")
    one, same, other = (train.generate(2000, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.single["user"], same.single["user"])
    np.testing.assert_array_equal(one.clicks, same.clicks)
    assert not np.array_equal(one.single["user"], other.single["user"])


def test_log_has_what_a_click_log_has() -> None:
    log = load("quickstart").generate(20_000, 1)
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


@pytest.mark.usefixtures("restored_isa")
def test_reproducible_runs_are_bit_equal() -> None:
    found = []
    for variant in ({}, *VARIANTS):
        options = dict(variant)
        cpu.select(options.pop("isa", None))
        report, rows = _run(samples=SMALL, reproducible=True, staleness=1, **options)
        found.append((report.auc, report.loss, report.rows, rows))
        assert found[-1] == found[0], variant


@functools.cache
def _full_run(seed: int, staleness: int) -> Any:
    return _run(seed=seed, staleness=staleness)[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staleness", [1, 10])
def test_learns_what_can_be_learned(seed: int, staleness: int) -> None:
    report = _full_run(seed, staleness)
    assert report.best_auc - report.auc <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_embeddings_are_what_learns(seed: int) -> None:
    without, _ = _run(seed=seed, embeddings=False)
    assert _full_run(seed, 10).auc - without.auc >= 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_staleness_costs_next_to_nothing() -> None:
    one, ten = ([_full_run(seed, staleness).auc for seed in SEEDS] for staleness in (1, 10))
    difference = float(np.mean(ten) - np.mean(one))
    print(f"mean AUC: staleness 1 {np.mean(one):.5f}, 10 {np.mean(ten):.5f}")
    assert abs(difference) <= 0.001, (one, ten)


def test_options_of_the_command_line() -> None:
    train = load("quickstart")
    assert train.parse_args([]) == train.Options()
    assert train.parse_args(["--reproducible"]).staleness == 1
    given = train.parse_args(["--servers", "2", "--no-embeddings", "--json"])
    assert dataclasses.replace(given, servers=1, embeddings=True, json=False) == train.Options()
