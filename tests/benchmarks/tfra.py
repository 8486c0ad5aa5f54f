"""TensorFlow Recommenders Addons, measured where it is installed: a hash table of any i64.

One table for all features, so that a step is one lookup and one update. TensorFlow takes its
number of threads once for a process: measure one number at a time.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import torch

from tests.benchmarks.workload import (
    ACCUMULATOR,
    BATCH,
    DIM,
    LR,
    Batch,
    Step,
    raw_ids,
    sizes,
)

# Apart from the build's own environment, as TensorFlow 2.16 needs NumPy 1.
INSTALL_TFRA = (
    "python -m venv .venv-tfra && .venv-tfra/bin/pip install . torch==2.13.0 "
    "tensorflow==2.16.2 tf-keras==2.16.0 tensorflow-recommenders-addons==0.8.1 'setuptools<81'"
)
FILL = 500_000  # ids at a time


class Tfra:
    """A ``dynamic_embedding`` variable in memory, with Keras's Adagrad on it."""

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
            keys = keys_of(np.arange(first, min(first + FILL, num_rows)))
            places = np.arange(len(keys), dtype=np.int32)
            self._train(
                tf.constant(keys), tf.constant(places), tf.zeros([len(keys), DIM], tf.float32)
            )
        held = int(table.size().numpy())
        if held != num_rows:
            raise RuntimeError(f"expected {num_rows} rows resident, got {held}")

    def _inputs(self, batch: Batch) -> tuple[Any, Any]:
        ends = np.append(batch.merged_offsets[1:], batch.num_ids)
        bags = np.arange(len(ends), dtype=np.int32)
        segments = np.repeat(bags, ends - batch.merged_offsets)
        tf = self._tf
        return tf.constant(keys_of(batch.merged_rows)), tf.constant(segments)

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


def keys_of(merged_rows: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Return hash-like ids, one to one, for row numbers of all features together."""
    return raw_ids(merged_rows).view(np.int64)
