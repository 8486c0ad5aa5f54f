"""Small contexts of embedded mode, and some steps of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from tests.faults.job import make_ctx

SCHEMA = {"feature_index_prefix_bit": 8, "slots_config": {"user": {"dim": 4}}}
SIZE = 16


def trained(**config: Any) -> TrainCtx:
    return make_ctx(SCHEMA, mixed_precision=False, global_config=config)


def a_batch(ids: NDArray[np.uint64]) -> PersiaBatch:
    label = Label(np.zeros((len(ids), 1), np.float32))
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("user", ids)], labels=[label], requires_grad=True
    )


def train(ctx: TrainCtx, num_batches: int) -> float:
    loss = torch.zeros(())
    for number in range(num_batches):
        ids = np.arange(SIZE, dtype=np.uint64) + np.uint64(number * SIZE)
        output, _ = ctx.forward(ctx.get_embedding_from_data(a_batch(ids)))
        loss = ctx.backward(output + number)  # of rows that are new, and so zeros
    assert ctx.backward_engine is not None
    ctx.backward_engine.flush()
    return loss.item()
