"""Trains the benchmark's DLRM, in whatever mode it is started in, or its dense net alone.

Every row is there before the first batch. Prints ``begin`` and ``end`` around the batches that
count, and then their seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from persia import env
from persia._training.batch import PersiaTrainingBatch
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from tests.benchmarks.local.dlrm import (
    SLOTS,
    TIMED,
    WARM,
    Ideal,
    loss_of,
    net,
    parse,
    raw_batches,
)
from tests.benchmarks.workload import ACCUMULATOR, LR, all_ids, check_resident, sizes


def marked(batches: Iterable[Any]) -> Iterator[Any]:
    """Mark those that count."""
    start = 0.0
    for number, batch in enumerate(batches):
        if number == WARM:
            print("begin", flush=True)
            start = time.perf_counter()
        elif number == WARM + TIMED:
            seconds = time.perf_counter() - start
            print(f"end\nseconds {seconds}", flush=True)
        yield batch


def fill(ctx: TrainCtx, quick: bool) -> None:
    """Give every id its row, by lookups that no update follows."""
    for number, ids in all_ids(sizes(quick)):
        feature = IDTypeFeatureWithSingleID(f"feature_{number}", ids)
        label = Label(np.zeros((len(ids), 1), np.float32))
        ctx.get_embedding_from_data(PersiaBatch([feature], labels=[label]))
    check_resident(sum(ctx.get_embedding_size()), sizes(quick))


@contextmanager
def filled(quick: bool, threads: int) -> Iterator[TrainCtx]:
    """Enter the context of the job, with every row there."""
    model, optimizer = net()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LR, initial_accumulator_value=ACCUMULATOR),
        dense_optimizer=optimizer,
        embedding_config={"slots_config": SLOTS},
        global_config={"embedded_config": {"num_threads": threads}},
        features=list(SLOTS),
        allow_missing=list(SLOTS),  # of the batches of ``fill``, each of one feature
    ) as ctx:
        fill(ctx, quick)
        yield ctx


def step(ctx: TrainCtx, batch: PersiaTrainingBatch) -> None:
    output, labels = ctx.forward(batch)
    ctx.backward(loss_of(output, (labels or [])[0]))


def train(options: argparse.Namespace) -> None:
    with filled(options.quick, options.threads) as ctx:
        is_embedded = env.get_mode() == "embedded"
        own = (raw.batch() for raw in raw_batches(options.quick))
        dataset = own if is_embedded else StreamingDataset()
        for batch in marked(DataLoader(dataset, embedding_staleness=10)):
            step(ctx, batch)


def train_dense(options: argparse.Namespace) -> None:
    """The same steps with embeddings that are given, and gradients that are dropped."""
    dense = Ideal(None)
    for raw in marked(raw_batches(options.quick)):
        dense.step(raw)


if __name__ == "__main__":
    chosen = parse()
    torch.set_num_threads(chosen.threads)
    (train_dense if chosen.dense else train)(chosen)
