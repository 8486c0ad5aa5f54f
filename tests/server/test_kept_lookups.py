"""Lookups kept for the updates that name them: what is found, dropped and refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._rpc.messages import (
    LookupRequest,
    Numbers,
    TableGradients,
    TableRows,
    TableSigns,
    UpdateRequest,
)
from persia._server.kept_lookups import LONGEST_S, LOOKUP_SIGNS, TABLE_SIGNS, KeptLookups
from persia._server.service import ParameterServer
from persia.errors import StoreError, UnknownRef
from tests.support.services import ADAGRAD, SCHEMA, make_servers

TABLE, DIM = SCHEMA.slots["mean"].table, SCHEMA.slots["mean"].dim
OTHER = SCHEMA.slots["raw"].table
NO_SIGNS = np.empty(0, np.uint64)


def asked(count: int, table: int = TABLE) -> tuple[TableSigns, ...]:
    signs = np.arange(count, dtype=np.uint64) | np.uint64(SCHEMA.slots["mean"].prefix)
    return (TableSigns(table, signs),)


def keep(kept: KeptLookups, number: int, count: int) -> None:
    hints = np.arange(count, dtype=np.uint32)
    reply = TableRows(TABLE, np.zeros((count, DIM), np.float32), hints)
    (without,) = kept.keep((5, number), asked(count), [reply])
    assert without.rows is reply.rows
    assert without.hints is None


def gradients(
    count: int, places: NDArray[np.uint32] | None = None, table: int = TABLE
) -> TableGradients:
    ones = np.ones((count, DIM), np.float32)
    return TableGradients(table, NO_SIGNS, None, ones, None, places)


def num_found(kept: KeptLookups, number: int) -> int | None:
    try:
        (part,) = kept.with_signs((5, number), [gradients(0)])
    except UnknownRef:
        return None
    return len(part.signs)


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(0, 5), st.integers(0, 12)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 400), st.just(0)),
    ),
    max_size=40,
)


@given(CALLS)
def test_what_is_kept_is_the_newest_within_two_bounds(
    calls: list[tuple[str, int, int]],
) -> None:
    now = 0.0
    beside = LOOKUP_SIGNS + TABLE_SIGNS
    kept = KeptLookups(lambda: now, most_signs=20 + 4 * beside)
    model: dict[int, tuple[float, int]] = {}  # in the order of keeping
    for name, number, count in calls:
        if name == "wait":
            now += number
        elif name == "drop":
            kept.drop((5, number))
            model.pop(number, None)
        else:
            keep(kept, number, count)
            model.pop(number, None)
            model[number] = now, count
            while model and (
                sum(size + beside for _, size in model.values()) > 20 + 4 * beside
                or next(iter(model.values()))[0] < now - LONGEST_S
            ):
                del model[next(iter(model))]
        for one in range(6):
            assert num_found(kept, one) == (model[one][1] if one in model else None)


def test_lookups_of_few_signs_or_none_are_bounded_too() -> None:
    kept = KeptLookups(most_signs=1 << 12)
    tracemalloc.start()
    try:
        for number in range(5_000):
            kept.keep((5, number), (), [])
            keep(kept, 5_000 + number, 1)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 24 * (1 << 12) * 2
    assert num_found(kept, 9_999) == 1
    assert num_found(kept, 5_000) is None


def test_places_choose_among_the_signs_of_a_lookup() -> None:
    kept = KeptLookups()
    keep(kept, 1, 5)
    (part,) = kept.with_signs((5, 1), [gradients(2, np.array([4, 1], np.uint32))])
    assert (part.signs & np.uint64(7)).tolist() == [4, 1]
    assert part.hints is not None
    assert part.hints.tolist() == [4, 1]
    own = TableGradients(TABLE, asked(3)[0].signs, None, np.ones((3, DIM), np.float32))
    assert kept.with_signs((5, 1), [own])[0] is own


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (gradients(5, table=OTHER), f"table {OTHER} was not in the lookup"),
        (gradients(1, np.array([5], np.uint32)), "expected places below 5.*got 5"),
        (gradients(4), "expected 5 rows of gradients, one a sign, got 4"),
    ],
)
def test_an_update_that_does_not_fit_its_lookup_changes_nothing(
    part: TableGradients, message: str
) -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    server.lookup(LookupRequest(0, True, asked(5), ref=(5, 1)))
    before = rows_of(server)
    with pytest.raises(StoreError, match=message):
        server.update(UpdateRequest((0, 0), (part,), (5, 1)))
    np.testing.assert_array_equal(rows_of(server), before)
    assert not server.update(UpdateRequest((0, 0), (gradients(5),), (5, 1))).repeated


def rows_of(server: ParameterServer) -> Any:
    (entries,) = server.read_embedding(asked(5))
    return np.concatenate([entries.values.view(np.uint32), entries.states], axis=1)


@pytest.mark.parametrize("places", [None, np.array([3, 0, 4], np.uint32)])
def test_a_step_is_the_same_with_signs_and_with_a_ref(places: Numbers | None) -> None:
    by_signs, by_ref = make_servers(optimizer=ADAGRAD)[0], make_servers(optimizer=ADAGRAD)[0]
    (reply,) = by_signs.lookup(LookupRequest(0, True, asked(5))).tables
    (kept,) = by_ref.lookup(LookupRequest(0, True, asked(5), ref=(5, 1))).tables
    assert reply.hints is not None
    assert kept.hints is None
    np.testing.assert_array_equal(kept.rows, reply.rows)
    chosen = slice(None) if places is None else places
    signs, hints = asked(5)[0].signs[chosen], reply.hints[chosen]
    steps = np.arange(len(signs) * DIM, dtype=np.float32).reshape(-1, DIM)
    by_signs.update(UpdateRequest((0, 0), (TableGradients(TABLE, signs, hints, steps),)))
    part = TableGradients(TABLE, NO_SIGNS, None, steps, None, places)
    report = by_ref.update(UpdateRequest((0, 0), (part,), (5, 1)))
    assert (report.num_missing, report.repeated) == (0, False)
    np.testing.assert_array_equal(rows_of(by_ref), rows_of(by_signs))


def test_an_applied_update_ends_its_lookup_and_comes_again_with_signs() -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    server.lookup(LookupRequest(0, True, asked(5), ref=(5, 1)))
    request = UpdateRequest((0, 0), (gradients(5),), (5, 1))
    server.update(request)
    before = rows_of(server)
    with pytest.raises(UnknownRef, match=r"no lookup is kept under ref \(5, 1\)"):
        server.update(request)
    part = TableGradients(TABLE, asked(5)[0].signs, None, gradients(5).gradients)
    assert server.update(UpdateRequest((0, 0), (part,))).repeated
    np.testing.assert_array_equal(rows_of(server), before)


def test_a_row_that_is_gone_skips_exactly_its_own_gradient() -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    server.lookup(LookupRequest(0, True, asked(5), ref=(5, 1)))
    server.delete_rows(TableSigns(TABLE, asked(5)[0].signs[2:3]))
    assert server.update(UpdateRequest((0, 0), (gradients(5),), (5, 1))).num_missing == 1
    assert server.get_embedding_size() == 4


def test_evaluation_keeps_nothing() -> None:
    (server,) = make_servers(optimizer=ADAGRAD)
    server.lookup(LookupRequest(0, False, asked(5), ref=(5, 1)))
    with pytest.raises(UnknownRef):
        server.update(UpdateRequest((0, 0), (gradients(5),), (5, 1)))
