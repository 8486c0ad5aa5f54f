"""A loop of Accelerate's trains rows as it trains torch's embeddings, and saves both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import persia.nn
import persia.optim
from tests.zoo.alike import package

pytestmark = pytest.mark.slow

ROWS, DIM = 50, 4


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = package("accelerate")
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in ("AcceleratorState", "GradientState"):  # which are one per process
        getattr(package("accelerate.state"), state)._reset_state()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.top = nn.Linear(DIM, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(self.user(users) * self.item(items))
        return scores.squeeze(1)


def prepared(accelerator: Any, *, converts: bool) -> tuple[Any, ...]:
    """Return model, optimizer, loader and schedule, as Accelerate has prepared them."""
    generator = torch.Generator().manual_seed(1)
    users, items = torch.randint(ROWS, (2, 256), generator=generator)
    labels = ((users * 7 + items * 3) % 5 < 2).float()
    loader = DataLoader(TensorDataset(users, items, labels), batch_size=32)
    net: nn.Module = Net()
    make = persia.optim.Adagrad if converts else torch.optim.Adagrad
    if converts:
        persia.nn.convert(net)
    optimizer = make(net.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    found: tuple[Any, ...] = accelerator.prepare(net, optimizer, loader, schedule)
    return found


def train(accelerator: Any, parts: tuple[Any, ...], epochs: int = 3) -> list[float]:
    model, optimizer, loader, schedule = parts
    losses = []
    for _ in range(epochs):
        for users, items, labels in loader:
            with accelerator.accumulate(model):
                scores = model(users, items)
                loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_loop_equals_that_of_torchs_embeddings(accelerator: Any) -> None:
    theirs = train(accelerator, prepared(accelerator, converts=False))
    ours = train(accelerator, prepared(accelerator, converts=True))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert ours[-1] < ours[0]


def test_training_goes_on_from_its_state_and_the_rows(accelerator: Any, tmp_path: Path) -> None:
    parts = prepared(accelerator, converts=True)
    train(accelerator, parts)
    accelerator.save_state(str(tmp_path / "state"))
    model = accelerator.unwrap_model(parts[0])
    persia.nn.save(model, tmp_path / "rows")
    after = train(accelerator, parts)
    persia.nn.load(model, tmp_path / "rows")
    accelerator.load_state(str(tmp_path / "state"))
    assert train(accelerator, parts) == after
