"""A walk over the rows of one prefix, while rows come and go between its pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.kernels.initial import Initializer
from persia._core.store.store import EmbeddingStore
from persia.errors import DataError
from tests.core.stores import ADAGRAD, adagrad_store, new_store, train, u64
from tests.support.profiles import tries
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S

BITS = 8
MINE, OTHER = 3 << (64 - BITS), 4 << (64 - BITS)
DIM, WORDS = 5, 5  # of ``adagrad_store``


def pieces(store: EmbeddingStore, prefix: int = MINE, **arguments: Any) -> Iterator[Any]:
    """Signs, values and states of each piece."""
    cursor: int | None = 0
    while cursor is not None:
        *rows, cursor = store.scan(
            prefix, BITS, DIM, WORDS, cursor=cursor, with_states=True, **arguments
        )
        yield rows


def signs_of(store: EmbeddingStore, **arguments: Any) -> list[int]:
    return [int(sign) for signs, *_ in pieces(store, **arguments) for sign in signs]


@pytest.mark.parametrize("max_rows", [1, 7, 1000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_of_the_prefix_comes_once_and_whole(max_rows: int, dtype: str) -> None:
    store = adagrad_store()
    train(store, range(MINE, MINE + 300), DIM, dtype=dtype)
    train(store, range(OTHER, OTHER + 300), DIM, dtype=dtype)
    train(store, [MINE + 1000], 8)  # another format
    found = list(pieces(store, max_rows=max_rows, dtype=dtype))
    assert all(len(signs) <= max_rows for signs, *_ in found)
    signs, values, states = (np.concatenate([one[i] for one in found]) for i in range(3))
    assert sorted(signs.tolist()) == list(range(MINE, MINE + 300))
    is_there, wanted, words = store.read(signs, DIM, WORDS, dtype=dtype)
    assert is_there.all()
    assert values.tobytes() == wanted.tobytes()
    assert states.tobytes() == words.tobytes()
    assert store.count(MINE, BITS, DIM, WORDS, dtype=dtype) == 300


Change = tuple[str, list[int]]
IDS = st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True)


@tries(200, deadline=None)
@given(
    first=IDS,
    changes=st.lists(st.tuples(st.sampled_from(["train", "delete", "write"]), IDS)),
    max_rows=st.integers(1, 5),
)
def test_a_row_that_stays_comes_once_while_others_come_and_go(
    first: list[int], changes: list[Change], max_rows: int
) -> None:
    store = adagrad_store()
    train(store, [MINE + x for x in first], DIM)
    now, stayed = set(first), set(first)
    ever = set(first)
    left = list(changes)
    seen: list[int] = []
    for signs, *_ in pieces(store, max_rows=max_rows):
        seen += [int(sign) - MINE for sign in signs]
        if not left:
            continue
        kind, ids = left.pop()
        array = u64([MINE + x for x in ids])
        if kind == "delete":
            assert store.delete(array) == len(now & set(ids))
            now -= set(ids)
            stayed &= now
            continue
        if kind == "train":
            train(store, array, DIM)
        else:
            store.write(array, np.ones((len(ids), DIM), np.float32), None)
        now |= set(ids)
        ever |= set(ids)
    assert len(set(seen) & stayed) == len([x for x in seen if x in stayed])
    assert stayed <= set(seen) <= ever
    assert store.count(MINE, BITS, DIM, WORDS) == len(now)
    store.check()


def test_rows_that_stay_come_once_while_threads_change_others() -> None:
    store = adagrad_store(num_threads=2)
    stay, go = (np.arange(n * 2000, (n + 1) * 2000, dtype=np.uint64) + MINE for n in range(2))
    train(store, stay, DIM)
    has_begun, is_over = threading.Event(), threading.Event()

    def churn() -> int:
        rounds = 0
        while not is_over.is_set():
            train(store, go, DIM, batch_id=rounds)
            store.update(stay, None, np.ones((len(stay), DIM), np.float32))
            assert store.delete(go) == len(go)
            rounds += 1
            has_begun.set()
        return rounds

    changing = Background(churn)
    try:
        assert has_begun.wait(PATIENCE_S)
        for _ in range(20):
            found = signs_of(store, max_rows=300)
            assert len([x for x in found if x < MINE + 2000]) == len(stay)
            assert set(stay.tolist()) <= set(found)
    finally:
        is_over.set()
    assert changing.result() > 0
    store.check()


def test_a_piece_ends_where_rows_of_the_prefix_are_few() -> None:
    """It looks at no more than some million places, so that a call takes milliseconds."""
    store = new_store(1 << 23, num_shards=2)
    count = (1 << 22) + (1 << 18)
    for start in range(0, count, 1 << 19):
        end = min(start + (1 << 19), count)
        train(store, np.arange(start, end, dtype=np.uint64) + np.uint64(OTHER), 1)
    train(store, [MINE], 1)
    signs, _, states, cursor = store.scan(MINE, BITS, 1, 0)
    assert cursor is not None
    assert states is None
    found = list(signs)
    while cursor is not None:
        signs, _, _, cursor = store.scan(MINE, BITS, 1, 0, cursor=cursor)
        found += list(signs)
    assert found == [MINE]


def test_what_has_expired_is_not_there() -> None:
    store = new_store(1000, ADAGRAD, policies=[("lru", "steps", 16)])
    train(store, [MINE, MINE + 1], DIM, policy=1)
    store.set_clocks(0, 15)
    assert store.count(MINE, BITS, DIM, WORDS) == 2
    store.set_clocks(0, 100)
    assert store.count(MINE, BITS, DIM, WORDS) == 0
    assert signs_of(store) == []
    assert len(store) == 2  # until a training lookup sweeps them


def test_a_cursor_of_elsewhere_is_refused() -> None:
    store = adagrad_store(10)
    for cursor, max_rows in ((4 << 32, 10), (0, 0)):
        with pytest.raises(DataError, match="expected a cursor of one of 4 shards"):
            store.scan(0, BITS, DIM, WORDS, cursor=cursor, max_rows=max_rows)
    # Beyond all places: of a store that was larger.
    assert store.scan(0, BITS, DIM, WORDS, cursor=(3 << 32) | 0xFFFF_0000)[3] is None


def test_a_write_keeps_the_state_of_rows_that_are_there() -> None:
    store = adagrad_store()
    train(store, [1, 2], DIM, initializer=Initializer("zeros"))
    store.update(u64([1]), None, np.full((1, DIM), 2, np.float32))
    _, _, before = store.read(u64([1, 2]), DIM)
    values = np.arange(3 * DIM, dtype=np.float32).reshape(3, DIM)
    store.write(u64([1, 2, 3]), values, None, keep_states=True)
    _, found, states = store.read(u64([1, 2, 3]), DIM)
    assert found.tobytes() == values.tobytes()
    assert states[:2].tobytes() == before.tobytes()
    assert states[2].tobytes() == before[1].tobytes()  # the initial one
    assert states[0].tobytes() != states[2].tobytes()
    store.write(u64([1]), values[:1], None)
    assert store.read(u64([1]), DIM)[2].tobytes() == states[2:].tobytes()
