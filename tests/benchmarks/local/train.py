"""Trains the benchmark's DLRM, in whatever mode it is started in, or its dense net alone.

Every row is there before the first batch. Prints ``begin`` and ``end`` around the batches that
count, and then their seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from tests.benchmarks.local.dlrm import (
    NUM_DIFFERENT,
    NUM_FEATURES,
    SLOTS,
    TIMED,
    WARM,
    Batches,
    loss_of,
    net,
    parse,
    raw_batches,
)
from tests.benchmarks.workload import BATCH, DIM, LR, all_ids, check_resident, sizes


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


def train(options: argparse.Namespace) -> None:
    model, optimizer = net()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LR),
        dense_optimizer=optimizer,
        embedding_config={"slots_config": SLOTS},
        global_config={"embedded_config": {"num_threads": options.threads}},
    ) as ctx:
        fill(ctx, options.quick)
        is_embedded = env.get_mode() == "embedded"
        dataset = Batches(raw_batches(options.quick)) if is_embedded else StreamingDataset(10)
        for batch in marked(DataLoader(dataset, embedding_staleness=10)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_of(output, (labels or [])[0]))


def train_dense(options: argparse.Namespace) -> None:
    """The same steps with embeddings that are given, and gradients that are dropped."""
    model, optimizer = net()
    given = [torch.randn(NUM_FEATURES, BATCH, DIM).unbind() for _ in range(NUM_DIFFERENT)]
    for number, raw in enumerate(marked(raw_batches(options.quick))):
        leaves = [one.detach().requires_grad_() for one in given[number % NUM_DIFFERENT]]
        logits = model([torch.from_numpy(raw.dense)], leaves)
        loss_of(logits, torch.from_numpy(raw.labels)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    chosen = parse()
    torch.set_num_threads(chosen.threads)
    (train_dense if chosen.dense else train)(chosen)
