"""An embedding-worker, and other ranks, that note what they are asked and can be disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from persia._rpc.messages import (
    BatchGradients,
    HyperParameters,
    IDFeatures,
    LookupResult,
    OptimizerSettings,
    PooledOutput,
    UpdateReport,
)
from persia._server.service import ParameterServer
from persia._training.ranks import Ranks
from persia._worker.service import EmbeddingWorker
from persia.config import load_configs
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import ServiceUnavailable

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIM = 4
FIXED = 3
SLOTS = {
    "user": {"dim": DIM},
    "tags": {"dim": DIM},
    "seq": {"dim": DIM, "pooling": "raw", "sample_fixed_size": FIXED},
    "jag": {"dim": DIM, "pooling": "jagged"},
}
NUM_IDS = 10


class SpyWorker(EmbeddingWorker):
    """Notes every lookup, update and release of a batch in ``events``.

    ``before_lookup`` and ``before_update`` are called with the batch id, so that a test can
    hold a call, or make it raise.
    """

    def __init__(self) -> None:
        schema, config = load_configs({"slots_config": SLOTS}, {})
        server = ParameterServer(schema, config.embedding_parameter_server_config)
        super().__init__(schema, config.embedding_worker_config, [server])
        self.events: list[tuple[str, int]] = []
        self.refs: dict[int, int] = {}  # batch id, of those between lookup and update
        self.configured: list[HyperParameters] = []
        self.optimizers: list[OptimizerSettings] = []
        self.gradients: list[BatchGradients] = []
        self.before_lookup: Callable[[int], None] = lambda batch_id: None
        self.before_update: Callable[[int], None] = lambda batch_id: None
        self.lock = threading.Lock()

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        self.before_lookup(features.batch_id)
        result = super().lookup_direct(features)
        with self.lock:
            kind = "lookup" if features.requires_grad else "read"
            self.events.append((kind, features.batch_id))
            if result.ref is not None:
                self.refs[result.ref] = features.batch_id
        return result

    def update(self, gradients: BatchGradients) -> UpdateReport:
        batch_id = gradients.update_id[1]
        self.before_update(batch_id)
        report = super().update(gradients)
        with self.lock:
            del self.refs[gradients.ref]
            self.events.append(("update", batch_id))
            self.gradients.append(gradients)
        return report

    def release(self, ref: int) -> None:
        super().release(ref)
        with self.lock:
            self.events.append(("release", self.refs.pop(ref)))

    def configure(self, settings: HyperParameters) -> None:
        super().configure(settings)
        self.configured.append(settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        super().register_optimizer(settings)
        self.optimizers.append(settings)

    def of(self, kind: str) -> list[int]:
        """Batch ids of the events of one kind, in order."""
        with self.lock:
            return [batch_id for event, batch_id in self.events if event == kind]

    @property
    def update_ids(self) -> list[tuple[int, int]]:
        return [gradients.update_id for gradients in self.gradients]

    @property
    def rows(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        """The pooled features' rows, by feature and id."""
        ids = np.arange(NUM_IDS, dtype=np.uint64)
        batch = PersiaBatch(
            [IDTypeFeatureWithSingleID(name, ids) for name in ("user", "tags")],
            requires_grad=False,
        )
        outputs = super().lookup_direct(IDFeatures(batch.features, 0, False)).outputs
        return {
            (output.name, number): row
            for output in outputs
            if isinstance(output, PooledOutput)
            for number, row in enumerate(output.values)
            if row.any()
        }


class SpyRanks(Ranks):
    """Ranks that do as this one does until they have gone, after some rounds."""

    def __init__(
        self, world_size: int = 2, *, rounds: int = 10**6, others_failed: bool = False
    ) -> None:
        self._size, self._left, self._others_failed = world_size, rounds, others_failed
        self.flags: list[bool] = []
        self.turns = 0

    def agree(self, code: int) -> list[int]:
        if not self._left:
            raise ServiceUnavailable("rank 1 has gone", role="nn-worker", replica=1)
        self._left -= 1
        return [code] * self._size

    def any(self, flag: bool) -> bool:
        self.flags.append(flag)
        return flag or self._others_failed

    def in_turn(self, action: Callable[[], Any]) -> Any:
        self.turns += 1
        return action()

    def close(self) -> None:
        pass


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
            ids = rng.integers(0, NUM_IDS, size).astype(np.uint64)
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
