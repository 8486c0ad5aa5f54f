"""PERSIA, and torch on its own, to which the others are compared."""

from __future__ import annotations

import numpy as np
import torch

from persia._core.feature_batch import FeatureBatch
from persia._rpc.messages import (
    BatchGradients,
    HyperParameters,
    IDFeatures,
    InitializationSettings,
    OptimizerSettings,
    SlotGradient,
)
from persia._services.embedding_worker import EmbeddingWorker
from persia._services.parameter_server import ParameterServer
from persia.config import EmbeddingSchema, GlobalConfig
from tests.benchmarks.workload import ACCUMULATOR, DIM, LR, Batch, Step, raw_ids, sizes

PREFILL = 500_000  # ids at a time


class Persia:
    """FeatureBatch, EmbeddingWorker, ParameterServer: raw ids to updated rows, no torch.

    Its steps start from raw ids: finding the distinct ones is part of what it is timed for.
    """

    ids = "any u64, LRU"

    def __init__(self, quick: bool, num_threads: int) -> None:
        table_sizes = sizes(quick)
        self._names = [f"feature_{number}" for number in range(len(table_sizes))]
        schema = EmbeddingSchema.load(
            {"slots_config": {name: {"dim": DIM} for name in self._names}}
        )
        config = GlobalConfig.load({"embedding_worker_config": {"forward_buffer_size": 1000}})
        server = ParameterServer(
            schema, config.embedding_parameter_server_config, num_threads=num_threads
        )
        self._worker = EmbeddingWorker(schema, config.embedding_worker_config, [server])
        self._worker.configure(HyperParameters(InitializationSettings(), 1.0, 10.0, 0))
        self._worker.register_optimizer(
            OptimizerSettings("adagrad", {"lr": LR, "initial_accumulator_value": ACCUMULATOR})
        )
        self._batch_id = 0
        for name, size in zip(self._names, table_sizes, strict=True):
            for first in range(0, size, PREFILL):
                ids = raw_ids(np.arange(first, min(first + PREFILL, size)))
                self._worker.release(self._look_up((FeatureBatch.from_single(name, ids),)))
        expected, held = sum(table_sizes), sum(self._worker.get_embedding_size())
        if held != expected:
            raise RuntimeError(f"expected {expected} rows resident, got {held}")

    def _look_up(self, features: tuple[FeatureBatch, ...]) -> int:
        self._batch_id += 1
        ref = self._worker.register(IDFeatures(features, self._batch_id, True))
        self._worker.lookup(ref, True)
        return ref

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
        return lambda: self._evaluate(batch)

    def _evaluate(self, batch: Batch) -> None:
        self._worker.lookup_direct(IDFeatures(self._features(batch), 0, False))


class TorchMerged:
    """One EmbeddingBag(sparse=True) over all features, with torch's sparse Adagrad."""

    ids = "row numbers"

    def __init__(self, quick: bool) -> None:
        weight = torch.empty(sum(sizes(quick)), DIM).uniform_(-0.01, 0.01)
        self._bag = torch.nn.EmbeddingBag.from_pretrained(
            weight, freeze=False, mode="sum", sparse=True
        )
        self._optimizer = torch.optim.Adagrad(
            self._bag.parameters(), lr=LR, initial_accumulator_value=ACCUMULATOR
        )

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(batch.merged_rows), torch.from_numpy(batch.merged_offsets)

    def train_step(self, batch: Batch) -> Step:
        inputs = self._inputs(batch)
        gradient = torch.from_numpy(batch.gradient.reshape(-1, DIM))

        def step() -> None:
            self._optimizer.zero_grad()
            self._bag(*inputs).backward(gradient)
            self._optimizer.step()

        return step

    def evaluate_step(self, batch: Batch) -> Step:
        inputs = self._inputs(batch)

        def step() -> None:
            with torch.no_grad():
                self._bag(*inputs)

        return step
