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
    "sparse_adam": (persia.optim.SparseAdam, torch.optim.Adam, {"lr": 0.002}),
    "rmsprop": (persia.optim.RMSprop, torch.optim.RMSprop, {"lr": 0.01}),
}


WAYS = ("plain", "accumulation", "scaler", "closure")
# Options of the net: by way, and what is besides.
OF_WAYS: dict[str, dict[str, Any]] = {f"{way}-weighted": {"weighted": True} for way in WAYS}
OF_MODES: dict[str, dict[str, Any]] = {
    f"plain-{mode}": {"mode": mode, "padding_idx": 3} for mode in ("sum", "mean", "max")
}


class Net(nn.Module):
    """A bag, whose ids may have weights, and an embedding, under one linear layer."""

    def __init__(
        self, mode: str = "sum", padding_idx: int | None = None, *, weighted: bool = False
    ) -> None:
        super().__init__()
        self.weighted = weighted
        self.user = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx)
        self.item = nn.Embedding(ROWS, DIM, padding_idx=padding_idx)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        weights = (users % 3 + 1) / 2 if self.weighted else None
        vectors = torch.cat([self.user(users, None, weights), self.item(items)], 1)
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


def twins(
    optimizer: str = "sgd",
    seed: int = 0,
    device: str = "cpu",
    prefix: str = "",
    **options: Any,
) -> Twins:
    """Make both; ``options`` are the net's, and ``prefix`` comes before names of tables."""
    torch.manual_seed(seed)
    theirs = Net(**options).to(device)
    ours = Net(**options).to(device)
    ours.load_state_dict(theirs.state_dict())
    persia.nn.convert(ours, prefix=prefix)
    make_ours, make_theirs, given = PAIRS[optimizer]
    return Twins(
        ours,
        theirs,
        make_ours(ours.parameters(), **given),
        make_theirs(theirs.parameters(), **given),
    )


def train_alike(both: Twins, way: str, steps: int = 200, compiled: Any = None) -> None:
    """Train both in one of ``WAYS``: each loss, and the rows at the end, are equal to 1e-5.

    Every row of both tables is in each batch. ``compiled`` is ours, as it is to be called.
    """
    nets = both.ours if compiled is None else compiled, both.torchs
    optimizers = both.our_optimizer, both.torch_optimizer
    scalers = [
        torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=30) for _ in nets
    ]
    count = 4 * steps if way == "accumulation" else steps
    for number, batch in enumerate(batches(count, meets_all=True), start=1):
        losses = [
            _train(*one, way, batch, number)
            for one in zip(nets, optimizers, scalers, strict=True)
        ]
        assert abs(losses[0] - losses[1]) < 1e-5, number
    assert scalers[0].get_scale() == scalers[1].get_scale()
    both.assert_equal()


def _train(
    net: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    way: str,
    batch: tuple[torch.Tensor, ...],
    number: int,
) -> float:
    users, items, labels = batch

    def backward() -> torch.Tensor:
        loss: torch.Tensor = ((net(users, items) - labels) ** 2).mean()
        if way != "accumulation" or number % 4 == 1:
            optimizer.zero_grad()
        if way == "scaler":
            # A loss that is inf makes every gradient inf or NaN, and its step is skipped.
            scaler.scale(loss * (float("inf") if number % 40 == 0 else 1.0)).backward()  # type: ignore[no-untyped-call]
        else:
            (loss / 4 if way == "accumulation" else loss).backward()  # type: ignore[no-untyped-call]
        return loss

    if way == "closure":
        stepped: Any = optimizer.step(backward)  # type: ignore[arg-type]
        return float(stepped.item())
    loss = backward()
    if way == "scaler":
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    elif way != "accumulation" or number % 4 == 0:
        optimizer.step()
    return loss.item()


def batches(
    count: int, seed: int = 1, *, meets_all: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield users [B, 3], items [B] and labels [B]; each user's row comes in each batch.

    With ``meets_all`` each item's does as well, and batches are twice as large.
    """
    size = BATCH * (1 + meets_all)
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(ROWS)
    for _ in range(count):
        users = torch.randint(ROWS, (size, 3), generator=generator)
        users.view(-1)[:ROWS] = every
        items = torch.randint(ROWS, (size + ROWS,), generator=generator)[:size]
        if meets_all:
            items[:ROWS] = every
        labels = torch.rand(size, generator=generator)
        yield users, items, labels
