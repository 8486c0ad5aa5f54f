"""A click model and its batches, the same in every process."""

from __future__ import annotations

import numpy as np
import torch

from persia.ctx import EmbeddingCtx, TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD

NUM_IDS = 50
DIM = 4
SLOTS = {"slots_config": {"user": {"dim": DIM}, "tags": {"dim": DIM}}}
BATCH_SIZE = 8


def make_batch(*numbers: int) -> PersiaBatch:
    """Return the samples of these batches as one."""
    users, tags, dense, labels = [], [], [], []
    for number in numbers:
        rng = np.random.default_rng(number)
        users.append(rng.integers(0, NUM_IDS, BATCH_SIZE).astype(np.uint64))
        tags += [
            rng.integers(0, NUM_IDS, rng.integers(0, 4)).astype(np.uint64)
            for _ in range(BATCH_SIZE)
        ]
        dense.append(rng.normal(size=(BATCH_SIZE, 3)).astype(np.float32))
        labels.append(rng.integers(0, 2, (BATCH_SIZE, 1)).astype(np.float32))
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID("user", np.concatenate(users)),
            IDTypeFeature("tags", tags),
        ],
        non_id_type_features=[NonIDTypeFeature(np.concatenate(dense))],
        labels=[Label(np.concatenate(labels))],
    )


class Net(torch.nn.Module):
    """Two layers over dense values and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3 + 2 * DIM, 8)
        self.second = torch.nn.Linear(8, 1)

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return logits [B, 1]."""
        hidden = torch.relu(self.first(torch.cat([*dense, *embeddings], dim=1)))
        logits: torch.Tensor = self.second(hidden)
        return logits


def make_ctx(seed: int = 0) -> TrainCtx:
    """Return the trainer's context; equal seeds give equal beginnings."""
    torch.manual_seed(seed)
    model = Net()
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(
            emb_initialization=(-0.5, 0.5), seed=seed, schema=SLOTS
        ),
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
