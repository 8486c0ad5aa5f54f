"""Sends the first batches of the job: loader.py COUNT."""

import logging
import sys

from persia import env
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        for number in range(index, int(sys.argv[1]), size):
            ctx.send_data(make_batch(number))
    print(dict(ctx.stats()), flush=True)
