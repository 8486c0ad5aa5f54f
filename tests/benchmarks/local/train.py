"""Trains the benchmark's DLRM, in whatever mode it is started in, or its dense net alone.

Every row is there before the first batch. Prints ``begin`` and ``end`` around the batches that
count, and then their seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from tests.benchmarks.local.dlrm import (
    DLRM,
    NUM_DIFFERENT,
    NUM_FEATURES,
    Options,
    parse,
    raw_batches,
)
from tests.benchmarks.workload import BATCH, DIM, LR, raw_ids, sizes

FILL = 250_000  # ids at a time


class Here(IterableDataset):
    """The batches of this process."""

    def __init__(self, quick: bool, count: int) -> None:
        super().__init__()
        self.raws = raw_batches(quick, count)

    def __iter__(self) -> Iterator[PersiaBatch]:
        for raw in self.raws:
            yield raw.batch()


class Clock:
    """Marks the batches that count."""

    def __init__(self, options: Options) -> None:
        self._first, self._last = options.warm, options.warm + options.timed
        self._start = 0.0

    def at(self, number: int) -> None:
        """Called before batch ``number``."""
        if number == self._first:
            print("begin", flush=True)
            self._start = time.perf_counter()
        elif number == self._last:
            seconds = time.perf_counter() - self._start
            print(f"end\nseconds {seconds}", flush=True)


def fill(ctx: TrainCtx, quick: bool) -> None:
    """Give every id its row, by lookups that no update follows."""
    for number, size in enumerate(sizes(quick)):
        for first in range(0, size, FILL):
            ids = raw_ids(np.arange(first, min(first + FILL, size)))
            feature = IDTypeFeatureWithSingleID(f"feature_{number}", ids)
            label = Label(np.zeros((len(ids), 1), np.float32))
            ctx.get_embedding_from_data(PersiaBatch([feature], labels=[label]))
    expected, held = sum(sizes(quick)), sum(ctx.get_embedding_size())
    if held != expected:
        raise RuntimeError(f"expected {expected} rows, got {held}")


def train(options: Options, model: DLRM, optimizer: torch.optim.Optimizer) -> None:
    slots = {f"feature_{number}": {"dim": DIM} for number in range(NUM_FEATURES)}
    loss_fn = torch.nn.BCEWithLogitsLoss()
    clock = Clock(options)
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LR),
        dense_optimizer=optimizer,
        embedding_config={"slots_config": slots},
        global_config={"embedded_config": {"num_threads": options.threads}},
    ) as ctx:
        fill(ctx, options.quick)
        is_embedded = env.get_mode() == "embedded"
        dataset = Here(options.quick, options.count) if is_embedded else StreamingDataset(10)
        for number, batch in enumerate(DataLoader(dataset, embedding_staleness=10)):
            clock.at(number)
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, (labels or [])[0]))


def train_dense(options: Options, model: DLRM, optimizer: torch.optim.Optimizer) -> None:
    """The same steps with embeddings that are given, and gradients that are dropped."""
    given = [
        (
            torch.from_numpy(raw.dense),
            [torch.randn(BATCH, DIM) for _ in range(NUM_FEATURES)],
            torch.from_numpy(raw.labels),
        )
        for raw in raw_batches(options.quick, NUM_DIFFERENT)
    ]
    loss_fn = torch.nn.BCEWithLogitsLoss()
    clock = Clock(options)
    for number in range(options.count):
        clock.at(number)
        dense, embeddings, labels = given[number % NUM_DIFFERENT]
        leaves = [values.detach().requires_grad_() for values in embeddings]
        loss_fn(model([dense], leaves), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = DLRM()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    (train_dense if options.dense else train)(options, model, optimizer)


if __name__ == "__main__":
    main()
