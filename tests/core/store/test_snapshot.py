"""Snapshots against the models of the store: what comes out is of their moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from persia._core.store.blocks import RowBlock
from persia._core.store.snapshot import Snapshot
from persia._core.store.store import EmbeddingStore
from persia.errors import StoreError
from tests.core.machine import PolicyMachine, ShardedMachine, StoreMachine
from tests.core.stores import (
    Rows,
    adagrad_store,
    in_order,
    rows_of,
    update,
)
from tests.reference.store import Store, shard_number
from tests.support.profiles import tries

NAMES = (None, "delta", "feed")
LARGE = 1 << 30


@dataclass
class Reader:
    """A snapshot that is being read, and what it should come to."""

    snapshot: Snapshot
    expected: Rows
    orders: list[list[int]]  # of signs, by shard; expired ones are in none
    before: Rows | None  # what the consumer had; None: nothing
    iterator: Iterator[RowBlock]
    blocks: list[RowBlock] = field(default_factory=list)

    def read(self, count: int | None = None) -> bool:
        """Whether the snapshot lives; it may have been given up."""
        try:
            while count is None or count > 0:
                block = next(self.iterator, None)
                if block is None:
                    break
                self.blocks.append(block)
                count = None if count is None else count - 1
        except StoreError as error:
            if "the snapshot was cancelled" not in str(error):
                raise
            return False
        return True


class SnapshotRules:
    """Rules for a machine that has these two."""

    store: EmbeddingStore
    model: Store

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Reader] = []
        self.replicas: dict[str, Rows | None] = {}

    def state(self) -> tuple[Rows, list[list[int]]]:
        """Rows, and signs by shard, policy after policy, of what has not expired."""
        rows: Rows = {}
        for number, shard in enumerate(self.model.shards):
            for sign in self.model.order(number):
                row = shard.rows[sign]
                kept = row.policy, row.dtype, row.values.tobytes(), row.state.tobytes()
                rows[sign] = *kept, shard.orders[row.policy].class_of(sign)
        return rows, [self.model.order(number) for number in range(self.model.num_shards)]

    @rule(
        name=st.sampled_from(NAMES),
        full=st.booleans(),
        max_rows=st.sampled_from([1, 7, 65536]),
        side_bytes=st.sampled_from([0, LARGE, LARGE]),
    )
    def begin(self, name: str | None, full: bool, max_rows: int, side_bytes: int) -> None:
        if name is not None and name not in self.replicas:
            self.store.open_changes(name, max_bytes=self.store.num_shards * 8192)
            self.replicas[name] = None
        arguments: dict[str, Any] = {"side_bytes": side_bytes, "wait_seconds": 0.0}
        if name is not None and any(
            snapshot.consumer == name for snapshot in self.store.watch.snapshots
        ):
            with pytest.raises(StoreError, match="has a snapshot under way"):
                self.store.begin_snapshot(name, **arguments)
            return
        snapshot = self.store.begin_snapshot(name, full=full, **arguments)
        if name is not None:
            self.model.sweep()  # a snapshot of changes drops what has expired
        rows, orders = self.state()
        before = self.replicas[name] if name is not None else None
        assert snapshot.is_full or not (name is None or full or before is None)
        if snapshot.is_full:
            assert snapshot.num_rows == len(rows)
            before = None
        self.readers.append(Reader(snapshot, rows, orders, before, snapshot.blocks(max_rows)))

    @precondition(lambda self: bool(self.readers))
    @rule(data=st.data(), count=st.integers(1, 40))
    def read(self, data: st.DataObject, count: int) -> None:
        at = data.draw(st.integers(0, len(self.readers) - 1), "reader")
        if not self.readers[at].read(count):
            self.readers.pop(at).snapshot.close()

    @precondition(lambda self: bool(self.readers))
    @rule(data=st.data(), commits=st.booleans())
    def finish(self, data: st.DataObject, commits: bool) -> None:
        at = data.draw(st.integers(0, len(self.readers) - 1), "reader")
        self._finish(self.readers.pop(at), commits)

    @precondition(lambda self: bool(self.readers))
    @rule(data=st.data())
    def close_half_read(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.readers) - 1), "reader")
        self.readers.pop(at).snapshot.close()

    def _finish(self, reader: Reader, commits: bool) -> None:
        snapshot = reader.snapshot
        if reader.read():
            assert snapshot.is_read
            self.compare(reader)
            if commits:
                snapshot.commit()
                if snapshot.consumer is not None:
                    self.replicas[snapshot.consumer] = reader.expected
        snapshot.close()

    @rule(name=st.sampled_from(NAMES[1:]), side_bytes=st.sampled_from([0, LARGE]))
    def take_changes(self, name: str, side_bytes: int) -> None:
        """From begin to commit, so that there is something for the next one to build on."""
        num_readers = len(self.readers)
        self.begin(name, False, 65536, side_bytes)
        if len(self.readers) > num_readers:
            self._finish(self.readers.pop(), True)

    def compare(self, reader: Reader) -> None:
        rows = rows_of(reader.blocks)
        deleted = reader.snapshot.deleted().tolist()
        assert len(rows) <= reader.snapshot.num_rows
        if reader.before is None:
            assert (rows, deleted) == (reader.expected, [])
        else:
            assert deleted == sorted(set(deleted))
            merged = {sign: row for sign, row in reader.before.items() if sign not in deleted}
            # A use alone may change class and policy, and is no change of the row.
            merged = {**merged, **rows}
            assert {sign: row[1:4] for sign, row in merged.items()} == {
                sign: row[1:4] for sign, row in reader.expected.items()
            }
            assert all(reader.expected[sign] == row for sign, row in rows.items())
        by_shard: dict[int, list[RowBlock]] = {}
        for block in reader.blocks:
            signs = block.signs.tolist()
            (shard,) = {shard_number(sign, self.store.num_shards) for sign in signs}
            by_shard.setdefault(shard, []).append(block)
        for shard, blocks in by_shard.items():
            wanted = [sign for sign in reader.orders[shard] if sign in rows]
            # Here policies take turns.
            order = sorted(in_order(blocks), key=lambda sign: reader.expected[sign][0])
            assert order == wanted

    def order_of_use(self) -> None:
        """Compared of each snapshot: another one after each request would begin an epoch."""

    def teardown(self) -> None:
        for reader in self.readers:
            reader.snapshot.close()
        assert self.store.watch.snapshots == ()


class StoreSnapshots(SnapshotRules, StoreMachine):
    pass


class ShardedSnapshots(SnapshotRules, ShardedMachine):
    pass


class PolicySnapshots(SnapshotRules, PolicyMachine):
    pass


few_examples = tries(40, stateful_step_count=25)
TestOneShard = StoreSnapshots.TestCase
TestOneShard.settings = few_examples
TestManyShards = ShardedSnapshots.TestCase
TestManyShards.settings = few_examples
TestPolicies = PolicySnapshots.TestCase
TestPolicies.settings = few_examples


def test_a_snapshot_that_is_not_read_is_given_up_and_training_goes_on() -> None:
    store = adagrad_store(1000)
    snapshot = store.begin_snapshot(side_bytes=1000, wait_seconds=0.01)
    blocks = snapshot.blocks(max_rows=10)
    next(blocks)
    update(store, range(1000))
    update(store, range(1000))
    with pytest.raises(StoreError, match=r"cancelled: copies of rows that changed .* of 1000"):
        next(blocks)
    with pytest.raises(StoreError, match="cancelled"):
        snapshot.commit()
    assert store.watch.snapshots == ()


def test_what_is_asked_for_wrongly_is_refused_and_named() -> None:
    store = adagrad_store(10)
    with pytest.raises(StoreError, match=r"among \[\], got 'unknown'"):
        store.begin_snapshot("unknown")
    with pytest.raises(StoreError, match="got 'unknown'"):
        store.close_changes("unknown")
    store.open_changes("feed")
    with pytest.raises(StoreError, match="'feed' of changes is open already"):
        store.open_changes("feed")
    snapshot = store.begin_snapshot()
    blocks = snapshot.blocks()
    with pytest.raises(StoreError, match="given out once"):
        snapshot.blocks()
    with pytest.raises(StoreError, match="committed once all its blocks"):
        snapshot.commit()
    snapshot.close()
    with pytest.raises(StoreError, match="is closed"):
        next(blocks)
    store.close_changes("feed")
    assert store.watch.cursors == {}


def test_w60_a_snapshot_of_an_empty_store_costs_nothing_whatever_its_capacity() -> None:
    store = EmbeddingStore(10**12, num_shards=1024)
    with store.begin_snapshot() as snapshot:
        assert snapshot.num_rows == 0
        assert list(snapshot.blocks()) == []
        snapshot.commit()
