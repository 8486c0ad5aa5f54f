"""The same model with torch's embeddings and with PERSIA's, trained side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import persia.nn
import persia.optim

ROWS, DIM, BATCH = 40, 6, 24

# By name the optimizers of rows, and torch's of the same formulas where every row is met.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (persia.optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (persia.optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adagrad": (persia.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (persia.optim.Adam, torch.optim.Adam, {"lr": 0.02}),
    "rmsprop": (persia.optim.RMSprop, torch.optim.RMSprop, {"lr": 0.01}),
}


class Net(nn.Module):
    """Two bags, one of them weighted, and an embedding, under one linear layer."""

    def __init__(self, mode: str = "sum", padding_idx: int | None = None) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx)
        self.item = nn.Embedding(ROWS, DIM, padding_idx=padding_idx)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([self.user(users), self.item(items)], 1)
        out: torch.Tensor = self.top(vectors)
        return out.squeeze(1)


@dataclass
class Twins:
    """Two equal models with their optimizers."""

    ours: Any
    torchs: Any
    our_optimizer: torch.optim.Optimizer
    torch_optimizer: torch.optim.Optimizer

    def losses(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        users, items, labels = batch
        both = [((net(users, items) - labels) ** 2).mean() for net in (self.ours, self.torchs)]
        return both[0], both[1]

    def assert_equal(self, tolerance: float = 1e-5) -> None:
        """The rows and the dense parameters of both are equal."""
        for name in ("user", "item"):
            ours, theirs = getattr(self.ours, name), getattr(self.torchs, name)
            difference = (ours.weight.detach() + 0 - theirs.weight.detach()).abs().max()
            assert difference < tolerance, name
        assert torch.allclose(self.ours.top.weight, self.torchs.top.weight, atol=tolerance)


def twins(optimizer: str = "sgd", seed: int = 0, **options: Any) -> Twins:
    """Make both; ``options`` are the net's."""
    torch.manual_seed(seed)
    theirs = Net(**options)
    ours = Net(**options)
    ours.load_state_dict(theirs.state_dict())
    persia.nn.convert(ours)
    make_ours, make_theirs, given = PAIRS[optimizer]
    return Twins(
        ours,
        theirs,
        make_ours(ours.parameters(), **given),
        make_theirs(theirs.parameters(), **given),
    )


def batches(count: int, seed: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield users [B, 3], items [B] and labels [B]; each row comes in each batch."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(ROWS)
    for _ in range(count):
        users = torch.randint(ROWS, (BATCH, 3), generator=generator)
        users.view(-1)[:ROWS] = every
        items = torch.randint(ROWS, (BATCH + ROWS,), generator=generator)[:BATCH]
        labels = torch.rand(BATCH, generator=generator)
        yield users, items, labels
