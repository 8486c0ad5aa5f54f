"""Batches of mixed rows are those that the same rows make in any other way."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import DataError
from persia.readers import Columns, _windows
from tests.readers.support import bytes_of
from tests.readers.test_columns import IDS

NUMBERS = [
    pa.array([1, None, 3], pa.int16()),
    pa.array([True, False, None]),
    pa.array([0.5, float("nan"), None], pa.float32()),
    pa.array([[1.5, 2.5], None, [3.5, None]], pa.list_(pa.float64(), 2)),
]


class Busy(Executor):
    """Never free."""

    def submit(self, *_: Any, **__: Any) -> Any:
        return Future()


class Quick(Executor):
    """Does all of it before the caller begins."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future = Future[Any]()
        try:
            future.set_result(fn(*args, **kwargs))
        except DataError as exc:
            future.set_exception(exc)
        return future


def split(rows: Any, edges: list[int]) -> list[Any]:
    """Return a record batch in parts, empty ones too."""
    places = [0, *sorted(min(edge, rows.num_rows) for edge in edges), rows.num_rows]
    return [rows.slice(begin, end - begin) for begin, end in itertools.pairwise(places)]


@given(
    ids=st.sampled_from([array for array, _ in IDS]),
    edges=st.lists(st.integers(0, 12), max_size=4),
    size=st.integers(1, 7),
    seed=st.integers(0, 5),
    num_left_out=st.integers(0, 12),
    many_rows=st.sampled_from([1, 256]),
    kind=st.sampled_from([Busy, Quick, lambda: ThreadPoolExecutor(1)]),
)
def test_every_kind_of_column(
    ids: Any,
    edges: list[int],
    size: int,
    seed: int,
    num_left_out: int,
    many_rows: int,
    kind: Any,
) -> None:
    num_rows = 12
    order = np.random.default_rng(seed).permutation(num_rows)
    picked = np.resize(np.arange(len(ids)), num_rows)
    arrays = {"ids": ids.take(pa.array(picked))}
    for number, array in enumerate(NUMBERS):
        arrays[f"x{number}"] = array.take(pa.array(np.resize(np.arange(3), num_rows)))
    arrays["y"] = pa.array(np.arange(num_rows))
    rows = pa.record_batch(arrays)
    # Columns that are used twice, and one that is not.
    columns = Columns(
        {"a": "ids", "b": "y", "c": "ids"},
        {"dense": ["x3", "y", "x0"], "more": ["x1"]},
        ["y"],
        fill=-1.0,
    )
    order = order[num_left_out:]
    places = [order[begin : begin + size] for begin in range(0, len(order), size)]
    parts = split(rows, edges)
    with mock.patch.object(_windows, "MANY_ROWS", many_rows), kind() as helper:
        assert bytes_of(_windows.batches_of(columns, parts, order, size, helper)) == [
            columns.batch_of(rows.take(pa.array(place))).to_bytes() for place in places
        ]
    assert not parts or not places


def test_a_column_is_given_up_once_it_is_mixed() -> None:
    num_rows, names = 50_000, [f"c{number}" for number in range(20)]
    before = pa.total_allocated_bytes()
    parts = [pa.record_batch({name: pa.array(range(num_rows)) for name in names})]
    held = pa.total_allocated_bytes() - before
    assert held >= 8 * num_rows * len(names)
    columns = Columns(names[:10], names[10:], requires_grad=False)
    batches = _windows.batches_of(columns, parts, np.arange(num_rows), num_rows, Busy())
    next(batches)
    assert pa.total_allocated_bytes() - before < held / 20


@pytest.mark.parametrize("edges", [[], [1], [2]])
@pytest.mark.parametrize("helper", [Busy(), Quick()])
def test_what_is_wrong_is_named(edges: list[int], helper: Executor) -> None:
    rows = pa.record_batch({"x": ["1", "red", "2"], "y": pa.array([1, 2, None])})
    order = np.array([2, 0, 1])
    columns = Columns(["x"], strings="hex", requires_grad=False)
    with pytest.raises(DataError, match=r"column 'x': expected 1 to 16 hex.* got 'red'"):
        list(_windows.batches_of(columns, split(rows, edges), order, 3, helper))
    columns = Columns(["x"], labels=["y"])
    with pytest.raises(DataError, match="column 'y': expected a number, got a null"):
        list(_windows.batches_of(columns, split(rows, edges), order, 3, helper))
