"""The features of one call, split."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.ids.joined_features import split_features
from persia.errors import DataError


def test_features_lie_one_behind_the_other() -> None:
    ids = np.array([5, 6, 5, 7], np.uint64)
    one, two = split_features(["a", "b"], ids, None, None)
    assert (one.values.tolist(), two.values.tolist()) == ([5, 6], [5, 7])
    edges = np.array([0, 0, 3, 3, 4], np.int64)
    one, two = split_features(["a", "b"], ids, edges, None)
    assert (one.asked.batch_size, one.asked.num_ids, two.asked.num_ids) == (2, 3, 1)
    assert (one.asked.name, two.asked.name) == ("a", "b")
    with pytest.raises(DataError, match=r"table 'a': offsets must be in 0\.\.4"):
        split_features(["a", "b"], ids, edges + 2, None)


def test_padding_is_left_out_and_remembered() -> None:
    ids = np.array([0, 3, 0, 4], np.uint64)
    (given,) = split_features(["padded"], ids, None, None, padding=0)
    assert given.asked.distinct.tolist() == [3, 4]
    assert given.asked.batch_size == 4
    assert given.kept is not None
    assert given.kept.tolist() == [False, True, False, True]


def test_weights_are_pooled_with_and_asked_for_without() -> None:
    ids, weights = np.array([1, 0, 2], np.uint64), np.array([3.0, 4.0, 5.0], np.float32)
    edges = np.array([0, 2, 3], np.int64)
    (given,) = split_features(["weighted"], ids, edges, weights, padding=0)
    assert given.asked.weights is None
    assert given.pooled.weights is not None
    assert given.pooled.weights.tolist() == [3.0, 5.0]
