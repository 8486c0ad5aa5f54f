"""Sends COUNT batches of PARTS of the job's parts each: loader.py COUNT PARTS."""

import logging
import sys

import numpy as np

from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from tests.faults.batches import NUM_IDS

PART = 16


def make_batch(number: int, parts: int) -> PersiaBatch:
    """Return parts ``number * parts`` and so on as one batch."""
    ids = np.concatenate(
        [
            np.random.default_rng(part).integers(0, NUM_IDS, (PART, 2))
            for part in range(number * parts, (number + 1) * parts)
        ]
    ).astype("u8")
    features = [
        IDTypeFeatureWithSingleID(name, np.ascontiguousarray(ids[:, place]))
        for place, name in enumerate(("user", "item"))
    ]
    label = np.sin(ids).sum(axis=1, keepdims=True).astype(np.float32)
    return PersiaBatch(features, labels=[Label(label)], meta=str(number).encode())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with DataCtx() as ctx:
        for number in range(int(sys.argv[1])):
            ctx.send_data(make_batch(number, int(sys.argv[2])))
