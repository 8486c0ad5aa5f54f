"""A model that was written for torch, converted by one call."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia.errors import ConfigError


class Written(nn.Module):
    """Reads what models of others read of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dict = nn.ModuleDict(
            {"user": nn.Embedding(20, 4), "item": nn.Embedding(30, 4, padding_idx=0)}
        )
        self.again = self.embedding_dict["user"]
        self.small = nn.Embedding(2, 4)
        self.tied = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        embeddings = self.embedding_dict
        weight: torch.Tensor = embeddings["item"].weight  # type: ignore[assignment]
        assert embeddings["user"].embedding_dim == weight.shape[1]
        found = embeddings["user"](users) * embeddings["item"](items) + self.again(users)
        out: torch.Tensor = self.head(found + self.small(users % 2) + self.tied(users % 9))
        return out


def test_what_can_be_converted_is_and_gives_the_same(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Written()
    ids = torch.randint(20, (12,)), torch.randint(30, (12,))
    expected = model(*ids)
    with caplog.at_level(logging.INFO, "persia.nn"):
        assert persia.nn.convert(model, min_rows=5) is model
    assert "small has fewer than 5 rows" in caplog.text
    (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert "tied: its weight is another module's too" in warning
    assert "write torch.nn.functional.linear(h, model.tied.weight)" in warning
    assert isinstance(model.embedding_dict["user"], persia.nn.Embedding)
    assert model.again is model.embedding_dict["user"]
    assert type(model.tied) is nn.Embedding
    assert torch.allclose(model(*ids), expected)
    optimizer = persia.optim.Adagrad(model.parameters(), lr=0.1)
    unseen = torch.randint(1 << 40, (12,)), torch.randint(1 << 40, (12,))
    before = model(*unseen)
    before.sum().backward()
    optimizer.step()
    assert (model(*unseen) - before).abs().max() > 0.01


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module, got dict"):
        persia.nn.convert({})  # type: ignore[arg-type]


def test_new_rows_begin_as_those_that_were_there() -> None:
    model = nn.ModuleDict({"wide": nn.Embedding(500, 16)})
    with torch.no_grad():
        next(model.parameters()).normal_(0.5, 0.01)
    persia.nn.convert(model)
    rows = model["wide"](torch.arange(10_000, 10_500))
    assert rows.mean().item() == pytest.approx(0.5, abs=0.002)
    assert rows.std().item() == pytest.approx(0.01, rel=0.1)


def test_models_of_one_process_do_not_share_by_chance() -> None:
    one = persia.nn.convert(nn.ModuleDict({"place": nn.Embedding(3, 2)}))
    two = persia.nn.convert(nn.ModuleDict({"place": nn.Embedding(3, 2)}))
    assert [model["place"].table_name for model in (one, two)] == ["place", "place_2"]  # type: ignore[index]


def test_a_penalty_over_the_old_weight_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"penalized": nn.EmbeddingBag(5, 2)})
    kept = list(model.parameters())
    persia.nn.convert(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sum(weight.square().sum() for weight in kept).backward()  # type: ignore[union-attr]
    (record,) = caplog.records
    assert "weight_decay= of the optimizer of persia.optim" in record.message


def test_frozen_weights_stay_frozen_and_modules_alone_are_converted() -> None:
    frozen = nn.Embedding.from_pretrained(torch.ones(3, 2))  # type: ignore[no-untyped-call]
    module = persia.nn.convert(frozen)
    assert isinstance(module, persia.nn.Embedding)
    assert not module(torch.tensor([1])).requires_grad
    assert module(torch.tensor([1])).tolist() == [[1.0, 1.0]]


def test_nothing_to_convert_is_an_error() -> None:
    with pytest.raises(ConfigError, match="got Linear with none to replace"):
        persia.nn.convert(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has max_norm or scale_grad_by_freq"):
        persia.nn.convert(nn.Embedding(3, 2, max_norm=1.0))
    tied = nn.ModuleDict({"e": nn.Embedding(3, 2), "out": nn.Linear(2, 3)})
    tied["out"].weight = tied["e"].weight
    with pytest.raises(
        ConfigError, match=r"write torch\.nn\.functional\.linear\(h, model\.e\."
    ):
        persia.nn.convert(tied)


def test_a_converted_model_is_converted_as_often_as_wanted() -> None:
    model = persia.nn.convert(nn.ModuleDict({"often": nn.Embedding(3, 2)}))
    found = dict(model.named_modules())["often"]
    assert persia.nn.convert(model) is model
    assert dict(model.named_modules())["often"] is found
