"""The batches of the income data, for the trainer and for data-loaders. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prepare_data import CATEGORICAL, Income

from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

BATCH_SIZE = 128


def num_batches(income: Income) -> int:
    return -(-len(income) // BATCH_SIZE)


def batches(
    income: Income, requires_grad: bool, index: int = 0, size: int = 1
) -> Iterator[PersiaBatch]:
    """Yield the batches of one file in its own order: every ``size``-th, from ``index`` on."""
    for number in range(index, num_batches(income), size):
        part = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        yield PersiaBatch(
            [
                IDTypeFeatureWithSingleID(name, np.ascontiguousarray(column))
                for name, column in zip(CATEGORICAL, income.categorical[part].T, strict=True)
            ],
            non_id_type_features=[NonIDTypeFeature(income.continuous[part])],
            labels=[Label(income.target[part])],
            requires_grad=requires_grad,
        )
