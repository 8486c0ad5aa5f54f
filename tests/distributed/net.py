"""A click model, the same in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from persia.ctx import EmbeddingCtx, TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD
from tests.distributed.batches import DIM, NUM_IDS, SLOTS

Tensors = list[torch.Tensor]


class Net(torch.nn.Module):
    """Two layers over dense values and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3 + 2 * DIM, 8)
        self.second = torch.nn.Linear(8, 1)

    def forward(self, dense: Tensors, embeddings: Tensors) -> torch.Tensor:
        hidden = torch.relu(self.first(torch.cat([*dense, *embeddings], dim=1)))
        logits: torch.Tensor = self.second(hidden)
        return logits


def make_ctx(**options: Any) -> TrainCtx:
    """Return the trainer's context; each begins equally."""
    torch.manual_seed(0)
    model = Net()
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig((-0.5, 0.5), schema=SLOTS),
        **options,
    )


def rows(ctx: EmbeddingCtx) -> list[list[float]]:
    """Return the sum of the rows of each id, by feature."""
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    features = [IDTypeFeatureWithSingleID(name, ids) for name in ("user", "tags")]
    batch = ctx.get_embedding_from_data(PersiaBatch(features, requires_grad=False))
    return [
        tensor.sum(1).tolist()
        for tensor in batch.embedding_tensors
        if isinstance(tensor, torch.Tensor)
    ]
