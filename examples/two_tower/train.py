"""Train a two-tower model in a plain PyTorch loop, and export its items for a search.

    python examples/two_tower/train.py --output items.parquet

An item's vector is its row, so that the export of the table is what an index takes. A user's is
made of the user's row and of the items bought before, which come from the same table. The loss
is a softmax over the items of the batch, corrected by how often each comes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

import persia.nn
import persia.optim
from persia.embedding import Normal
from persia.sampling import FrequencyEstimator

NUM_USERS, NUM_ITEMS, DIM, BATCH_SIZE = 500, 1000, 16, 128
HISTORY = 4  # items bought before, at most
FIRST_ITEM = 1 << 40  # ids are numbers of any size, as a shop has them


class Purchases:
    """Users with tastes, items with kinds, and few items that most of them buy."""

    def __init__(self, samples: int, seed: int) -> None:
        tastes, kinds = (
            np.random.default_rng(which).normal(size=(count, 8))
            for which, count in ((0, NUM_USERS), (1, NUM_ITEMS))
        )
        truth = np.exp(0.7 * tastes @ kinds.T) / np.arange(1, NUM_ITEMS + 1)
        self.truth = truth / truth.sum(1, keepdims=True)  # p(item | user)
        sums, rng = self.truth.cumsum(1), np.random.default_rng(seed)

        def bought(users: np.ndarray) -> np.ndarray:
            places = (sums[users] < rng.random((len(users), 1))).sum(1)
            return FIRST_ITEM + places.clip(max=NUM_ITEMS - 1)

        self.users = rng.integers(0, NUM_USERS, samples)
        self.items = bought(self.users)
        self.histories = np.stack([bought(self.users) for _ in range(HISTORY)], axis=1)
        self.lengths = rng.integers(0, HISTORY + 1, samples)

    def batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield users [B], histories [N] with offsets [B], and items [B]."""
        for begin in range(0, len(self.users), BATCH_SIZE):
            part = slice(begin, begin + BATCH_SIZE)
            lengths = self.lengths[part]
            history = self.histories[part][np.arange(HISTORY) < lengths[:, None]]
            offsets = np.cumsum(lengths) - lengths
            arrays = (self.users[part], history, offsets, self.items[part])
            yield tuple(torch.from_numpy(array) for array in arrays)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        small = Normal(0.0, 0.1)
        self.user = persia.nn.Embedding("user", DIM, initialization=small)
        self.item = persia.nn.Embedding("item", DIM, initialization=small)
        self.history = persia.nn.EmbeddingBag("item", DIM, mode="mean")  # the same rows
        self.top = nn.Sequential(
            nn.Linear(2 * DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)
        )

    def of_users(
        self, users: torch.Tensor, history: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return the vectors [B, DIM] of users with what they bought before."""
        own = self.user(users)
        return own + self.top(torch.cat([own, self.history(history, offsets)], dim=1))


def train(samples: int, seed: int) -> TwoTower:
    torch.manual_seed(seed)
    model = TwoTower()
    rows = persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.2)
    dense = torch.optim.Adam(persia.nn.dense_parameters(model), lr=0.003)
    frequency = FrequencyEstimator()
    for users, history, offsets, items in Purchases(samples, seed).batches():
        scores = model.of_users(users, history, offsets) @ model.item(items).T
        log_q = torch.from_numpy(frequency.observe(items))
        # The item of another sample that is the same one is no negative of it.
        is_same = (items[:, None] == items) & ~torch.eye(len(items), dtype=torch.bool)
        scores = (scores - log_q).masked_fill(is_same, -torch.inf)
        loss = nn.functional.cross_entropy(scores, torch.arange(len(items)))
        rows.zero_grad()
        dense.zero_grad()
        loss.backward()
        rows.step()
        dense.step()
    return model


def nearest(vectors: np.ndarray, asked: np.ndarray, k: int) -> np.ndarray:
    """Return the k places with the largest products, by hnswlib where it is installed."""
    try:
        import hnswlib
    except ModuleNotFoundError:
        return np.argsort(-(asked @ vectors.T), axis=1)[:, :k]
    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    index.init_index(max_elements=len(vectors), ef_construction=200, M=16, random_seed=1)
    index.add_items(vectors, np.arange(len(vectors)))
    index.set_ef(10 * k)
    return index.knn_query(asked, k=k)[0]


def recall(model: TwoTower, path: Path, samples: int, seed: int) -> tuple[float, float]:
    """Return how many purchases are among the ten nearest of a file, and how many can be."""
    table = pq.read_table(path)
    ids = table["id"].to_numpy()
    vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, DIM)
    purchases, hits = Purchases(samples, seed), 0
    model.eval()
    for users, history, offsets, items in purchases.batches():
        with torch.no_grad():
            asked = model.of_users(users, history, offsets).numpy()
        hits += (ids[nearest(vectors, asked, 10)] == items.numpy()[:, None]).any(1).sum()
    best = np.argsort(-purchases.truth, axis=1)[purchases.users, :10] + FIRST_ITEM
    return hits / samples, (best == purchases.items[:, None]).any(1).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=64_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("items.parquet"))
    options = parser.parse_args()
    model = train(options.samples, options.seed)
    count = model.item.table.export(options.output)
    found, best = recall(model, options.output, 5_000, options.seed + 1)
    print(f"{count} items in {options.output}")
    print(f"recall@10 {found:.4f}, best possible {best:.4f}")


if __name__ == "__main__":
    main()
