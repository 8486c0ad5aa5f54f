"""torch on its own; FBGEMM, TorchRec and TFRA, measured where they are installed.

The latter are optional and untyped: they are loaded by name, and what they give is ``Any``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.benchmarks.tfra import Tfra
from tests.benchmarks.workload import (
    ACCUMULATOR,
    BATCH,
    DIM,
    LR,
    Batch,
    Contender,
    Step,
    raw_ids,
    sizes,
)

# Without dependencies: torchrec asks for fbgemm-gpu, which writes over fbgemm-gpu-cpu's files.
INSTALL_PEERS = (
    "pip install tensordict 'torchmetrics==1.0.3' tqdm pyre-extensions && "
    "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
)
# Past the number of training steps of a run: managed collision merges its history of ids into
# its tables at intervals, and that cost is left out in its favour.
EVICTION_INTERVAL = 2000


def is_installed(package: str) -> bool:
    """Return whether the package can be imported; it is not imported here."""
    return importlib.util.find_spec(package) is not None


def peers(quick: bool) -> dict[str, Callable[[], Contender]]:
    """Return how to make the peers that are installed, by name."""
    found: dict[str, Callable[[], Contender]] = {}
    if is_installed("fbgemm_gpu"):
        found["FBGEMM TBE, exact Adagrad"] = lambda: Fbgemm(quick, row_wise=False)
        found["FBGEMM TBE, row-wise Adagrad"] = lambda: Fbgemm(quick, row_wise=True)
        if is_installed("torchrec"):
            found["TorchRec fused, row-wise Adagrad"] = lambda: TorchRec(quick)
            found["TorchRec ZCH, row-wise Adagrad"] = lambda: ManagedCollision(quick)
    if is_installed("tensorflow_recommenders_addons"):
        found["TFRA, exact Adagrad"] = lambda: Tfra(quick)
    return found


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


class Fbgemm:
    """FBGEMM's table-batched embeddings on the CPU, one table a feature."""

    ids = "row numbers"

    def __init__(self, quick: bool, row_wise: bool) -> None:
        training: Any = importlib.import_module(
            "fbgemm_gpu.split_table_batched_embeddings_ops_training"
        )
        common: Any = importlib.import_module(
            "fbgemm_gpu.split_table_batched_embeddings_ops_common"
        )
        optimizers: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        kind = optimizers.EmbOptimType
        self._tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (size, DIM, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
                for size in sizes(quick)
            ],
            optimizer=kind.EXACT_ROWWISE_ADAGRAD if row_wise else kind.EXACT_ADAGRAD,
            learning_rate=LR,
        )
        self._tables.init_embedding_weights_uniform(-0.01, 0.01)

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.concatenate([feature.rows for feature in batch.features])
        offsets = np.append(batch.merged_offsets, len(rows))
        return torch.from_numpy(rows), torch.from_numpy(offsets)

    def train_step(self, batch: Batch) -> Step:
        inputs, gradient = self._inputs(batch), sample_major_gradient(batch)
        return lambda: self._tables(*inputs).backward(gradient)

    def evaluate_step(self, batch: Batch) -> Step:
        inputs = self._inputs(batch)

        def step() -> None:
            with torch.no_grad():
                self._tables(*inputs)

        return step


class TorchRec:
    """A fused collection of embedding bags: the optimizer runs inside the backward pass."""

    ids = "row numbers"

    def __init__(self, quick: bool, spare_rows: int = 0) -> None:
        configs: Any = importlib.import_module("torchrec.modules.embedding_configs")
        fused: Any = importlib.import_module("torchrec.modules.fused_embedding_modules")
        optimizers: Any = importlib.import_module("torchrec.optim")
        self._jagged: Any = importlib.import_module("torchrec.sparse.jagged_tensor")
        self.tables = [
            configs.EmbeddingBagConfig(
                name=f"table_{number}",
                embedding_dim=DIM,
                num_embeddings=size + spare_rows,
                feature_names=[f"feature_{number}"],
            )
            for number, size in enumerate(sizes(quick))
        ]
        self._bags = fused.FusedEmbeddingBagCollection(
            self.tables,
            optimizer_type=optimizers.RowWiseAdagrad,
            optimizer_kwargs={"lr": LR, "eps": ACCUMULATOR},
        )

    def _values(self, batch: Batch) -> list[np.ndarray[Any, Any]]:
        return [feature.rows for feature in batch.features]

    def _inputs(self, batch: Batch) -> Any:
        values = torch.from_numpy(np.concatenate(self._values(batch)))
        offsets = np.append(batch.merged_offsets, len(values))
        keys = [table.feature_names[0] for table in self.tables]
        inputs = self._jagged.KeyedJaggedTensor(
            keys, values, lengths=torch.from_numpy(np.diff(offsets))
        )
        return inputs.sync()

    def _lookup(self, inputs: Any, is_training: bool) -> torch.Tensor:
        output: torch.Tensor = self._bags(inputs).values()
        return output

    def train_step(self, batch: Batch) -> Step:
        inputs, gradient = self._inputs(batch), sample_major_gradient(batch)
        return lambda: self._lookup(inputs, True).backward(gradient)  # type: ignore[no-untyped-call]

    def evaluate_step(self, batch: Batch) -> Step:
        inputs = self._inputs(batch)

        def step() -> None:
            with torch.no_grad():
                self._lookup(inputs, False)

        return step


class ManagedCollision(TorchRec):
    """The same behind TorchRec's managed collision (ZCH): sorted ids, found by bisection."""

    ids = "any u63, fixed size"

    def __init__(self, quick: bool) -> None:
        super().__init__(quick, spare_rows=1)  # the last row stands for ids it does not hold
        managed: Any = importlib.import_module("torchrec.modules.mc_modules")
        collisions = {}
        for table in self.tables:
            collision = managed.MCHManagedCollisionModule(
                zch_size=table.num_embeddings,
                device=torch.device("cpu"),
                eviction_policy=managed.LFU_EvictionPolicy(),
                eviction_interval=EVICTION_INTERVAL,
                name=table.name,
            )
            fill(collision, table.num_embeddings - 1)
            collisions[table.name] = collision
        self._collisions = managed.ManagedCollisionCollection(collisions, self.tables)

    def _values(self, batch: Batch) -> list[np.ndarray[Any, Any]]:
        return [feature.values.view(np.int64) for feature in batch.features]

    def _lookup(self, inputs: Any, is_training: bool) -> torch.Tensor:
        if self._collisions.training != is_training:
            self._collisions.train(is_training)
        return super()._lookup(self._collisions(inputs), is_training)


def fill(collision: Any, num_ids: int) -> None:
    """Let a managed collision module hold the ids of a feature, as a checkpoint would."""
    ids = raw_ids(np.arange(num_ids)).view(np.int64)
    order = np.argsort(ids)
    state = collision.state_dict()
    state["_mch_sorted_raw_ids"][:num_ids] = torch.from_numpy(ids[order])
    state["_mch_remapped_ids_mapping"][:num_ids] = torch.from_numpy(order)
    collision.load_state_dict(state)


def sample_major_gradient(batch: Batch) -> torch.Tensor:
    """Return the gradient as these peers give their output: [BATCH, features * DIM]."""
    by_sample = np.ascontiguousarray(batch.gradient.transpose(1, 0, 2))
    return torch.from_numpy(by_sample.reshape(BATCH, -1))
