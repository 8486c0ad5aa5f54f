"""Data-loaders: a stream for each argument, a phase of ``phases.py`` or a number of batches."""

import sys

from persia import env
from persia.ctx import DataCtx
from tests.distributed.batches import make_batch

# Batches of each data-loader.
COUNTS = {"even": (40, 40), "uneven": (10, 6), "joined": (10, 6), "failing": (10, 6)}
COUNTS["epochs"] = (10, 6)
# Those of the first epoch.
FIRST = {"epochs": (6, 4)}

if __name__ == "__main__":
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    for phase in sys.argv[1:]:
        with DataCtx() as ctx:
            count = int(phase) if phase.isdigit() else COUNTS[phase][index]
            for place in range(count):
                if place == FIRST.get(phase, (0, 0))[index] > 0:
                    ctx.end_epoch()
                # Ranks get other orders by it; one holds for the job.
                ctx.send_data(make_batch(place * size + index, is_reversed=index == 1))
            if phase == "failing" and index == 1:
                raise RuntimeError("no such file")
            print("stats", dict(ctx.stats()), flush=True)
