"""Rows and manifests to write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._files.schema import SavedSchema
from persia.config import EmbeddingSchema

SETTINGS: dict[str, Any] = {
    "slots_config": {"user": {"dim": 4}, "item": {"dim": 4}, "tag": {"dim": 3}},
    "group_settings": {"tag": {"dtype": "bfloat16"}},
}


def schema(settings: dict[str, Any] = SETTINGS) -> SavedSchema:
    config = EmbeddingSchema.load(settings)
    return SavedSchema.of(config, [RowOptimizer("adagrad") for _ in config.tables])


def block(
    signs: Iterable[int],
    *,
    dim: int = 4,
    words: int = 4,
    dtype: str = "float32",
    policy: int = 0,
    seed: int = 0,
) -> RowBlock:
    """Return rows of these signs, of chance otherwise."""
    rng = np.random.default_rng(seed)
    keys = np.array(list(signs), np.uint64)
    n = len(keys)
    values: Any = rng.normal(size=(n, dim)).astype(np.float32)
    if dtype != "float32":
        values = rng.integers(0, 1 << 16, (n, dim), dtype=np.uint16)
    return RowBlock(
        policy,
        dtype,
        keys,
        values,
        rng.integers(0, 1 << 32, (n, words), dtype=np.uint32),
        rng.permutation(n).astype(np.uint64),
        rng.integers(0, 9, n, dtype=np.uint32) * np.uint32(policy > 0),
        rng.integers(0, 9, n, dtype=np.uint64) * np.uint64(policy > 0),
    )


def joined(blocks: Iterable[RowBlock]) -> RowBlock:
    """Return blocks of one kind as one."""
    held = list(blocks)
    arrays = zip(*(each.arrays for each in held), strict=True)
    return RowBlock(held[0].policy, held[0].dtype, *map(np.concatenate, arrays))


def rows_of(blocks: Iterable[RowBlock]) -> dict[int, tuple[bytes, ...]]:
    """Return the rows by sign, as bytes; the order of eviction is left out."""
    found: dict[int, tuple[bytes, ...]] = {}
    for each in blocks:
        for place, sign in enumerate(each.signs.tolist()):
            assert sign not in found
            found[sign] = (
                bytes([each.policy]),
                each.dtype.encode(),
                each.values[place].tobytes(),
                each.states[place].tobytes(),
                each.uses[place].tobytes(),
                each.ages[place].tobytes(),
            )
    return found
