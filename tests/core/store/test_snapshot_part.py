"""A shard's part of a snapshot: images of rows that change, places in the orders of use."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from persia._core.store.store import EmbeddingStore
from persia.errors import StoreError
from tests.core.policies import KINDS, new_store, train
from tests.core.stores import (
    adagrad_store,
    add,
    blocks_of,
    contents,
    contents_of,
    held,
    rows_of,
    shuffled,
    u64,
    update,
)
from tests.support.waiting import until


def test_w63_training_goes_on_between_two_blocks_of_a_snapshot() -> None:
    store = adagrad_store(3000)
    expected = contents(store)
    with store.begin_snapshot() as snapshot:
        blocks = []
        for turn, block in enumerate(snapshot.blocks(max_rows=100)):
            blocks.append(block)
            update(store, range(turn, 3000, 7))
            store.delete(u64(range(turn, 3000, 61)))
            add(store, range(10_000 + 100 * turn, 10_100 + 100 * turn))
        assert contents_of(blocks) == expected
    assert contents(store) != expected


def test_a_snapshot_is_of_its_moment_while_threads_train() -> None:
    store = adagrad_store(20_000, num_threads=2)
    for _ in range(3):
        expected = contents(store)
        snapshot = store.begin_snapshot(side_bytes=1 << 16, wait_seconds=60)
        failures: list[BaseException] = []

        def change(first: int, failures: list[BaseException] = failures) -> None:
            try:
                for turn in range(12):
                    update(store, range(first, 20_000, 2))
                    store.delete(u64(range(first + 13 * turn, 20_000, 211)))
                    add(store, range(first, 20_000, 3))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=change, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        blocks = list(snapshot.blocks(max_rows=500))
        for thread in threads:
            thread.join(60)
        assert not failures
        assert contents_of(blocks) == expected
        snapshot.commit()
        store.check()


def test_a_request_waits_for_a_reader_that_has_too_many_copies_to_take() -> None:
    store = adagrad_store(1000)
    expected = contents(store)
    snapshot = store.begin_snapshot(side_bytes=0, wait_seconds=60)
    update(store, range(1000))  # the first one is served whole, whatever it takes
    is_done = threading.Event()

    def again() -> None:
        update(store, range(1000))
        is_done.set()

    thread = threading.Thread(target=again)
    thread.start()
    assert contents_of(list(snapshot.blocks())) == expected
    assert is_done.wait(60)
    thread.join(60)
    snapshot.close()


def waits(thread: threading.Thread) -> bool:
    """Whether it is in the wait of a condition, or dead, which is another failure."""
    frame = sys._current_frames().get(thread.ident or 0)
    return not thread.is_alive() or (
        frame is not None
        and frame.f_code.co_name in ("wait", "wait_for")
        and frame.f_globals["__name__"] == "threading"
    )


def test_a_request_that_waits_goes_on_where_copies_may_take_more() -> None:
    store = adagrad_store(1000)
    expected = contents(store)
    with store.begin_snapshot(side_bytes=0, wait_seconds=60) as snapshot:
        update(store, range(500))
        thread = threading.Thread(target=update, args=(store, range(1000)))
        thread.start()
        until(lambda: waits(thread))
        snapshot.allow(1 << 30)
        thread.join(60)
        assert not thread.is_alive()
        assert snapshot.fill == snapshot.copied_bytes / (1 << 30)  # every row was copied
        assert contents_of(list(snapshot.blocks())) == expected


def test_rows_cleared_before_they_were_read_are_an_error_of_the_reader() -> None:
    store = adagrad_store(1000)
    store.open_changes("feed")
    with store.begin_snapshot("feed") as snapshot:
        assert sum(map(len, snapshot.blocks())) == 1000
        store.clear()  # was read: nothing to wait for
        snapshot.commit()
    snapshot = store.begin_snapshot("feed", wait_seconds=0.0)
    assert snapshot.is_full  # instead of a thousand deletions
    assert not list(snapshot.blocks())
    snapshot.commit()
    add(store, range(10))
    snapshot = store.begin_snapshot("feed", wait_seconds=0.0)
    store.clear()
    with pytest.raises(StoreError, match="all rows were cleared"):
        list(snapshot.blocks())


def policy_store() -> tuple[EmbeddingStore, EmbeddingStore]:
    """One with a life behind it, and an empty one whose clocks begin elsewhere."""
    kinds = (("lfu", None, 0), ("lru", "steps", 40), ("lfu", "milliseconds", 60))
    stores = [new_store(5000, *kinds, sketch_bytes=640) for _ in range(2)]
    stores[0].set_clocks(900, 800)
    rng = np.random.default_rng(3)
    for turn in range(60):
        stores[0].set_clocks(900 + turn, 800 + turn)
        policy = turn % 4
        train(stores[0], rng.integers(0, 250, 90) + 1000 * policy, turn, policy=policy)
    return stores[0], stores[1]


def test_orders_classes_and_ages_come_back() -> None:
    store, other = policy_store()
    other.set_clocks(7, 3)
    for block in shuffled(blocks_of(store, 50)):
        other.restore(block)
    other.end_restore()
    other.check()
    assert held(other) == held(store)
    assert {sign: row[4] for sign, row in rows_of(blocks_of(other)).items()} == {
        sign: row[4] for sign, row in rows_of(blocks_of(store)).items()
    }
    for later in range(1, 70, 3):
        store.set_clocks(959 + later, 859 + later)
        other.set_clocks(7 + later, 3 + later)
        # Expiry is exact to a sixteenth of the ttl, before and after.
        assert abs(len(held(other)) - len(held(store))) <= 60


def test_policies_take_turns_at_eviction_as_before() -> None:
    stores = [new_store(300, *KINDS) for _ in range(2)]
    for turn in range(30):
        policy = (turn // 3) % 2
        train(stores[0], range(10 * turn, 10 * turn + 10), turn, policy=policy)
    for block in shuffled(blocks_of(stores[0], 20)):
        stores[1].restore(block)
    stores[1].end_restore()
    for turn in range(5):
        kept = []
        for store in stores:
            train(store, range(1000 + 40 * turn, 1040 + 40 * turn), 100 + turn)
            kept.append(sorted(held(store)))
        assert kept[0] == kept[1]
