"""Sends the first COUNT batches of its share: resume_loader.py COUNT."""

import sys

from persia import env
from persia.ctx import DataCtx
from tests.distributed.batches import make_batch

if __name__ == "__main__":
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        for number in range(index, int(sys.argv[1]), size):
            ctx.send_data(make_batch(number))
        print("stats", dict(ctx.stats()), flush=True)
