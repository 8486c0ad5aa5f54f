"""AUC and GAUC against their definitions, in batches, over merges and over ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import distributed as dist

from persia.errors import ConfigError, DataError
from persia.metrics import AUC, GAUC
from tests.reference import ranking
from tests.support.processes import ROOT

SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-30, -1e30, math.inf, -math.inf]),
    st.floats(width=32, allow_nan=False),
    st.floats(0.0, 1.0, width=32),
)
SAMPLES = st.lists(st.tuples(SCORES, st.integers(0, 1), st.integers(0, 5)), max_size=40)


def columns(
    samples: list[tuple[float, int, int]],
) -> tuple[list[float], list[int], list[int]]:
    return [s[0] for s in samples], [s[1] for s in samples], [s[2] for s in samples]


def assert_is(got: torch.Tensor, want: object) -> None:
    assert got.dtype == torch.float64
    if want is None:
        assert math.isnan(float(got))
    else:
        assert float(got) == pytest.approx(float(want), abs=1e-12)  # type: ignore[arg-type]


@given(SAMPLES, st.integers(0, 40))
@example([(0.5, 1, 0), (0.5, 0, 0)], 1)
@example([(0.0, 1, 0), (-0.0, 0, 0)], 0)
def test_without_bins_it_is_exact(samples: list[tuple[float, int, int]], cut: int) -> None:
    scores, targets, _ = columns(samples)
    metric = AUC(bins=None)
    metric.update(scores[:cut], targets[:cut])
    metric.update(torch.tensor(scores[cut:]), torch.tensor(targets[cut:]))
    assert_is(metric.compute(), ranking.auc(scores, targets))
    assert metric.error_bound() == 0.0


@given(SAMPLES, st.sampled_from([2, 64, 1 << 12, 1 << 18]), st.integers(0, 40))
def test_with_bins_it_is_within_the_bound_it_states(
    samples: list[tuple[float, int, int]], bins: int, cut: int
) -> None:
    scores, targets, _ = columns(samples)
    metric, other = AUC(bins), AUC(bins)
    metric.update(np.array(scores[:cut], np.float32), np.array(targets[:cut]))
    other.update(torch.tensor(scores[cut:]), torch.tensor(targets[cut:]))
    metric.merge_state(other)
    want = ranking.auc(scores, targets)
    if want is None:
        assert_is(metric.compute(), None)
        assert metric.error_bound() == 0.0
        return
    assert abs(float(metric.compute()) - float(want)) <= metric.error_bound() + 1e-12
    assert metric.error_bound() <= 0.5


def test_the_bound_is_small_where_scores_are_probabilities() -> None:
    rng = np.random.default_rng(1)
    for centre in (-6.0, 0.0):
        logits = rng.normal(size=20_000) * 1.5 + centre
        targets = rng.random(20_000) < 1 / (1 + np.exp(-logits))
        probability = (1 / (1 + np.exp(-logits))).astype(np.float32)
        exact, binned = AUC(bins=None), AUC()
        exact.update(probability, targets)
        binned.update(probability, targets)
        # Within a bin half of the pairs are right, so the error is far below its bound.
        assert binned.error_bound() < 1e-3
        assert abs(float(exact.compute()) - float(binned.compute())) < 2e-5


@given(SAMPLES, st.integers(0, 40))
def test_gauc_is_exact_up_to_its_bound(samples: list[tuple[float, int, int]], cut: int) -> None:
    scores, targets, groups = columns(samples)
    metric, other = GAUC(), GAUC()
    metric.update(scores[:cut], targets[:cut], torch.tensor(groups[:cut], dtype=torch.int64))
    other.update(scores[cut:], targets[cut:], np.array(groups[cut:], np.uint64))
    metric.merge_state(other)
    assert_is(metric.compute(), ranking.gauc(scores, targets, groups))
    assert metric.fraction == 1.0
    assert metric.standard_error() == 0.0


def test_gauc_samples_whole_groups_beyond_its_bound() -> None:
    rng = np.random.default_rng(2)
    groups = rng.integers(0, 4000, 60_000)
    scores = rng.random(60_000)
    targets = rng.random(60_000) < 0.25 + 0.5 * scores
    whole, sampled = GAUC(), GAUC(max_samples=10_000)
    for at in range(0, 60_000, 1000):
        here = slice(at, at + 1000)
        whole.update(scores[here], targets[here], groups[here])
        sampled.update(scores[here], targets[here], groups[here])
    assert sampled.fraction < 1.0
    kept = np.concatenate([piece.groups for piece in sampled._pieces])
    assert len(kept) <= 10_000
    # Every sample of a kept group is there.
    assert len(kept) == np.isin(groups.astype(np.uint64), kept).sum()
    error = float(sampled.compute()) - float(whole.compute())
    assert 0.0 < sampled.standard_error() < 0.02
    assert abs(error) < 4 * sampled.standard_error()
    with pytest.raises(DataError, match=r"group 7 alone has 12 samples, .* max_samples = 10"):
        GAUC(max_samples=10).update(np.zeros(12), np.zeros(12), np.full(12, 7))


def test_a_call_counts_and_returns_its_own_batch() -> None:
    auc, gauc = AUC(), GAUC()
    assert float(auc([0.1, 0.9], [0, 1])) == 1.0
    assert float(auc([0.9, 0.1], [0, 1])) == 0.0
    assert float(auc.compute()) == 0.5
    assert float(gauc([0.1, 0.9], [0, 1], [1, 1])) == 1.0
    assert float(gauc([0.9, 0.1], [0, 1], [2, 2])) == 0.0
    assert float(gauc.compute()) == 0.5
    auc.reset()
    gauc.reset()
    assert math.isnan(float(auc.compute()))
    assert math.isnan(float(gauc.compute()))


@pytest.mark.parametrize("bins", [None, 16])
def test_nan_is_told_when_it_is_computed(bins: int | None) -> None:
    metric = AUC(bins)
    metric.update([0.5, math.nan, math.nan], [1, 0, 1])
    with pytest.raises(DataError, match="preds: expected numbers, got 2 NaN"):
        metric.compute()
    with pytest.raises(DataError, match="got 1 NaN"):
        GAUC().update([math.nan], [1], [1])


def test_what_does_not_fit_is_named() -> None:
    for bins in (0, 3, 1 << 33):
        with pytest.raises(ConfigError, match=rf"bins must be .* got {bins}"):
            AUC(bins)
    with pytest.raises(ConfigError, match="max_samples must be at least 1, got 0"):
        GAUC(0)
    with pytest.raises(ConfigError, match="another AUC of 16, got 32"):
        AUC(16).merge_state(AUC(32))
    with pytest.raises(DataError, match=r"as many elements of each, got preds 2, target 1"):
        AUC().update([0.1, 0.2], [1])
    with pytest.raises(DataError, match=r"groups: expected integers, got torch\.float"):
        GAUC().update([0.1], [1], [1.5])


def computed(*, low: int, high: int) -> list[float]:
    """What a rank computes that has seen these samples, and the other rank its own."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=501).round(2).astype(np.float32)[low:high]
    targets, groups = (rng.random(501) < 0.4)[low:high], rng.integers(0, 40, 501)[low:high]
    values: list[float] = []
    for bins in (None, 256):
        auc = AUC(bins)
        auc.update(scores, targets)
        values += [float(auc.compute()), float(auc.compute()), auc.error_bound()]
    gauc = GAUC()
    gauc.update(scores, targets, groups)
    return [*values, float(gauc.compute()), gauc.standard_error()]


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    want = computed(low=0, high=501)
    program = (
        "import sys; from torch import distributed as dist\n"
        "from tests.test_metrics import computed\n"
        "dist.init_process_group('gloo', sys.argv[1], rank=1, world_size=2)\n"
        "print(computed(low=200, high=501)); dist.destroy_process_group()"
    )
    meeting = f"file://{tmp_path / 'meeting'}"
    child = subprocess.Popen(
        [sys.executable, "-c", program, meeting], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        dist.init_process_group("gloo", meeting, rank=0, world_size=2)
        try:
            got = computed(low=0, high=200)
        finally:
            dist.destroy_process_group()
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert got == want
    assert output.strip() == str(want)
