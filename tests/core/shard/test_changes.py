"""The log of changes, as its consumers see it."""

from __future__ import annotations

from tests.core.stores import (
    adagrad_store,
    add,
    contents,
    rows_of,
    take_changes,
    u64,
    update,
    values_of,
)


def test_a_snapshot_of_changes_has_copies_of_few_rows() -> None:
    store = adagrad_store(1000)
    store.open_changes("feed")
    with store.begin_snapshot("feed") as snapshot:
        whole = snapshot.copied_bytes
        list(snapshot.blocks())
        snapshot.commit()
    update(store, range(10))
    with store.begin_snapshot("feed", side_bytes=1 << 30) as snapshot:
        assert snapshot.copied_bytes <= whole / 50
        update(store, range(1000))
        assert 0 < snapshot.fill <= snapshot.copied_bytes / (1 << 30)
        assert sorted(rows_of(list(snapshot.blocks()))) == list(range(10))


def test_w18_changes_come_to_the_consumer_whatever_happened_to_the_rows() -> None:
    # Updated, evicted, evicted and back, deleted, and all that twice within one second.
    store = adagrad_store(capacity=640, num_shards=1)
    store.open_changes("delta")
    replica: dict[int, tuple[bytes, bytes]] = {}
    for turn in range(30):
        add(store, range(50 * turn, 50 * turn + 100))
        update(store, range(50 * turn, 50 * turn + 700, 3))
        store.delete(u64(range(50 * turn, 50 * turn + 100, 7)))
        if turn % 3 == 0:
            add(store, range(30))
        for _ in range(turn % 4):
            is_full, rows, gone = take_changes(store, "delta", max_rows=50)
            assert is_full == (replica == {})
            for sign in gone:
                replica.pop(sign, None)
            replica.update(values_of(rows))
            assert replica == contents(store)
    assert store.stats()["evicted"] > 500


def test_what_a_consumer_did_not_commit_comes_again() -> None:
    store = adagrad_store(100)
    store.open_changes("feed")
    take_changes(store, "feed")
    update(store, range(10))
    for _ in range(3):
        with store.begin_snapshot("feed") as snapshot:
            assert sorted(rows_of(list(snapshot.blocks()))) == list(range(10))
    update(store, range(5, 20))
    assert sorted(take_changes(store, "feed")[1]) == list(range(20))
    with store.begin_snapshot("feed") as snapshot:
        assert snapshot.num_rows == 0
        assert not list(snapshot.blocks())


def test_a_log_that_is_too_short_makes_the_next_snapshot_full() -> None:
    store = adagrad_store(50_000, num_shards=1)
    store.open_changes("feed", max_bytes=4 * 4096)
    for num_changed, is_full in ((0, True), (2000, False), (40_000, True), (3000, False)):
        update(store, range(num_changed))
        got, rows, _ = take_changes(store, "feed")
        assert (got, len(rows)) == (is_full, 50_000 if is_full else num_changed)


def test_the_slowest_consumer_pays_for_its_slowness_alone() -> None:
    store = adagrad_store(50_000, num_shards=1)
    for name in ("slow", "quick"):
        store.open_changes(name, max_bytes=4 * 4096)
        take_changes(store, name)
    for _ in range(10):
        update(store, range(2000))
        is_full, rows, _ = take_changes(store, "quick")
        assert (is_full, len(rows)) == (False, 2000)
    with store.begin_snapshot("slow") as snapshot:
        assert snapshot.is_full


def test_a_consumer_that_comes_back_does_not_go_on_from_a_snapshot_of_its_former_life() -> None:
    store = adagrad_store(100)
    for name in ("gone", "feed"):
        store.open_changes(name)
    store.close_changes("gone")  # before another one has begun
    former = store.begin_snapshot("feed")
    assert sum(map(len, former.blocks())) == 100
    store.close_changes("feed")
    update(store, range(10))  # in no log
    store.open_changes("feed")
    former.commit()
    is_full, rows, _ = take_changes(store, "feed")
    assert is_full
    assert values_of(rows) == contents(store)
