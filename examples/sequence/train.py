"""The next item of a sequence, by causal self-attention over jagged ids (SASRec).

python train.py

Sequences of different lengths go into the table as they are, in one nested tensor: no id of
padding is looked up. The same table scores what comes next: sampled items in training, and all
items in evaluation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

import persia.nn
import persia.optim
from persia.embedding import Normal

NUM_ITEMS, DIM, LONGEST = 200, 32, 20
ITEM_ID = 0x7F4A7C15  # times a number: ids as sparse as real ones


def sequences(num: int, seed: int) -> list[torch.Tensor]:
    """Draw sequences: after an item mostly its successor comes, and sometimes any."""
    successor = np.random.default_rng(0).permutation(NUM_ITEMS)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        items = [int(rng.integers(NUM_ITEMS))]
        for _ in range(int(rng.integers(4, LONGEST))):
            follows = rng.random() < 0.8
            items.append(int(successor[items[-1]] if follows else rng.integers(NUM_ITEMS)))
        found.append(torch.tensor(items))
    return found


class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = persia.nn.Embedding("item", DIM, initialization=Normal(0, 0.1))
        self.place = nn.Parameter(torch.randn(LONGEST, DIM) * 0.1)
        layer = nn.TransformerEncoderLayer(
            DIM,
            nhead=2,
            dim_feedforward=4 * DIM,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is expected next at each place [B, L, dim], and where places are [B, L].

        Args:
            seen: Ids of items, oldest first, as a nested tensor of B sequences.
        """
        vectors = torch.nested.to_padded_tensor(self.item(seen), 0.0)
        length = vectors.shape[1]
        lengths = seen.offsets().diff()
        is_there = torch.arange(length) < lengths[:, None]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        # Padding is behind the items, and the causal mask hides it from them.
        out = self.encoder(vectors + self.place[:length], mask=later, is_causal=True)
        return self.norm(out), is_there


def nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def batches(data: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def loss_of(model: SASRec, items: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of the right next items among those of the batch and sampled ones."""
    expected, is_there = model(nested([each[:-1] * ITEM_ID for each in items]))
    following = torch.cat([each[1:] for each in items])
    candidates = torch.cat([following, torch.randint(NUM_ITEMS, (64,))]).unique()
    scores = expected[is_there] @ model.item(candidates * ITEM_ID).T
    return nn.functional.cross_entropy(scores, torch.searchsorted(candidates, following))


@torch.no_grad()
def hit_rate(model: SASRec, data: list[torch.Tensor], best: int = 5) -> float:
    """Return how often the last item is among the best of all items."""
    model.eval()
    expected, is_there = model(nested([each[:-1] * ITEM_ID for each in data]))
    last = is_there.sum(1) - 1
    catalog = model.item(torch.arange(NUM_ITEMS) * ITEM_ID)
    found = (expected[torch.arange(len(data)), last] @ catalog.T).topk(best).indices
    model.train()
    return float(
        (found == torch.stack([each[-1] for each in data])[:, None]).any(1).float().mean()
    )


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = SASRec()
    rows = persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.1)
    dense = torch.optim.Adam(persia.nn.dense_parameters(model), lr=0.003)
    data, new = sequences(options.sequences, seed=1), sequences(1000, seed=2)
    for epoch in range(options.epochs):
        losses = []
        for items in batches(data, options.batch_size):
            loss = loss_of(model, items)
            rows.zero_grad()
            dense.zero_grad()
            loss.backward()
            rows.step()
            dense.step()
            losses.append(loss.item())
        found = hit_rate(model, new)
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}, hit rate {found:.3f}")
    return found


if __name__ == "__main__":
    main()
