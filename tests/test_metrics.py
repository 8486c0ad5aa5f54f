"""Metrics against their definitions, in batches, over merges and over ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import distributed as dist

from persia.errors import ConfigError, DataError
from persia.metrics import (
    AUC,
    GAUC,
    NDCG,
    Calibration,
    LogLoss,
    NormalizedEntropy,
    RecallAtK,
)
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


PROBABILITIES = st.one_of(st.sampled_from([0.25, 0.5, 0.75, 1e-6]), st.floats(1e-6, 1 - 1e-6))
PREDICTED = st.lists(st.tuples(PROBABILITIES, st.integers(0, 1)), max_size=40)
ENTROPIES: list[tuple[Any, Any]] = [
    (LogLoss, lambda p, y: ranking.log_loss(p, y) if p else None),
    (NormalizedEntropy, ranking.normalized_entropy),
    (Calibration, ranking.calibration),
]


@given(PREDICTED, st.integers(0, 40), st.booleans())
def test_what_is_of_probabilities_is_as_defined_and_merged_is_whole(
    samples: list[tuple[float, int]], cut: int, from_logits: bool
) -> None:
    p, targets = [s[0] for s in samples], [s[1] for s in samples]
    preds = np.array(p, np.float64)
    if from_logits:
        preds = np.log(preds) - np.log1p(-preds)
    for kind, reference in ENTROPIES:
        metric, other = kind(from_logits=from_logits), kind(from_logits=from_logits)
        metric.update(preds[:cut], targets[:cut])
        other.update(torch.from_numpy(preds[cut:]), torch.tensor(targets[cut:]))
        before = other.compute()
        metric.merge_state(other)
        want = reference(p, targets)
        if want is None:
            assert math.isnan(float(metric.compute()))
        else:
            assert float(metric.compute()) == pytest.approx(want, rel=1e-9)
        assert torch.equal(other.compute(), before) or math.isnan(float(before))


def test_the_log_loss_is_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(4)
    p = rng.random(1000).astype(np.float32)
    p[:4] = (0.0, 0.0, 1.0, 1.0)
    targets = rng.random(1000) < p
    targets[:4] = (False, True, True, False)
    metric = LogLoss()
    for at in range(0, 1000, 100):
        metric.update(p[at : at + 100], targets[at : at + 100])
    assert float(metric.compute()) == pytest.approx(sklearn.log_loss(targets, p), rel=1e-6)


def test_logits_of_any_size_have_a_loss() -> None:
    metric = LogLoss(from_logits=True)
    metric.update(torch.tensor([1000.0, -1000.0, math.inf, -math.inf]), [1, 0, 1, 0])
    assert float(metric.compute()) == 0.0
    metric.reset()
    metric.update(torch.tensor([-800.0, 30.0]).double(), [1, 1])
    assert float(metric.compute()) == pytest.approx((800 + math.exp(-30)) / 2, rel=1e-15)
    metric.update(torch.tensor([-math.inf]), [1])
    assert float(metric.compute()) == math.inf


def test_half_precision_on_the_way_is_summed_in_double() -> None:
    metric = Calibration()
    for _ in range(100):
        metric.update(torch.full((1000,), 0.1, dtype=torch.bfloat16), torch.ones(1000))
    assert float(metric.compute()) == pytest.approx(float(torch.tensor(0.1).bfloat16()))


@pytest.mark.parametrize("kind", [LogLoss, NormalizedEntropy, Calibration])
def test_logits_are_not_taken_for_probabilities(kind: Any) -> None:
    metric = kind()
    metric.update([0.5, 1.5, -2.0], [1, 0, 1])
    says = (
        rf"expected probabilities in 0\.\.1, got 2 others; .* {kind.__name__}\(from_logits=True"
    )
    with pytest.raises(DataError, match=says):
        metric.compute()
    metric.reset()
    metric.update([math.nan], [1])
    with pytest.raises(DataError, match="preds: expected numbers, got 1 NaN"):
        metric.compute()
    with pytest.raises(DataError, match="got preds 2, target 1"):
        metric.update([0.1, 0.2], [1])


# Few of one score and group, as the reference looks at every order.
RANKED = st.lists(
    st.tuples(
        st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]),
        st.sampled_from([0.0, 0.0, 1.0, 2.5]),
        st.integers(0, 4),
    ),
    max_size=14,
)


@given(RANKED, st.integers(0, 14), st.integers(1, 5))
def test_recall_and_ndcg_of_groups_are_as_defined_and_merged_is_whole(
    samples: list[tuple[float, float, int]], cut: int, k: int
) -> None:
    scores, gains, groups = zip(*samples, strict=True) if samples else ((), (), ())
    clicks = [float(gain > 0.5) for gain in gains]
    for metric, other, values, reference in (
        (RecallAtK(k), RecallAtK(k), clicks, partial(ranking.recall, k=k)),
        (NDCG(k), NDCG(k), gains, partial(ranking.ndcg, k=k)),
        (NDCG(), NDCG(), gains, partial(ranking.ndcg, k=None)),
    ):
        of = np.array(groups, np.uint64)
        metric.update(np.array(scores[:cut]), values[:cut], of[:cut])
        other.update(torch.tensor(scores[cut:]), torch.tensor(values[cut:]), of[cut:])
        metric.merge_state(other)  # type: ignore[arg-type]
        assert_is(metric.compute(), ranking.mean_of_groups(reference, scores, values, groups))
        assert metric.fraction == 1.0


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=5, max_size=5), max_size=4),
    st.integers(0, 2**20 - 1),
    st.integers(1, 6),
)
def test_a_row_is_a_group(rows: list[list[float]], bits: int, k: int) -> None:
    gains = [[float(bits >> (5 * i + j) & 1) for j in range(5)] for i in range(len(rows))]
    shape = len(rows), 5
    of = np.arange(len(rows)).repeat(5)
    for by_row, by_group in (
        (RecallAtK(k), RecallAtK(k)),
        (NDCG(k), NDCG(k)),
        (NDCG(), NDCG()),
    ):
        scores, targets = np.reshape(rows, shape), np.reshape(gains, shape)
        by_row.update(scores[:2], torch.from_numpy(targets[:2]))
        by_row.update(torch.from_numpy(scores[2:].astype(np.float32)), targets[2:])
        by_group.update(scores.reshape(-1), targets.reshape(-1), of)
        value = float(by_group.compute())
        assert_is(by_row.compute(), None if math.isnan(value) else value)


def test_ndcg_is_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(5)
    scores = rng.random((200, 50)).round(1)  # many equal ones
    gains = rng.integers(0, 5, (200, 50))
    for k in (None, 1, 10, 100):
        metric = NDCG(k)
        metric.update(scores, gains)
        want = sklearn.ndcg_score(gains, scores, k=k)
        assert float(metric.compute()) == pytest.approx(want, rel=1e-12)


def test_whole_groups_are_sampled_beside_rows() -> None:
    rng = np.random.default_rng(6)
    groups = np.arange(60_000) // 15  # 4000 of them
    scores = rng.random(60_000)
    clicks = rng.random(60_000) < 0.1 + 0.2 * scores
    whole, sampled = RecallAtK(3), RecallAtK(3, max_samples=10_000)
    for metric in (whole, sampled):
        for at in range(0, 60_000, 1000):
            here = slice(at, at + 1000)
            metric.update(scores[here], clicks[here], groups[here])
        # As many as there are groups: half of the weight is theirs.
        metric.update(
            np.tile([[0.9, 0.8, 0.7, 0.6]], (4000, 1)), np.tile([[0, 0, 0, 1]], (4000, 1))
        )
    assert (whole.fraction, whole.standard_error()) == (1.0, 0.0)
    assert sampled.fraction < 1.0
    error = float(sampled.compute()) - float(whole.compute())
    assert 0.0 < sampled.standard_error() < 0.02
    assert 0.0 < abs(error) < 4 * sampled.standard_error()


def test_what_cannot_be_ranked_is_named() -> None:
    for k in (0, -1, 2.0, True):
        with pytest.raises(ConfigError, match=rf"k must be .*, got {k}"):
            NDCG(k)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"k must be .*, got {k}"):
            RecallAtK(k)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"k must be .*, got None"):
        RecallAtK(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another NDCG of 10, got 5"):
        NDCG(10).merge_state(NDCG(5))
    for scores, targets, shown in (
        (np.zeros(3), np.zeros(3), r"\[3\] and \[3\]"),
        (np.zeros((2, 3)), np.zeros((2, 4)), r"\[2, 3\] and \[2, 4\]"),
    ):
        with pytest.raises(DataError, match=rf"\[queries, candidates\] .* got {shown}"):
            RecallAtK(1).update(scores, targets)
    with pytest.raises(DataError, match="got preds 4, target 4, groups 3"):
        NDCG().update(np.zeros(4), np.zeros(4), [1, 1, 1])
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(DataError, match="target: expected finite numbers from 0 on, got 1"):
            NDCG().update([[0.5, 0.6]], [[wrong, 0.0]])
    with pytest.raises(DataError, match="preds: expected numbers, got 1 NaN"):
        RecallAtK(1).update([[0.5, math.nan]], [[1, 0]])


@pytest.mark.parametrize("k", [1, 3])
def test_no_queries_and_no_candidates_are_no_error(k: int) -> None:
    for shape in ((0, 4), (3, 0)):
        for metric in (RecallAtK(k), NDCG(k), NDCG()):
            metric.update(np.zeros(shape), np.zeros(shape))
            assert math.isnan(float(metric.compute()))


def test_a_call_of_each_returns_its_own_batch() -> None:
    for metric, good, bad in (
        (LogLoss(), ([0.9], [1]), ([0.1], [1])),
        (NDCG(1), ([[0.9, 0.1]], [[1, 0]]), ([[0.1, 0.9]], [[1, 0]])),
    ):
        first, second = float(metric(*good)), float(metric(*bad))
        assert first != second
        assert float(metric.compute()) == pytest.approx((first + second) / 2)


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
    logits, rows = scores[: len(scores) // 4 * 4], (len(scores) // 4, 4)
    gauc, recall, ndcg = GAUC(), RecallAtK(3), NDCG(5)
    for by_group in (gauc, recall, ndcg):
        by_group.update(scores, targets, groups)
        values += [float(by_group.compute()), by_group.standard_error()]
    ndcg.update(logits.reshape(rows), targets[: len(logits)].reshape(rows))
    values.append(float(ndcg.compute()))
    for kind in (LogLoss, NormalizedEntropy, Calibration):
        of_all = kind(from_logits=True)
        of_all.update(scores, targets)
        values.append(float(of_all.compute()))
    return values


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    want = computed(low=0, high=500)
    program = (
        "import sys; from torch import distributed as dist\n"
        "from tests.test_metrics import computed\n"
        "dist.init_process_group('gloo', sys.argv[1], rank=1, world_size=2)\n"
        "print(computed(low=200, high=500)); dist.destroy_process_group()"
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
    assert got == pytest.approx(want, rel=1e-12)  # sums in another order
    assert output.strip() == str(got)
