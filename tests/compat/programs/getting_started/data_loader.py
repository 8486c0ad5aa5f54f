# mypy: ignore-errors
"""Getting started, the data: Criteo's log, a line a sample, in the words of July 2021.

The tutorial's errors are mended: ids are u64 (it sent i32), and a target is a column.
"""

import os
from itertools import islice

import numpy as np

from persia.ctx import init_backend
from persia.prelude import PyPersiaBatchData

BATCH_SIZE = 64
NUM_DENSE = 13


def read(file):
    """One batch of lines: label, 13 numbers, 26 hex words, any of which may be missing."""
    rows = [line.rstrip("\n").split("\t") for line in islice(file, BATCH_SIZE)]
    target = [[float(row[0])] for row in rows]
    dense = [[float(text or 0) for text in row[1 : 1 + NUM_DENSE]] for row in rows]
    words = zip(*(row[1 + NUM_DENSE :] for row in rows), strict=True)
    ids = [[np.array([int(word or "0", 16)], np.uint64) for word in column] for column in words]
    return np.array(target, np.float32), np.log1p(np.array(dense, np.float32)), ids


def main():
    backend = init_backend(init_output=True, wait_server_ready=True)
    with open(os.environ["CRITEO_SAMPLE"], encoding="ascii") as file:  # noqa: PTH123
        while True:
            target, dense, ids = read(file)
            if not len(target):
                break
            batch = PyPersiaBatchData()
            batch.add_dense([dense])
            batch.add_sparse(
                [(f"sparse_feature{i}", column) for i, column in enumerate(ids, start=1)]
            )
            batch.add_target(target)
            backend.send_data(batch)


if __name__ == "__main__":
    main()
