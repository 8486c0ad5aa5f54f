"""Sends this data-loader's share of the job's batches, from the first on.

NUM_BATCHES is the number of all batches. They name features in one order: with several ranks
that of the batch that is there first holds.
"""

import os

from persia import env
from persia.ctx import DataCtx
from tests.distributed.batches import make_batch

if __name__ == "__main__":
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        for number in range(index, int(os.environ["NUM_BATCHES"]), size):
            ctx.send_data(make_batch(number))
