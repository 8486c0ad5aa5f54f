"""A two-tower click model under Lightning: rows of any id, checkpoints, and going on from them.

python train.py                 trains four epochs
python train.py --resume        goes on from the newest checkpoint of --folder

Needs `pip install lightning`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import persia.nn
import persia.optim
from persia.embedding import Normal


class Clicks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.user = persia.nn.Embedding("user", 16, initialization=Normal(0, 0.3))
        self.item = persia.nn.Embedding("item", 16, initialization=Normal(0, 0.3))
        self.top = nn.Linear(16, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        users, items, labels = batch
        scores = self.top(self.user(users) * self.item(items)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = persia.optim.Adagrad(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Rows(pl.Callback):
    """Writes rows beside each of Lightning's checkpoints, which refer to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.to_load: str | None = None

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        rows = self.folder / f"rows-{trainer.global_step}"
        persia.nn.save(module, rows)
        checkpoint["rows"] = str(rows)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.to_load = checkpoint["rows"]  # there are no optimizers yet, and rows have state

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.to_load is not None:
            persia.nn.load(module, self.to_load)


def click_log(num: int = 20_000, seed: int = 0) -> TensorDataset:
    """Draw clicks: users like the items of their own group; ids are as sparse as real ones."""
    generator = torch.Generator().manual_seed(seed)
    users, items = torch.randint(200, (2, num), generator=generator)
    likes = torch.where(users % 4 == items % 4, 0.8, 0.2)
    clicked = torch.rand(num, generator=generator) < likes
    return TensorDataset(users * 0x9E3779B97, items * 0x7F4A7C15, clicked.float())


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    pl.seed_everything(0, verbose=False)
    model = Clicks()
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=not options.quiet,
        callbacks=[
            ModelCheckpoint(options.folder, "last", enable_version_counter=False),
            Rows(options.folder),
        ],
    )
    loader = DataLoader(click_log(), batch_size=512)
    trainer.fit(
        model, loader, ckpt_path=options.folder / "last.ckpt" if options.resume else None
    )
    loss = float(trainer.callback_metrics["loss_epoch"])
    print(f"loss {loss:.6f}, {len(model.user.table)} users, {len(model.item.table)} items")
    return loss


if __name__ == "__main__":
    main()
