"""What an embedding-worker has seen of each feature."""

from __future__ import annotations

import numpy as np

from persia._cluster.embedded import build_embedding_worker
from persia._core.ids import cardinality
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import IDFeatures
from persia.config import EmbeddingSchema, GlobalConfig

SCHEMA = EmbeddingSchema.load({"slots_config": {"user": {"dim": 4}, "tags": {"dim": 8}}})


def batch(number: int) -> IDFeatures:
    user = FeatureBatch.from_single("user", np.array([1, 2, 1, number], np.uint64))
    tags = FeatureBatch.from_csr(
        "tags", np.array([9, 9, number], np.uint64), np.array([0, 2, 2, 3, 3])
    )
    return IDFeatures((user, tags), number, requires_grad=True)


def test_a_batch_counts_once_however_often_it_is_asked_for() -> None:
    worker = build_embedding_worker(SCHEMA, GlobalConfig.load(None))
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
