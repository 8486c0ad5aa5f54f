"""Sends adult_income's training batches again and again: adult_loader.py BATCH_SIZE PASSES."""

import sys

from persia.ctx import DataCtx
from tests.examples.loading import load

if __name__ == "__main__":
    batch_size, passes = map(int, sys.argv[1:])
    example = load("adult_income")
    sys.modules["batches"].BATCH_SIZE = batch_size  # type: ignore[attr-defined]
    train_data, _ = example.load()
    for _ in range(passes):
        with DataCtx() as ctx:
            for batch in example.batches(train_data, requires_grad=True):
                ctx.send_data(batch)
