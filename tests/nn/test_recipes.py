"""Where ids are in a batch: by leaf, row, column, transposed, shifted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import persia.nn
import persia.optim
from persia._core.ids.joined_features import split_features
from persia._modules.homes import read_rows
from persia._modules.requests import AheadCall, AheadRows, Missed
from persia._modules.tables import ModuleTable
from persia.nn.recipes import PATIENCE, Leaves, Recipe, Recipes

MATRIX = torch.tensor([[3, 5, 8], [1, 4, 9]])
LONG = torch.arange(24).reshape(8, 3)
FORMS: dict[str, tuple[Any, torch.Tensor]] = {
    "leaf": ((torch.rand(3), [MATRIX[0]]), MATRIX[0]),
    "flat": (MATRIX, MATRIX.reshape(-1)),
    "row": (MATRIX, MATRIX[1]),
    "column": ({"x": MATRIX.double()}, MATRIX[:, 2]),
    "transposed": (MATRIX, MATRIX.t().reshape(-1)),
    "shifted": ({"x": LONG}, LONG[:, 1] + 1000),
}


@pytest.fixture(scope="module")
def module() -> persia.nn.Embedding:
    found = persia.nn.Embedding("of recipes", 2)
    persia.optim.SGD(found.parameters(), lr=0.1)
    found(torch.tensor([1]))
    return found


def learnt(module: persia.nn.Embedding, batch: Any, ids: torch.Tensor) -> Recipes:
    recipes = Recipes()
    table = module._tables[0]
    (given,) = split_features([table.name], ids.numpy().view(np.uint64), None, None)
    assert recipes.note_batch(Leaves(batch), [], [Missed([(table, given)], 1)]) == 0
    return recipes


def ids_of(recipes: Recipes, batch: Any) -> list[int]:
    """Return what is looked up ahead, of one module, and give it up."""
    (call,) = recipes.look_up(Leaves(batch))
    assert isinstance(call, AheadCall)
    found: list[int] = call.ids.view(np.int64).tolist()
    assert call.give_up() == 1
    return found


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_found_in_another_batch(module: persia.nn.Embedding, form: str) -> None:
    batch, ids = FORMS[form]
    recipes = learnt(module, batch, ids)
    assert len(recipes) == 1
    moved = torch.utils._pytree.tree_map(lambda leaf: leaf + 20, batch)
    assert ids_of(recipes, moved) == (ids + 20).tolist()


def test_a_batch_that_a_model_changes_afterwards_is_looked_up_as_it_was(
    module: persia.nn.Embedding,
) -> None:
    ids = torch.tensor([3, 5])
    (call,) = learnt(module, ids, ids.clone()).look_up(Leaves(ids))
    ids += 1
    assert isinstance(call, AheadCall)
    assert call.ids.tolist() == [3, 5]
    assert call.give_up() == 1


def test_few_ids_are_not_taken_for_shifted_ones(module: persia.nn.Embedding) -> None:
    """A label of one sample and its id always have a difference."""
    assert not learnt(module, (torch.ones(1), MATRIX), torch.tensor([7]))


@pytest.mark.filterwarnings("error")
def test_ids_of_all_64_bits_are_compared(module: persia.nn.Embedding) -> None:
    ids = torch.arange(10) - (1 << 63)
    batch = torch.arange(10, 0, -1), ids
    assert len(learnt(module, batch, ids)) == 1
    assert ids_of(learnt(module, ids + 5, ids), ids) == (ids - 5).tolist()


def test_tensors_that_numpy_has_not_hold_no_ids(module: persia.nn.Embedding) -> None:
    ids = torch.arange(3)
    others = torch.ones(3, dtype=torch.bfloat16), torch.eye(3).to_sparse(), torch.ones(3) == 1
    recipes = learnt(module, (*others, ids), ids)
    assert ids_of(recipes, (*others, ids)) == ids.tolist()


def test_a_batch_without_the_place_has_no_ids(module: persia.nn.Embedding) -> None:
    for form in FORMS:
        recipes = learnt(module, *FORMS[form])
        assert recipes.look_up(Leaves(())) == []
    table = module._tables[0]
    for row, column in ((9, None), (None, 9)):
        recipe = Recipe(table, None, 0, row, column, is_transposed=False, addend=0)
        assert recipe.ids(Leaves(MATRIX)) is None
        assert recipe.ids(Leaves(MATRIX[0])) is None


def test_frozen_tables_are_not_looked_up_ahead(module: persia.nn.Embedding) -> None:
    ids = torch.tensor([3, 5])
    recipes = learnt(module, ids, ids)
    module.requires_grad_(False)
    assert recipes.look_up(Leaves(ids)) == []
    module.requires_grad_(True)


def test_what_is_never_found_is_counted(module: persia.nn.Embedding) -> None:
    recipes = Recipes()
    table = module._tables[0]
    (given,) = split_features([table.name], np.array([7, 9], np.uint64), None, None)
    for _ in range(PATIENCE + 3):
        recipes.note_batch(Leaves(torch.tensor([1, 1])), [], [Missed([(table, given)], 1)])
    assert recipes.num_failed == PATIENCE
    assert len(recipes) == 0


def test_a_lookup_is_ahead_as_a_whole_if_all_of_it_is_known(
    module: persia.nn.Embedding,
) -> None:
    other = persia.nn.Embedding("of recipes too", 2)
    persia.optim.SGD(other.parameters(), lr=0.1)
    tables = [module._tables[0], other._tables[0]]
    ids = MATRIX.numpy().view(np.uint64)
    features = [
        split_features([x.name], row, None, None)[0] for x, row in zip(tables, ids, strict=True)
    ]
    lookups = list(zip(tables, features, strict=True))
    recipes = Recipes()
    recipes.note_batch(Leaves(MATRIX), [], [Missed(lookups, 2)])
    (call,) = recipes.look_up(Leaves(MATRIX))
    assert isinstance(call, AheadCall)
    assert call.vectors.reshape(6, 2).tolist() == [
        vector
        for table, row in zip(tables, MATRIX, strict=True)
        for vector in rows_of(table, row)
    ]
    assert call.give_up() == 2
    # Of three features one is not in the batch.
    recipes = Recipes()
    recipes.note_batch(Leaves(MATRIX), [], [Missed(lookups, 3)])
    found = recipes.look_up(Leaves(MATRIX))
    assert [type(one) for one in found] == [AheadRows] * 2
    assert [one.give_up() for one in found] == [1, 1]


def rows_of(table: ModuleTable, ids: torch.Tensor) -> list[list[float]]:
    rows: list[list[float]] = read_rows(table, ids.numpy().view(np.uint64)).tolist()
    return rows
