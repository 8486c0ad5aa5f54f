"""Trains adult_income anew for each seed: adult_train.py STALENESS SEEDS.

A step is of two batches: of two ranks, or of one rank that keeps every other one. Rank 0
prints the AUC of each seed as a line of JSON.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from tests.examples.loading import load


def wait_for_all(ctx: TrainCtx) -> None:
    if ctx.world_size > 1:
        dist.barrier()


def train_pairs(ctx: TrainCtx, options: Any) -> None:
    loss_fn = torch.nn.BCELoss()
    losses = []
    loader = DataLoader(
        StreamingDataset(10),
        reproducible=options.reproducible,
        embedding_staleness=max(2, options.staleness),
    )
    for batch in loader:
        output, labels = ctx.forward(batch)
        assert labels is not None
        losses.append(loss_fn(output, labels[0]) / 2)
        if len(losses) == 1:
            ctx.keep(batch)
        else:
            ctx.backward(torch.stack(losses).sum())
            losses.clear()


def main(staleness: int, seeds: int) -> None:
    example = load("adult_income")
    train_data, test_data = example.load()
    aucs = []
    for seed in range(1, seeds + 1):
        options = example.Options(
            seed=seed, staleness=staleness, reproducible=staleness == 1, quiet=True
        )
        with example.build_ctx(options) as ctx:
            if ctx.world_size > 1:
                example.train(ctx, train_data, options)
            else:
                train_pairs(ctx, options)
            aucs.append(example.test(ctx, test_data))
            wait_for_all(ctx)
            if ctx.rank_id == 0:
                ctx.clear_embeddings()
            wait_for_all(ctx)
    if ctx.rank_id == 0:
        print("AUCS " + json.dumps(aucs), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
