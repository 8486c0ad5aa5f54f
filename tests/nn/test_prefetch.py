"""Lookups ahead of the model: what they change, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import persia.nn
import persia.optim
from persia.errors import ConfigError
from persia.nn.prefetch import _Pass
from tests.support.waiting import until

NUM = 24


class Rows(torch.utils.data.Dataset[Any]):
    """Ids as a dict of columns, as rows of a matrix, and behind an offset."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 50, (NUM * 8, 3), generator=generator)
        self.labels = torch.rand(NUM * 8, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        ids = self.ids[place]
        return {"user": ids[0], "clicked": ids, "x": ids.float()}, self.labels[place]


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.user = persia.nn.Embedding(f"{name} user", 4)
        self.item = persia.nn.EmbeddingBag(f"{name} item", 4, padding_idx=7)
        self.column = persia.nn.Embedding(f"{name} column", 4)
        self.top = nn.Linear(4, 1)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        column = features["x"][:, 2].long() + 1000
        found = self.user(features["user"]) + self.item(features["clicked"])
        out: torch.Tensor = self.top(found + self.column(column)).squeeze(1)
        return out


def trained(name: str, depth: int | str | None, every: int = 1) -> tuple[Any, list[float]]:
    """Train, stepping every few batches; return the loader and the losses."""
    torch.manual_seed(3)
    model = Model(name)
    for module in (model.user, model.item, model.column):
        rows = torch.arange(1100 * 4, dtype=torch.float32).view(1100, 4).sin()
        module.num_embeddings = 1100
        module.weight.copy_(rows)
    optimizer = persia.optim.Adagrad(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Rows(), batch_size=8)
    if depth is not None:
        loader = persia.nn.prefetch(loader, model, depth)
    losses = []
    for number, (features, labels) in enumerate(loader, start=1):
        loss = ((model(features) - labels) ** 2).mean()
        loss.backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return loader, losses


def test_at_depth_1_results_are_those_without_bit_for_bit() -> None:
    _, expected = trained("plain", None)
    loader, losses = trained("ahead", 1)
    assert losses == expected
    assert loader.num_hits >= 3 * (NUM - 4)
    assert len(loader) == NUM
    assert loader.batch_size == 8


def test_lookups_begin_in_the_order_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the lookup thread is always faster than the loop."""
    read = _Pass._read

    def read_and_wait(self: Any, source: Any, items: Any) -> bool:
        is_read = read(self, source, items)
        queued = [item for item in items if item.is_queued]
        until(lambda: not queued or any(item.done.is_set() for item in queued))
        return is_read

    _, expected = trained("plain in order", None)
    monkeypatch.setattr(_Pass, "_read", read_and_wait)
    _, losses = trained("ahead in order", 1)
    assert losses == expected


def test_deeper_lookups_hit_as_well() -> None:
    for depth in (3, "auto"):
        loader, losses = trained(f"depth {depth}", depth)
        assert loader.num_hits >= 3 * (NUM - 6)
        assert losses[-1] < losses[0]


def test_accumulation_neither_waits_for_ever_nor_changes_a_bit() -> None:
    _, expected = trained("plain accumulated", None, every=4)
    _, losses = trained("ahead accumulated", 1, every=4)
    assert losses == expected


def test_a_loop_that_is_left_leaves_nothing_in_flight() -> None:
    model = Model("left")
    persia.optim.SGD(model.parameters(), lr=0.1)
    for number, (features, _) in enumerate(
        persia.nn.prefetch(DataLoader(Rows(), batch_size=8), model, 2)
    ):
        model(features).sum().backward()
        if number == 5:
            break
    from persia._modules import requests

    assert not any(requests._ahead.values())
    assert requests.missed is None


def test_what_cannot_be_looked_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth: expected 'auto'"):
        persia.nn.prefetch([], Model("refused"), 0)
    with pytest.raises(ConfigError, match="got Linear with none"):
        persia.nn.prefetch([], nn.Linear(2, 2))
