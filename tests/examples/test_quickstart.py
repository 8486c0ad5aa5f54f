"""The quickstart learns what can be learned, and repeats itself bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from persia._core import cpu
from tests.examples.loading import digest, load

SEEDS = range(1, 6)
SMALL = 6_000  # samples that touch every feature, in a second


@pytest.fixture
def restored_isa() -> Iterator[None]:
    before = cpu.selected()
    yield
    cpu.select(before)


def _run(**options: Any) -> tuple[Any, str]:
    train = load("quickstart")
    chosen = train.Options(quiet=True, **options)
    log = train.generate(chosen.samples, chosen.seed)
    with train.build_ctx(chosen) as ctx:
        report = train.run(ctx, log, chosen)
        return report, digest(ctx)


def _reproducible(samples: int, **options: Any) -> tuple[float, float, int, str]:
    report, rows = _run(samples=samples, reproducible=True, staleness=1, **options)
    return report.auc, report.loss, report.rows, rows


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


def _check_bit_equal(samples: int) -> None:
    want = _reproducible(samples)
    assert _reproducible(samples) == want, "a second run"
    for servers in (2, 4):
        assert _reproducible(samples, servers=servers) == want, f"{servers} servers"
    for servers in (1, 2):
        assert _reproducible(samples, servers=servers, threads=2) == want, "2 threads"
    assert len(cpu.available()) >= 1
    for isa in cpu.available():
        cpu.select(isa)
        assert _reproducible(samples) == want, isa


@pytest.mark.usefixtures("restored_isa")
def test_reproducible_runs_are_bit_equal_small() -> None:
    _check_bit_equal(SMALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("restored_isa")
def test_reproducible_runs_are_bit_equal() -> None:
    _check_bit_equal(load("quickstart").Options().samples)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learns_what_can_be_learned() -> None:
    report, _ = _run()
    assert report.best_auc - report.auc <= 0.01
    without, _ = _run(embeddings=False)
    assert report.auc - without.auc >= 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_staleness_costs_next_to_nothing() -> None:
    aucs: dict[int, list[float]] = {1: [], 10: []}
    gaps = []
    for seed in SEEDS:
        for staleness, values in aucs.items():
            report, _ = _run(seed=seed, staleness=staleness)
            values.append(report.auc)
            gaps.append(report.best_auc - report.auc)
    print({staleness: np.round(values, 5).tolist() for staleness, values in aucs.items()})
    assert abs(np.mean(aucs[10]) - np.mean(aucs[1])) <= 0.001
    assert max(gaps) <= 0.01


def test_options_of_the_command_line() -> None:
    train = load("quickstart")
    assert train.parse_args([]) == train.Options()
    assert train.parse_args(["--reproducible"]).staleness == 1
    given = train.parse_args(["--servers", "2", "--no-embeddings", "--json"])
    assert dataclasses.replace(given, servers=1, embeddings=True, json=False) == train.Options()
