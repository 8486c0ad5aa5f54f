"""Where the ids of a model's lookups are in what the model is given, learnt by value.

A lookup that was not ahead is compared with the tensors of the batch. A lookup takes rows from
ahead only if its ids are the same; so results never depend on what was guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.joined_features import GivenIds, split_features
from persia._modules import joint, requests
from persia._modules.lookups import of_single, pool
from persia._modules.requests import AheadCall, AheadRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._modules.joint import JointRows
    from persia._modules.requests import Lookup, Missed
    from persia._modules.tables import ModuleTable

    Ahead = AheadRows | AheadCall
    _Key = tuple[str, int]  # of a table, and the number of its lookup in the batch

# Batches in a row in which a lookup was not found, after which it is not sought any more.
PATIENCE = 8
# Different ids from which on a tensor may be theirs shifted by a number: of one sample each is.
_LEAST_SHIFTED = 8
# Of tensors that may hold ids; NumPy has no others.
_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
_DTYPES = frozenset((*_INTEGERS, torch.float64, torch.float32, torch.float16))


class Leaves:
    """The tensors of a batch, as integers when they are asked for."""

    def __init__(self, batch: Any) -> None:
        self._leaves = pytree.tree_leaves(batch)
        self._arrays: dict[int, NDArray[np.int64] | None] = {}
        self._rows: dict[int, NDArray[np.int64]] = {}
        self._columns: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def array(self, place: int) -> NDArray[np.int64] | None:
        """Return a leaf, or None if there is none or it holds no ids."""
        if place not in self._arrays:
            leaf = self._leaves[place] if place < len(self._leaves) else None
            self._arrays[place] = _integers(leaf)
        return self._arrays[place]

    def rows(self, place: int) -> NDArray[np.int64] | None:
        """Return a copy of a leaf; None if there is none or it holds no ids."""
        if place not in self._rows:
            array = self.array(place)
            if array is None:
                return None
            self._rows[place] = np.array(array, order="C")
        return self._rows[place]

    def columns(self, place: int) -> NDArray[np.int64] | None:
        """Return a copy of a leaf [B, F] by columns, [F, B]; None if it has another shape."""
        if place not in self._columns:
            array = self.array(place)
            if array is None or array.ndim != 2:
                return None
            self._columns[place] = np.array(array.T, order="C")
        return self._columns[place]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a module's ids are: a leaf, a row or a column of it, and what is added."""

    table: ModuleTable
    padding: int | None
    leaf: int
    row: int | None
    column: int | None
    is_transposed: bool
    addend: int
    is_single: bool = False  # each sample has one id, and none is padding

    def ids(self, leaves: Leaves) -> NDArray[np.uint64] | None:
        """Return a copy of the ids, as a model may change its batch; None if there are none."""
        found: NDArray[np.int64] | None
        if self.column is not None or self.is_transposed:
            found = leaves.columns(self.leaf)
            if found is None or (self.column or 0) >= len(found):
                return None
            found = found.reshape(-1) if self.column is None else found[self.column]
        else:
            found = leaves.rows(self.leaf)
            if found is None:
                return None
            if self.row is not None:
                if found.ndim != 2 or self.row >= len(found):
                    return None
                found = found[self.row]
            found = found.reshape(-1)
        return (found + self.addend if self.addend else found).view(np.uint64)


class Recipes:
    """Where the ids of the lookups of a model are, as far as it is known."""

    def __init__(self) -> None:
        self._recipes: dict[_Key, Recipe] = {}
        # Lookups all of whose features are known, with one id per sample.
        self._calls: list[tuple[_Key, ...]] = []
        self.num_failed = 0  # batches in a row in which a lookup was not found

    def __len__(self) -> int:
        return len(self._recipes)

    def look_up(self, leaves: Leaves) -> list[Ahead]:
        """Ask for the rows of a batch, in one call if no table comes twice, and pool them."""
        features = self._features(leaves)
        if not features:
            return []
        asked = requests.ask([feature for _, feature in features.values()])
        left = dict(zip(features, asked, strict=True))
        found: list[Ahead] = []
        for keys in self._calls:
            if all(key in left and left[key].table.anchor.is_cpu for key in keys):
                rows = [left.pop(key) for key in keys]
                found.append(requests.put_call(rows, pool(of_single(rows))))
        for one in left.values():
            requests.put_ahead(one)
            found.append(one)
        return found

    def open_joint(self, leaves: Leaves) -> tuple[list[AheadRows], list[JointRows]]:
        """Ask for the rows of a forward; return those ahead, and those that are pooled."""
        singles: list[Lookup] = []
        others: list[Lookup] = []
        for recipe, feature in self._features(leaves).values():
            joins = recipe.is_single and joint.can_join(recipe.table.anchor)
            (singles if joins else others).append(feature)
        call = None
        if singles:
            ids = [given.values for _, given in singles]
            call = requests.take_call([table for table, _ in singles], ids)
        if requests.is_recording():
            others = []  # modules take what a loader has asked for
            if singles and call is None:
                requests.note_missed(singles, len(singles))
        pooled, ahead, vectors = [], [], None
        if call is not None:
            pooled, vectors = call.rows, call.vectors
        elif singles or others:
            rows = requests.ask([*singles, *others])
            pooled, ahead = rows[: len(singles)], rows[len(singles) :]
        for one in ahead:
            requests.put_ahead(one)
        try:
            return ahead, joint.open_joint(pooled, vectors) if pooled else []
        except BaseException:
            for one in ahead:
                one.give_up()
            for one in pooled:
                one.request.give_up()
            raise

    def _features(self, leaves: Leaves) -> dict[_Key, tuple[Recipe, Lookup]]:
        found = {}
        for key, recipe in list(self._recipes.items()):
            table, padding = recipe.table, recipe.padding
            ids = recipe.ids(leaves) if table.anchor.requires_grad else None
            if ids is None or not len(ids):
                continue
            if padding is None:
                asked = FeatureBatch.from_single(table.name, ids)
                given = GivenIds(asked, asked, ids, None)
            else:
                (given,) = split_features([table.name], ids, None, None, padding)
            found[key] = recipe, (table, given)
        return found

    def part(self, rows: JointRows) -> None:
        """Do not pool these any more: their module has samples of several ids."""
        for key, recipe in list(self._recipes.items()):
            if recipe.table is rows.rows.table:
                self._recipes[key] = replace(recipe, is_single=False)

    def note_batch(
        self, leaves: Leaves, rows: Sequence[Ahead | JointRows], missed: Sequence[Missed]
    ) -> int:
        """Learn from a batch that the model is done with; return how many rows were not used.

        ``missed`` is what the model has looked up and was not ahead.
        """
        num_unused = sum([one.give_up() for one in rows])
        if num_unused and missed:
            self._recipes.clear()  # some were wrong: they were equal by chance
            self._calls.clear()
        if missed and self.num_failed < PATIENCE:
            self._learn(leaves, missed)
        return num_unused

    def _learn(self, leaves: Leaves, missed: Sequence[Missed]) -> None:
        lost = 0
        counts: dict[str, int] = {}
        for lookup in missed:
            singles: list[_Key] = []
            for table, given in lookup.features:
                counts[table.key] = counts.get(table.key, 0) + 1
                recipe = _find(table, given, leaves)
                if recipe is None:
                    lost += 1
                    continue
                key = table.key, counts[table.key]
                self._recipes[key] = recipe
                if recipe.is_single:
                    singles.append(key)
            if len(singles) == lookup.size:
                others = [one for one in self._calls if set(one).isdisjoint(singles)]
                self._calls = [*others, tuple(singles)]
        self.num_failed = self.num_failed + 1 if lost else 0


def _integers(leaf: Any) -> NDArray[np.int64] | None:
    """Return a leaf of a batch as integers, if it may hold ids."""
    if isinstance(leaf, torch.Tensor):
        # A subclass may have no values: those of compilers do not.
        if type(leaf) is not torch.Tensor or leaf.is_nested or leaf.dtype not in _DTYPES:
            return None
        if leaf.layout is not torch.strided or leaf.device.type != "cpu" or leaf.is_neg():
            return None
        leaf = leaf.detach().numpy()
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iuf" or leaf.ndim == 0:
        return None
    with np.errstate(invalid="ignore"):
        return leaf.astype(np.int64, copy=False)


def _find(table: ModuleTable, given: GivenIds, leaves: Leaves) -> Recipe | None:
    """Return where the ids of a lookup are in its batch, equal or all shifted by one number."""
    values = given.values.view(np.int64)
    shifted: Recipe | None = None
    for place in range(len(leaves)):
        array = leaves.array(place)
        if array is None or not len(values):
            continue
        views: list[tuple[int | None, int | None, bool, NDArray[np.int64]]] = []
        if array.size == len(values):
            views.append((None, None, False, array.reshape(-1)))
            if array.ndim == 2:
                views.append((None, None, True, array.T.reshape(-1)))
        if array.ndim == 2 and len(array) == len(values):
            views += [(None, x, False, array[:, x]) for x in range(array.shape[1])]
        if array.ndim == 2 and array.shape[1] == len(values):
            views += [(x, None, False, array[x]) for x in range(len(array))]
        for row, column, is_transposed, view in views:
            # As int64 has it, where ids use all 64 bits.
            addend = (int(values[0]) - int(view[0]) + (1 << 63)) % (1 << 64) - (1 << 63)
            if (addend and shifted is not None) or not np.array_equal(values, view + addend):
                continue
            if addend and len(np.unique(view)) < _LEAST_SHIFTED:
                continue
            found = Recipe(
                *(table, given.padding, place, row, column, is_transposed, addend),
                is_single=given.padding is None
                and given.pooled.offsets is None
                and given.pooled.weights is None,
            )
            if not addend:
                return found
            shifted = found
    return shifted
