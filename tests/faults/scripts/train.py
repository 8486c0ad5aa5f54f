"""One rank with the least of every budget: train.py OUTPUT; rank 0 writes what rows say."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.faults.job import make_ctx, trained
from tests.faults.test_budgets import least_loader

if __name__ == "__main__":
    with make_ctx() as ctx:
        for batch in least_loader():
            loss, _ = ctx.forward(batch)
            # The mean over ranks would make halves of it.
            ctx.backward(loss * ctx.world_size)
        dist.barrier()
        counts = {name: values.tolist() for name, values in trained(ctx).items()}
        dist.barrier()
        stats = dict(ctx.stats())  # of updates that are acknowledged: ``trained`` waited
        if ctx.rank_id == 0:
            Path(sys.argv[1]).write_text(json.dumps({"counts": counts, "stats": stats}))
