"""Stores whose rows outlive them, in a file of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from tests.core import stores
from tests.core.stores import ADAGRAD, train, u64

HEADER, SHARD = 1 << 32, 1 << 37  # bytes of the file, which is sparse
CONTROL = 4096  # offset of the word that says whether it is void
ARGUMENTS: dict[str, Any] = {
    "capacity": 5000,
    "num_shards": 3,
    "seed": 4,
    "policies": [("lfu", "steps", 1000)],
    "sketch_bytes": 640,
}


@contextmanager
def state_file() -> Iterator[int]:
    """The descriptor of an empty one."""
    descriptor = os.memfd_create("state")
    os.truncate(descriptor, HEADER + ARGUMENTS["num_shards"] * SHARD)
    yield descriptor
    os.close(descriptor)


def new_store(file: int, optimizer: RowOptimizer = ADAGRAD, **changed: Any) -> EmbeddingStore:
    return stores.new_store(**(ARGUMENTS | changed), optimizer=optimizer, state_file=file)


def filled(file: int) -> EmbeddingStore:
    """One with a life behind it; its last update was tag 12 of slot 1."""
    store = new_store(file)
    for turn in range(12):
        store.set_clocks(turn, turn)
        _, hints, _, _ = train(store, range(300 * turn, 300 * turn + 900), 4, batch_id=turn)
        signs = u64(range(300 * turn, 300 * turn + 900))
        store.update(signs, hints, np.ones((900, 4), np.float32), slot=1, tag=turn + 1)
        train(store, range(50_000, 50_050), 8)
        store.delete(u64(range(300 * turn, 300 * turn + 60, 3)))
    return store
