"""Cuts against the models of the store: what comes out is of the moment of the cut."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from numpy.typing import NDArray

from persia._core.base.halves import widen
from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._core.store.snapshot import Cut
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError, DataError, StoreError
from tests.core.test_policies import PolicyMachine
from tests.core.test_store_machine import ShardedMachine, StoreMachine
from tests.support.profiles import tries
from tests.support.waiting import until

Rows = dict[int, tuple[Any, ...]]

UNIFORM = Initializer("uniform")
NAMES = (None, "delta", "feed")
LARGE = 1 << 30


def rows_of(blocks: list[RowBlock]) -> Rows:
    """Policy, dtype, values, state and class of each sign, which must come once."""
    rows: Rows = {}
    for block in blocks:
        assert {len(array) for array in block.arrays} == {len(block)} != {0}
        values = block.values if block.dtype == "float32" else None
        for i, sign in enumerate(block.signs.tolist()):
            kept = (
                block.values[i] if values is not None else widen(block.values[i], block.dtype)
            )
            assert sign not in rows
            rows[sign] = (
                block.policy,
                block.dtype,
                kept.tobytes(),
                block.states[i].tobytes(),
                int(block.uses[i]),
            )
    return rows


def in_order(blocks: list[RowBlock]) -> list[int]:
    """Signs by their orders, which must be comparable: of one shard."""
    pairs = [pair for block in blocks for pair in zip(block.orders, block.signs, strict=True)]
    assert len({order for order, _ in pairs}) == len(pairs)
    return [int(sign) for _, sign in sorted(pairs)]


@dataclass
class Reader:
    """A cut that is being read, and what it should come to."""

    cut: Cut
    expected: Rows
    orders: list[list[int]]  # of signs, by shard; expired ones are in none
    before: Rows | None  # what the consumer had; None: nothing
    iterator: Iterator[RowBlock]
    blocks: list[RowBlock] = field(default_factory=list)

    def read(self, count: int | None = None) -> bool:
        """Whether the cut lives; it may have been given up."""
        try:
            while count is None or count > 0:
                block = next(self.iterator, None)
                if block is None:
                    break
                self.blocks.append(block)
                count = None if count is None else count - 1
        except StoreError as error:
            if "the cut was given up" not in str(error):
                raise
            return False
        return True


class Cutting:
    """Rules for a machine that has ``store``, ``model`` and the two methods below."""

    store: EmbeddingStore
    readers: list[Reader]
    replicas: dict[str, Rows | None]

    def state(self) -> tuple[Rows, list[list[int]]]:
        raise NotImplementedError

    def shard_of(self, sign: int) -> int:
        return 0

    def sweep(self) -> None:
        """A cut of changes drops what has expired."""

    @rule(
        name=st.sampled_from(NAMES),
        full=st.booleans(),
        max_rows=st.sampled_from([1, 7, 65536]),
        side_bytes=st.sampled_from([0, LARGE, LARGE]),
    )
    def begin(self, name: str | None, full: bool, max_rows: int, side_bytes: int) -> None:
        if not hasattr(self, "readers"):
            self.readers, self.replicas = [], {}
        if name is not None and name not in self.replicas:
            self.store.open_changes(name, max_bytes=self.store.num_shards * 8192)
            self.replicas[name] = None
        arguments: dict[str, Any] = {"side_bytes": side_bytes, "wait_seconds": 0.0}
        if name is not None and any(cut.consumer == name for cut in self.store.watch.cuts):
            with pytest.raises(StoreError, match="has a cut under way"):
                self.store.begin_cut(name, **arguments)
            return
        cut = self.store.begin_cut(name, full=full, **arguments)
        if name is not None:
            self.sweep()
        rows, orders = self.state()
        before = self.replicas[name] if name is not None else None
        assert cut.is_full or not (name is None or full or before is None)
        if cut.is_full:
            assert cut.num_rows == len(rows)
            before = None
        self.readers.append(Reader(cut, rows, orders, before, cut.blocks(max_rows)))

    @precondition(lambda self: bool(getattr(self, "readers", [])))
    @rule(data=st.data(), count=st.integers(1, 40))
    def read(self, data: st.DataObject, count: int) -> None:
        at = data.draw(st.integers(0, len(self.readers) - 1), "reader")
        if not self.readers[at].read(count):
            self.readers.pop(at).cut.close()

    @precondition(lambda self: bool(getattr(self, "readers", [])))
    @rule(data=st.data(), commits=st.booleans())
    def finish(self, data: st.DataObject, commits: bool) -> None:
        at = data.draw(st.integers(0, len(self.readers) - 1), "reader")
        self._finish(self.readers.pop(at), commits)

    def _finish(self, reader: Reader, commits: bool) -> None:
        cut = reader.cut
        if reader.read():
            assert cut.is_read
            self.compare(reader)
            if commits:
                cut.commit()
                if cut.consumer is not None:
                    self.replicas[cut.consumer] = reader.expected
        cut.close()

    @rule(name=st.sampled_from(NAMES[1:]), side_bytes=st.sampled_from([0, LARGE]))
    def take_changes(self, name: str, side_bytes: int) -> None:
        """From begin to commit, so that there is something for the next one to build on."""
        num_readers = len(getattr(self, "readers", []))
        self.begin(name, False, 65536, side_bytes)
        if len(self.readers) > num_readers:
            self._finish(self.readers.pop(), True)

    def compare(self, reader: Reader) -> None:
        rows = rows_of(reader.blocks)
        deleted = reader.cut.deleted().tolist()
        assert len(rows) <= reader.cut.num_rows
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
            (shard,) = {self.shard_of(sign) for sign in block.signs.tolist()}
            by_shard.setdefault(shard, []).append(block)
        for shard, blocks in by_shard.items():
            wanted = [sign for sign in reader.orders[shard] if sign in rows]
            assert self.sorted_like(in_order(blocks), reader) == wanted

    def sorted_like(self, signs: list[int], reader: Reader) -> list[int]:
        return signs

    def teardown(self) -> None:
        for reader in getattr(self, "readers", []):
            reader.cut.close()
        assert self.store.watch.cuts == ()


class StoreCuts(Cutting, StoreMachine):
    def state(self) -> tuple[Rows, list[list[int]]]:
        rows = {
            sign: (
                0,
                self.dtypes[len(row.values)],
                row.values.tobytes(),
                row.state.tobytes(),
                0,
            )
            for shard in self.model.shards
            for sign, row in shard.items()
        }
        return rows, [list(shard) for shard in self.model.shards]

    def shard_of(self, sign: int) -> int:
        return next(
            i for i, shard in enumerate(self.model.shards) if self.model.shard(sign) is shard
        )


class ShardedCuts(StoreCuts):
    capacities = ShardedMachine.capacities
    num_shards = ShardedMachine.num_shards
    dtypes: ClassVar[dict[int, str]] = {1: "float16", 5: "bfloat16", 8: "float32"}


class PolicyCuts(Cutting, PolicyMachine):
    def state(self) -> tuple[Rows, list[list[int]]]:
        rows: Rows = {}
        for policy, order in enumerate(self.model.orders):
            for uses, signs in enumerate(order.classes):
                for sign in signs:
                    values = self.model.values[sign].tobytes()
                    rows[sign] = (policy, "float32", values, b"", uses)
        rows = {sign: row for sign, row in rows.items() if not self.model.has_expired(sign)}
        return rows, [self.model.order()]

    def sweep(self) -> None:
        self.model.sweep()

    def sorted_like(self, signs: list[int], reader: Reader) -> list[int]:
        """The model has policy after policy; here they take turns."""
        return sorted(signs, key=lambda sign: reader.expected[sign][0])


few_examples = tries(8, stateful_step_count=25)
TestOneShard = StoreCuts.TestCase
TestOneShard.settings = few_examples
TestManyShards = ShardedCuts.TestCase
TestManyShards.settings = few_examples
TestPolicies = PolicyCuts.TestCase
TestPolicies.settings = few_examples


# --- one store, by hand ---------------------------------------------------------------------

DIM = 5


def array(signs: Any) -> NDArray[np.uint64]:
    return np.array(list(signs), np.uint64)


def new_store(num_rows: int = 0, **arguments: Any) -> EmbeddingStore:
    store = EmbeddingStore(**({"capacity": 100_000, "num_shards": 4, "seed": 3} | arguments))
    store.configure(RowOptimizer("adagrad", lr=0.1))
    train(store, range(num_rows))
    return store


def train(store: EmbeddingStore, signs: Any, **arguments: Any) -> None:
    signs = array(signs)
    rows = np.empty((len(signs), DIM), np.float32)
    hints = np.empty(len(signs), np.uint32)
    store.lookup_train(signs, UNIFORM, 1.0, 0, rows, hints, **arguments)


def update(store: EmbeddingStore, signs: Any) -> None:
    signs = array(signs)
    store.update(signs, None, np.ones((len(signs), DIM), np.float32))


def contents(store: EmbeddingStore) -> dict[int, tuple[bytes, bytes]]:
    return {
        int(signs[i]): (values[i].tobytes(), states[i].tobytes())
        for signs, values, states in store.iterate()
        for i in range(len(signs))
    }


def cut_contents(blocks: list[RowBlock]) -> dict[int, tuple[bytes, bytes]]:
    return {sign: (row[2], row[3]) for sign, row in rows_of(blocks).items()}


def test_what_has_expired_is_deleted_in_a_cut_of_changes() -> None:
    """Full equals base plus deltas though no request has swept the rows."""
    store = new_store(policies=[("lru", "steps", 10)])
    train(store, range(2000), policy=1)
    store.open_changes("delta")
    with store.begin_cut("delta") as base:
        chain = cut_contents(list(base.blocks()))
        base.commit()
    store.set_clocks(0, 8)
    train(store, range(0, 2000, 4), policy=1)
    with store.begin_cut() as before:  # has them still
        store.set_clocks(0, 12)
        with store.begin_cut("delta") as delta:
            changed = cut_contents(list(delta.blocks()))
            gone = delta.deleted().tolist()
            delta.commit()
        assert cut_contents(list(before.blocks())) == chain
    assert gone == [sign for sign in range(2000) if sign % 4]
    chain = {sign: row for sign, row in chain.items() if sign not in set(gone)} | changed
    with store.begin_cut() as full:
        assert cut_contents(list(full.blocks())) == chain == contents(store)
    assert store.stats()["expired"] == len(gone)
    store.check()


def test_w63_training_goes_on_between_two_blocks_of_a_cut() -> None:
    store = new_store(3000)
    expected = contents(store)
    with store.begin_cut() as cut:
        blocks = []
        for turn, block in enumerate(cut.blocks(max_rows=100)):
            blocks.append(block)
            update(store, range(turn, 3000, 7))
            store.delete(array(range(turn, 3000, 61)))
            train(store, range(10_000 + 100 * turn, 10_100 + 100 * turn))
        assert cut_contents(blocks) == expected
    assert contents(store) != expected


def test_two_cuts_at_once_are_each_of_its_own_moment() -> None:
    store = new_store(1000)
    store.open_changes("feed")
    cuts, expected = [], []
    for first, name in ((0, "feed"), (300, None), (600, None)):
        cuts.append(store.begin_cut(name))
        expected.append(contents(store))
        update(store, range(first, first + 400))
        store.delete(array(range(first, first + 400, 50)))
    train(store, range(0, 1200, 25))  # some of them are back
    closed = cuts.pop(1)
    next(closed.blocks(max_rows=10))
    closed.close()  # half read: the others go on
    update(store, range(1000))
    for cut, rows in zip(cuts, expected[::2], strict=True):
        assert cut_contents(list(cut.blocks(max_rows=100))) == rows
        cut.commit()
    with store.begin_cut("feed") as cut:
        assert not cut.is_full
        after = {**expected[0]}
        for sign in cut.deleted().tolist():
            del after[sign]
        assert after | cut_contents(list(cut.blocks())) == contents(store)


def test_a_cut_is_of_its_moment_while_threads_train() -> None:
    store = new_store(20_000, num_threads=2)
    for _ in range(3):
        expected = contents(store)
        cut = store.begin_cut(side_bytes=1 << 16, wait_seconds=60)
        failures: list[BaseException] = []

        def change(first: int, failures: list[BaseException] = failures) -> None:
            try:
                for turn in range(12):
                    update(store, range(first, 20_000, 2))
                    store.delete(array(range(first + 13 * turn, 20_000, 211)))
                    train(store, range(first, 20_000, 3))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=change, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        blocks = list(cut.blocks(max_rows=500))
        for thread in threads:
            thread.join(60)
        assert not failures
        assert cut_contents(blocks) == expected
        cut.commit()
        store.check()


def test_a_request_waits_for_a_reader_that_has_too_many_copies_to_take() -> None:
    store = new_store(1000)
    expected = contents(store)
    cut = store.begin_cut(side_bytes=0, wait_seconds=60)
    update(store, range(1000))  # the first one is served whole, whatever it takes
    is_done = threading.Event()

    def again() -> None:
        update(store, range(1000))
        is_done.set()

    thread = threading.Thread(target=again)
    thread.start()
    assert cut_contents(list(cut.blocks())) == expected
    assert is_done.wait(60)
    thread.join(60)
    cut.close()


def waits(thread: threading.Thread) -> bool:
    """Whether it is in the wait of a condition, or dead, which is another failure."""
    frame = sys._current_frames().get(thread.ident or 0)
    return not thread.is_alive() or (
        frame is not None
        and frame.f_code.co_name in ("wait", "wait_for")
        and frame.f_globals["__name__"] == "threading"
    )


def test_a_cut_of_changes_has_copies_of_few_rows() -> None:
    store = new_store(1000)
    store.open_changes("feed")
    with store.begin_cut("feed") as cut:
        whole = cut.copied_bytes
        list(cut.blocks())
        cut.commit()
    update(store, range(10))
    with store.begin_cut("feed", side_bytes=1 << 30) as cut:
        assert cut.copied_bytes <= whole / 50
        update(store, range(1000))
        assert 0 < cut.fill <= cut.copied_bytes / (1 << 30)
        assert sorted(rows_of(list(cut.blocks()))) == list(range(10))


def test_a_request_that_waits_goes_on_where_copies_may_take_more() -> None:
    store = new_store(1000)
    expected = contents(store)
    with store.begin_cut(side_bytes=0, wait_seconds=60) as cut:
        update(store, range(500))
        thread = threading.Thread(target=update, args=(store, range(1000)))
        thread.start()
        until(lambda: waits(thread))
        cut.allow(1 << 30)
        thread.join(60)
        assert not thread.is_alive()
        assert cut.fill == cut.copied_bytes / (1 << 30)  # every row was copied
        assert cut_contents(list(cut.blocks())) == expected


def test_a_cut_that_nobody_reads_is_given_up_and_training_goes_on() -> None:
    store = new_store(1000)
    cut = store.begin_cut(side_bytes=1000, wait_seconds=0.01)
    blocks = cut.blocks(max_rows=10)
    next(blocks)
    update(store, range(1000))
    update(store, range(1000))
    with pytest.raises(
        StoreError, match=r"given up: copies of rows that changed .* 1000 are al"
    ):
        next(blocks)
    with pytest.raises(StoreError, match="given up"):
        cut.commit()
    assert store.watch.cuts == ()


def test_rows_cleared_before_they_were_read_are_an_error_of_the_reader() -> None:
    store = new_store(1000)
    store.open_changes("feed")
    with store.begin_cut("feed") as cut:
        assert sum(map(len, cut.blocks())) == 1000
        store.clear()  # was read: nothing to wait for
        cut.commit()
    cut = store.begin_cut("feed", wait_seconds=0.0)
    assert cut.is_full  # instead of a thousand deletions
    assert not list(cut.blocks())
    cut.commit()
    train(store, range(10))
    cut = store.begin_cut("feed", wait_seconds=0.0)
    store.clear()
    with pytest.raises(StoreError, match="all rows were cleared"):
        list(cut.blocks())


def test_w18_changes_come_to_the_consumer_whatever_happened_to_the_rows() -> None:
    # Updated, evicted, evicted and back, deleted, and all that twice within one second.
    store = new_store(capacity=640, num_shards=1)
    store.open_changes("delta")
    replica: dict[int, tuple[bytes, bytes]] = {}
    for turn in range(30):
        train(store, range(50 * turn, 50 * turn + 100))
        update(store, range(50 * turn, 50 * turn + 700, 3))
        store.delete(array(range(50 * turn, 50 * turn + 100, 7)))
        if turn % 3 == 0:
            train(store, range(30))
        for _ in range(turn % 4):
            with store.begin_cut("delta") as cut:
                blocks = list(cut.blocks(max_rows=50))
                assert cut.is_full == (replica == {})
                assert cut.num_rows <= 1500
                for sign in cut.deleted().tolist():
                    replica.pop(sign, None)
                replica.update(cut_contents(blocks))
                cut.commit()
            assert replica == contents(store)
    assert store.stats()["evicted"] > 500


def test_what_a_consumer_did_not_commit_comes_again() -> None:
    store = new_store(100)
    store.open_changes("feed")
    with store.begin_cut("feed") as cut:
        list(cut.blocks())
        cut.commit()
    update(store, range(10))
    for _ in range(3):
        with store.begin_cut("feed") as cut:
            assert sorted(rows_of(list(cut.blocks()))) == list(range(10))
    update(store, range(5, 20))
    with store.begin_cut("feed") as cut:
        assert sorted(rows_of(list(cut.blocks()))) == list(range(20))
        cut.commit()
    with store.begin_cut("feed") as cut:
        assert cut.num_rows == 0
        assert not list(cut.blocks())


def test_a_log_that_is_too_short_makes_the_next_cut_full() -> None:
    store = new_store(50_000, num_shards=1)
    store.open_changes("feed", max_bytes=4 * 4096)
    for num_changed, is_full in ((0, True), (2000, False), (40_000, True), (3000, False)):
        update(store, range(num_changed))
        with store.begin_cut("feed") as cut:
            assert cut.is_full == is_full
            rows = sum(map(len, cut.blocks()))
            assert rows == (50_000 if is_full else num_changed)
            cut.commit()


def test_the_slowest_consumer_pays_for_its_slowness_alone() -> None:
    store = new_store(50_000, num_shards=1)
    for name in ("slow", "quick"):
        store.open_changes(name, max_bytes=4 * 4096)
        with store.begin_cut(name) as cut:
            list(cut.blocks())
            cut.commit()
    for _ in range(10):
        update(store, range(2000))
        with store.begin_cut("quick") as cut:
            assert not cut.is_full
            assert sum(map(len, cut.blocks())) == 2000
            cut.commit()
    with store.begin_cut("slow") as cut:
        assert cut.is_full


@pytest.mark.filterwarnings("error")
def test_a_consumer_may_go_before_another_one_has_begun() -> None:
    store = new_store(100)
    for name in ("gone", "feed"):
        store.open_changes(name)
    store.close_changes("gone")
    with store.begin_cut("feed") as cut:
        assert sum(map(len, cut.blocks())) == 100


def test_a_consumer_that_comes_back_does_not_go_on_from_a_cut_of_its_former_life() -> None:
    store = new_store(100)
    store.open_changes("feed")
    former = store.begin_cut("feed")
    list(former.blocks())
    store.close_changes("feed")
    update(store, range(10))  # nobody notes this
    store.open_changes("feed")
    former.commit()
    with store.begin_cut("feed") as cut:
        assert cut.is_full
        assert cut_contents(list(cut.blocks())) == contents(store)


def test_what_is_asked_for_wrongly_is_refused_and_named() -> None:
    store = new_store(10)
    with pytest.raises(StoreError, match=r"among \[\], got 'nobody'"):
        store.begin_cut("nobody")
    with pytest.raises(StoreError, match="got 'nobody'"):
        store.close_changes("nobody")
    store.open_changes("feed")
    with pytest.raises(StoreError, match="'feed' of changes is open already"):
        store.open_changes("feed")
    with pytest.raises(ConfigError, match="max_bytes of the change log"):
        store.open_changes("other", max_bytes=1)
    with pytest.raises(ConfigError, match="side_bytes"):
        store.begin_cut(side_bytes=-1)
    with pytest.raises(ConfigError, match="wait_seconds"):
        store.begin_cut(wait_seconds=-1.0)
    cut = store.begin_cut()
    with pytest.raises(DataError, match="max_rows"):
        cut.blocks(0)
    blocks = cut.blocks()
    with pytest.raises(StoreError, match="given out once"):
        cut.blocks()
    with pytest.raises(StoreError, match="committed once all its blocks"):
        cut.commit()
    cut.close()
    with pytest.raises(StoreError, match="is closed"):
        next(blocks)
    store.close_changes("feed")
    assert store.watch.cursors == {}


def test_w60_a_cut_of_an_empty_store_costs_nothing_whatever_its_capacity() -> None:
    store = EmbeddingStore(10**12, num_shards=1024)
    with store.begin_cut() as cut:
        assert cut.num_rows == 0
        assert list(cut.blocks()) == []
        cut.commit()
