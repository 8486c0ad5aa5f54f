"""Many features in one call."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

import persia.nn
import persia.optim
from persia._modules.homes import home_of
from persia._modules.lookups import MANY_LOOKUPS
from persia.errors import ConfigError, DataError

DIMS = {f"f{number}": 4 for number in range(26)}


def test_26_features_are_one_lookup_and_one_update() -> None:
    collection = persia.nn.EmbeddingCollection(DIMS)
    optimizer = persia.optim.Adagrad(persia.nn.sparse_parameters(collection), lr=0.1)
    ids = torch.randint(100, (16, 26))
    collection(ids)
    home = home_of(collection._tables[0])
    with (
        mock.patch.object(
            home.worker, "lookup_direct", wraps=home.worker.lookup_direct
        ) as asked,
        mock.patch.object(home.worker, "update", wraps=home.worker.update) as updated,
    ):
        torch.stack(collection(ids)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        home.wait()
    assert asked.call_count == 1
    assert updated.call_count == 1


def test_every_form_of_ids_gives_the_same_vectors() -> None:
    collection = persia.nn.EmbeddingCollection(
        {"clicked": ("thing", 3), "thing": ("thing", 3), "user": ("person", 5)},
        mode={"clicked": "mean", "thing": "sum", "user": "max"},
    )
    bag = persia.nn.EmbeddingBag("thing", 3, mode="mean")
    clicked = torch.tensor([[1, 2], [2, 3]])
    thing, user = torch.tensor([2, 9]), torch.tensor([4, 4])
    found = collection({"clicked": clicked, "thing": thing, "user": user})
    assert torch.allclose(found["clicked"], bag(clicked))
    assert torch.allclose(found["thing"], bag(thing[:, None]))
    assert found["user"].shape == (2, 5)
    pair = clicked.reshape(-1), torch.tensor([0, 2, 4])
    nested = torch.nested.nested_tensor_from_jagged(*pair)
    for one in (pair, nested):
        again = collection({"user": user, "thing": thing, "clicked": one})
        for name, vectors in again.items():
            assert torch.equal(vectors, found[name])


class Jagged:
    """Has what TorchRec's KeyedJaggedTensor has of methods."""

    def keys(self) -> list[str]:
        return ["a", "b"]

    def values(self) -> torch.Tensor:
        return torch.tensor([1, 2, 3])

    def offsets(self) -> torch.Tensor:
        return torch.tensor([0, 2, 2, 2, 3])

    def weights_or_none(self) -> None:
        return None


def test_a_keyed_jagged_tensor_gives_a_keyed_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    collection = persia.nn.EmbeddingCollection({"a": ("keyed a", 2), "b": ("keyed b", 3)})
    made: list[Any] = []
    torchrec = mock.Mock()
    torchrec.KeyedTensor = lambda *given: made.append(given)
    monkeypatch.setitem(__import__("sys").modules, "torchrec", torchrec)
    collection(Jagged())
    ((keys, dims, values),) = made
    assert (keys, dims, values.shape) == (["a", "b"], [2, 3], (2, 5))
    bag = persia.nn.EmbeddingBag("keyed a", 2, mode="sum")
    assert torch.allclose(values[0, :2], bag(torch.tensor([[1, 2]]))[0])
    assert values[1, :2].tolist() == [0.0, 0.0]


def test_wrong_features_are_named() -> None:
    collection = persia.nn.EmbeddingCollection({"a": 2, "b": 3})
    with pytest.raises(DataError, match="missing b, unknown c"):
        collection({"a": torch.tensor([1]), "c": torch.tensor([1])})
    with pytest.raises(ConfigError, match="at least one feature"):
        persia.nn.EmbeddingCollection({})
    with pytest.raises(ConfigError, match="expected one of sum, mean, max"):
        persia.nn.EmbeddingCollection({"a": 2}, mode="first")


def test_a_frozen_table_of_several_makes_no_rows_and_is_not_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    features = persia.nn.EmbeddingCollection({"thawed": 2, "frozen": 2})
    optimizer = persia.optim.SGD(features.parameters(), lr=0.1)
    persia.nn.Embedding("frozen", 2).requires_grad_(False)
    ids = torch.arange(6).view(3, 2)
    caplog.set_level(logging.WARNING)
    for _ in range(MANY_LOOKUPS + 1):
        optimizer.zero_grad()
        torch.autograd.backward(torch.cat(features(ids)).sum())
        optimizer.step()
    assert len(features.tables["thawed"]) == 3
    assert len(features.tables["frozen"]) == 0
    assert not caplog.messages


def test_a_feature_that_a_loss_does_not_reach_takes_no_step() -> None:
    features = persia.nn.EmbeddingCollection({"reached": 2, "left out": 2})
    optimizer = persia.optim.Adam(features.parameters(), lr=0.1)
    ids = torch.arange(6).view(3, 2)
    for losses in (2, 1):  # with momentum, a gradient of zeros would be a step as well
        before = rows_of(features, ids)
        optimizer.zero_grad()
        torch.autograd.backward([one.sum() for one in features(ids)[:losses]])
        optimizer.step()
    after = rows_of(features, ids)
    assert (after[0] != before[0]).all()
    assert (after[1] == before[1]).all()


def rows_of(features: persia.nn.EmbeddingCollection, ids: torch.Tensor) -> list[Any]:
    tables = features.tables.values()
    return [table.read(column) for table, column in zip(tables, ids.t(), strict=True)]
