# mypy: ignore-errors
"""Customization, the batch: made from any arrays, in the words of November 2021.

The tutorial's errors are mended: an id feature is a name and then its ids, and labels are f32.
"""

import numpy as np

from persia.ctx import DataCtx
from persia.prelude import PyPersiaBatchData

BATCH_SIZE = 64


def main():
    rng = np.random.default_rng(7)
    with DataCtx() as ctx:
        for _ in range(160):
            users = rng.integers(0, 50, BATCH_SIZE).astype(np.uint64)
            items = [rng.integers(0, 50, rng.integers(0, 4)).astype(np.uint64) for _ in users]
            dense = rng.normal(size=(BATCH_SIZE, 3)).astype(np.float32)
            batch = PyPersiaBatchData()
            batch.add_non_id_type_feature(dense)
            batch.add_id_type_features(
                [("user", [np.array([user], np.uint64) for user in users]), ("items", items)]
            )
            batch.add_label((users % 2).astype(np.float32).reshape(-1, 1))
            ctx.send_data(batch)


if __name__ == "__main__":
    main()
