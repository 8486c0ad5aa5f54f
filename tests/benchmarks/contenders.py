"""PERSIA as a contender. It needs no torch, so that it can run under valgrind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import (
    BatchGradients,
    HyperParameters,
    IDFeatures,
    InitializationSettings,
    OptimizerSettings,
    SlotGradient,
)
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, GlobalConfig
from tests.benchmarks.workload import ACCUMULATOR, DIM, LR, Batch, Step, all_ids, check_resident

ADAGRAD = {"name": "adagrad", "lr": LR, "initial_accumulator_value": ACCUMULATOR}
ROWWISE = {**ADAGRAD, "vectorwise_shared": True}


class Persia:
    """FeatureBatch, EmbeddingWorker, ParameterServer: raw ids to updated rows, no torch.

    Its steps start from raw ids: finding the distinct ones is part of what it is timed for.
    """

    ids = "any u64, LRU"

    def __init__(
        self,
        table_sizes: Sequence[int],
        num_threads: int,
        optimizer: dict[str, Any] = ADAGRAD,
        capacity: int | None = None,
        dtype: str = "float32",
    ) -> None:
        self._names = [f"feature_{number}" for number in range(len(table_sizes))]
        schema = EmbeddingSchema.load(
            {
                "slots_config": {name: {"dim": DIM} for name in self._names},
                "group_settings": {name: {"dtype": dtype} for name in self._names},
            }
        )
        servers = {} if capacity is None else {"capacity": capacity}
        config = GlobalConfig.load(
            {
                "embedding_worker_config": {"forward_buffer_size": 1000},
                "embedding_parameter_server_config": servers,
            }
        )
        settings, own = config.embedding_parameter_server_config, config.embedding_worker_config
        self._server = ParameterServer(schema, settings, num_threads=num_threads)
        self._worker = EmbeddingWorker(
            schema, own, [self._server], num_pooling_threads=num_threads
        )
        self._worker.configure(HyperParameters(InitializationSettings(), 1.0, 10.0, 0))
        options = {key: value for key, value in optimizer.items() if key != "name"}
        self._worker.register_optimizer(OptimizerSettings(optimizer["name"], options))
        self._batch_id = 0
        for number, ids in all_ids(table_sizes):
            self.insert(number, ids)
        # A shard evicts when its part of the capacity is full.
        if capacity is None:
            check_resident(self.num_rows, table_sizes)

    @property
    def num_rows(self) -> int:
        return sum(self._worker.get_embedding_size())

    def insert(self, feature: int, ids: NDArray[np.uint64]) -> None:
        """Look ids of one feature up, as training does; they get rows if they had none."""
        name = self._names[feature]
        self._worker.release(self._look_up((FeatureBatch.from_single(name, ids),)))

    def _look_up(self, features: tuple[FeatureBatch, ...]) -> int:
        self._batch_id += 1
        ref = self._worker.register(IDFeatures(features, self._batch_id, True))
        self._worker.lookup(ref, True)
        return ref

    def stats(self) -> Mapping[str, int]:
        """Return the server's counts, rows and bytes among them."""
        return self._server.stats()

    def _features(self, batch: Batch) -> tuple[FeatureBatch, ...]:
        return tuple(
            FeatureBatch.from_single(name, ids.values)
            if ids.offsets is None
            else FeatureBatch.from_csr(name, ids.values, ids.offsets)
            for name, ids in zip(self._names, batch.features, strict=True)
        )

    def train_step(self, batch: Batch) -> Step:
        gradients = tuple(
            SlotGradient(name, gradient)
            for name, gradient in zip(self._names, batch.gradient, strict=True)
        )

        def step() -> None:
            ref = self._look_up(self._features(batch))
            self._worker.update(BatchGradients(ref, (0, self._batch_id), gradients))

        return step

    def evaluate_step(self, batch: Batch) -> Step:
        def step() -> None:
            self._worker.lookup_direct(IDFeatures(self._features(batch), 0, False))

        return step
