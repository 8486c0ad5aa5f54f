"""Which rows a shard has, and how they are cut and mixed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.readers._order import (
    TURN_ROWS,
    Piece,
    Span,
    between,
    column_of,
    cut,
    deal,
    joined,
    permutation,
    rows_of,
)

SIZES = st.lists(st.integers(0, 30), max_size=8)


def part(begin: int, end: int) -> Any:
    return pa.record_batch({"row": np.arange(begin, end)})


def numbers(parts: Any) -> list[int]:
    return [row for each in parts for row in each["row"].to_pylist()]


@dataclass(frozen=True, slots=True)
class Rows(Span):
    def read(self) -> Iterator[Any]:
        for begin in range(self.begin, self.end, 4):
            yield part(begin, min(begin + 4, self.end))


@dataclass(frozen=True, slots=True)
class Unknown(Piece):
    begin: int
    end: int

    def read(self) -> Iterator[Any]:
        yield part(self.begin, self.end)


def pieces(kind: type[Rows | Unknown], sizes: list[int]) -> list[Any]:
    edges = itertools.accumulate(sizes, initial=0)
    return [kind(begin, end) for begin, end in itertools.pairwise(edges)]


@given(SIZES, st.integers(1, 9))
def test_shards_are_equal_parts_in_order(sizes: list[int], count: int) -> None:
    made = pieces(Rows, sizes)
    dealt = [numbers(rows_of(deal(made, (index, count)), 0)) for index in range(count)]
    assert list(itertools.chain(*dealt)) == list(range(sum(sizes)))
    lengths = [len(rows) for rows in dealt]
    assert max(lengths) - min(lengths) <= 1


@given(SIZES, st.integers(0, 120))
def test_rows_behind_some(sizes: list[int], skipped: int) -> None:
    for kind in (Rows, Unknown):
        assert numbers(rows_of(pieces(kind, sizes), skipped)) == list(
            range(skipped, sum(sizes))
        )


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pieces_that_cannot_be_cut(count: int) -> None:
    sizes = [300, 10, 1000]
    made = pieces(Unknown, sizes)
    assert [piece.num_rows() for piece in made] == [None] * 3
    dealt = [numbers(rows_of(deal(made, (index, count)), 0)) for index in range(count)]
    assert sorted(itertools.chain(*dealt)) == list(range(1310))
    if count > len(sizes):
        for index, rows in enumerate(dealt):
            assert rows == [row for row in range(1310) if row // TURN_ROWS % count == index]
    else:
        assert dealt[0][:300] == list(range(300))  # by pieces


@given(SIZES, st.integers(0, 100), st.integers(0, 100))
def test_between(sizes: list[int], begin: int, end: int) -> None:
    parts = [part(piece.begin, piece.end) for piece in pieces(Unknown, sizes)]
    coming = iter(parts)
    got = list(between(coming, begin, end))
    # What lies behind the end is not even read.
    read = sum(each.num_rows for each in parts) - len(numbers(coming))
    edges = itertools.accumulate(each.num_rows for each in parts)
    assert read == next((edge for edge in edges if edge >= end), sum(sizes))
    assert numbers(got) == list(range(sum(sizes)))[begin:end]
    assert all(each.num_rows for each in got)


@given(SIZES, st.integers(1, 40))
def test_cut(sizes: list[int], size: int) -> None:
    parts = (part(piece.begin, piece.end) for piece in pieces(Unknown, sizes))
    got = [joined(each) for each in cut(parts, size)]
    assert numbers(got) == list(range(sum(sizes)))
    assert [each.num_rows for each in got[:-1]] == [size] * (len(got) - 1)
    assert not got or 1 <= got[-1].num_rows <= size


def test_dictionaries_and_lists_of_several_parts() -> None:
    def parts() -> list[Any]:
        return [
            pa.record_batch({"x": pa.array(texts).dictionary_encode(), "y": pa.array(lists)})
            for texts, lists in ((["a", "b"], [[1], None]), (["c", "a"], [[], [2, 3]]))
        ]

    rows: dict[str, list[Any]] = {"x": ["a", "b", "c", "a"], "y": [[1], None, [], [2, 3]]}
    assert joined(parts()).to_pydict() == rows
    order = permutation(4, [2])
    assert sorted(order) == list(range(4)) != order.tolist()
    for name, column in rows.items():
        mixed = column_of([each[name] for each in parts()], order)
        assert mixed.to_pylist() == [column[row] for row in order]


def test_every_row_comes_anywhere() -> None:
    places = np.zeros((50, 50))
    for epoch in range(2000):
        places[permutation(50, [7, epoch, 0, 1, 0]), np.arange(50)] += 1
    assert (places.sum(0) == 2000).all()
    # 40 times in each place, with a deviation of 6.3.
    assert np.abs(places - 40).max() < 6 * 6.3
    chi_squared, freedom = ((places - 40) ** 2 / 40).sum(), 49 * 49
    assert abs(chi_squared - freedom) < 6 * (2 * freedom) ** 0.5
