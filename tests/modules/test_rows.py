"""Rows by id of a module's table: read, written and dropped where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia.nn
import persia.optim
from persia.ctx import TrainCtx
from persia.embedding.optim import SGD
from persia.errors import ConfigError, DataError


def test_rows_by_id_are_those_that_lookups_find() -> None:
    module = persia.nn.Embedding("by id", 3, padding_idx=0)
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0)
    module(torch.tensor([5, 1 << 40])).sum().backward()
    optimizer.step()
    table = module.table
    assert (table.name, table.dim, len(table)) == ("by id", 3, 2)
    ids = torch.tensor([5, 1 << 40])
    assert np.array_equal(table.read(ids), module(ids).detach().numpy())
    module(ids).sum().backward()
    optimizer.zero_grad()
    assert not module(torch.tensor([0])).any()  # the padding's row is known now
    before = int(module.version)
    rows = torch.arange(6.0).view(2, 3)
    table.write([0, 5], rows)
    assert int(module.version) == before + 1
    assert torch.equal(module(torch.tensor([0, 5])), rows)
    assert table.delete([5, 6]) == 1
    assert int(module.version) == before + 2
    assert table.contains([0, 5]).tolist() == [True, False]
    assert dict(table).keys() == {0, 1 << 40}
    with pytest.raises(DataError, match="have no row: 5"):
        table.read([5], missing="raise")


def test_rows_that_convert_has_copied_are_there_before_a_lookup() -> None:
    theirs = torch.nn.Embedding(4, 2)
    module = persia.nn.convert(torch.nn.ModuleDict({"kept": theirs}))["kept"]  # type: ignore[index]
    assert np.array_equal(module.table.read(np.arange(4)), theirs.weight.detach().numpy())


def test_rows_of_a_collection_are_by_feature() -> None:
    module = persia.nn.EmbeddingCollection({"clicked": ("goods", 2), "seen": ("goods", 2)})
    tables = module.tables
    assert list(tables) == ["clicked", "seen"]
    tables["clicked"].write([3], [[1.0, 2.0]])
    assert tables["seen"].read([3]).tolist() == [[1.0, 2.0]]
    assert module(torch.tensor([[3, 3]]))[0].tolist() == [[1.0, 2.0]]


def test_rows_elsewhere_are_not_those_that_were_taken() -> None:
    module = persia.nn.Embedding("wandering", 2)
    alone = module.table
    alone.write([1], [[1.0, 1.0]])
    linear = torch.nn.Linear(1, 1)
    with TrainCtx(
        SGD(lr=1.0),
        torch.optim.SGD(linear.parameters(), lr=0.1),
        model=linear,
        embedding_config={"slots_config": {"wandering": {"dim": 2, "pooling": "jagged"}}},
    ) as ctx:
        module.table.write([1], [[2.0, 2.0]])
        assert ctx.table("wandering").read([1]).tolist() == [[2.0, 2.0]]
        with pytest.raises(ConfigError, match="'wandering': its rows are elsewhere now"):
            alone.read([1])
    assert alone.read([1]).tolist() == [[1.0, 1.0]]
    persia.optim.Adam(module.parameters(), lr=0.1)  # moves them
    with pytest.raises(ConfigError, match=r"take `\.table` of its module again"):
        alone.write([1], [[3.0, 3.0]])
    assert module.table.read([1]).tolist() == [[1.0, 1.0]]
