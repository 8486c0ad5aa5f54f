"""The Python calls of one training step in embedded mode, and the modules they are in.

The profiler sees every thread; counted are functions of the package, ten steps in a steady
state, one batch in flight.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from tests.meta.sources import PACKAGE
from tests.training.conftest import Net

NUM_FEATURES, DIM, BATCH_SIZE = 8, 8, 256
FIRST, LAST = 3, 13  # steps


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(LAST + 1):
            rng = np.random.default_rng(number)
            ids = rng.integers(0, 1000, (NUM_FEATURES, BATCH_SIZE), dtype=np.uint64)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID(f"f{i}", column) for i, column in enumerate(ids)],
                [NonIDTypeFeature(rng.random((BATCH_SIZE, 4), np.float32))],
                [Label(np.ones((BATCH_SIZE, 1), np.float32))],
            )


def count() -> tuple[int, int]:
    """Return calls per step and the number of modules."""
    calls: Counter[str] = Counter()
    is_counted = threading.Event()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and is_counted.is_set() and name.startswith(str(PACKAGE)):
            calls[name] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    model = Net(NUM_FEATURES, num_dense=4, dim=DIM)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config={"slots_config": {f"f{i}": {"dim": DIM} for i in range(NUM_FEATURES)}},
        mixed_precision=False,
    ) as ctx:
        loader = DataLoader(Batches(), reproducible=True, embedding_staleness=1)
        for step, batch in enumerate(loader, start=1):
            output, labels = ctx.forward(batch)
            if labels:  # always: each batch has one
                ctx.backward(torch.nn.functional.mse_loss(output, labels[0]))
            if step == FIRST:
                is_counted.set()
            elif step == LAST:
                is_counted.clear()
    sys.setprofile(None)
    threading.setprofile(None)
    return round(sum(calls.values()) / (LAST - FIRST)), len(calls)
