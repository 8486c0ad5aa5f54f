"""The change log as a follower sees it, against a dictionary of what its writers have."""

from __future__ import annotations

import dataclasses
import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from persia._core.base.hashing import mix64_array, owners
from persia._files import catalog, change_log
from persia._files.change_log import ChangeLog, Deletion, Packet, Rows, read_chain, read_packet
from persia._files.manifest import Manifest, number_of, time_text
from persia._files.open import open_storage
from persia._files.part_writer import PartWriter
from persia._files.parts import write_deleted
from persia.errors import CheckpointError, LogNotReady
from tests.files.support import SCHEMA, joined, row

NUM_SIGNS = 24
SIGNS = np.arange(NUM_SIGNS, dtype=np.uint64) * np.uint64(0x0007_0000_0001) + np.uint64(1 << 56)
Held = dict[int, int]  # seed of the row of each sign


def owner_of(sign: int, count: int) -> int:
    return int(owners(count)[int(mix64_array(np.array([sign], np.uint64))[0] >> np.uint64(50))])


def values_of(held: Held) -> dict[int, bytes]:
    return {
        sign: np.asarray(row(sign, seed).values, np.float32).tobytes()
        for sign, seed in held.items()
    }


class Writer:
    """What one server writes: a delta at a time, and full packets beside them."""

    def __init__(self, url: str, server: int, count: int) -> None:
        self.storage = open_storage(catalog.below(url, catalog.folder_of(server)))
        self.server, self.count = server, count
        self.held: Held = {}
        self.changed: set[int] = set()
        self.base: str | None = None
        self.time = 1e9
        self.history, self.reached = uuid.uuid4().hex, dict[str, int]()
        self.states: dict[int, list[Held]] = {}  # that a follower may have at a packet

    def lose_rows(self) -> None:
        """Begin again as a process without the rows of the one before."""
        self.base, self.held, self.changed = None, {}, set()
        self.history, self.reached = uuid.uuid4().hex, {}

    def put(self, sign: int, seed: int) -> None:
        self.held[sign] = seed
        self.changed.add(sign)

    def drop(self, sign: int) -> None:
        self.held.pop(sign, None)
        self.changed.add(sign)

    def write(self, *, is_published: bool = True) -> Manifest:
        """Write a delta, or all rows if it is the first packet."""
        identity = catalog.new_id(self.storage)
        is_full = self.base is None
        rows = (
            dict(self.held)
            if is_full
            else {sign: self.held[sign] for sign in self.changed if sign in self.held}
        )
        gone = set() if is_full else set(self.changed)  # came again: in both
        made = self._manifest(identity, rows, gone, self.base, {})
        if is_published:
            catalog.publish(self.storage, made)
            self.base, self.changed = identity, set()
        return made

    def begin_full(self) -> Manifest:
        """Write a full packet beside the deltas, of this moment, to be published later."""
        assert self.base is not None
        return self._manifest(
            catalog.new_id(self.storage), dict(self.held), set(), None, {"after": self.base}
        )

    def _manifest(
        self,
        identity: str,
        rows: Held,
        gone: set[int],
        base: str | None,
        extras: dict[str, Any],
    ) -> Manifest:
        after = extras.get("after", identity)
        self.states.setdefault(number_of(after)[0], []).append(dict(self.held))
        extras = {**extras, "log": {"history": self.history, "reached": self.reached}}
        prefix = f"{identity}/rows"
        with PartWriter(self.storage, prefix, server=self.server, num_threads=1) as writer:
            if rows:
                writer.add("table0", joined(row(s, rows[s]) for s in sorted(rows)))
            parts = writer.finish()
        signs = np.array(sorted(gone), np.uint64)
        deleted = write_deleted(self.storage, prefix, signs, self.server)
        self.storage.publish(f"{identity}/here", b"1")  # an object store has no empty folders
        return Manifest(
            id=identity,
            kind="delta" if base else "full",
            base=base,
            step=0,
            created=time_text(self.time),
            num_servers=self.count,
            schema=SCHEMA,
            parts=parts,
            deleted=deleted,
            extras=extras,
        )


class Follower:
    """Rows of one of some replicas, kept as ``ChangeLog`` says."""

    def __init__(self, url: str, owned: tuple[int, int] | None = None) -> None:
        self.url, self.owned = url, owned
        self.log = ChangeLog(url)
        self.rows: dict[int, bytes] = {}
        self.num_starts = 0

    def start(self, *, is_damaged: bool = False) -> None:
        log = ChangeLog(self.url)
        rows: dict[int, bytes] = {}
        for chain in log.start(is_damaged=is_damaged):
            for found in read_chain(chain, self.owned):
                assert not set(found.signs.tolist()) & rows.keys()
                rows.update(as_bytes(found))
        if is_damaged and self.num_starts and log.progress(self.log) < 0:
            return  # never back
        self.log, self.rows = log, rows
        self.num_starts += 1

    def share(self, rows: dict[int, bytes]) -> dict[int, bytes]:
        """Those of its replica."""
        number, count = self.owned or (0, 1)
        return {s: values for s, values in rows.items() if owner_of(s, count) == number}

    def apply(self, packet: Packet) -> None:
        changes = list(read_packet(packet, self.owned))  # all of it, or an error
        for found in changes:
            if isinstance(found, Deletion):
                assert found is changes[0]
                for sign in found.signs.tolist():
                    self.rows.pop(sign, None)
            else:
                self.rows.update(as_bytes(found))
        self.log.applied(packet)

    def follow(self) -> None:
        """One round, as a consumer does."""
        update = self.log.poll()
        for packet in update.packets:
            try:
                self.apply(packet)
            except CheckpointError:
                break
        if update.resync:
            try:
                self.start()
            except CheckpointError:
                return  # the rows stay

    def settle(self) -> None:
        for _ in range(20):
            self.follow()


def as_bytes(found: Rows) -> dict[int, bytes]:
    assert found.table == "table0"
    assert found.values.dtype == np.float32
    pairs = zip(found.signs.tolist(), found.values, strict=True)
    return {sign: values.tobytes() for sign, values in pairs}


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    pytest.importorskip("fsspec")
    return f"memory://{uuid.uuid4().hex}"


def test_deltas_are_followed_and_full_packets_passed_by(url: str) -> None:
    follower = Follower(url)
    with pytest.raises(LogNotReady, match="s0 has none yet"):
        follower.start()
    writer = Writer(url, 0, 1)
    for sign in SIGNS[:4].tolist():
        writer.put(sign, 1)
    first = writer.write()
    follower.start()
    assert follower.log.position == {0: 1}
    writer.drop(int(SIGNS[0]))
    writer.put(int(SIGNS[1]), 2)
    writer.time += 5
    delta = writer.write()
    (packet,) = follower.log.poll().packets
    assert (packet.server, packet.number, packet.created) == (0, 2, writer.time)
    assert follower.log.poll().packets == (packet,)  # until it is applied
    follower.apply(packet)
    assert follower.rows == values_of(writer.held)
    assert follower.log.ages(writer.time + 3) == {0: 3.0}
    assert follower.log.ages(writer.time - 3) == {0: 0.0}
    # A full packet begins; deltas go on, and it is there in the end.
    writer.put(int(SIGNS[5]), 3)
    full = writer.begin_full()
    writer.write()
    follower.follow()
    catalog.publish(writer.storage, full)
    writer.drop(int(SIGNS[5]))
    last = writer.write()
    follower.follow()
    assert (follower.num_starts, follower.log.poll().resync) == (1, False)
    assert follower.rows == values_of(writer.held)
    assert [one.id for one in catalog.chain(writer.storage)][::2] == [full.id, last.id]
    # What came before it is not needed any more.
    catalog.drop_before(writer.storage, full.id)
    assert first.id not in catalog.ids(writer.storage)
    assert delta.id not in catalog.ids(writer.storage)
    late = Follower(url)
    late.start()
    assert late.rows == follower.rows
    assert late.log.position == follower.log.position == {0: number_of(last.id)[0]}
    assert follower.log.contains({0: 5})
    assert not follower.log.contains({0: 6})


def test_who_begins_at_a_full_packet_goes_on_with_the_delta_beside_it(url: str) -> None:
    writer = Writer(url, 0, 1)
    writer.put(int(SIGNS[0]), 1)
    writer.write()
    writer.put(int(SIGNS[1]), 1)
    delta = writer.write()
    writer.put(int(SIGNS[2]), 1)  # the next delta has it too
    catalog.publish(writer.storage, writer.begin_full())
    catalog.drop_before(writer.storage, delta.id)
    follower = Follower(url)
    follower.start()
    assert follower.log.position == {0: 2}  # a cut at 3 may be of a later moment than it
    writer.write()
    follower.follow()
    assert follower.log.position == {0: 4}
    assert (follower.rows, follower.num_starts) == (values_of(writer.held), 1)


def test_a_gap_is_one_when_it_is_seen_again(url: str) -> None:
    writer = Writer(url, 0, 1)
    writer.put(int(SIGNS[0]), 1)
    writer.write()
    follower = Follower(url)
    follower.start()
    missing = writer.write()
    writer.storage.remove(f"{missing.id}.json")
    writer.write()
    assert follower.log.poll() == change_log.Update((), False)
    catalog.publish(writer.storage, missing)  # a listing lacked it
    assert len(follower.log.poll().packets) == 2
    follower.follow()
    gone = writer.write()
    writer.write()
    writer.storage.remove(f"{gone.id}.json")
    follower.follow()
    update = follower.log.poll()
    assert update.resync
    assert update.reason.endswith(f"no delta to {gone.base} is there any more")


@pytest.mark.parametrize("what", ["manifest", "part", "missing"])
def test_what_cannot_be_read_is_tried_again(
    url: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(url, 0, 1)
    for sign in SIGNS[:4].tolist():
        writer.put(sign, 1)
    writer.write()
    follower = Follower(url)
    follower.start()
    before = dict(follower.rows)
    writer.put(int(SIGNS[0]), 2)
    delta = writer.write()
    path = f"{delta.id}.json" if what == "manifest" else delta.parts[0].path
    whole = writer.storage.read(path, 1 << 20).tobytes()
    writer.storage.publish(path, whole[:-7])
    if what == "missing":
        writer.storage.remove(path)
    for _ in range(change_log._BROKEN_POLLS - 1):
        follower.follow()
        assert follower.rows == before
    assert follower.num_starts == 1
    writer.storage.publish(path, whole)
    follower.follow()
    assert follower.rows == values_of(writer.held)
    # One that stays so: its rows are there again with the next full packet.
    writer.put(int(SIGNS[1]), 2)
    broken = writer.write()
    writer.storage.publish(broken.parts[0].path, b"1")
    writer.write()
    for _ in range(change_log._BROKEN_POLLS + 1):
        follower.follow()
    assert follower.log.poll().resync
    catalog.publish(writer.storage, writer.begin_full())
    follower.settle()
    assert follower.rows == values_of(writer.held)
    assert follower.num_starts == 2

    def fail(*_: Any) -> Any:
        raise CheckpointError("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "ids", fail)
        assert follower.log.poll() == change_log.Update((), False, "Too many open files")


def test_a_set_of_servers_is_one_jobs(url: str) -> None:
    old = [Writer(url, server, 2) for server in range(2)]
    for sign in SIGNS.tolist():
        old[owner_of(sign, 2)].put(sign, 1)
    old[0].write()
    follower = Follower(url)
    with pytest.raises(LogNotReady, match="s1 has none yet"):
        follower.start()
    old[1].write()
    follower.start()
    before = dict(follower.rows)
    assert len(before) == NUM_SIGNS
    # Three servers take their place, one after the other; until then the rows stay.
    new = [Writer(url, server, 3) for server in range(3)]
    for sign in SIGNS.tolist():
        new[owner_of(sign, 3)].put(sign, 2)
    for writer in reversed(new):
        assert follower.rows == before
        writer.write()
        follower.settle()
    assert follower.rows == values_of(new[0].held | new[1].held | new[2].held)
    assert follower.log.position == {0: 2, 1: 2, 2: 1}
    assert follower.log.contains({0: 2, 1: 2})
    # One server again: the folders of the others stay, and mean nothing.
    (last,) = [Writer(url, 0, 1)]
    last.put(int(SIGNS[0]), 3)
    last.write()
    follower.settle()
    assert follower.rows == values_of(last.held)
    assert follower.log.contains({0: 3, 1: 2, 2: 99})


def test_a_log_that_was_removed_begins_again(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path), 0, 1)
    writer.put(int(SIGNS[0]), 1)
    for _ in range(3):
        writer.write()
    follower = Follower(str(tmp_path))
    follower.start()
    (tmp_path / "s0").rename(tmp_path / "aside")
    assert follower.log.poll() == change_log.Update((), False)
    again = Writer(str(tmp_path), 0, 1)
    again.put(int(SIGNS[1]), 1)
    again.write()
    assert "began again" in follower.log.poll().reason
    follower.follow()
    assert follower.rows == values_of(again.held)


def test_packets_are_checked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [Writer(str(tmp_path), server, 2) for server in range(2)]
    for sign in SIGNS.tolist():
        writers[owner_of(sign, 2)].put(sign, 1)
    for writer in writers:
        writer.write()
    follower = Follower(str(tmp_path))
    follower.start()
    for sign in SIGNS.tolist():
        writers[owner_of(sign, 2)].put(sign, 2)
    for writer in writers:
        writer.write()
    first, second = follower.log.poll().packets
    for held in (0, 1 << 20):  # read twice, or held
        monkeypatch.setattr(change_log, "_HELD_BYTES", held)
        gone, found = read_packet(first)
        assert isinstance(gone, Deletion)
        assert isinstance(found, Rows)
        assert as_bytes(found) == values_of(writers[0].held)
        stranger = dataclasses.replace(first, server=1)
        with pytest.raises(CheckpointError, match="expected those of server 1 of 2"):
            next(read_packet(stranger))
    follower.log.applied(second)
    with pytest.raises(CheckpointError, match="expected the delta to"):
        follower.log.applied(second)


class Machine(RuleBasedStateMachine):
    """Writers and followers of any number, whose files vanish, break and come late."""

    folder: Path

    @initialize(count=st.integers(1, 3), owned=st.integers(1, 3), seed=st.integers(0, 99))
    def begin(self, count: int, owned: int, seed: int) -> None:
        self.url = str(self.folder / uuid.uuid4().hex)
        self.rng = random.Random(seed)
        self.count = count
        self.begin_job(count)
        self.followers = [Follower(self.url, (n, owned)) for n in range(owned)]
        self.broken: dict[tuple[int, str], bytes] = {}
        self.put(set(range(NUM_SIGNS)), seed)
        for writer in self.writers:
            writer.write()
        self.follow(1)

    def begin_job(self, count: int) -> None:
        self.writers = [Writer(self.url, server, count) for server in range(count)]
        self.fulls: list[tuple[Writer, Manifest]] = []
        self.unpublished: list[tuple[Writer, Manifest]] = []

    def writer_of(self, place: int) -> Writer:
        return self.writers[owner_of(int(SIGNS[place]), len(self.writers))]

    @rule(places=st.sets(st.integers(0, NUM_SIGNS - 1), max_size=6), seed=st.integers(0, 9))
    def put(self, places: set[int], seed: int) -> None:
        for place in places:
            self.writer_of(place).put(int(SIGNS[place]), seed)

    @rule(places=st.sets(st.integers(0, NUM_SIGNS - 1), max_size=6))
    def drop(self, places: set[int]) -> None:  # or expire
        for place in places:
            self.writer_of(place).drop(int(SIGNS[place]))

    @rule(number=st.integers(0, 2))
    def write(self, number: int) -> None:
        self.writers[number % len(self.writers)].write()

    @rule(back_s=st.integers(-9, 9))
    def set_clock(self, back_s: int) -> None:
        for writer in self.writers:
            writer.time += back_s

    @rule(number=st.integers(0, 2))
    def begin_full(self, number: int) -> None:
        writer = self.writers[number % len(self.writers)]
        if writer.base is not None:
            self.fulls.append((writer, writer.begin_full()))

    @precondition(lambda self: self.fulls)
    @rule()
    def end_full(self) -> None:
        writer, made = self.fulls.pop(0)
        catalog.publish(writer.storage, made)

    @precondition(lambda self: self.fulls)
    @rule()
    def lose_full(self) -> None:
        writer, made = self.fulls.pop()
        catalog.discard(writer.storage, made.id)

    @rule(number=st.integers(0, 2))
    def fail_to_write(self, number: int) -> None:
        writer = self.writers[number % len(self.writers)]
        catalog.discard(writer.storage, writer.write(is_published=False).id)

    @rule(number=st.integers(0, 2))
    def restart(self, number: int) -> None:
        """With its rows, or some of them; what it was writing is lost."""
        writer = self.writers[number % len(self.writers)]
        writer.base = None
        self.fulls = [each for each in self.fulls if each[0] is not writer]
        if self.rng.random() < 0.5:
            return
        kept = self.rng.sample(sorted(writer.held.items()), len(writer.held) // 2)
        writer.lose_rows()
        writer.held = dict(kept)

    @rule(count=st.integers(1, 3))
    def change_servers(self, count: int) -> None:
        held: Held = {}
        for writer in self.writers:
            held |= writer.held
        self.begin_job(count)
        for sign, seed in held.items():
            self.writers[owner_of(sign, count)].put(sign, seed)

    @rule(number=st.integers(0, 2), fulls=st.integers(1, 2))
    def prune(self, number: int, fulls: int) -> None:
        """Keep the last full ones and what came after them."""
        writer = self.writers[number % len(self.writers)]
        found = [
            one
            for one in catalog.ids(writer.storage)
            if f"{one}.json" not in self._broken_of(writer)
            and catalog.load(writer.storage, one).kind == "full"
        ]
        if len(found) >= fulls and not self._broken_of(writer):
            writing = [made.id for _, made in self.fulls]
            catalog.drop_before(writer.storage, found[-fulls], writing)

    def _broken_of(self, writer: Writer) -> set[str]:
        return {path for server, path in self.broken if server == writer.server}

    @rule(number=st.integers(0, 2), whole=st.booleans())
    def cut_off(self, number: int, whole: bool) -> None:
        """Cut a file off, the manifest or a part of the newest packet."""
        writer = self.writers[number % len(self.writers)]
        identity = catalog.latest(writer.storage)
        if identity is None or self._broken_of(writer):
            return
        made = catalog.load(writer.storage, identity)
        path = made.parts[0].path if made.parts and not whole else f"{identity}.json"
        data = writer.storage.read(path, 1 << 20).tobytes()
        self.broken[writer.server, path] = data
        writer.storage.publish(path, data[: len(data) // 2])

    @precondition(lambda self: self.broken)
    @rule()
    def mend(self) -> None:
        for (server, path), data in self.broken.items():
            storage = open_storage(catalog.below(self.url, catalog.folder_of(server)))
            storage.publish(path, data)
        self.broken.clear()

    @rule(times=st.integers(1, 7))
    def follow(self, times: int) -> None:
        for follower in self.followers:
            if not follower.num_starts:
                try:
                    follower.start()
                except CheckpointError:
                    continue
            for _ in range(times):
                follower.follow()

    @rule(number=st.integers(0, 2))
    def start_damaged(self, number: int) -> None:
        """Begin at what can be read: the rows of some moment of each server."""
        follower = self.followers[number % len(self.followers)]
        try:
            follower.start(is_damaged=True)
        except CheckpointError:
            return
        count, mine = len(self.writers), dict[int, bytes]()
        if {one.history for one in self.writers} != {*follower.log.histories.values()}:
            return
        for writer in self.writers:
            states = writer.states[follower.log.position[writer.server]]
            found = {
                sign: values
                for sign, values in follower.rows.items()
                if owner_of(sign, count) == writer.server
            }
            assert any(found == follower.share(values_of(state)) for state in states)
            mine |= found
        assert mine == follower.rows

    @rule()
    def settle(self) -> None:
        """What all have written is what followers have in the end."""
        self.mend()
        for writer in self.writers:
            writer.write()
        expected: Held = {}
        for writer in self.writers:
            expected |= writer.held
        found: dict[int, bytes] = {}
        for follower in self.followers:
            if not follower.num_starts:
                follower.start()
            follower.settle()
            assert not found.keys() & follower.rows.keys()
            found |= follower.rows
            for writer in self.writers:
                assert writer.base is not None
                packets = {writer.server: number_of(writer.base)[0]}
                assert follower.log.contains(packets)
                assert follower.log.position[writer.server] == packets[writer.server]
        assert found == values_of(expected)

    @invariant()
    def no_folder_is_lost(self) -> None:
        for writer in self.writers:
            if writer.base is not None:
                assert catalog.latest(writer.storage) is not None

    def teardown(self) -> None:
        if hasattr(self, "writers"):
            self.settle()


def test_followers_have_what_was_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    Machine.folder = tmp_path_factory.mktemp("logs")
    few = settings(max_examples=40, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Machine, settings=few)
