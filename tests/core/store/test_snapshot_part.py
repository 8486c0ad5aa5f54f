"""A shard's part of a snapshot: images of rows that change, places in the orders of use."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from persia.errors import StoreError
from tests.core.machine import KINDS
from tests.core.policies import new_store, train
from tests.core.stores import (
    adagrad_store,
    add,
    blocks_of,
    contents,
    contents_of,
    held,
    restore_all,
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

        def change(first: int) -> None:
            for turn in range(12):
                update(store, range(first, 20_000, 2))
                store.delete(u64(range(first + 13 * turn, 20_000, 211)))
                add(store, range(first, 20_000, 3))

        with ThreadPoolExecutor(2) as pool:
            changes = [pool.submit(change, first) for first in (0, 1)]
            blocks = list(snapshot.blocks(max_rows=500))
            for one in changes:
                one.result(60)
        assert contents_of(blocks) == expected
        snapshot.commit()
        store.check()


def waits(thread: threading.Thread) -> bool:
    """Whether it is in the wait of a condition, or dead, which is another failure."""
    frame = sys._current_frames().get(thread.ident or 0)
    return not thread.is_alive() or (
        frame is not None
        and frame.f_code.co_name in ("wait", "wait_for")
        and frame.f_globals["__name__"] == "threading"
    )


@pytest.mark.parametrize("is_allowed_more", [False, True])
def test_a_request_waits_for_a_reader_that_has_too_many_copies_to_take(
    is_allowed_more: bool,
) -> None:
    store = adagrad_store(1000)
    expected = contents(store)
    with store.begin_snapshot(side_bytes=0, wait_seconds=60) as snapshot:
        update(store, range(500))  # the first one is served whole, whatever it takes
        thread = threading.Thread(target=update, args=(store, range(1000)))
        thread.start()
        until(lambda: waits(thread))
        if is_allowed_more:
            snapshot.allow(1 << 30)
            thread.join(60)
            assert snapshot.fill == snapshot.copied_bytes / (1 << 30)  # every row was copied
        assert contents_of(list(snapshot.blocks())) == expected
        thread.join(60)
        assert not thread.is_alive()


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


def test_orders_classes_and_ages_come_back() -> None:
    kinds = (("lfu", None, 0), ("lru", "steps", 40), ("lfu", "milliseconds", 60))
    store, other = (new_store(5000, *kinds, sketch_bytes=640) for _ in range(2))
    rng = np.random.default_rng(3)
    for turn in range(60):
        store.set_clocks(900 + turn, 800 + turn)
        signs = rng.integers(0, 250, 90) + 1000 * (turn % 4)
        train(store, signs, turn, policy=turn % 4)
    other.set_clocks(7, 3)  # which begin elsewhere
    restore_all(other, shuffled(blocks_of(store, 50)))
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
    restore_all(stores[1], shuffled(blocks_of(stores[0], 20)))
    for turn in range(5):
        kept = []
        for store in stores:
            train(store, range(1000 + 40 * turn, 1040 + 40 * turn), 100 + turn)
            kept.append(sorted(held(store)))
        assert kept[0] == kept[1]
