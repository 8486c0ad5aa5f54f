"""Train a SASRec of jagged sequences in a plain PyTorch loop.

    python examples/sequence/train.py

Items are looked up as a nested tensor: sequences of different lengths, without padding. The
same rows score what comes next, against the other items of the batch. Kang and McAuley,
"Self-Attentive Sequential Recommendation", arXiv 1808.09781.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import persia.nn
import persia.optim
from persia.embedding import Normal

NUM_ITEMS, DIM, LONGEST, BATCH_SIZE = 300, 32, 30, 128
FIRST_ITEM = 1 << 40  # ids are numbers of any size


def draw(count: int, seed: int) -> list[torch.Tensor]:
    """Return sequences in which the last item decides half of the time which one follows.

    Three times in ten the item before it does, and otherwise chance.
    """
    ring = np.random.default_rng(0).permutation(NUM_ITEMS)
    after_last, after_former = np.empty_like(ring), np.empty_like(ring)
    after_last[ring], after_former[ring] = np.roll(ring, -1), np.roll(ring, -100)
    rng, found = np.random.default_rng(seed), []
    for length in rng.integers(6, LONGEST, count):
        items = list(rng.integers(0, NUM_ITEMS, 2))
        for chance in rng.random(length - 2):
            if chance < 0.5:
                items.append(after_last[items[-1]])
            elif chance < 0.8:
                items.append(after_former[items[-2]])
            else:
                items.append(rng.integers(0, NUM_ITEMS))
        found.append(torch.tensor(items) + FIRST_ITEM)
    return found


def collate(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what was seen, as a nested tensor [B, *], and what came next, ids [N]."""
    seen = torch.nested.nested_tensor([one[:-1] for one in sequences], layout=torch.jagged)
    return seen, torch.cat([one[1:] for one in sequences])


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.parts, self.out = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 3 * DIM),
            nn.Linear(DIM, DIM),
        )
        self.feed = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.parts(self.norm(x)).chunk(3, dim=2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended)
        return x + self.feed(x)


class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = persia.nn.Embedding("item", DIM, initialization=Normal(0.0, 0.1))
        self.places = nn.Parameter(torch.randn(LONGEST, DIM) * 0.1)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(DIM))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Return what is expected behind each of the N items of [B, *]: [N, DIM]."""
        # An item sees those before it, so padding behind the last changes nothing.
        padded = torch.nested.to_padded_tensor(self.item(seen), 0.0)
        length = padded.shape[1]
        out = self.blocks(padded + self.places[:length])
        return out[torch.arange(length) < seen.offsets().diff()[:, None]]


def train(sequences: list[torch.Tensor], epochs: int, seed: int) -> SASRec:
    torch.manual_seed(seed)
    model = SASRec()
    loader = DataLoader(sequences, BATCH_SIZE, shuffle=True, collate_fn=collate)
    rows = persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.1)
    dense = torch.optim.Adam(persia.nn.dense_parameters(model), lr=0.003)
    for _ in range(epochs):
        for seen, following in loader:
            candidates, right = following.unique(return_inverse=True)
            scores = model(seen) @ model.item(candidates).T
            loss = nn.functional.cross_entropy(scores, right)
            rows.zero_grad()
            dense.zero_grad()
            loss.backward()
            rows.step()
            dense.step()
    return model


def recall(model: SASRec, sequences: list[torch.Tensor]) -> float:
    """Return how often the last item is among the ten with the highest scores."""
    model.eval()
    catalog, hits = torch.arange(NUM_ITEMS) + FIRST_ITEM, 0
    with torch.no_grad():
        items = model.item(catalog)
        for seen, following in DataLoader(sequences, BATCH_SIZE, collate_fn=collate):
            last = seen.offsets()[1:] - 1
            best = catalog[(model(seen)[last] @ items.T).topk(10).indices]
            hits += int((best == following[last][:, None]).sum())
    return hits / len(sequences)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model = train(draw(options.sequences, options.seed), options.epochs, options.seed)
    found = recall(model, draw(2000, options.seed + 1))
    print(f"recall@10 {found:.4f}, best possible {0.8 + 0.2 * 10 / NUM_ITEMS:.4f}")


if __name__ == "__main__":
    main()
