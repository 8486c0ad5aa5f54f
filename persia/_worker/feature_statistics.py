"""What an embedding-worker has counted of each feature.

Ids of all lookups, and of training also samples and about how many distinct ids. A batch costs
a hash and a byte of a table that stays in the cache for each of its distinct ids, beside the
dozens of a lookup and an update; metrics and a report read the counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np

from persia._core.ids import cardinality
from persia._rpc.messages import FeatureStats
from persia._worker.packing import PackedBatch
from persia.config import EmbeddingSchema
from persia.logger import get_logger

_logger = get_logger("persia.embedding_worker")


class _Feature:
    __slots__ = (
        *("num_distinct", "num_ids", "num_masked", "num_skipped"),
        *("num_empty", "num_samples", "num_trained", "registers"),
    )

    def __init__(self) -> None:
        self.num_ids = self.num_distinct = self.num_masked = self.num_skipped = 0
        # Of training only.
        self.num_samples = self.num_empty = self.num_trained = 0
        self.registers = np.zeros(cardinality.NUM_REGISTERS, np.uint8)


class FeatureStatistics:
    """Counts by feature; any thread may add to it.

    Args:
        schema: The embedding config.
    """

    def __init__(self, schema: EmbeddingSchema) -> None:
        self._dims = {slot.name: slot.dim for slot in schema.slots.values()}
        self._index_bits = 64 - schema.prefix_bits
        self._lock = threading.Lock()  # guards all below
        self._features: dict[str, _Feature] = {}  # in the order in which they came first

    def add(self, packed: PackedBatch, is_training: bool) -> None:
        """Count the ids of a batch; warn when those of a feature are masked the first time."""
        first_masked = []
        with self._lock:
            for feature in packed.features:
                ids = feature.ids
                counts = self._features.get(ids.name) or self._add_feature(ids.name)
                counts.num_ids += ids.num_ids
                counts.num_distinct += ids.num_distinct
                if is_training:
                    offsets = ids.offsets
                    counts.num_samples += ids.batch_size
                    counts.num_trained += ids.num_ids
                    if offsets is not None:
                        is_empty = offsets[1:] == offsets[:-1]
                        counts.num_empty += int(np.count_nonzero(is_empty))
                    cardinality.add(counts.registers, ids.distinct)
            for name, num_masked in packed.num_masked.items():
                counts = self._features[name]
                if not counts.num_masked:
                    first_masked.append((name, num_masked))
                counts.num_masked += num_masked
        for name, num_masked in first_masked:
            _logger.warning(
                "feature %r: %d ids of a batch need more than %d bits (64 - "
                "feature_index_prefix_bit) and were cut to them, so that they may share "
                "rows; later ones are only counted. strict_ids: true makes this an error",
                name,
                num_masked,
                self._index_bits,
            )

    def add_skipped(self, names: Iterable[str]) -> None:
        """Count features of a batch that had no gradient."""
        with self._lock:
            for name in names:
                # A repeated registration may be updated before the first has been counted.
                one = self._features.get(name) or self._add_feature(name)
                one.num_skipped += 1

    def _add_feature(self, name: str) -> _Feature:
        counts = self._features[name] = _Feature()
        return counts

    def count_ids(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Return by feature: ids, distinct ids batch by batch, masked, gradients skipped."""
        with self._lock:
            return {
                name: (one.num_ids, one.num_distinct, one.num_masked, one.num_skipped)
                for name, one in self._features.items()
            }

    def read(self) -> tuple[FeatureStats, ...]:
        """Return what training saw, in the order in which features came; the others last."""
        with self._lock:
            trained = {name: x for name, x in self._features.items() if x.num_samples}
            features = trained | {
                name: _Feature() for name in self._dims if name not in trained
            }
            return tuple(
                FeatureStats(
                    name,
                    self._dims[name],
                    one.num_samples,
                    one.num_empty,
                    one.num_trained,
                    one.registers.copy(),
                )
                for name, one in features.items()
            )
