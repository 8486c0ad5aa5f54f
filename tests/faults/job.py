"""A job whose rows say how often each id was trained.

The loss is the sum of all embeddings and SGD's rate is 1, so each occurrence of an id lowers
every value of its row by 1, whatever the order: a batch that is lost or applied twice shows.
"""

from __future__ import annotations

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.embedding import Constant, EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD
from tests.faults.batches import NUM_IDS, SLOTS


class Sum(torch.nn.Module):
    """The sum of the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return one number."""
        return torch.stack(embeddings).sum() + 0 * self.bias.sum()


def make_ctx() -> TrainCtx:
    """Return the trainer's context."""
    model = Sum()
    return TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(
            emb_initialization=Constant(0.0), weight_bound=0.0, schema=SLOTS
        ),
    )


def trained(ctx: TrainCtx) -> dict[str, np.ndarray]:
    """Return how often each id was trained, by feature, as the rows say."""
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID(name, ids) for name in ("user", "item")],
        requires_grad=False,
    )
    tensors = ctx.get_embedding_from_data(batch).embedding_tensors
    counts = {}
    for name, tensor in zip(("user", "item"), tensors, strict=True):
        assert isinstance(tensor, torch.Tensor)
        values = -tensor.detach().numpy()
        assert (values == values[:, :1]).all()
        counts[name] = values[:, 0]
    return counts
