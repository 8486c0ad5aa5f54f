"""The dense part of the income model, layer by layer as in the original example."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class IncomeModel(nn.Module):
    """Linear layers and batch norm; there is no activation between them, on purpose.

    The order in which layers are made decides their initial values under a seed, so it stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dense_mlp = nn.Linear(5, 16)
        self.dense_bn = nn.BatchNorm1d(16)
        self.sparse_mlp = nn.Linear(8 * 8, 128)
        self.sparse_bn = nn.BatchNorm1d(128)
        self.ln1 = nn.Linear(144, 256)
        self.ln2 = nn.Linear(256, 128)
        self.ln3 = nn.Linear(128, 1)

    def forward(
        self, dense: Sequence[torch.Tensor], embeddings: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the probability [B, 1] of an income above 50K.

        Args:
            dense: One tensor [B, 5].
            embeddings: Eight tensors [B, 8].
        """
        sparse = torch.cat([embedding.float() for embedding in embeddings], dim=1)
        sparse = self.sparse_bn(self.sparse_mlp(sparse))
        features = torch.cat([sparse, self.dense_bn(self.dense_mlp(dense[0]))], dim=1)
        return torch.sigmoid(self.ln3(self.ln2(self.ln1(features))))
