"""PERSIA and its peers behind one seam: a training step and an evaluation lookup on a batch."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

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
from tests.benchmarks.workload import BATCH, DIM, Batch, raw_ids, sizes

INSTALL_PEERS = "pip install torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
LR = 0.01
ACCUMULATOR = 1e-8
PREFILL = 500_000  # ids at a time


class Contender(Protocol):
    name: str
    ids: str  # which ids it takes

    def train(self, batch: Batch) -> None: ...
    def evaluate(self, batch: Batch) -> None: ...


class Persia:
    """FeatureBatch, EmbeddingWorker, ParameterServer: raw ids to updated rows, no torch."""

    name = "PERSIA, exact Adagrad"
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
                self._worker.release(self._register((FeatureBatch.from_single(name, ids),)))
        expected, held = sum(table_sizes), sum(self._worker.get_embedding_size())
        if held != expected:
            raise RuntimeError(f"expected {expected} rows resident, got {held}")

    def _register(self, features: tuple[FeatureBatch, ...]) -> int:
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

    def train(self, batch: Batch) -> None:
        ref = self._register(self._features(batch))
        gradients = tuple(
            SlotGradient(name, gradient)
            for name, gradient in zip(self._names, batch.gradient, strict=True)
        )
        self._worker.update(BatchGradients(ref, (0, self._batch_id), gradients))

    def evaluate(self, batch: Batch) -> None:
        self._worker.lookup_direct(IDFeatures(self._features(batch), 0, False))


class TorchMerged:
    """One EmbeddingBag(sparse=True) over all features, with torch's sparse Adagrad."""

    name = "torch EmbeddingBag + Adagrad, merged"
    ids = "row numbers"

    def __init__(self, quick: bool) -> None:
        weight = torch.empty(sum(sizes(quick)), DIM).uniform_(-0.01, 0.01)
        self._bag = torch.nn.EmbeddingBag.from_pretrained(
            weight, freeze=False, mode="sum", sparse=True
        )
        self._optimizer = torch.optim.Adagrad(
            self._bag.parameters(), lr=LR, initial_accumulator_value=ACCUMULATOR
        )

    def _lookup(self, batch: Batch) -> torch.Tensor:
        output: torch.Tensor = self._bag(
            torch.from_numpy(batch.merged_rows), torch.from_numpy(batch.merged_offsets)
        )
        return output

    def train(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        gradient = torch.from_numpy(batch.gradient.reshape(-1, DIM))
        self._lookup(batch).backward(gradient)  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self._lookup(batch)


class Fbgemm:
    """FBGEMM's table-batched embeddings on the CPU, one table a feature."""

    ids = "row numbers"

    def __init__(self, quick: bool, row_wise: bool) -> None:
        ops: Any = importlib.import_module(
            "fbgemm_gpu.split_table_batched_embeddings_ops_training"
        )
        common: Any = importlib.import_module(
            "fbgemm_gpu.split_table_batched_embeddings_ops_common"
        )
        optim: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        kind = optim.EmbOptimType
        self.name = f"FBGEMM TBE, {'row-wise' if row_wise else 'exact'} Adagrad"
        self._tables = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (size, DIM, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
                for size in sizes(quick)
            ],
            optimizer=kind.EXACT_ROWWISE_ADAGRAD if row_wise else kind.EXACT_ADAGRAD,
            learning_rate=LR,
        )
        self._tables.init_embedding_weights_uniform(-0.01, 0.01)

    def _lookup(self, batch: Batch) -> torch.Tensor:
        rows = np.concatenate([feature.rows for feature in batch.features])
        offsets = np.append(batch.merged_offsets, len(rows))
        output: torch.Tensor = self._tables(torch.from_numpy(rows), torch.from_numpy(offsets))
        return output

    def train(self, batch: Batch) -> None:
        gradient = batch.gradient.transpose(1, 0, 2).reshape(BATCH, -1)
        output = self._lookup(batch)
        output.backward(torch.from_numpy(gradient))  # type: ignore[no-untyped-call]

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self._lookup(batch)


def contenders(quick: bool, num_threads: int) -> list[Contender]:
    """Return PERSIA, torch, and the optional peers that are installed, filled with rows."""
    found: list[Contender] = [Persia(quick, num_threads), TorchMerged(quick)]
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        found += [Fbgemm(quick, row_wise=False), Fbgemm(quick, row_wise=True)]
    return found
