"""Sends the batches of the job, every REPLICA_SIZE-th of them."""

from __future__ import annotations

import json

from counting import (  # type: ignore[import-not-found]  # beside this script
    NUM_BATCHES,
    ids_of,
    make_batch,
)

from persia import env
from persia.ctx import DataCtx

if __name__ == "__main__":
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        for number in range(index, NUM_BATCHES, size):
            ctx.send_data(make_batch(ids_of(number)))
    print("loader", json.dumps(dict(ctx.stats())), flush=True)
