"""What an embedding-worker has seen of each feature."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from persia._cluster.embedded import build_embedding_worker
from persia._core.ids import cardinality
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import (
    IDFeatures,
)
from persia.config import EmbeddingSchema, GlobalConfig
from tests.support.services import (
    features,
)
from tests.worker.cluster import WIDE, faulty_cluster

if TYPE_CHECKING:
    import pytest

SLOTS = EmbeddingSchema.load({"slots_config": {"user": {"dim": 4}, "tags": {"dim": 8}}})


def batch(number: int) -> IDFeatures:
    user = FeatureBatch.from_single("user", np.array([1, 2, 1, number], np.uint64))
    tags = FeatureBatch.from_csr(
        "tags", np.array([9, 9, number], np.uint64), np.array([0, 2, 2, 3, 3])
    )
    return IDFeatures((user, tags), number, requires_grad=True)


def test_a_batch_counts_once_however_often_it_is_asked_for() -> None:
    worker = build_embedding_worker(SLOTS, GlobalConfig.load(None))
    try:
        for number in (50, 51, 51):
            worker.register(batch(number))
        user, tags = worker.feature_stats()
    finally:
        worker.close()
    assert (user.name, user.dim, user.num_samples, user.num_empty) == ("user", 4, 8, 0)
    assert (tags.name, tags.dim, tags.num_samples, tags.num_empty) == ("tags", 8, 8, 4)
    assert (user.num_ids, tags.num_ids) == (8, 6)
    assert round(cardinality.estimate(user.registers)) == 4
    assert round(cardinality.estimate(tags.registers)) == 3
    both = np.maximum(user.registers, tags.registers)
    assert round(cardinality.estimate(both)) == 5


def test_ids_beyond_the_index_bits_are_counted_with_one_warning_a_feature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with faulty_cluster() as (worker, _), caplog.at_level(logging.WARNING):
        batch = {"sum": [[1, WIDE], [2**64 - 1]], "max": [[WIDE - 1], []]}
        batch["stack"] = [[2**64 - 1], []]
        ref = worker.register(features(batch, 0))
        worker.lookup(ref, True)
        worker.lookup_direct(features(batch, 1))
        worker.lookup_direct(features({"mean": [[WIDE]]}, requires_grad=False))
        stats = worker.stats()
        masked = {name: stats[name] for name in stats if name.startswith("masked_ids")}
        assert masked == {"masked_ids.sum": 4, "masked_ids.mean": 1}
        warned = [
            r.getMessage() for r in caplog.records if "more than 56 bits" in r.getMessage()
        ]
        assert len(warned) == 2
        assert warned[0].startswith("feature 'sum': 2 ids")
