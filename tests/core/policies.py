"""Stores with several policies."""

from __future__ import annotations

from typing import Any

from persia._core.store.store import EmbeddingStore
from tests.core import stores
from tests.core.stores import Floats
from tests.reference.policies import Kind

DIM = 2


def new_store(capacity: int, *kinds: Kind, **arguments: Any) -> EmbeddingStore:
    return stores.new_store(capacity, policies=kinds, **({"seed": 11} | arguments))


def train(
    store: EmbeddingStore, signs: Any, batch_id: int = 0, **policy: Any
) -> tuple[Floats, int, int]:
    """Rows, and how many were inserted and refused."""
    rows, _, *counts = stores.train(store, signs, DIM, batch_id=batch_id, **policy)
    return rows, counts[0], counts[1]


def stream(store: EmbeddingStore, first: int, count: int, batch_id: int, **policy: Any) -> None:
    """Ids that come once, a hundred a batch."""
    for start in range(first, first + count, 100):
        train(store, range(start, start + 100), batch_id + start, **policy)
