"""The how-to pages' programs in plain PyTorch: the same data, batches and dense modules.

Rows are an ``nn.Embedding`` here, whose gradients are dense: ``torch.optim.Adagrad`` leaves
values without a gradient as they are, so it steps the rows of a batch alone, as PERSIA does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD
from persia.metrics import AUC


def table(page: Any, feature: str, trained: NDArray[Any], num_ids: int) -> nn.Embedding:
    """Return rows of ids 0, 1, ... as PERSIA creates them; zeros where training has no such id.

    One row more, the last, is zeros, for padding.
    """
    ids = np.unique(trained)
    model = nn.Linear(1, 1)
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=page.CONFIG,
    ) as ctx:
        batch = PersiaBatch([IDTypeFeatureWithSingleID(feature, ids)], labels=[])
        rows = ctx.get_embedding_from_data(batch).embedding_tensors[feature]
        if isinstance(rows, tuple):  # jagged
            rows = rows.values
        elif rows.ndim == 3:  # raw, with its mask
            rows = rows[..., :-1].sum(1)
        weight = torch.zeros(num_ids + 1, rows.shape[1])
        weight[torch.from_numpy(ids.astype(np.int64))] = rows.detach()
    return nn.Embedding(num_ids + 1, rows.shape[1], padding_idx=num_ids, _weight=weight)


def parts(samples: range, size: int) -> Iterator[NDArray[Any]]:
    """Yield the numbers of samples, batch by batch."""
    for begin in range(samples.start, samples.stop, size):
        yield np.arange(begin, min(begin + size, samples.stop))


def auc_of(score: Callable[[NDArray[Any]], torch.Tensor], part: range, labels: Any) -> float:
    """Return the AUC of scores of samples, by ``score(their numbers)``."""
    auc = AUC()
    with torch.no_grad():
        for samples in parts(part, 4096):
            auc.update(score(samples), labels[samples])
    return float(auc.compute())


def step(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.autograd.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
