"""An embedding-worker of plain dictionaries: small, exact, and willing to be disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import (
    BatchGradients,
    FeatureStats,
    HyperParameters,
    IDFeatures,
    JaggedOutput,
    LookupResult,
    OptimizerSettings,
    PooledOutput,
    RawOutput,
    SlotOutput,
    UpdateReport,
)
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIM = 4
FIXED = 3


KINDS = {"user": "sum", "tags": "sum", "seq": "raw", "jag": "jagged"}


def initial_row(name: str, number: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([len(name), number])
    return rng.uniform(-0.01, 0.01, DIM).astype(np.float32)


class FakeWorker:
    """Rows by (feature, id), trained by SGD. Every call is noted in ``events``.

    ``before_lookup`` and ``before_update`` are called with the batch id, outside the lock,
    so that a test can hold a call, or make it raise.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], NDArray[np.float32]] = {}
        self.events: list[tuple[str, int]] = []
        self.refs: dict[int, IDFeatures] = {}
        self.configured: list[HyperParameters] = []
        self.optimizers: list[OptimizerSettings] = []
        self.gradients: list[BatchGradients] = []
        self.update_ids: list[tuple[int, int]] = []
        self.before_lookup: Callable[[int], None] = lambda batch_id: None
        self.before_update: Callable[[int], None] = lambda batch_id: None
        self.lock = threading.RLock()
        self.next_ref = 100

    # --- lookups ----------------------------------------------------------------------------

    def register(self, features: IDFeatures) -> int:
        with self.lock:
            ref = self.next_ref
            self.next_ref += 1
            self.refs[ref] = features
            return ref

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        self.before_lookup(features.batch_id)
        with self.lock:
            kind = "lookup" if features.requires_grad else "read"
            self.events.append((kind, features.batch_id))
            ref = self.register(features) if features.requires_grad else None
            outputs = tuple(
                self._output(feature, features.requires_grad) for feature in features.features
            )
            return LookupResult(outputs, ref)

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        with self.lock:
            features = self.refs[ref]
            return LookupResult(
                tuple(self._output(feature, is_training) for feature in features.features), ref
            )

    def _rows(self, name: str, ids: NDArray[np.uint64], inserts: bool) -> NDArray[np.float32]:
        rows = np.zeros((len(ids), DIM), np.float32)
        for place, number in enumerate(ids.tolist()):
            row = self.rows.get((name, number))
            if row is None and inserts:
                row = self.rows[name, number] = initial_row(name, number)
            if row is not None:
                rows[place] = row
        return rows

    def _output(self, feature: FeatureBatch, inserts: bool) -> SlotOutput:
        name = feature.name
        rows = self._rows(name, feature.distinct, inserts)
        offsets = offsets_of(feature)
        inverse = np.asarray(feature.inverse).astype(np.int64)
        size = feature.batch_size
        if KINDS[name] == "jagged":
            return JaggedOutput(name, rows, inverse, offsets)
        if KINDS[name] == "raw":
            index = np.zeros((size, FIXED), np.int64)
            for sample in range(size):
                numbers = inverse[offsets[sample] : offsets[sample + 1]][:FIXED]
                index[sample, : len(numbers)] = numbers + 1
            padded = np.concatenate([np.zeros((1, DIM), np.float32), rows])
            return RawOutput(name, padded, index.reshape(-1), FIXED)
        values = np.zeros((size, DIM), np.float32)
        for sample in range(size):
            for number in inverse[offsets[sample] : offsets[sample + 1]]:
                values[sample] += rows[number]
        return PooledOutput(name, values)

    # --- updates ----------------------------------------------------------------------------

    def update(self, gradients: BatchGradients) -> UpdateReport:
        batch_id = gradients.update_id[1]
        self.before_update(batch_id)
        with self.lock:
            features = self.refs.pop(gradients.ref)
            self.events.append(("update", batch_id))
            self.gradients.append(gradients)
            assert gradients.update_id not in self.update_ids
            self.update_ids.append(gradients.update_id)
            lr = np.float32(self.optimizers[-1].options["lr"])
            skipped: list[str] = []
            nans: dict[str, int] = {}
            for feature, slot in zip(features.features, gradients.gradients, strict=True):
                assert feature.name == slot.name
                if slot.gradient is None:
                    skipped.append(slot.name)
                    continue
                grad = slot.gradient.astype(np.float32) / np.float32(gradients.scale)
                bad = ~np.isfinite(grad).all(axis=1)
                if bad.any():
                    nans[slot.name] = int(bad.sum())
                    grad[bad] = 0
                for number, step in self._steps(feature, grad):
                    self.rows[feature.name, number] -= lr * step
            return UpdateReport(nan_samples=nans, skipped=tuple(skipped))

    def _steps(
        self, feature: FeatureBatch, grad: NDArray[np.float32]
    ) -> list[tuple[int, NDArray[np.float32]]]:
        ids = feature.distinct.tolist()
        if KINDS[feature.name] == "sum":
            assert grad.shape == (feature.batch_size, DIM)
            offsets = offsets_of(feature)
            summed = np.zeros((len(ids), grad.shape[1]), np.float32)
            samples = np.repeat(np.arange(feature.batch_size), np.diff(offsets))
            np.add.at(summed, feature.inverse, grad[samples])
            grad = summed
        assert grad.shape == (len(ids), DIM)
        return list(zip(ids, grad, strict=True))

    def release(self, ref: int) -> None:
        with self.lock:
            features = self.refs.pop(ref)
            self.events.append(("release", features.batch_id))

    # --- the rest ---------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        self.configured.append(settings)

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        return (0,)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        self.optimizers.append(settings)

    def ready_for_serving(self) -> bool:
        return bool(self.configured)

    def get_embedding_size(self) -> list[int]:
        return [len(self.rows)]

    # This one has no checkpoints.
    begin_cut = write_cut = cut_status = end_cut = load = set_embedding = cast("Any", None)

    def clear_embeddings(self) -> None:
        self.rows.clear()

    def stats(self) -> Mapping[str, int]:
        return {}

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        return ()

    def server_stats(self) -> list[Mapping[str, int]]:
        return [{"rows": len(self.rows)}]

    def of(self, kind: str) -> list[int]:
        """Batch ids of the events of one kind, in order."""
        with self.lock:
            return [batch_id for event, batch_id in self.events if event == kind]


def offsets_of(feature: FeatureBatch) -> NDArray[np.int64]:
    if feature.offsets is None:
        return np.arange(feature.batch_size + 1, dtype=np.int64)
    return np.asarray(feature.offsets).astype(np.int64)


# --- batches ----------------------------------------------------------------------------------


def u64(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def make_batch(
    number: int = 0,
    size: int = 4,
    names: Sequence[str] = ("user", "tags"),
    requires_grad: bool = True,
    meta: bytes | None = None,
) -> PersiaBatch:
    """A batch whose ids, dense data and labels follow from its number."""
    rng = np.random.default_rng(number)
    features: list[IDTypeFeature | IDTypeFeatureWithSingleID] = []
    for name in names:
        if name == "user":
            ids = rng.integers(0, 10, size).astype(np.uint64)
            features.append(IDTypeFeatureWithSingleID(name, ids))
        else:
            lists = [
                rng.integers(0, 10, rng.integers(0, 5)).astype(np.uint64) for _ in range(size)
            ]
            features.append(IDTypeFeature(name, lists))
    dense = rng.normal(size=(size, 2)).astype(np.float32)
    labels = rng.integers(0, 2, (size, 1)).astype(np.float32)
    return PersiaBatch(
        features,
        non_id_type_features=[NonIDTypeFeature(dense)],
        labels=[Label(labels)],
        requires_grad=requires_grad,
        meta=meta,
    )
