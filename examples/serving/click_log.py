"""A click log made from a seed, in which a new item becomes popular.

An item has a place in a plane, a user likes one direction. Users meet ``NEW_ITEM``
only after ``LAUNCH`` of the log: a server that follows the training sees its score rise.
"""

import numpy as np

from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

BATCH_SIZE = 256
NUM_USERS, NUM_ITEMS = 20_000, 2_000
NEW_ITEM = 987_654_321_987
LAUNCH = 0.4  # share of the log before the first click on NEW_ITEM


def angles(ids):
    """Return where ids stand on a circle, -pi to pi, drawn from the ids themselves."""
    mixed = ids * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return mixed / 2.0**24 * 2 * np.pi - np.pi


def batch(number, progress, size=BATCH_SIZE):
    """Return one batch.

    Args:
        number: Seeds it.
        progress: Where in the log it is, 0 to 1.
        size: Of the batch, in samples.
    """
    rng = np.random.default_rng(number)
    user = rng.zipf(1.2, size).astype(np.uint64) % NUM_USERS
    item = rng.zipf(1.3, size).astype(np.uint64) % NUM_ITEMS
    num_seen = rng.integers(0, 5, size)
    seen = rng.zipf(1.3, num_seen.sum()).astype(np.uint64) % NUM_ITEMS
    hour = rng.random((size, 1), dtype=np.float32)
    logit = 2 * np.cos(angles(user) - angles(item)) - hour[:, 0]
    if progress >= LAUNCH:
        is_new = rng.random(size) < 0.1
        item[is_new], logit[is_new] = NEW_ITEM, 3.0
    click = rng.random(size) < 1 / (1 + np.exp(-logit))
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID("user", user),
            IDTypeFeatureWithSingleID("item", item),
            IDTypeFeature.from_csr("seen_items", seen, np.append(0, num_seen.cumsum())),
        ],
        non_id_type_features=[NonIDTypeFeature(hour, name="hour")],
        labels=[Label(click.astype(np.float32).reshape(-1, 1))],
    )
