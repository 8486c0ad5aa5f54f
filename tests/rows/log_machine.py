"""Live rows of a log and checkpoints, against dictionaries of what their writers hold."""

from __future__ import annotations

import random
import shutil
import uuid
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from persia._files import catalog
from persia._files.log_position import LogPosition
from persia._files.manifest import Manifest, number_of, time_text
from persia._files.open import open_storage
from persia._files.part_writer import PartWriter
from persia._rows.live_rows import LiveRows, RowView
from persia._rows.row_source import RowSource
from persia.config import EmbeddingSchema
from persia.errors import PersiaError, ServiceBusy
from tests.files.support import SCHEMA as SAVED
from tests.files.support import SETTINGS, joined, row
from tests.files.test_change_log import Writer, owner_of

SCHEMA = EmbeddingSchema.load(SETTINGS)
NUM_SIGNS = 24
SIGNS = np.arange(NUM_SIGNS, dtype=np.uint64) * np.uint64(0x0007_0000_0001) + np.uint64(
    SCHEMA.slots["user"].prefix
)
Seeds = dict[int, int]  # of the row of each sign
PLACES = st.sets(st.integers(0, NUM_SIGNS - 1), max_size=6)


def seeds_in(view: RowView, known: dict[tuple[int, bytes], int]) -> Seeds:
    """The rows of a view, by the seeds that they were made of."""
    out = np.empty((NUM_SIGNS, 4), np.float32)
    states = np.empty(NUM_SIGNS, np.uint8)
    missing = view.lookup(0, SIGNS, out, states)
    assert missing == int(np.count_nonzero(states != 1))
    assert set(states.tolist()) <= {0, 1}
    assert not out[states == 0].any()
    return {
        sign: known[sign, values.tobytes()]
        for sign, values, state in zip(SIGNS.tolist(), out, states.tolist(), strict=True)
        if state
    }


class Server:
    """One of some servers, and what it has shown so far."""

    def __init__(self, source: RowSource, owned: tuple[int, int]) -> None:
        self.source, self.owned = source, owned
        self.restart()

    def restart(self) -> None:
        self.rows = LiveRows(self.source, SCHEMA, owned=self.owned, follow_interval_s=0.001)
        self.newest: Seeds = {}  # of each sign, of all rows shown

    def owns(self, sign: int) -> bool:
        number, count = self.owned
        return owner_of(sign, count) == number

    def poll(self) -> None:
        try:
            self.rows.poll()
        except (PersiaError, OSError):
            return  # the rows stay


class LogMachine(RuleBasedStateMachine):
    """Each row that is written has a later seed, so rows that go back in time show.

    Writers, whose files vanish, break and come late; servers that poll; requests that stay.
    """

    folder: Path

    @initialize(count=st.integers(1, 3), owned=st.integers(1, 2), seed=st.integers(0, 99))
    def begin(self, count: int, owned: int, seed: int) -> None:
        place = self.folder / uuid.uuid4().hex
        self.url, self.checkpoints = str(place / "log"), str(place / "checkpoints")
        self.rng, self.last_seed = random.Random(seed), 0
        self.known: dict[tuple[int, bytes], int] = {}
        self.broken: dict[tuple[int, str], bytes] = {}
        # By checkpoint, its rows and how many were dropped before; and when each was, last.
        self.saved: dict[str, tuple[Seeds, int]] = {}
        self.drops: dict[int, int] = {}
        self.num_drops = 0
        self.begin_job(count)
        source = RowSource(checkpoint=self.checkpoints, follows_newer=True, change_log=self.url)
        self.servers = [Server(source, (n, owned)) for n in range(owned)]
        self.pinned: list[tuple[ExitStack, RowView, Seeds]] = []

    def begin_job(self, count: int) -> None:
        self.writers = [Writer(self.url, server, count) for server in range(count)]
        self.fulls: list[tuple[Writer, Manifest]] = []

    def held(self) -> Seeds:
        return {sign: seed for writer in self.writers for sign, seed in writer.held.items()}

    def writer_of(self, sign: int) -> Writer:
        return self.writers[owner_of(sign, len(self.writers))]

    def writer(self, number: int) -> Writer:
        return self.writers[number % len(self.writers)]

    @rule(places=PLACES)
    def put(self, places: set[int]) -> None:
        for place in places:
            sign = int(SIGNS[place])
            self.last_seed += 1
            values = np.asarray(row(sign, self.last_seed).values, np.float32)
            self.known[sign, values.tobytes()] = self.last_seed
            self.writer_of(sign).put(sign, self.last_seed)

    @rule(places=PLACES)
    def drop(self, places: set[int]) -> None:  # or expire
        for place in places:
            sign = int(SIGNS[place])
            self.writer_of(sign).drop(sign)
            self.num_drops += 1
            self.drops[sign] = self.num_drops

    @rule(number=st.integers(0, 2))
    def write(self, number: int) -> None:
        self.writer(number).write()

    @rule(back_s=st.integers(-9, 9))
    def set_clock(self, back_s: int) -> None:
        for writer in self.writers:
            writer.time += back_s

    @rule(number=st.integers(0, 2))
    def begin_full(self, number: int) -> None:
        if self.writer(number).base is not None:
            self.fulls.append((self.writer(number), self.writer(number).begin_full()))

    @precondition(lambda self: self.fulls)
    @rule()
    def end_full(self) -> None:
        writer, made = self.fulls.pop(0)
        catalog.publish(writer.storage, made)

    @rule(number=st.integers(0, 2), is_whole=st.booleans())
    def restart_writer(self, number: int, is_whole: bool) -> None:
        """With its rows, or some of them; what it was writing is lost."""
        writer = self.writer(number)
        writer.base = None
        self.fulls = [each for each in self.fulls if each[0] is not writer]
        if is_whole:
            return
        kept = self.rng.sample(sorted(writer.held.items()), len(writer.held) // 2)
        writer.lose_rows()
        writer.held = dict(kept)

    @rule(count=st.integers(1, 3), is_lost=st.booleans())
    def change_servers(self, count: int, is_lost: bool) -> None:
        """Another number of servers, and perhaps without the log: numbers begin again."""
        held = self.held()
        if is_lost:
            shutil.rmtree(self.url, ignore_errors=True)
            self.broken.clear()
        self.begin_job(count)
        for sign, seed in held.items():
            self.writer_of(sign).put(sign, seed)

    @rule()
    def checkpoint(self) -> None:
        """All servers' rows, which are in their next packets."""
        storage = open_storage(self.checkpoints)
        identity, held = catalog.new_id(storage), self.held()
        with PartWriter(storage, f"{identity}/rows", server=0, num_threads=1) as writer:
            if held:
                writer.add("table0", joined(row(s, held[s]) for s in sorted(held)))
            parts = writer.finish()
        position = LogPosition(
            {one.server: number_of(catalog.new_id(one.storage))[0] for one in self.writers},
            {one.server: one.history for one in self.writers},
        )
        self.saved[identity] = held, self.num_drops
        manifest = Manifest(
            id=identity,
            kind="full",
            base=None,
            step=0,
            created=time_text(1e9),
            num_servers=len(self.writers),
            schema=SAVED,
            parts=parts,
            deleted=(),
            extras={"change_log": position.to_json(self.url)},
        )
        catalog.publish(storage, manifest)

    @rule(number=st.integers(0, 2))
    def prune(self, number: int) -> None:
        """Keep the last full one and what came after it."""
        writer = self.writer(number)
        if self.broken:
            return
        ids = catalog.ids(writer.storage)
        fulls = [one for one in ids if catalog.load(writer.storage, one).kind == "full"]
        if fulls:
            writing = [made.id for _, made in self.fulls]
            catalog.drop_before(writer.storage, fulls[-1], writing)

    @rule(number=st.integers(0, 2), whole=st.booleans())
    def cut_off(self, number: int, whole: bool) -> None:
        """Cut a file off, the manifest or a part of the newest packet."""
        writer = self.writer(number)
        identity = catalog.latest(writer.storage)
        if identity is None or self.broken:
            return
        made = catalog.load(writer.storage, identity)
        path = made.parts[0].path if made.parts and not whole else f"{identity}.json"
        data = writer.storage.read(path, 1 << 20).tobytes()
        self.broken[writer.server, path] = data
        writer.storage.publish(path, data[: len(data) // 2])

    @rule()
    def mend(self) -> None:
        for (server, path), data in self.broken.items():
            storage = open_storage(catalog.below(self.url, catalog.folder_of(server)))
            storage.publish(path, data)
        self.broken.clear()

    @rule(times=st.integers(1, 7))
    def poll(self, times: int) -> None:
        for server in self.servers:
            for _ in range(times):
                server.poll()
                self.look(server)

    def look(self, server: Server) -> Seeds:
        try:
            with server.rows.view() as view:
                found = seeds_in(view, self.known)
        except ServiceBusy:
            return {}
        for sign, seed in found.items():
            assert seed >= server.newest.get(sign, 0)
        server.newest |= found
        # Whatever became of its servers, no row of the checkpoint is lost but those dropped.
        held, dropped = self.saved.get(server.rows._checkpoint, ({}, 0))
        for sign, seed in held.items():
            if server.owns(sign) and self.drops.get(sign, 0) <= dropped:
                assert found.get(sign, -1) >= seed
        for _, pinned, before in self.pinned:
            assert seeds_in(pinned, self.known) == before
        return found

    @rule(number=st.integers(0, 1))
    def pin(self, number: int) -> None:
        server = self.servers[number % len(self.servers)]
        if server.rows.is_ready and len(self.pinned) < 3:
            stack = ExitStack()
            view = stack.enter_context(server.rows.view())
            self.pinned.append((stack, view, seeds_in(view, self.known)))

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            stack, view, before = self.pinned.pop(0)
            assert seeds_in(view, self.known) == before
            stack.close()

    @rule(number=st.integers(0, 1))
    def restart_server(self, number: int) -> None:
        self.servers[number % len(self.servers)].restart()

    @rule()
    def settle(self) -> None:
        """What all have written is what servers show in the end."""
        self.mend()
        while self.pinned:
            self.unpin()
        self.checkpoint()
        for writer in self.writers:
            writer.write()
        found: Seeds = {}
        for server in self.servers:
            for _ in range(24):
                server.poll()
                last = self.look(server)
            assert not found.keys() & last.keys()
            found |= last
        assert found == self.held()

    def teardown(self) -> None:
        if hasattr(self, "servers"):
            self.settle()
            for server in self.servers:
                server.rows.close()
