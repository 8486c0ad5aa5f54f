"""Sends the training batches of adult_income a number of times: adult_loader.py PASSES."""

import sys

from persia.ctx import DataCtx
from tests.examples.loading import load

if __name__ == "__main__":
    example = load("adult_income")
    train_data, _ = example.load()
    for _ in range(int(sys.argv[1])):
        with DataCtx() as ctx:
            for batch in example.batches(train_data, requires_grad=True):
                ctx.send_data(batch)
