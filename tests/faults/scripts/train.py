"""A rank with the least of every budget: train.py OUTPUT, which rank 0 writes."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.faults.job import make_ctx, trained
from tests.faults.test_budgets import least_loader

if __name__ == "__main__":
    with make_ctx() as ctx:
        seen = []
        for batch in least_loader():
            seen.append(int(batch.meta or b"-1"))
            loss, _ = ctx.forward(batch)
            # The mean over ranks would make halves of it.
            ctx.backward(loss * ctx.world_size)
        wait_for_others = dist.barrier if ctx.world_size > 1 else list
        wait_for_others()
        counts = {name: values.tolist() for name, values in trained(ctx).items()}
        wait_for_others()
        stats = dict(ctx.stats())  # of updates that are acknowledged: ``trained`` waited
        if ctx.rank_id == 0:
            found = {"counts": counts, "seen": seen, "stats": stats}
            Path(sys.argv[1]).write_text(json.dumps(found))
