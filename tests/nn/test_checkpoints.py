"""``save`` and ``load``: a model and its rows, as one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia import env
from persia._files import catalog
from persia._files.open import open_storage
from persia._training.checkpoint import CheckpointWriter
from persia.errors import CheckpointError, ConfigError


def a_model(suffix: str = "") -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "user": persia.nn.Embedding(f"saved user{suffix}", 3, is_new=True),
            "item": persia.nn.Embedding(f"saved item{suffix}", 3, is_new=True),
            "top": nn.Linear(3, 1),
        }
    )


def train(model: nn.ModuleDict, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(3):
        ids = torch.arange(10)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model["top"](model["user"](ids) * model["item"](ids)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("are_apart", [False, True])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    are_apart: bool, tmp_path: Path
) -> None:
    model = a_model("s" if are_apart else "")
    optimizers: list[torch.optim.Optimizer] = [persia.optim.Adagrad(model.parameters(), lr=0.1)]
    if are_apart:  # two stores
        optimizers = [
            persia.optim.Adagrad(model["user"].parameters(), lr=0.1),
            persia.optim.SGD(
                [*model["item"].parameters(), *model["top"].parameters()], lr=0.1, momentum=0.9
            ),
        ]
    train(model, *optimizers)
    persia.nn.save(model, tmp_path, *optimizers)
    ids = torch.arange(10)
    train(model, *optimizers)
    after = [model[name](ids).detach() for name in ("user", "item")]
    persia.nn.load(model, tmp_path, *optimizers)
    assert not torch.equal(model["user"](ids), after[0])
    train(model, *optimizers)
    for name, rows in zip(("user", "item"), after, strict=True):
        assert torch.equal(model[name](ids), rows)


def test_a_save_that_is_cut_short_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two stores the first one's checkpoint is written last, and fails."""
    model = a_model("c")
    optimizers = [
        persia.optim.SGD(model["user"].parameters(), lr=0.1),
        persia.optim.Adagrad(model["item"].parameters(), lr=0.1),
    ]
    finish = CheckpointWriter.finish

    def finish_others(
        self: CheckpointWriter, frozen: Any, url: str, *rest: Any, **more: Any
    ) -> str:
        if url == str(tmp_path):
            raise CheckpointError("no space left")
        return finish(self, frozen, url, *rest, **more)

    ids = torch.arange(10)
    train(model, *optimizers)
    persia.nn.save(model, tmp_path)
    saved = [model[name](ids).detach() for name in ("user", "item")]
    monkeypatch.setattr(CheckpointWriter, "finish", finish_others)
    for _ in range(2):
        train(model, *optimizers)
        with pytest.raises(CheckpointError, match="no space left"):
            persia.nn.save(model, tmp_path)
    persia.nn.load(model, tmp_path)
    for name, rows in zip(("user", "item"), saved, strict=True):
        assert torch.equal(model[name](ids), rows)
    monkeypatch.undo()
    persia.nn.save(model, tmp_path)
    assert len(catalog.ids(open_storage(str(tmp_path / "stores" / "1")))) == 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got Linear with none"):
        persia.nn.save(nn.Linear(2, 2), tmp_path)
    model = a_model()
    persia.optim.SGD(model.parameters(), lr=0.1)
    model["user"](torch.arange(3))
    persia.nn.save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"looks up in|no rows of table"):
        persia.nn.load(a_model("x"), tmp_path)


def test_ranks_without_a_process_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model("r")
    persia.optim.SGD(model.parameters(), lr=0.1)
    model["user"](torch.arange(3))
    model["item"](torch.arange(3))
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(env, "_place", None)
    for call in (persia.nn.save, persia.nn.load):
        with pytest.raises(ConfigError, match="rank 0 of 2, without a process group"):
            call(model, tmp_path)
