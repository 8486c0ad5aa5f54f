"""``save`` and ``load``: a model and its rows, as one checkpoint."""

from __future__ import annotations

import logging
import subprocess
import sys
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
from persia._training.checkpoint import CheckpointReader, CheckpointWriter
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


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_save_that_is_cut_short_leaves_those_before_it(
    keep_last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two stores the first one's checkpoint is written last, and fails."""
    model = a_model(f"c{keep_last}")
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
    persia.nn.save(model, tmp_path, keep_last=keep_last)
    saved = [model[name](ids).detach() for name in ("user", "item")]
    monkeypatch.setattr(CheckpointWriter, "finish", finish_others)
    for _ in range(2):
        train(model, *optimizers)
        with pytest.raises(CheckpointError, match="no space left"):
            persia.nn.save(model, tmp_path, keep_last=keep_last)
    persia.nn.load(model, tmp_path)
    for name, rows in zip(("user", "item"), saved, strict=True):
        assert torch.equal(model[name](ids), rows)
    monkeypatch.undo()
    for _ in range(keep_last - 1):  # the first one stays, and is whole
        train(model, *optimizers)
        persia.nn.save(model, tmp_path, keep_last=keep_last)
        newest = catalog.ids(open_storage(str(tmp_path)))[-1]
        catalog.discard(open_storage(str(tmp_path)), newest)
        persia.nn.load(model, tmp_path)
        for name, rows in zip(("user", "item"), saved, strict=True):
            assert torch.equal(model[name](ids), rows)
    for _ in range(keep_last):
        persia.nn.save(model, tmp_path, keep_last=keep_last)
    assert len(catalog.ids(open_storage(str(tmp_path)))) == keep_last
    assert len(catalog.ids(open_storage(str(tmp_path / "stores" / "1")))) == keep_last


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got Linear with none"):
        persia.nn.save(nn.Linear(2, 2), tmp_path)
    model = a_model()
    persia.optim.SGD(model.parameters(), lr=0.1)
    model["user"](torch.arange(3))
    persia.nn.save(model, tmp_path)
    other = a_model()
    del other["user"]
    with pytest.raises(CheckpointError, match="user is missing here and a module with tables"):
        persia.nn.load(other, tmp_path)
    other["user"] = persia.nn.Embedding("named by a user", 3)
    with pytest.raises(CheckpointError, match=r"user: the state dict is of .*looks up in"):
        persia.nn.load(other, tmp_path)
    optimizers = [torch.optim.SGD(model.parameters()) for _ in range(3)]
    persia.nn.save(model, tmp_path, *optimizers[:1])
    for given in (optimizers[:2], optimizers):
        said = f"as were saved, 1 .*or none, got {len(given)}"
        with pytest.raises(CheckpointError, match=said):
            persia.nn.load(model, tmp_path, *given)


class Net(nn.Module):
    """As written for torch: its tables are named by ``convert``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(10, 3), nn.EmbeddingBag(10, 3, mode="sum")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.one(ids) * self.two(ids[:, None])
        return found.sum(1)


def converted(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = persia.nn.convert(Net(), **options)
    return model, persia.optim.Adagrad(model.parameters(), lr=0.1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.arange(5, 15)) - 1).square().sum().backward()
        optimizer.step()


LOAD = """
import sys, torch, persia.nn
from tests.nn.test_checkpoints import converted
model, optimizer = converted()
persia.nn.load(model, sys.argv[1], optimizer)
torch.save(model.eval()(torch.arange(20)), sys.argv[1] + "/scores.pt")
"""


def test_tables_are_found_by_their_place_whatever_else_is_alive(tmp_path: Path) -> None:
    """The checkpoint has names with ``_2``, and goes into models of other names."""
    others = [converted()]
    model, optimizer = converted()
    assert model.get_submodule("one").table_name == "one_2"
    learn(model, optimizer)
    ids = torch.arange(20)
    learn(*others[0])
    persia.nn.save(model, tmp_path, optimizer)
    persia.nn.load(model, tmp_path, optimizer)
    scores = model.eval()(ids)
    before = others[0][0].eval()(ids)
    again = converted()
    found: Any = again[0].get_submodule("one")
    left = found.table_name
    assert not torch.equal(again[0](ids), scores)
    learn(*again)
    persia.nn.load(again[0], tmp_path, again[1])
    assert torch.equal(again[0].eval()(ids), scores)
    assert torch.equal(others[0][0](ids), before)
    for one in (model, again[0]):  # and training goes on alike
        learn(one.train(), optimizer if one is model else again[1])
    assert torch.equal(again[0].eval()(ids), model.eval()(ids))
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "scores.pt"), scores)
    assert persia.nn.Embedding(left, 3)._tables[0] is not found._tables[0]
    again[0].load_state_dict(others[0][0].state_dict())
    with pytest.raises(ConfigError, match="both named 'one_2'"):
        persia.nn.save(nn.ModuleList([again[0], model]), tmp_path)


def test_a_load_that_fails_leaves_names_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = converted(prefix="failing.")
    learn(model, optimizer)
    persia.nn.save(model, tmp_path, optimizer)
    again = converted(prefix="other.")
    learn(*again)
    scores = again[0].eval()(torch.arange(20))

    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("cannot be read")

    monkeypatch.setattr(CheckpointReader, "commit", fail)
    with pytest.raises(CheckpointError, match="cannot be read"):
        persia.nn.load(again[0], tmp_path, again[1])
    assert torch.equal(again[0](torch.arange(20)), scores)
    assert again[0].get_submodule("one").table_name == "other.one"


def test_modules_share_tables_as_in_the_checkpoint(tmp_path: Path) -> None:
    one, other = (persia.nn.Embedding(10, 3) for _ in range(2))
    for first, second in ((one, other), (one, one)):
        model = nn.ModuleList([first, second])
        persia.optim.SGD(model.parameters(), lr=0.1)
        persia.nn.save(model, tmp_path)
        wrong = [persia.nn.Embedding(10, 3)] * 2
        if first is second:
            wrong[1] = persia.nn.Embedding(10, 3)
        with pytest.raises(CheckpointError, match="share"):
            persia.nn.load(nn.ModuleList(wrong), tmp_path)


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


def test_a_load_warns_of_what_a_user_has_decided(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of the seed, nor of an optimizer that there is none of."""
    model, optimizer = converted(prefix="warned.")
    learn(model, optimizer)
    persia.nn.save(model, tmp_path)
    torch.manual_seed(5)
    other = persia.nn.convert(Net())
    with caplog.at_level(logging.WARNING):
        persia.nn.load(other, tmp_path)
        assert not caplog.records
        persia.optim.SGD(other.parameters(), lr=0.1)
        (text,) = caplog.messages
        assert text.startswith("table 'warned.one', table 'warned.two': the checkpoint has")
        assert "call persia.nn.load once more" in text
        persia.nn.load(other, tmp_path)
        persia.optim.SGD(other.parameters(), lr=0.1)
        assert "were trained by adagrad and are by sgd" in caplog.messages.pop()
        persia.nn.load(model, tmp_path)
        caplog.clear()
        persia.optim.SGD(model.parameters(), lr=0.1)
    (text,) = caplog.messages
    assert text.startswith("feature groups 'warned.one', 'warned.two' were trained by adagrad")
