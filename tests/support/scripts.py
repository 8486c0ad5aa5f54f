"""Parts of the scripts that jobs of real processes run: two features, and a small net."""

from __future__ import annotations

SEND = """
import numpy as np
from persia.ctx import DataCtx
from persia.embedding.data import (
    IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch,
)

def send(ctx, rng, ids):
    ctx.send_data(PersiaBatch(
        [IDTypeFeatureWithSingleID(name, x) for name, x in zip(("user", "item"), ids)],
        non_id_type_features=[NonIDTypeFeature(rng.random((len(ids[0]), 1), np.float32))],
        labels=[Label((ids[0] % 2).astype(np.float32).reshape(-1, 1))],
    ))
"""

# ``DIM`` stands before it.
NET = """
import torch
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.optim import Adagrad

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.top = torch.nn.Linear(2 * DIM + 1, 1)

    def forward(self, dense, embeddings):
        return self.top(torch.cat([*dense, *embeddings], dim=1))

loss_of = torch.nn.functional.binary_cross_entropy_with_logits
torch.manual_seed(0)
model = Net()
"""


def slots(dim: int) -> dict[str, object]:
    """Return the embedding config of both features."""
    of_each = {name: {"dim": dim} for name in ("user", "item")}
    return {"feature_index_prefix_bit": 8, "slots_config": of_each}
