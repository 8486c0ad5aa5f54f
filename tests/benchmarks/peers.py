"""torch on its own; FBGEMM, TorchRec and TFRA, measured where they are installed.

The latter are optional and untyped: they are loaded by name, and what they give is ``Any``.
TFRA's table takes any i64; TensorFlow takes its number of threads once for a process: measure
one number at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.benchmarks.workload import (
    ACCUMULATOR,
    BATCH,
    DIM,
    LR,
    Batch,
    Contender,
    Step,
    check_resident,
    raw_ids,
    sizes,
)

FILL = 500_000  # ids at a time
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


class TorchPeer:
    """A contender of torch: what it is given, and how it looks that up."""

    ids = "row numbers"

    def _inputs(self, batch: Batch) -> Any:
        raise NotImplementedError

    def _lookup(self, inputs: Any, is_training: bool) -> Any:
        raise NotImplementedError

    def _gradient(self, batch: Batch) -> torch.Tensor:
        """Return the gradient as most give their output: [BATCH, features * DIM]."""
        by_sample = np.ascontiguousarray(batch.gradient.transpose(1, 0, 2))
        return torch.from_numpy(by_sample.reshape(BATCH, -1))

    def train_step(self, batch: Batch) -> Step:
        inputs, gradient = self._inputs(batch), self._gradient(batch)
        return lambda: self._lookup(inputs, True).backward(gradient)

    def evaluate_step(self, batch: Batch) -> Step:
        inputs = self._inputs(batch)

        def step() -> None:
            with torch.no_grad():
                self._lookup(inputs, False)

        return step


class TorchMerged(TorchPeer):
    """One EmbeddingBag(sparse=True) over all features, with torch's sparse Adagrad."""

    def __init__(self, quick: bool) -> None:
        weight = torch.empty(sum(sizes(quick)), DIM).uniform_(-0.01, 0.01)
        self._bag = torch.nn.EmbeddingBag.from_pretrained(
            weight, freeze=False, mode="sum", sparse=True
        )
        self._optimizer = torch.optim.Adagrad(
            self._bag.parameters(), lr=LR, initial_accumulator_value=ACCUMULATOR
        )

    def _inputs(self, batch: Batch) -> Any:
        return torch.from_numpy(batch.merged_rows), torch.from_numpy(batch.merged_offsets)

    def _lookup(self, inputs: Any, is_training: bool) -> Any:
        return self._bag(*inputs)

    def train_step(self, batch: Batch) -> Step:
        inputs = self._inputs(batch)
        gradient = torch.from_numpy(batch.gradient.reshape(-1, DIM))

        def step() -> None:
            self._optimizer.zero_grad()
            self._lookup(inputs, True).backward(gradient)
            self._optimizer.step()

        return step


class Fbgemm(TorchPeer):
    """FBGEMM's table-batched embeddings on the CPU, one table a feature."""

    def __init__(self, quick: bool, row_wise: bool) -> None:
        ops = "fbgemm_gpu.split_table_batched_embeddings_ops_"
        training: Any = importlib.import_module(f"{ops}training")
        common: Any = importlib.import_module(f"{ops}common")
        optimizers: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        kind = optimizers.EmbOptimType
        where = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self._tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(size, DIM, *where) for size in sizes(quick)],
            optimizer=kind.EXACT_ROWWISE_ADAGRAD if row_wise else kind.EXACT_ADAGRAD,
            learning_rate=LR,
        )
        self._tables.init_embedding_weights_uniform(-0.01, 0.01)

    def _inputs(self, batch: Batch) -> Any:
        rows = np.concatenate([feature.rows for feature in batch.features])
        offsets = np.append(batch.merged_offsets, len(rows))
        return torch.from_numpy(rows), torch.from_numpy(offsets)

    def _lookup(self, inputs: Any, is_training: bool) -> Any:
        return self._tables(*inputs)


class TorchRec(TorchPeer):
    """A fused collection of embedding bags: the optimizer runs inside the backward pass."""

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

    def _lookup(self, inputs: Any, is_training: bool) -> Any:
        return self._bags(inputs).values()


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
            # The ids of a feature, as a checkpoint would give them.
            num_ids = table.num_embeddings - 1
            ids = raw_ids(np.arange(num_ids)).view(np.int64)
            order = np.argsort(ids)
            state = collision.state_dict()
            state["_mch_sorted_raw_ids"][:num_ids] = torch.from_numpy(ids[order])
            state["_mch_remapped_ids_mapping"][:num_ids] = torch.from_numpy(order)
            collision.load_state_dict(state)
            collisions[table.name] = collision
        self._collisions = managed.ManagedCollisionCollection(collisions, self.tables)

    def _values(self, batch: Batch) -> list[np.ndarray[Any, Any]]:
        return [feature.values.view(np.int64) for feature in batch.features]

    def _lookup(self, inputs: Any, is_training: bool) -> Any:
        if self._collisions.training != is_training:
            self._collisions.train(is_training)
        return super()._lookup(self._collisions(inputs), is_training)


class Tfra:
    """A ``dynamic_embedding`` variable in memory, with Keras's Adagrad on it.

    One table for all features, so that a step is one lookup and one update.
    """

    ids = "any i64, unbounded"

    def __init__(self, quick: bool) -> None:
        # Its optimizers are those of Keras 2; there is nothing for it to look for on a GPU.
        os.environ |= {"TF_USE_LEGACY_KERAS": "1", "CUDA_VISIBLE_DEVICES": ""}
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        self._tf: Any = importlib.import_module("tensorflow")
        addons: Any = importlib.import_module("tensorflow_recommenders_addons")
        tf, dynamic = self._tf, addons.dynamic_embedding
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
        tf.config.threading.set_inter_op_parallelism_threads(1)
        num_rows = sum(sizes(quick))
        table = dynamic.get_variable(
            "table",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=DIM,
            devices=["/CPU:0"],
            initializer=tf.keras.initializers.RandomUniform(-0.01, 0.01, seed=0),
            init_size=num_rows,
        )
        rows = dynamic.shadow_ops.ShadowVariable(table, name="rows")
        optimizer = dynamic.DynamicEmbeddingOptimizer(
            tf.keras.optimizers.Adagrad(LR, initial_accumulator_value=ACCUMULATOR, epsilon=0.0)
        )

        def pooled(keys: Any, segments: Any, num_bags: Any) -> Any:
            distinct, places = tf.unique(keys)
            vectors = tf.gather(dynamic.shadow_ops.embedding_lookup(rows, distinct), places)
            return tf.math.unsorted_segment_sum(vectors, segments, num_bags)

        def train(keys: Any, segments: Any, gradient: Any) -> None:
            with tf.GradientTape() as tape:
                output = pooled(keys, segments, tf.shape(gradient)[0])
            found = tape.gradient(output, rows, output_gradients=gradient)
            optimizer.apply_gradients([(found, rows)])

        # Shapes are left open, or each batch would be compiled.
        of_ids = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int32)
        self._train = tf.function(
            train, input_signature=[*of_ids, tf.TensorSpec([None, DIM], tf.float32)]
        )
        self._pooled = tf.function(
            pooled, input_signature=[*of_ids, tf.TensorSpec([], tf.int32)]
        )
        for first in range(0, num_rows, FILL):
            keys = raw_ids(np.arange(first, min(first + FILL, num_rows))).view(np.int64)
            places = np.arange(len(keys), dtype=np.int32)
            self._train(
                tf.constant(keys), tf.constant(places), tf.zeros([len(keys), DIM], tf.float32)
            )
        check_resident(int(table.size().numpy()), sizes(quick))

    def _inputs(self, batch: Batch) -> tuple[Any, Any]:
        ends = np.append(batch.merged_offsets[1:], batch.num_ids)
        bags = np.arange(len(ends), dtype=np.int32)
        segments = np.repeat(bags, ends - batch.merged_offsets)
        tf = self._tf
        return tf.constant(raw_ids(batch.merged_rows).view(np.int64)), tf.constant(segments)

    def train_step(self, batch: Batch) -> Step:
        keys, segments = self._inputs(batch)
        gradient = self._tf.constant(batch.gradient.reshape(-1, DIM))
        return lambda: self._train(keys, segments, gradient)

    def evaluate_step(self, batch: Batch) -> Step:
        keys, segments = self._inputs(batch)
        num_bags = self._tf.constant(len(batch.features) * BATCH)

        def step() -> None:
            self._pooled(keys, segments, num_bags).numpy()

        return step
