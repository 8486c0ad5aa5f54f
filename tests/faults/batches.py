"""Batches of ids drawn by their number: the same in every process, and without torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch

NUM_IDS = 64
DIM = 4
SLOTS = {"slots_config": {"user": {"dim": DIM}, "item": {"dim": DIM}}}


def make_batch(number: int, batch_size: int = 16) -> PersiaBatch:
    """Return batch ``number``; the same in every process."""
    rng = np.random.default_rng(number)
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID(name, rng.integers(0, NUM_IDS, batch_size).astype("u8"))
            for name in ("user", "item")
        ],
        labels=[Label(np.zeros((batch_size, 1), np.float32))],
        meta=str(number).encode(),
    )


def occurrences(count: int, sizes: Mapping[int, int] = {}) -> dict[str, np.ndarray]:
    """Return how often each id is in the first ``count`` batches, by feature."""
    total = {name: np.zeros(NUM_IDS) for name in ("user", "item")}
    for number in range(count):
        rng = np.random.default_rng(number)
        for counts in total.values():
            ids = rng.integers(0, NUM_IDS, sizes.get(number, 16))
            counts += np.bincount(ids, minlength=NUM_IDS)
    return total
