"""Batches of which it is known how often each id is in them. Imports no torch.

The loss is the sum of all embeddings and SGD's rate is 1, so each occurrence of an id lowers
every value of its row by 1, whatever the order: a batch that is lost or applied twice shows.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch

NUM_BATCHES = int(os.environ.get("NUM_BATCHES", "500"))
NUM_IDS = 256
BATCH_SIZE = 64


def ids_of(number: int) -> NDArray[np.uint64]:
    """Return the ids of a batch; the same in every process."""
    return np.random.default_rng(number).integers(0, NUM_IDS, BATCH_SIZE).astype(np.uint64)


def make_batch(ids: NDArray[np.uint64], requires_grad: bool = True) -> PersiaBatch:
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", ids)],
        labels=[Label(np.zeros((len(ids), 1), np.float32))],
        requires_grad=requires_grad,
    )


def occurrences() -> NDArray[np.int64]:
    """Return how often each id is in all batches."""
    everything = np.concatenate([ids_of(number) for number in range(NUM_BATCHES)])
    return np.bincount(everything.view(np.int64), minlength=NUM_IDS)
