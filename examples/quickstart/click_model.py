"""The dense part of the click model: what PyTorch trains beside the embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# The slots that PERSIA pools to one vector each, and its width, in the order of the batches;
# the sequence follows them.
POOLED_DIMS = {
    "user": 16,
    "candidate": 16,
    "viewed_items": 16,
    "query_words": 16,
    "url": 16,
    "publisher": 8,
    "device": 8,
    "country": 8,
    "candidate_category": 16,
}
NUM_DENSE = 4


class ClickModel(nn.Module):
    """Two layers over the embeddings, the dense numbers, and how history meets candidate.

    The viewed items share their rows with the candidate, so the dot product of the two says
    how much of the candidate is in the history. Among the recent categories a match is a
    distance of zero, place by place.

    Args:
        use_embeddings: False feeds zeros in place of every embedding, which shows what they
            are worth.
    """

    def __init__(self, use_embeddings: bool = True) -> None:
        super().__init__()
        self.use_embeddings = use_embeddings
        width = sum(POOLED_DIMS.values()) + NUM_DENSE + 2
        self.deep = nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        # Equal ids have equal rows, so a distance of 0 is a match, whatever the rows say.
        self.sharpness = nn.Parameter(torch.tensor(4.0))
        self.wide = nn.Linear(width, 1)

    def forward(
        self, dense: Sequence[torch.Tensor], embeddings: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return click logits [B, 1].

        Args:
            dense: One tensor [B, 4].
            embeddings: Pooled vectors [B, dim] in the order of POOLED_DIMS, then the sequence
                [B, places, dim + 1], whose last channel is 1 where there is an id.
        """
        if not self.use_embeddings:
            embeddings = [embedding * 0.0 for embedding in embeddings]
        *pooled, sequence = embeddings
        by_name = dict(zip(POOLED_DIMS, pooled, strict=True))
        seen_item = (by_name["candidate"] * by_name["viewed_items"]).sum(1, keepdim=True)
        places, filled = sequence[..., :-1], sequence[..., -1]
        distance = (places - by_name["candidate_category"][:, None, :]).square().sum(2)
        match = torch.exp(-distance * self.sharpness)
        seen_category = torch.log1p((match * filled).sum(1, keepdim=True))
        inputs = torch.cat([*pooled, seen_item, seen_category, *dense], dim=1)
        return self.deep(inputs) + self.wide(inputs)
