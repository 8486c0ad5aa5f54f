"""log q and negatives: against a plain model, against what was drawn, and in a batch."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import ConfigError, DataError, DataTypeError
from persia.sampling import FrequencyEstimator, NegativeSampler
from tests.reference.sampling import Frequencies
from tests.support.strategies import id_array, ids

ZIPF = 1 / np.arange(1, 1001)
ZIPF /= ZIPF.sum()


@given(
    st.lists(st.lists(ids(), max_size=20), max_size=12),
    *(st.integers(1, 40), st.integers(1, 3), st.integers(1, 8), st.integers(0, 2**64 - 1)),
)
def test_it_is_the_plain_model(
    batches: list[list[int]], num_cells: int, num_hashes: int, window: int, seed: int
) -> None:
    """With few cells ids share them; with a short window old intervals fade."""
    estimator = FrequencyEstimator(num_cells, num_hashes, window, seed)
    model = Frequencies(num_cells, num_hashes, window, seed)
    for batch in batches:
        got, want = estimator.observe(id_array(batch)), model.observe(batch)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    some = [0, 1, 2**64 - 1]
    wanted = [model.log_q(one) for one in some]
    before = estimator.state_dict()
    np.testing.assert_allclose(estimator.log_q(id_array(some)), wanted, rtol=1e-5, atol=1e-6)
    for name, kept in estimator.state_dict().items():
        assert np.array_equal(kept, before[name])  # a question counts nothing


def test_log_q_is_the_share_of_the_samples_from_the_hottest_to_the_rare() -> None:
    rng = np.random.default_rng(1)
    estimator = FrequencyEstimator(1 << 14)
    for _ in range(400):
        estimator.observe(rng.choice(1000, 256, p=ZIPF))
    error = estimator.log_q(np.arange(1000)) - np.log(ZIPF)
    # The hottest, 13 % of the samples, is in every batch about 34 times: its steps would say 1.
    assert np.abs(error[:10]).max() < 0.1
    assert np.abs(error[:100]).mean() < 0.1
    assert np.abs(error).mean() < 0.3  # the rarest came 14 times
    assert abs(error.mean()) < 0.05


def test_it_follows_what_becomes_popular() -> None:
    estimator = FrequencyEstimator(window=20)
    for _ in range(100):
        estimator.observe([1] * 90 + [2] * 10)
    for _ in range(10):
        log_q = estimator.observe([1] * 10 + [2] * 90)
    assert math.exp(log_q[0]) == pytest.approx(0.1, rel=0.1)
    assert math.exp(log_q[-1]) == pytest.approx(0.9, rel=0.1)


@pytest.mark.parametrize("window", [10, 50])
def test_a_window_has_the_error_that_it_is_said_to_have(window: int) -> None:
    rng = np.random.default_rng(5)
    estimator = FrequencyEstimator(window=window)
    for _ in range(4000):
        estimator.observe(rng.integers(0, 200, 10))
    error = estimator.log_q(np.arange(200)) + math.log(200)
    assert float(error.std()) == pytest.approx(1 / math.sqrt(2 * window), rel=0.25)


def test_ids_that_share_cells_look_too_frequent_and_more_tables_help() -> None:
    rng = np.random.default_rng(2)
    one, three = FrequencyEstimator(2000, 1), FrequencyEstimator(2000, 3)
    for _ in range(200):
        batch = rng.choice(1000, 256, p=ZIPF)
        one.observe(batch)
        three.observe(batch)
    items = np.arange(1000)
    assert (one.log_q(items) > np.log(ZIPF) + 0.7).mean() > 2 * (
        three.log_q(items) > np.log(ZIPF) + 0.7
    ).mean()


def test_an_id_that_was_never_seen_counts_as_seen_once() -> None:
    estimator = FrequencyEstimator()
    assert estimator.log_q([5]).tolist() == [0]
    estimator.observe(np.arange(100))
    assert np.exp(estimator.log_q([7, 1000])) == pytest.approx([0.01, 0.01])
    assert estimator.observe([]).shape == (0,)


def test_ids_of_any_integer_dtype_are_the_same_ids() -> None:
    arrays: list[Any] = [np.array([5, 5, 6], dtype) for dtype in ("u8", "i8", "i4", "u1")]
    arrays += [[5, 5, 6], np.array([5, 0, 5, 0, 6, 0])[::2]]
    got = {tuple(FrequencyEstimator(64).observe(array).tolist()) for array in arrays}
    assert len(got) == 1
    below = FrequencyEstimator()
    below.observe(np.array([-1, -1]))
    assert below.log_q(np.array([2**64 - 1], np.uint64)).tolist() == [0]


@pytest.mark.parametrize("given", [[1.0], ["a"], [[1, 2]], [True]])
def test_other_ids_are_refused(given: list[Any]) -> None:
    for call in (FrequencyEstimator().observe, FrequencyEstimator().log_q, NegativeSampler):
        with pytest.raises(DataTypeError, match="expected ids as integers"):
            call(given)


@pytest.mark.parametrize("name", ["num_cells", "num_hashes", "window"])
def test_numbers_are_checked(name: str) -> None:
    for bad in (0, -1, 2.5, "9"):
        options: Any = {name: bad}
        with pytest.raises(ConfigError, match=f"{name} must be.*{re.escape(repr(bad))}"):
            FrequencyEstimator(**options)


def test_a_state_continues_and_another_is_refused(tmp_path: Any) -> None:
    rng = np.random.default_rng(3)
    whole, first, second = (FrequencyEstimator(500, seed=9) for _ in range(3))
    batches = rng.integers(0, 300, (10, 32))
    for batch in batches[:5]:
        whole.observe(batch)
        first.observe(batch)
    np.savez(tmp_path / "q.npz", **first.state_dict())  # type: ignore[arg-type]
    with np.load(tmp_path / "q.npz") as state:
        second.load_state_dict(state)
    for batch in batches[5:]:
        assert whole.observe(batch).tolist() == second.observe(batch).tolist()
    for other in (FrequencyEstimator(400, seed=9), FrequencyEstimator(500, seed=8)):
        with pytest.raises(ConfigError, match="same num_hashes, num_cells and seed"):
            other.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="expected a state with num_samples"):
        second.load_state_dict({})


def users_and(item: Any, requires_grad: bool = True) -> PersiaBatch:
    users = IDTypeFeatureWithSingleID("user", np.arange(3, dtype=np.uint64))
    return PersiaBatch(
        [users, item],
        [NonIDTypeFeature(np.ones((3, 2), np.float32), "price")],
        [Label(np.zeros(3, np.float32), "click")],
        requires_grad=requires_grad,
        meta=b"mine",
    )


def test_attach_adds_a_label_and_keeps_the_rest() -> None:
    estimator = FrequencyEstimator()
    batch = users_and(IDTypeFeatureWithSingleID("item", np.array([4, 4, 9], np.uint64)))
    with_q = estimator.attach(batch, "item")
    assert [each.name for each in with_q.features] == ["user", "item"]
    assert [each.name for each in with_q.non_id_type_features] == ["price"]
    assert [each.name for each in with_q.labels] == ["click", "log_q"]
    assert (with_q.meta, with_q.requires_grad, with_q.batch_size) == (b"mine", True, 3)
    log_q: NDArray[np.float32] = with_q.labels[1].data
    np.testing.assert_allclose(np.exp(log_q), [2 / 3, 2 / 3, 1 / 3], rtol=1e-6)
    assert [each.name for each in batch.labels] == ["click"]
    lists = IDTypeFeature("item", [np.array([x], np.uint64) for x in (4, 9, 9)])
    assert estimator.attach(users_and(lists), "item", "q").labels[1].name == "q"
    assert estimator.num_samples == 6


def test_attach_counts_no_batch_of_an_evaluation() -> None:
    estimator = FrequencyEstimator()
    item = IDTypeFeatureWithSingleID("item", np.array([4, 4, 9], np.uint64))
    batch = estimator.attach(users_and(item, requires_grad=False), "item")
    assert (batch.requires_grad, estimator.num_samples) == (False, 0)


def test_attach_names_what_does_not_fit() -> None:
    estimator = FrequencyEstimator()
    item = IDTypeFeature("item", [np.array(x, np.uint64) for x in ([4], [], [9, 9])])
    with pytest.raises(DataError, match=r"'item'.*one id in each sample.*got 0 in sample 1"):
        estimator.attach(users_and(item), "item")
    with pytest.raises(DataError, match=r"'items'.*got user, item"):
        estimator.attach(users_and(item), "items")
    assert estimator.num_samples == 0


@pytest.mark.parametrize("weights", [None, "log_uniform", ZIPF, [0.0, 3.0, 0.0, 1.0]])
def test_negatives_come_as_often_as_they_say(weights: Any) -> None:
    num = 1000 if weights is ZIPF else 4 if isinstance(weights, list) else 50
    catalog = np.arange(num, dtype=np.uint64) * 1_000_003
    drawn, log_q = NegativeSampler(catalog, weights, seed=1).sample(200_000)
    assert drawn.dtype == np.uint64
    assert log_q.dtype == np.float32
    said = {int(one): math.exp(q) for one, q in zip(drawn, log_q, strict=True)}
    assert sum(said.values()) == pytest.approx(1, abs=0.01)
    assert set(said) <= set(catalog.tolist())
    for one, share in sorted(said.items(), key=lambda pair: -pair[1])[:10]:
        seen = float((drawn == np.uint64(one)).mean())
        assert seen == pytest.approx(share, abs=5 * math.sqrt(share / 200_000) + 1e-12)


def test_log_uniform_is_its_formula() -> None:
    drawn, log_q = NegativeSampler(9, "log_uniform").sample(1000)
    want = np.log(np.log((drawn + 2.0) / (drawn + 1.0)) / math.log(10))
    np.testing.assert_allclose(log_q, want, rtol=1e-5)


def test_weights_may_change_and_seeds_repeat() -> None:
    one, two = NegativeSampler(100, seed=5), NegativeSampler(100, seed=5)
    assert one.sample(50)[0].tolist() == two.sample(50)[0].tolist()
    one.reweigh(np.eye(100)[7])
    assert one.sample(5)[0].tolist() == [7] * 5
    assert one.sample(5)[1].tolist() == [0] * 5


@pytest.mark.parametrize(
    "weights", [[1.0], [1, -1, 1], [0, 0, 0], [1, math.nan, 1], [1, math.inf, 1], "zipf"]
)
def test_weights_that_do_not_fit_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="NegativeSampler: expected"):
        NegativeSampler(3, weights)


def test_numbers_of_numpy_are_numbers() -> None:
    num: Any = np.arange(5).max() + 1
    assert NegativeSampler(num, seed=1).sample(9)[0].tolist() == [
        *NegativeSampler(5, seed=1).sample(9)[0].tolist()
    ]
    assert FrequencyEstimator(window=num).window == 5


def test_a_sampler_needs_candidates() -> None:
    with pytest.raises(ConfigError, match="at least one candidate"):
        NegativeSampler([])
