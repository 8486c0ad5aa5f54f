"""Where ids are in a batch: by leaf, row, column, transposed, shifted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import persia.nn
import persia.optim
from persia._modules.requests import split_features
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
    (given,) = split_features([table], ids.numpy().view(np.uint64), None, None)
    assert recipes.note_batch(Leaves(batch), [], [(table, given)]) == 0
    return recipes


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_found_in_another_batch(module: persia.nn.Embedding, form: str) -> None:
    batch, ids = FORMS[form]
    recipes = learnt(module, batch, ids)
    assert recipes.tables() == {module._tables[0]}
    moved = torch.utils._pytree.tree_map(lambda leaf: leaf + 20, batch)
    (rows,) = recipes.look_up(Leaves(moved))
    assert rows.given.values.tolist() == (ids + 20).tolist()
    assert rows.give_up()


def test_a_batch_that_a_model_changes_afterwards_is_looked_up_as_it_was(
    module: persia.nn.Embedding,
) -> None:
    ids = torch.tensor([3, 5])
    (rows,) = learnt(module, ids, ids.clone()).look_up(Leaves(ids))
    ids += 1
    assert rows.given.values.tolist() == [3, 5]
    assert rows.give_up()


def test_few_ids_are_not_taken_for_shifted_ones(module: persia.nn.Embedding) -> None:
    """A label of one sample and its id always have a difference."""
    assert not learnt(module, (torch.ones(1), MATRIX), torch.tensor([7])).tables()


@pytest.mark.filterwarnings("error")
def test_ids_of_all_64_bits_are_compared(module: persia.nn.Embedding) -> None:
    ids = torch.arange(10) - (1 << 63)
    batch = torch.arange(10, 0, -1), ids
    assert learnt(module, batch, ids).tables() == {module._tables[0]}
    (rows,) = learnt(module, ids + 5, ids).look_up(Leaves(ids))
    assert rows.give_up()


def test_tensors_that_numpy_has_not_hold_no_ids(module: persia.nn.Embedding) -> None:
    ids = torch.arange(3)
    others = torch.ones(3, dtype=torch.bfloat16), torch.eye(3).to_sparse(), torch.ones(3) == 1
    recipes = learnt(module, (*others, ids), ids)
    (rows,) = recipes.look_up(Leaves((*others, ids)))
    assert rows.give_up()


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
    (given,) = split_features([table], np.array([7, 9], np.uint64), None, None)
    for _ in range(PATIENCE + 3):
        recipes.note_batch(Leaves(torch.tensor([1, 1])), [], [(table, given)])
    assert recipes.num_failed == PATIENCE
    assert len(recipes) == 0
