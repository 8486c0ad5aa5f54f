"""What an embedding-worker has seen of each feature in training.

That is samples, ids, and about how many distinct ones. It costs a hash and a byte of a table
that stays in the cache for each distinct id of a batch, beside the dozens of a lookup and an
update; a report reads it, and nobody else.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from persia._core.ids import cardinality
from persia._rpc.messages import FeatureStats

if TYPE_CHECKING:
    from persia._core.ids.feature_batch import FeatureBatch
    from persia.config import EmbeddingSchema


class _Seen:
    __slots__ = ("num_empty", "num_ids", "num_samples", "registers")

    def __init__(self) -> None:
        self.num_samples = self.num_empty = self.num_ids = 0
        self.registers = np.zeros(cardinality.NUM_REGISTERS, np.uint8)


class FeatureStatistics:
    """Counts by feature; any thread may add to it.

    Args:
        schema: The embedding config.
    """

    def __init__(self, schema: EmbeddingSchema) -> None:
        self._dims = {slot.name: slot.dim for slot in schema.slots.values()}
        self._lock = threading.Lock()  # guards all of it
        self._seen: dict[str, _Seen] = {}

    def add(self, ids: FeatureBatch) -> None:
        """Count one feature of a batch."""
        offsets = ids.offsets
        num_empty = 0 if offsets is None else int((offsets[1:] == offsets[:-1]).sum())
        with self._lock:
            seen = self._seen.setdefault(ids.name, _Seen())
            seen.num_samples += ids.batch_size
            seen.num_empty += num_empty
            seen.num_ids += ids.num_ids
            cardinality.add(seen.registers, ids.distinct)

    def read(self) -> tuple[FeatureStats, ...]:
        """Return all so far, in the order in which features came first; the others last."""
        with self._lock:
            all_seen = self._seen | {
                name: _Seen() for name in self._dims if name not in self._seen
            }
            return tuple(
                FeatureStats(
                    name,
                    self._dims[name],
                    seen.num_samples,
                    seen.num_empty,
                    seen.num_ids,
                    seen.registers.copy(),
                )
                for name, seen in all_seen.items()
            )
