"""Trains a batch, dumps a checkpoint, and trains that batch once more: late_update.py FOLDER.

It does not end by itself: the second update is never answered.
"""

import sys

from persia.data import DataLoader
from tests.faults.batches import make_batch
from tests.faults.job import make_ctx, step

if __name__ == "__main__":
    with make_ctx() as ctx:
        twice = DataLoader([make_batch(0), make_batch(0)], embedding_staleness=1)
        for number, batch in enumerate(twice):
            step(ctx, batch)
            if number == 0:
                ctx.dump_checkpoint(sys.argv[1])  # waits for the update
