"""Sends the quickstart's training batches: click_loader.py SAMPLES BATCH_SIZE SEED."""

import sys

from persia import env
from persia.ctx import DataCtx
from tests.examples.loading import load

if __name__ == "__main__":
    quickstart = load("quickstart")
    samples, batch_size, seed = map(int, sys.argv[1:])
    log = quickstart.generate(samples, seed)
    dataset = quickstart.ClickDataset(log, range(log.num_train), batch_size, True)
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        for number, batch in enumerate(dataset):
            if number % size == index:
                ctx.send_data(batch)
