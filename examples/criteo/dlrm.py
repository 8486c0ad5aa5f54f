"""DLRM (Naumov et al. 2019): an MLP for numbers, dot products of all pairs, an MLP on top."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU behind each."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Scores clicks from 13 numbers and 26 embeddings of ``dim``."""

    def __init__(self, num_dense: int = 13, num_ids: int = 26, dim: int = 16) -> None:
        super().__init__()
        self.bottom = mlp(num_dense, 64, dim)
        num_vectors = num_ids + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(
            mlp(dim + num_pairs + num_ids * dim, 128, 64), nn.Linear(64, 1)
        )
        pairs = torch.triu_indices(num_vectors, num_vectors, 1)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(
        self, dense: Sequence[torch.Tensor], embeddings: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the logit [B, 1] of a click.

        Args:
            dense: One tensor [B, 13] of counts.
            embeddings: 26 tensors [B, dim]; zeros where a sample has no id.
        """
        bottom = self.bottom(torch.log1p(dense[0].clamp(min=0)))
        vectors = torch.stack([bottom, *embeddings], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        # The embeddings themselves, too: more than DLRM has, and it learns sooner.
        return self.top(torch.cat([bottom, pairs, *embeddings], dim=1))
