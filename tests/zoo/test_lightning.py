"""A Lightning module with rows trains by Lightning's own loop as torch's embeddings do."""

from __future__ import annotations

import logging
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

# Lightning says how many workers a loader should have.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROWS, DIM, EPOCHS = 50, 4, 4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    users, items = torch.randint(ROWS, (2, 256), generator=generator)
    labels = ((users * 7 + items * 3) % 5 < 2).float()
    return DataLoader(TensorDataset(users, items, labels), batch_size=32)


def clicks(pl: Any, *, converts: bool) -> Any:
    """Return a module of Lightning, with torch's embeddings or with rows."""

    class Clicks(pl.LightningModule):  # type: ignore[misc]  # a class by its value
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.ModuleDict(
                {
                    "user": nn.Embedding(ROWS, DIM),
                    "item": nn.Embedding(ROWS, DIM),
                    "top": nn.Linear(DIM, 1),
                }
            )
            if converts:
                persia.nn.convert(self.net)
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            users, items, labels = batch
            scores = self.net["top"](self.net["user"](users) * self.net["item"](items))
            loss = nn.functional.binary_cross_entropy_with_logits(scores.squeeze(1), labels)
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            make = persia.optim.Adagrad if converts else torch.optim.Adagrad
            optimizer = make(self.parameters(), lr=0.2)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Clicks()


def trainer(pl: Any, folder: Path, **more: Any) -> Any:
    return pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **more,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.01},
    ],
    ids=["plain", "accumulated", "clipped"],
)
def test_fit_equals_that_of_torchs_embeddings(tmp_path: Path, options: Any) -> None:
    pl = package("lightning.pytorch")
    theirs, ours = clicks(pl, converts=False), clicks(pl, converts=True)
    for module in (theirs, ours):
        trainer(pl, tmp_path, **options).fit(module, loader())
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert len(ours.losses) == 8 * EPOCHS
