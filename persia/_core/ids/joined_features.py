"""The features of one call of a lookup operator, whose ids come one behind the other.

``persia::lookup`` splits them where a model is trained, ``persia::served_lookup`` where it is
served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch
from persia.errors import DataError

# The mode in which each id is a sample, and how each mode pools.
PER_ID = "none"
POOLINGS = {"sum": "sum", "mean": "mean", "max": "max", PER_ID: "sum"}


@dataclass(slots=True, eq=False)
class GivenIds:
    """The ids of one feature, as they are asked for and, with weights, as they are pooled."""

    asked: FeatureBatch
    pooled: FeatureBatch
    values: NDArray[np.uint64]  # [N], as given
    padding: int | None
    kept: NDArray[np.bool_] | None = None  # of these, those that are no padding; None: all


def split_features(
    tables: Sequence[str],
    ids: NDArray[np.uint64],
    offsets: NDArray[np.int64] | None,
    weights: NDArray[np.float32] | None,
    padding: int | None = None,
) -> list[GivenIds]:
    """Return the ids of each feature, by the names of their tables, all with as many samples.

    Without offsets each sample has one id. ``padding`` is an id that counts nothing.

    Raises:
        DataError: If offsets go beyond the ids.
    """
    kept, raw = None, ids
    if padding is not None:
        kept = ids != np.uint64(padding % (1 << 64))
        if kept.all():
            kept = None
        else:
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
            offsets = before if offsets is None else before[offsets]
            ids = ids[kept]
            weights = None if weights is None else weights[kept]
    found = []
    num_samples = (len(ids) if offsets is None else len(offsets) - 1) // len(tables)
    for place, table in enumerate(tables):
        first = place * num_samples
        if offsets is None:
            asked = FeatureBatch.from_single(table, ids[first : first + num_samples])
            found.append(GivenIds(asked, asked, ids[first : first + num_samples], padding))
            continue
        edges = offsets[first : first + num_samples + 1]
        start, stop = int(edges[0]), int(edges[-1])
        if not 0 <= start <= stop <= len(ids):
            raise DataError(
                f"table {table!r}: offsets must be in 0..{len(ids)}, got {start} to {stop}"
            )
        edges, values = edges - start, ids[start:stop]
        asked = pooled = FeatureBatch.from_csr(table, values, edges)
        if weights is not None:
            pooled = FeatureBatch.from_csr(table, values, edges, weights[start:stop])
        found.append(
            GivenIds(asked, pooled, raw if padding is not None else values, padding, kept)
        )
    return found
