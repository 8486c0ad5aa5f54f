"""What exists loads whole and is what it was; what does not exist does not load.

A disk that fails at any write, fsync, rename, mkdir or unlink is under all of it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from persia._core.store.blocks import RowBlock
from persia._files.catalog import chain, discard, ids, keep_last, latest, load, new_id, publish
from persia._files.parts import read_part, write_file
from persia._files.rows import rewrite, verify
from persia._files.storage import LocalStorage
from persia.errors import CheckpointError, ConfigError
from tests.files.disk import PAST_CACHE, Disk, PowerFailure
from tests.files.support import Rows, dump, loaded, manifest, row, rows_of, written
from tests.support.profiles import tries

ROWS = {sign: row(sign, 1) for sign in range(5)}
SIGNS = st.sets(st.integers(1, 12).map(lambda n: n << 52 | n), min_size=1, max_size=4)
FAULTS = st.tuples(st.sampled_from(["power", "error", None]), st.integers(0, 90))


class CatalogMachine(RuleBasedStateMachine):
    """One job that trains, and writes into one catalog on a disk that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.storage = LocalStorage("/data/job", self.disk)
        self.rows: dict[int, RowBlock] = {}
        self.seed = 0
        self.exists: dict[str, Rows] = {}  # what has to load, by id
        # The change log: what changed since the checkpoint that deltas are written to.
        self.base: str | None = None
        self.changed: set[int] = set()
        self.deleted: set[int] = set()

    @rule(signs=SIGNS)
    def train(self, signs: set[int]) -> None:
        for sign in signs:
            self.seed += 1
            self.rows[sign] = row(sign, self.seed)
        self.changed |= signs
        self.deleted -= signs

    @rule(signs=SIGNS)
    def evict(self, signs: set[int]) -> None:
        for sign in signs & self.rows.keys():
            del self.rows[sign]
            self.deleted.add(sign)
            self.changed.discard(sign)

    def attempt(
        self, fault: tuple[str | None, int], action: Callable[[], str | None]
    ) -> str | None:
        """Do it on a disk that may fail; returns what it returned, None if it failed."""
        before = set(ids(self.storage))
        self.disk.arm(fault[1], fault[0])
        done = None
        try:
            done = action()
        except (CheckpointError, PowerFailure):
            assert fault[0] is not None
        finally:
            if self.disk.is_off:
                self.disk.restart(random.Random(fault[1]))
            self.disk.arm(-1, None)
        # It may exist although it failed: if it failed after the rename, or the disk has it.
        for identity in set(ids(self.storage)) - before:
            self.exists[identity] = rows_of(self.rows.values())
        return done

    @rule(fault=FAULTS)
    def dump(self, fault: tuple[str | None, int]) -> None:
        done = self.attempt(fault, lambda: dump(self.storage, self.rows).id)
        self._committed(done)

    @precondition(lambda self: self.base is not None)
    @rule(fault=FAULTS)
    def delta(self, fault: tuple[str | None, int]) -> None:
        rows = {sign: self.rows[sign] for sign in self.changed}
        done = self.attempt(
            fault, lambda: dump(self.storage, rows, base=self.base, deleted=self.deleted).id
        )
        self._committed(done)

    def _committed(self, done: str | None) -> None:
        if done is not None:
            assert done in self.exists
            self.base, self.changed, self.deleted = done, set(), set()

    @precondition(lambda self: self.exists)
    @rule(fault=FAULTS)
    def compact(self, fault: tuple[str | None, int]) -> None:
        held = self.rows
        want = self.exists[latest(self.storage) or ""]
        before = set(self.exists)
        self.attempt(fault, lambda: rewrite(self.storage, self.storage).id)
        for identity in self.exists.keys() - before:
            self.exists[identity] = want
        assert self.rows is held

    @precondition(lambda self: self.exists)
    @rule(fault=FAULTS, count=st.integers(1, 3))
    def keep_last(self, fault: tuple[str | None, int], count: int) -> None:
        kept: set[str] = set()
        for identity in ids(self.storage)[-count:]:
            kept |= {each.id for each in chain(self.storage, identity)}

        def action() -> str | None:
            removed = keep_last(self.storage, count)
            assert set(removed) == self.exists.keys() - kept
            left = {name.partition(".")[0] for name in self.storage.list()}
            assert min(left - kept, default=max(kept)) >= max(kept)  # never published
            return "done"

        self.attempt(fault, action)
        there = set(ids(self.storage))
        assert kept <= there <= self.exists.keys()
        self.exists = {identity: self.exists[identity] for identity in there}
        if self.base not in there:
            self.base = None

    @invariant()
    def what_exists_loads_and_nothing_else(self) -> None:
        assert set(ids(self.storage)) == self.exists.keys()
        for identity, rows in self.exists.items():
            assert loaded(self.storage, identity) == rows
            verify(self.storage, identity)


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = tries(30, stateful_step_count=15)


def failing_later() -> Iterator[tuple[int, Disk, LocalStorage]]:
    """A fresh disk each time, and a number that grows."""
    for number in itertools.count():
        disk = Disk()
        yield number, disk, LocalStorage("/data", disk)


@pytest.mark.parametrize("failure", ["power", "error"])
def test_w19_a_writer_that_dies_anywhere_leaves_the_last_checkpoint(failure: str) -> None:
    """Also W-18: a delta whose writer died is none, and the next one has its changes."""
    later = {sign: row(sign, 2) for sign in range(3, 6)}
    for fail_at, disk, storage in failing_later():
        first = dump(storage, ROWS).id
        disk.arm(fail_at, failure)
        try:
            dump(storage, later, base=first, deleted={0})
        except (PowerFailure, CheckpointError):
            pass
        else:
            break
        if failure == "power":
            disk.restart(random.Random(fail_at))
        disk.arm(-1, None)
        assert loaded(storage, first) == rows_of(ROWS.values())
        again = dump(storage, later, base=first, deleted={0})
        assert loaded(storage) == rows_of(v for s, v in {**ROWS, **later}.items() if s)
        keep_last(storage, 1)
        kept = [first, again.id]
        assert sorted(storage.list()) == sorted([*kept, *(f"{name}.json" for name in kept)])
    assert fail_at > 20


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="a system without O_DIRECT")
@pytest.mark.parametrize("failure", ["power", "error"])
def test_w19_also_past_the_page_cache(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    """Where files of some hundred bytes go, as large ones do."""
    for name in ("BLOCK_BYTES", "_DIRECT_BYTES"):
        monkeypatch.setattr(f"persia._files.storage.{name}", 64)
    for name in ("storage", "part_writer"):
        monkeypatch.setattr(f"persia._files.{name}.AT_ONCE", 1024)
    monkeypatch.setattr("tests.files.disk.BLOCK_BYTES", 64)
    PAST_CACHE.clear()
    test_w19_a_writer_that_dies_anywhere_leaves_the_last_checkpoint(failure)
    assert len(PAST_CACHE) > 50


def test_w19_a_second_dump_replaces_the_first(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not a checkpoint's")
    (tmp_path / "00000001").mkdir()
    first = dump(storage, {1: row(1, 1)})
    second = dump(storage, {2: row(2, 1)})
    assert loaded(storage, first.id).keys() == {1}
    assert keep_last(storage, 1) == [first.id]
    assert loaded(storage).keys() == {2}
    with pytest.raises(CheckpointError, match=f"{first.id}.json: cannot read"):
        load(storage, first.id)
    assert storage.list() == ["00000001", second.id, f"{second.id}.json", "mine.txt"]
    with pytest.raises(ConfigError, match="keep_last: expected at least 1, got 0"):
        keep_last(storage, 0)


def test_w18_a_missing_delta_is_an_error(storage: LocalStorage, tmp_path: Path) -> None:
    first = dump(storage, {1: row(1, 1)})
    second = dump(storage, {2: row(2, 1)}, base=first.id)
    third = dump(storage, {3: row(3, 1)}, base=second.id)
    assert [each.id for each in chain(storage)] == [first.id, second.id, third.id]
    (tmp_path / f"{second.id}.json").unlink()
    with pytest.raises(CheckpointError, match=f"{third.id}.json: base: {second.id} is not"):
        chain(storage)
    with pytest.raises(CheckpointError, match=f"{second.id}.json: cannot read"):
        keep_last(storage, 1)
    assert ids(storage) == [first.id, third.id]


def test_w18_deltas_that_come_in_one_second_are_two(storage: LocalStorage) -> None:
    base = dump(storage, {1: row(1, 1)})
    made = [dump(storage, {sign: row(sign, 1)}, base=base.id).id for sign in range(2, 6)]
    assert ids(storage) == [base.id, *made]
    assert loaded(storage).keys() == {1, 5}


def test_what_is_being_written_is_left_alone(storage: LocalStorage) -> None:
    slow = new_id(storage)
    part = write_file(storage, f"{slow}/dense.pt", [b"x"])
    dump(storage, {1: row(1, 1)})
    keep_last(storage, 1, writing={slow})
    assert storage.size(part.path) == 1
    keep_last(storage, 1)
    with pytest.raises(CheckpointError, match="cannot read"):
        storage.size(part.path)


def test_writers_that_began_together_keep_their_files(storage: LocalStorage) -> None:
    slow = write_file(storage, "00000001-00000000/dense.pt", [b"slow"])
    quick = write_file(storage, "00000001-ffffffff/dense.pt", [b"quick"])
    publish(storage, manifest("00000001-ffffffff", parts=(), files={"dense.pt": quick}))
    keep_last(storage, 1)
    assert storage.size(slow.path) == 4


def test_what_a_link_leads_to_is_not_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "job")
    first = dump(storage, {1: row(1, 1)})
    (tmp_path / "job" / first.id).rename(tmp_path / "elsewhere")
    (tmp_path / "job" / first.id).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("mine")
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "mine")
    second = dump(storage, {1: row(1, 2)})
    assert keep_last(storage, 1) == [first.id]
    assert storage.list() == [second.id, f"{second.id}.json"]
    assert (tmp_path / "elsewhere" / "dense.pt").read_bytes() == first.id.encode()
    storage = LocalStorage(tmp_path)
    storage.remove_folder("elsewhere")
    assert storage.list() == ["job", "mine"]
    assert (tmp_path / "mine" / "text").read_text() == "mine"


def test_what_is_published_loads(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a/b: no checkpoint is here"):
        load(storage)
    first = written(storage)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(storage)
    publish(storage, first)
    assert load(storage) == load(LocalStorage(tmp_path / "a" / "b"), first.id) == first
    later = written(storage)
    assert load(storage) == first
    publish(storage, later)
    assert load(storage) == later
    assert ids(storage) == [first.id, later.id]
    assert first.num_rows == 200
    assert len(rows_of(read_part(storage, part) for part in later.parts)) == 200
    other = "00000009-00000000"
    place = tmp_path / "a" / "b"
    (place / f"{later.id}.json").rename(place / f"{other}.json")
    with pytest.raises(CheckpointError, match=f"{other}.json: id: expected {other}"):
        load(storage)
    # With all of its files only.
    path = place / later.parts[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{path}: expected {len(whole)} bytes, got"):
        publish(storage, later)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path}: cannot read: No such file"):
        publish(storage, later)
    assert ids(storage) == [first.id, other]


@pytest.mark.parametrize("failure", ["error", "power"])
def test_what_a_failed_dump_wrote_is_removed(failure: str) -> None:
    """Whatever fails: afterwards the checkpoint is there whole, or nothing of it is."""
    for fail_at, disk, storage in failing_later():
        first = dump(storage, ROWS, num_servers=1).id
        before = storage.list()
        disk.arm(fail_at, "error")
        try:
            dump(storage, ROWS, num_servers=1)
        except CheckpointError:
            pass
        else:
            break
        disk.arm(-1, None)
        (left,) = {name.partition(".")[0] for name in storage.list()} - {first} or {""}
        if left:
            if failure == "power":
                disk.arm(fail_at % 4, "power")  # while it is removed
            try:
                assert discard(storage, left)
            except PowerFailure:
                disk.restart(random.Random(fail_at))
                for identity in ids(storage):
                    assert set(storage.list(identity)) >= {"dense.pt", "server0"}
                assert discard(storage, left)
            disk.arm(-1, None)
        assert storage.list() == before
    assert fail_at > 10


def test_removing_may_die_anywhere_too() -> None:
    """What is still there loads whole; done again, the rest goes."""
    for fail_at, disk, storage in failing_later():
        first = dump(storage, {1: row(1, 1)}, num_servers=1)
        dump(storage, {2: row(2, 1)}, base=first.id, num_servers=1)
        last = dump(storage, {3: row(3, 1)}, num_servers=1)
        disk.arm(fail_at, "power")
        try:
            keep_last(storage, 1)
        except PowerFailure:
            disk.restart(random.Random(fail_at))
        else:
            break
        assert last.id in ids(storage)
        for identity in ids(storage):
            verify(storage, identity)
        keep_last(storage, 1)
        assert storage.list() == [last.id, f"{last.id}.json"]
    assert fail_at > 8
