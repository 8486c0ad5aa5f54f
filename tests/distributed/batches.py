"""Batches of a click model, the same in every process, and without torch."""

from __future__ import annotations

import numpy as np

from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

NUM_IDS = 50
DIM = 4
SLOTS = {"slots_config": {"user": {"dim": DIM}, "tags": {"dim": DIM}}}
BATCH_SIZE = 8


def make_batch(*numbers: int, is_reversed: bool = False) -> PersiaBatch:
    """Return the samples of these batches as one, its arrays in this order or in the other."""
    users, tags, dense, labels = [], [], [], []
    for number in numbers:
        rng = np.random.default_rng(number)
        users.append(rng.integers(0, NUM_IDS, BATCH_SIZE).astype(np.uint64))
        tags += [
            rng.integers(0, NUM_IDS, rng.integers(0, 4)).astype(np.uint64)
            for _ in range(BATCH_SIZE)
        ]
        dense.append(rng.normal(size=(BATCH_SIZE, 3)).astype(np.float32))
        labels.append(rng.integers(0, 2, (BATCH_SIZE, 1)).astype(np.float32))
    first, *rest = np.split(np.concatenate(dense), 3, axis=1)
    back = -1 if is_reversed else 1
    ids = IDTypeFeatureWithSingleID("user", np.concatenate(users)), IDTypeFeature("tags", tags)
    return PersiaBatch(
        ids[::back],
        non_id_type_features=[
            NonIDTypeFeature(first, "first"),
            NonIDTypeFeature(np.concatenate(rest, axis=1), "rest"),
        ][::back],
        labels=[Label(np.concatenate(labels))],
    )
