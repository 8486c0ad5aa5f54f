"""Trains adult_income once for each seed, reproducibly: adult_train.py BATCH_SIZE SEEDS.

Rank 0 prints the AUC of each seed as a line of JSON.
"""

import json
import sys

import torch.distributed as dist

from persia.ctx import TrainCtx
from tests.examples.loading import load


def wait_for_all(ctx: TrainCtx) -> None:
    if ctx.world_size > 1:
        dist.barrier()


def main(batch_size: int, seeds: int) -> None:
    example = load("adult_income")
    sys.modules["batches"].BATCH_SIZE = batch_size  # type: ignore[attr-defined]
    train_data, test_data = example.load()
    aucs = []
    for seed in range(1, seeds + 1):
        options = example.Options(seed=seed, staleness=1, reproducible=True, quiet=True)
        with example.build_ctx(options) as ctx:
            example.train(ctx, train_data, options)
            aucs.append(example.test(ctx, test_data))
            wait_for_all(ctx)
            if ctx.rank_id == 0:
                ctx.clear_embeddings()
            wait_for_all(ctx)
    if ctx.rank_id == 0:
        print("AUCS " + json.dumps(aucs), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
