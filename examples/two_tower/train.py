"""Recall by two towers: sampled softmax with its correction, and item vectors as Parquet.

python train.py [--items run/items.parquet]

A user's tower is an embedding and a small net; an item's is its row, so that the exported table
is what a nearest-neighbour index is built of. With hnswlib installed, one is built and asked.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import persia.nn
import persia.optim
from persia.embedding import Normal
from persia.sampling import FrequencyEstimator, NegativeSampler

NUM_USERS, NUM_ITEMS, DIM, BEST = 500, 1000, 16, 10
USER_ID, ITEM_ID = 0x9E3779B97, 0x7F4A7C15  # times a number: ids as sparse as real ones


class Purchases:
    """Users with tastes, items with kinds, of which some are far more popular than others."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        tastes, kinds = (self.rng.normal(0, 1, (n, 8)) for n in (NUM_USERS, NUM_ITEMS))
        share = np.exp(0.7 * tastes @ kinds.T) / np.arange(1, NUM_ITEMS + 1)
        self.share = share / share.sum(1, keepdims=True)  # of an item among a user's purchases

    def draw(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        users = self.rng.integers(0, NUM_USERS, num)
        items = (self.share.cumsum(1)[users] < self.rng.random((num, 1))).sum(1)
        return torch.from_numpy(users), torch.from_numpy(items.clip(max=NUM_ITEMS - 1))


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        begin = Normal(0, 0.1)
        self.user = persia.nn.Embedding("user", DIM, initialization=begin)
        self.item = persia.nn.Embedding("item", DIM, initialization=begin)
        self.top = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def users(self, ids: torch.Tensor) -> torch.Tensor:
        vectors = self.user(ids)
        return vectors + self.top(vectors)

    def forward(self, users: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        return self.users(users) @ self.item(candidates).T


def train(model: TwoTower, purchases: Purchases, num: int, batch_size: int) -> list[float]:
    """Train; return the losses. Candidates are the batch's items, and as many others."""
    optimizer = persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.2)
    dense = torch.optim.Adam(persia.nn.dense_parameters(model), lr=0.003)
    frequency, sampler = FrequencyEstimator(), NegativeSampler(NUM_ITEMS, seed=1)
    loader = DataLoader(TensorDataset(*purchases.draw(num)), batch_size=batch_size)
    losses = []
    for users, items in loader:
        negatives, negative_log_q = sampler.sample(len(items))
        log_q = frequency.observe(items.numpy())
        candidates = torch.cat([items, torch.from_numpy(negatives.astype(np.int64))])
        correction = torch.from_numpy(np.concatenate([log_q, negative_log_q]))
        scores = model(users * USER_ID, candidates * ITEM_ID) - correction
        loss = nn.functional.cross_entropy(scores, torch.arange(len(items)))
        optimizer.zero_grad()
        dense.zero_grad()
        loss.backward()
        optimizer.step()
        dense.step()
        losses.append(loss.item())
    return losses


def recall(vectors: torch.Tensor, catalog: torch.Tensor, purchases: Purchases) -> float:
    """Return the share of new purchases whose item is among the user's best ten."""
    users, items = purchases.draw(20_000)
    best = (vectors @ catalog.T).topk(BEST, dim=1).indices
    return float((best[users] == items[:, None]).any(1).float().mean())


def neighbours(vectors: np.ndarray, asked: np.ndarray) -> np.ndarray | None:
    """Return the places of the best items of each user, by an index; None without hnswlib."""
    if importlib.util.find_spec("hnswlib") is None:
        return None
    import hnswlib

    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    index.init_index(max_elements=len(vectors), ef_construction=200, M=16, random_seed=1)
    index.add_items(vectors)
    index.set_ef(200)
    return index.knn_query(asked, k=BEST)[0]


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--items", type=Path, default=Path("items.parquet"))
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    purchases, model = Purchases(seed=1), TwoTower()
    losses = train(model, purchases, options.samples, options.batch_size)
    print(f"loss {np.mean(losses[:50]):.3f} -> {np.mean(losses[-50:]):.3f}")

    options.items.parent.mkdir(parents=True, exist_ok=True)
    count = model.item.table.export(options.items)
    table = pq.read_table(options.items)
    ids = table["id"].to_numpy()
    vectors = np.stack(table["vector"].to_numpy())
    print(f"{count} items in {options.items}")

    model.eval()
    with torch.no_grad():
        users = model.users(torch.arange(NUM_USERS) * USER_ID)
        catalog = torch.full((NUM_ITEMS, DIM), 0.0)
        catalog[torch.from_numpy(ids.astype(np.int64) // ITEM_ID)] = torch.from_numpy(vectors)
    found = recall(users, catalog, purchases)
    best = recall(torch.eye(NUM_USERS), torch.tensor(purchases.share).float().T, purchases)
    print(f"recall@{BEST} {found:.3f}, best possible {best:.3f}")
    near = neighbours(vectors, users.numpy())
    if near is not None:
        exact = (users.numpy() @ vectors.T).argsort(1)[:, ::-1][:, :BEST]
        share = np.mean([np.isin(a, b).mean() for a, b in zip(near, exact, strict=True)])
        print(f"the index finds {share:.3f} of them")
    return found


if __name__ == "__main__":
    main()
