"""The change log of a job as it is read: packets that servers write, followed as they come.

    <url>/s0/   full 1 <- delta 2 <- delta 3 <- delta 5 <- ...     by ``base``
                                     full 4, after 3               a shortcut for who begins

``start`` finds whole chains, one of each server; what they hold is the position. ``poll`` finds
the deltas that continue it, each to be applied whole: deletions, then rows. What cannot be read
yet comes with a later call. Where the position leads nowhere, since the writer began again or
has removed what is missing here, the follower begins again too, beside the rows that it has.
No two clocks are compared but for ``ages``: order is by number in each catalog, and servers are
of one job if they agree on how many they are, as server 0 says.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia._core.base.halves import widen
from persia._core.base.hashing import mix64_array, owners
from persia._core.store.blocks import RowBlock
from persia._files import catalog
from persia._files.catalog import Chain, below, folder_of
from persia._files.log_position import LogPosition, Reached, history_of
from persia._files.manifest import Manifest, Part, number_of
from persia._files.mapping import Mapping as SchemaMapping
from persia._files.open import open_storage
from persia._files.parts import (
    DuplicateFilter,
    check_part,
    filter_owned,
    num_owned,
    parts_for,
    read_ahead,
    read_deleted,
    split,
)
from persia._files.rows import rows_of
from persia._files.storage import BufferPool, Storage
from persia.errors import CheckpointError, LogNotReady

# Looks at chains whose files are removed while they are looked at.
_START_TRIES = 3
# Polls that find the same gap until it is one: a listing may lack what came while it was made.
_GAP_POLLS = 2
# Polls that find the same packet unread or unreadable.
_BROKEN_POLLS = 5
# Packets up to this size are read once, and held; larger ones are checked, then read again.
_HELD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Packet:
    """A delta of one server."""

    server: int
    number: int  # in its server's catalog, where numbers grow
    storage: Storage
    manifest: Manifest

    @property
    def created(self) -> float:
        """When its moment was, in seconds since 1970 by its server's clock."""
        return self.manifest.created_s


@dataclass(frozen=True, slots=True)
class Deletion:
    """Rows that are gone, before the rows of the same packet are written."""

    signs: NDArray[np.uint64]  # [n]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table, whole, in place of what was there."""

    table: str  # as ``schema.table_name`` names it
    signs: NDArray[np.uint64]  # [n]
    values: NDArray[np.float32]  # [n, dim]


@dataclass(frozen=True, slots=True)
class Update:
    """What ``poll`` found."""

    # To apply whole, in this order; those of one server follow each other.
    packets: tuple[Packet, ...]
    # After ``packets`` the position leads nowhere: begin again with another ``ChangeLog``,
    # beside the rows there are.
    resync: bool
    reason: str = ""  # of a resync, or why something waits to be read; for messages


class ChangeLog:
    """Follows one log. One thread calls ``start``, ``poll`` and ``applied``; any the others.

    Args:
        url: What ``incremental_dir`` is to its servers; any path or URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.damage = ""  # what ``start`` has left out, and why
        self._lock = threading.Lock()  # guards what servers have applied, and the next
        self._servers: dict[int, _ServerLog] = {}

    def start(self, *, is_damaged: bool = False) -> list[Chain]:
        """Return the newest chain of every server; they are the position from now on.

        Load them whole (``read_chain``), or call it again: files may be removed meanwhile.

        Args:
            is_damaged: Where a server's newest chain cannot be read, take the longest that can,
                all files of which are read for that; ``damage`` says so. It ends at an earlier
                moment, and ``poll`` goes on from there.

        Raises:
            LogNotReady: Not every server of one job has written its rows yet.
            CheckpointError: What is there cannot be read.
        """
        for tries in range(1, _START_TRIES + 1):
            try:
                found = self._find_chains(is_damaged)
                break
            except LogNotReady:
                raise
            except CheckpointError:  # perhaps removed since it was listed
                if tries == _START_TRIES:
                    raise
        servers = {server: _ServerLog(chain) for server, chain in enumerate(found)}
        with self._lock:
            self._servers = servers
        return found

    def _find_chains(self, is_damaged: bool) -> list[Chain]:
        found: list[Chain] = []
        self.damage = ""
        count = 1
        while len(found) < count:
            server = len(found)
            storage = open_storage(below(self.url, folder_of(server)))
            if catalog.latest(storage) is None:
                raise LogNotReady(
                    f"{self.url}: expected rows of {count} server{'s' * (count > 1)} or more, "
                    f"{folder_of(server)} has none yet"
                )
            manifests = self._whole_chain(storage) if is_damaged else catalog.chain(storage)
            chain = Chain(storage, manifests, server)
            its_count = chain.manifests[-1].num_servers
            if server == 0:
                count = its_count
            if its_count != count:
                raise LogNotReady(
                    f"{storage.url}: expected rows of one of {count} servers, as server 0's, "
                    f"got one of {its_count}: another job's, which has ended or just begins"
                )
            found.append(chain)
        return found

    def _whole_chain(self, storage: Storage) -> list[Manifest]:
        """Return the newest chain of which every file can be read."""
        problem: CheckpointError | None = None
        known: dict[str, CheckpointError | None] = {}
        for identity in reversed(catalog.ids(storage)):
            whole: list[Manifest] = []
            try:
                for manifest in catalog.chain(storage, identity):
                    if manifest.id not in known:
                        known[manifest.id] = _damage_of(storage, manifest)
                    if (damage := known[manifest.id]) is not None:
                        raise damage
                    whole.append(manifest)
            except CheckpointError as exc:
                problem = problem or exc
            if whole:
                if problem is not None:
                    self.damage = self.damage or str(problem)
                return whole
        raise problem or catalog.nothing_in(storage)

    def poll(self) -> Update:
        """Return the deltas that follow; those not applied yet come again.

        What may be mended at a later call raises nothing: a file that is not whole, a storage
        that fails. A packet that came several times and was not applied is given up.
        """
        packets: list[Packet] = []
        gap = trouble = ""
        for log in self._servers.values():
            try:
                found = log.look()
            except CheckpointError as exc:  # the whole folder
                trouble = trouble or str(exc)
                continue
            packets += found
            gap, trouble = gap or log.gap, trouble or log.trouble
        return Update(tuple(packets), bool(gap), gap or trouble)

    def applied(self, packet: Packet) -> None:
        """Note that a packet is applied, whole: the position of its server is its number."""
        log = self._servers[packet.server]
        if packet.manifest.base != log.last:
            raise CheckpointError(
                f"{packet.storage.at(packet.manifest.id)}: expected the delta to {log.last}, "
                f"got one to {packet.manifest.base}"
            )
        with self._lock:
            log.advance(packet.manifest)

    @property
    def position(self) -> dict[int, int]:
        """Number applied last, by server; empty before ``start``. A copy."""
        with self._lock:
            return {server: number_of(log.last)[0] for server, log in self._servers.items()}

    @property
    def histories(self) -> dict[int, str]:
        """Name of the history of every server's rows, "" of earlier versions. A copy."""
        with self._lock:
            return {server: log.history for server, log in self._servers.items()}

    def contains(self, packets: Mapping[int, int]) -> bool:
        """Whether the position has reached these numbers, of the same servers and histories.

        Where another number of servers has written since, it has once that is true of the
        servers that both have.
        """
        here = self.position
        common = here.keys() & packets.keys()
        if not common or (len(here) == len(packets) and len(common) < len(here)):
            return False
        return all(here[server] >= packets[server] for server in common)

    def has(self, position: LogPosition) -> bool:
        """Whether the rows at this position are those of a checkpoint, or later ones.

        They are not where a server has lost the rows that it had then, and did not load them.
        """
        if not position.packets:
            return True
        places = self._places()
        if not position.histories or not all(history for history, _, _ in places):
            return self.contains(position.packets)
        return bool(places) and all(position.is_in(*one) for one in places)

    def is_behind(self, position: LogPosition) -> bool:
        """Whether no server's rows are those of a checkpoint, or later ones."""
        places, here = self._places(), self.position
        if not position.histories or not all(history for history, _, _ in places):
            packets = position.packets.items()
            return all(here.get(server, -1) < number for server, number in packets)
        return not any(position.is_in(*one) for one in places)

    def progress(self, other: ChangeLog) -> int:
        """Packets beyond the position of another one; -1 if some of that one's are not here.

        Of other histories nothing can be said but that there is something new.
        """
        here, there = self.position, other.position
        histories = self.histories
        if histories != other.histories or not all(histories.values()):
            return -1 if self.damage and not all(histories.values()) else 1
        ahead = [here[server] - number for server, number in there.items()]
        return -1 if min(ahead) < 0 else sum(ahead)

    def _places(self) -> list[tuple[str, int, Reached]]:
        with self._lock:
            return [(log.history, *log.place) for log in self._servers.values()]

    def ages(self, now: float) -> dict[int, float]:
        """Seconds, at least 0, since the moment of what was applied last, by server."""
        with self._lock:
            made = {server: log.created for server, log in self._servers.items()}
        return {server: max(0.0, now - then) for server, then in made.items()}


class _ServerLog:
    """Where a follower is in the log of one server, and what it has seen beyond.

    Attributes:
        last: Id of what was applied last. Of a full packet that was written beside the deltas,
            the delta that it has whole: with the next one it is of one moment.
        gap: Why the position leads nowhere, or "".
        trouble: What could not be read at the last look, or "".
    """

    def __init__(self, chain: Chain) -> None:
        manifest = chain.manifests[-1]
        self._storage, self._server = chain.storage, chain.server or 0
        self._num_servers, self._schema = manifest.num_servers, manifest.schema
        self.last = manifest.after or manifest.id
        self.created = manifest.created_s
        self.history, self._reached = history_of(manifest)
        self.gap = self.trouble = ""
        self._known: dict[str, Manifest] = {}  # by id, beyond ``last``
        self._seen: dict[str, int] = {}  # what stood in the way, and at how many looks in a row
        self._seen_now: dict[str, int] = {}

    @property
    def place(self) -> tuple[int, Reached]:
        """Number applied last, and what the rows have of other histories."""
        return number_of(self.last)[0], self._reached

    def advance(self, manifest: Manifest) -> None:
        self.last, self.created = manifest.id, manifest.created_s
        self.history, self._reached = history_of(manifest)
        self._known.pop(manifest.id, None)

    def look(self) -> list[Packet]:
        """Return the deltas that follow, in their order; notes gaps."""
        listed = catalog.ids(self._storage)
        own = number_of(self.last)[0]
        names = [one for one in listed if number_of(one)[0] >= own and one != self.last]
        self.trouble = ""
        self._seen, self._seen_now = self._seen_now, {}
        found: dict[str, Manifest] = {}
        for name in names:
            try:
                found[name] = self._known.get(name) or catalog.load(self._storage, name)
            except CheckpointError as exc:
                self.trouble = self.trouble or str(exc)
        self._known = found
        following = self._follow(found)
        self.gap = self._find_gap(listed, found, following)
        # What comes again was not applied the last time: it cannot be read.
        times = self._count(following[0].id) if following else 0
        if not self.gap and times > _BROKEN_POLLS:
            name = self._storage.at(following[0].id)
            self.gap = f"{name}: came {_BROKEN_POLLS} times and was not applied"
            return []
        return [
            Packet(self._server, number_of(one.id)[0], self._storage, one) for one in following
        ]

    def _follow(self, found: Mapping[str, Manifest]) -> list[Manifest]:
        # Of two to the same base the later one has what the other has: publishing that was
        # reported as failed.
        by_base = {one.base: one for one in found.values() if one.base is not None}
        following: list[Manifest] = []
        last = self.last
        while (delta := by_base.get(last)) is not None:
            if delta.schema != self._schema or delta.num_servers != self._num_servers:
                break
            following.append(delta)
            last = delta.id
        return following

    def _find_gap(
        self, listed: Sequence[str], found: Mapping[str, Manifest], following: list[Manifest]
    ) -> str:
        """Return why what is there does not all follow, "" while that may be mended."""
        last = following[-1].id if following else self.last
        reached = number_of(last)[0]
        if listed and number_of(listed[-1])[0] < reached:
            return f"{self._storage.url}: the numbers of packets began again"
        beyond = [
            one
            for one in found.values()
            if one.id != last
            and number_of(one.after or one.id)[0] >= reached
            and one.after != last
        ]
        if not beyond:
            if self.trouble and self._count(f"after {last}") >= _BROKEN_POLLS:
                return self.trouble
            return ""
        for one in beyond:
            if one.kind == "full" and one.after is None:
                return f"{self._storage.at(one.id)}: its writer began again"
        limit = _BROKEN_POLLS if self.trouble else _GAP_POLLS
        if self._count(f"after {last}") < limit:
            return ""
        return self.trouble or f"{self._storage.url}: no delta to {last} is there any more"

    def _count(self, what: str) -> int:
        """Return how many looks in a row have found this."""
        self._seen_now[what] = self._seen.get(what, 0) + 1
        return self._seen_now[what]


# --- what is in a packet --------------------------------------------------------------------


def read_packet(
    packet: Packet,
    owned: tuple[int, int] | None = None,
    mapping: SchemaMapping | None = None,
) -> Iterator[Deletion | Rows]:
    """Yield what a packet changes: at most one ``Deletion`` first, then rows, each sign once.

    Every file is checked before anything is yielded. ``owned`` is (replica, count): only signs
    of that one of ``count``. ``mapping`` leads from the packet's schema to another config.

    Raises:
        CheckpointError: A file is missing, or not what was written. What was yielded before is
            to be thrown away.
    """
    storage, manifest = packet.storage, packet.manifest
    view = _View(packet.storage, packet.server, manifest.num_servers, owned, mapping)
    parts = sorted(view.parts_of(manifest), key=lambda part: part.buckets)
    gone = [read_deleted(storage, each) for each in manifest.deleted]
    for each, signs in zip(manifest.deleted, gone, strict=True):
        view.check_writer(each.path, signs)
    window = DuplicateFilter(f"parts of {storage.at(manifest.id)}")
    memory = BufferPool()
    held: list[tuple[Part, RowBlock]] | None = None
    if sum(part.num_bytes for part in parts) <= _HELD_BYTES:
        held = list(read_ahead(storage, parts, memory))
    for place, part in enumerate(parts):
        signs = check_part(storage, part, memory) if held is None else held[place][1].signs
        view.check_writer(part.path, signs)
        window.add(part, signs)
        storage.on_progress()
    window.close()
    storage.on_progress()
    deleted = view.deleted(manifest, np.concatenate([np.empty(0, np.uint64), *gone]))
    if len(deleted):
        yield Deletion(deleted)
    for part, block in read_ahead(storage, parts, memory) if held is None else held:
        yield from view.rows(part, block)


def _damage_of(storage: Storage, manifest: Manifest) -> CheckpointError | None:
    """Read every file of a packet; returns the error of one that is not what was written."""
    memory = BufferPool()
    try:
        for each in manifest.deleted:
            read_deleted(storage, each)
        for part in manifest.parts:
            check_part(storage, part, memory)
    except CheckpointError as exc:
        return exc
    return None


def read_chain(
    chain: Chain,
    owned: tuple[int, int] | None = None,
    mapping: SchemaMapping | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Iterator[Rows]:
    """Yield every row of a chain once, in its latest state; for the rest as ``read_packet``.

    Each file is checked before its rows are yielded. ``progress`` gets bytes as they are read.
    """
    last = chain.manifests[-1]
    view = _View(chain.storage, chain.server, last.num_servers, owned, mapping)
    needed = [dataclasses.replace(m, parts=tuple(view.parts_of(m))) for m in chain.manifests]
    for part, block in rows_of(chain.storage, needed, progress):
        view.check_writer(part.path, block.signs)
        yield from view.rows(part, block)


@dataclass(frozen=True, slots=True)
class _View:
    """Packets of one server as a reader needs them."""

    storage: Storage
    server: int | None  # whose signs they are; None if all wrote together
    num_servers: int
    owned: tuple[int, int] | None
    mapping: SchemaMapping | None

    def parts_of(self, manifest: Manifest) -> list[Part]:
        """Return the parts with rows of the reader."""
        replica, count = self.owned or (0, 1)
        if self.mapping is not None:
            return self.mapping.parts_for(manifest.parts, replica, count)
        return parts_for(manifest.parts, replica, count)

    def check_writer(self, path: str, signs: NDArray[np.uint64]) -> None:
        """Check that no other server's packets can have these signs too."""
        if self.server is None:
            return
        if num_owned(signs, self.server, self.num_servers) != len(signs):
            raise CheckpointError(
                f"{self.storage.at(path)}: signs: expected those of server {self.server} of "
                f"{self.num_servers}, got another server's"
            )

    def deleted(self, manifest: Manifest, signs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return signs of the reader, as they are here."""
        if self.mapping is not None:
            schema = manifest.schema
            prefixes = signs >> np.uint64(64 - schema.prefix_bits)
            here = [np.empty(0, np.uint64)]
            for name in schema.tables:
                of_table = [1 + i for i, g in enumerate(schema.groups) if g.table == name]
                found = signs[np.isin(prefixes, np.array(of_table, np.uint64))]
                here.append(self.mapping.signs_of(name, found))
            signs = np.concatenate(here)
        if self.owned is None:
            return signs
        replica, count = self.owned
        whose = owners(count)[mix64_array(signs) >> np.uint64(50)]
        mine: NDArray[np.uint64] = signs[whose == replica]
        return mine

    def rows(self, part: Part, block: RowBlock) -> Iterator[Rows]:
        """Yield rows of the reader, as they are here."""
        replica, count = self.owned or (0, 1)
        for piece in split(block):
            here: Iterator[tuple[str, RowBlock]] = iter([(part.table, piece)])
            if self.mapping is not None:
                here = self.mapping.apply(part.table, piece)
            for table, rows in here:
                mine = filter_owned(rows, replica, count)
                if len(mine):
                    yield Rows(table, mine.signs, _floats(mine))


def _floats(block: RowBlock) -> NDArray[np.float32]:
    if block.values.dtype == np.float32:
        return np.asarray(block.values, np.float32)
    values = np.ascontiguousarray(block.values, np.uint16)
    return widen(values.reshape(-1), block.dtype).reshape(values.shape)
