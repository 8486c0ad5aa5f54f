"""The batches of a window, whose rows are mixed.

    a column's parts    [7 9 3] [4 1 1 8]         as they were decoded
    as a whole          [7 9 3 4 1 1 8]           u64 of ids, f32 of numbers
    its batches         [1 7 3] [8 9 4] [1]       each takes its own rows

One column after the other: picked at random, the rows of one fit in a processor's cache, those
of all do not. A column is given up once it is mixed, so that no window is there twice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from persia._core.ids.feature_batch import FeatureBatch
from persia.readers._columns import (
    feature_of,
    id_feature,
    is_list,
    numbers,
    single_ids,
    width_of,
)
from persia.readers._order import column_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from persia.embedding.data import PersiaBatch
    from persia.readers._columns import Columns

    Work = Callable[[], Iterator[Any]]

# Samples of a batch from which on all batches of a window may be there at once: each array of
# a smaller one takes about as much memory itself as the ids in it.
MANY_ROWS = 256


def batches_of(
    columns: Columns,
    parts: list[Any],
    order: NDArray[np.int64],
    batch_size: int,
    helper: Executor,
) -> Iterator[PersiaBatch]:
    """Yield batches of record batches, which are one window; empties their list.

    ``order`` has the rows to yield, numbered from the beginning of the window. ``helper`` mixes
    some of the columns, if it is free before all of them are mixed.
    """
    if not len(order):
        return

    def arrays(name: str) -> list[Any]:
        return [part.column(name) for part in parts]

    # Those of numbers first: they take longest.
    works: list[Work] = [
        partial(_matrices, names, list(map(arrays, names)), fill, order, batch_size)
        for names, fill in columns.matrices
    ]
    num_matrices = len(works)
    works += [
        partial(_features, feature, name, arrays(name), columns.strings, order, batch_size)
        for feature, name in columns.ids.items()
    ]
    parts.clear()
    made = _done(works, helper)

    def batch(_: int) -> PersiaBatch:
        own = [next(each) for each in made]
        return columns.assembled(own[num_matrices:], own[:num_matrices])

    yield from map(batch, range(0, len(order), batch_size))


def _done(works: list[Work], helper: Executor) -> list[Iterator[Any]]:
    """Return what each work returns."""
    done: list[Iterator[Any]] = [iter(())] * len(works)
    numbers = iter(range(len(works)))  # two threads may ask it for the next one

    def some() -> None:
        for number in numbers:
            done[number] = works[number]()

    helped = helper.submit(some)
    some()
    if not helped.cancel():
        helped.result()
    return done


def _features(
    feature: str,
    column: str,
    arrays: list[Any],
    strings: str,
    order: NDArray[np.int64],
    batch_size: int,
) -> Iterator[FeatureBatch]:
    """Mix a column of ids; return the id feature of each batch. Empties the list."""
    if is_list(arrays[0].type):
        mixed = column_of(arrays, order)
        arrays.clear()

        def made(begin: int) -> Any:
            return id_feature(feature, column, mixed.slice(begin, batch_size), strings)
    else:
        ids, known = _whole_ids(feature, column, arrays, strings)
        if known is None and batch_size >= MANY_ROWS:
            return _given_up(FeatureBatch.from_rows(feature, ids, order, batch_size))
        ids, known = ids.take(order), None if known is None else known.take(order)

        def made(begin: int) -> Any:
            own = ids[begin : begin + batch_size]
            if known is None:
                return feature_of(feature, own, None)
            has_one = known[begin : begin + batch_size]
            return feature_of(feature, own[has_one], has_one)

    return (made(begin).feature_batch for begin in range(0, len(order), batch_size))


def _given_up(batches: list[Any]) -> Iterator[Any]:
    """Yield a list's entries, which it has no longer then."""
    batches.reverse()
    while batches:
        yield batches.pop()


def _whole_ids(
    feature: str, column: str, arrays: list[Any], strings: str
) -> tuple[NDArray[np.uint64], NDArray[np.bool_] | None]:
    """Return an id for each row, and which rows have it, None if all; empties the list."""
    found = [single_ids(feature, column, array, strings) for array in arrays]
    arrays.clear()
    ids = np.concatenate([part for part, _ in found])
    if all(known is None for _, known in found):
        return ids, None
    known = np.concatenate(
        [np.ones(len(part), np.bool_) if own is None else own for part, own in found]
    )
    spread = np.zeros(len(known), np.uint64)
    spread[known] = ids
    return spread, known


def _matrices(
    names: list[str],
    columns: list[list[Any]],
    fill: float | None,
    order: NDArray[np.int64],
    batch_size: int,
) -> Iterator[NDArray[np.float32]]:
    """Mix columns of numbers; return those of each batch side by side, f32 [B, n]."""
    mixed = [
        _whole_numbers(name, arrays, fill).take(order, axis=0)
        for name, arrays in zip(names, columns, strict=True)
    ]
    rows = mixed[0] if len(mixed) == 1 else np.concatenate(mixed, axis=1)
    begins = range(0, len(order), batch_size)
    # Copied: a batch must not hold the window.
    return (rows[begin : begin + batch_size].copy() for begin in begins)


def _whole_numbers(name: str, arrays: list[Any], fill: float | None) -> NDArray[np.float32]:
    """Return a column of numbers, f32 [N, width]; empties the list."""
    width = width_of(arrays[0].type)
    whole = np.empty((sum(map(len, arrays)), width), np.float32)
    end = 0
    for array in arrays:
        begin, end = end, end + len(array)
        numbers(name, array, whole[begin:end], fill)
    arrays.clear()
    return whole
