"""Changed rows, written out by each server as training goes on: its change log.

    update --note--> time, or enough changes? --> a thread writes their snapshot,
                                                  a delta to the one before

    full 1 <- delta 2 <- delta 3 <- delta 5 <- delta 6      by ``base``
                                 <- full 4                  by ``after``: of another thread

The first packet has all rows. Deltas follow it without a break, as long as this process writes
them. When they have become as large as the last full packet, or many, another one is written
beside them: a plain snapshot begun right after a delta, by a thread of its own, so that deltas
go on meanwhile. Who follows the deltas passes it by; who begins, or loads, begins there. Its
number is of when it began, not of when it is there.

Each packet is a checkpoint of the server's own catalog, ``incremental_dir/s<replica>``: whole
or not there, and of no other moment than its own. One that fails is logged; what it had comes
again in the next one. While a load replaces rows, and while rows are missing because one was
cut short, there is none. A server keeps other writers out of its folder from its first packet
to its end, or to that of the job.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from persia import env
from persia._core.store.snapshot import Snapshot
from persia._core.store.store import EmbeddingStore
from persia._files import catalog
from persia._files.catalog import below, folder_of
from persia._files.log_position import HISTORY, Reached, joined
from persia._files.manifest import Manifest, number_of, time_text
from persia._files.open import open_storage
from persia._files.schema import SavedSchema
from persia._files.storage import Storage
from persia._files.writer_lock import WriterLock
from persia._server.packets import RUN
from persia._server.row_settings import ServerState
from persia._server.snapshot import room_for_copies, write_rows
from persia.config import ParameterServerConfig
from persia.errors import CheckpointError, PersiaError, StoreError
from persia.logger import get_logger

_logger = get_logger("persia.incremental")

CONSUMER = "incremental"
# Seconds that the end of a server waits for a packet that is being written.
LAST_PACKET_S = 120.0
# Deltas after which there is a full packet though they are small: who begins reads them all.
MAX_DELTAS = 1000
# Longest pause in seconds after packets that failed; each one doubles it.
LONGEST_PAUSE_S = 60.0
# Full packets that stay, with all that came after them.
_NUM_FULLS = 2


class IncrementalWriter:
    """Writes the changes of one server. Any thread may call its methods.

    Args:
        replica: Number of the server, of ``num_replicas``.
        config: Where and how often.
        whole_rows: A context in which no load replaces rows, or an error.
        requests: Returns how many requests were served, which packets are to disturb little.
        clock: Seconds since 1970, of packets.
        note_history: Gets what ``resume`` needs in the next process, if the rows outlive this
            one.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        config: ParameterServerConfig,
        whole_rows: AbstractContextManager[object],
        requests: Callable[[], int],
        *,
        clock: Callable[[], float] = time.time,
        note_history: Callable[[dict[str, Any]], object] = lambda noted: None,
    ) -> None:
        self._whole_rows, self._requests, self._clock = whole_rows, requests, clock
        self._replica, self._num_replicas = replica, num_replicas
        self._threshold = config.incremental_buffer_size
        self._flush_s = config.incremental_flush_sec
        self.url = below(config.incremental_dir, folder_of(replica))
        self._dir = config.incremental_dir
        self._kept = _KeptPackets(config.incremental_keep_sec, clock)  # used with _pruning
        self._pruning = threading.Lock()
        self._writing = threading.Lock()  # held over a packet; guards the next
        self._lock: WriterLock | None = None  # of the folder
        self._is_claimed = False  # since it was locked last
        self._last_full = ""  # the one begun last beside deltas
        self._store: EmbeddingStore | None = None  # whose changes are logged
        self._base: str | None = None  # the packet written last; None before a full one
        self._schema: SavedSchema | None = None  # of that packet
        self._full: _FullPacket | None = None  # begun last
        self._failed_fulls = 0  # one after the other
        self._no_full_before = 0.0  # monotonic
        self._note_history = note_history
        self._changed = threading.Condition()  # guards all below
        self._history = secrets.token_hex(8)
        self._reached: Reached = {}  # of other histories
        self._has_failed = False  # the packet begun last
        self._num_failed = 0  # one after the other
        self._num_changes = 0  # upper bound, since the last packet
        self._is_awaited = False  # a cut needs a packet, though nothing may have changed
        self._number: int | None = None  # the largest in use, once it is known
        self._begun = 0  # number of the packet begun last, of none beside the others
        # Bytes of the last full packet and of the deltas since, and how many those are.
        self._sizes = [0, 0, 0]
        self._state: ServerState | None = None  # as it was at the last change
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def note(self, num_rows: int, state: Callable[[], ServerState]) -> None:
        """Note that rows have changed; ``state`` returns what the server holds now."""
        with self._changed:
            self._num_changes += num_rows
            # Under the lock: a state read before could replace one that came after it.
            self._state = state()
            self._start()
            if self._num_changes >= self._threshold:
                self._changed.notify_all()

    def note_replaced(self, state: Callable[[], ServerState]) -> None:
        """Note that rows were written or dropped, not trained; nothing before any was."""
        with self._changed:
            if self._state is None:
                return
        self.note(1, state)

    def resume(self, noted: Any) -> None:
        """Begin with what a process before this one noted of the rows that are here again."""
        with self._changed:
            with suppress(TypeError, KeyError, ValueError):
                reached = {str(name): int(number) for name, number in noted["reached"].items()}
                self._history, self._reached = str(noted["history"]), reached
            self._note_history(self._about_history())

    def note_loaded(self, reached: Reached) -> None:
        """Note what the rows that were loaded have of logs."""
        with self._changed:
            others = {name: n for name, n in reached.items() if name != self._history}
            self._reached = joined(self._reached, others)
            self._note_history(self._about_history())

    def _about_history(self) -> dict[str, Any]:
        return {"history": self._history, "reached": dict(self._reached)}

    def begin_wait(self, state: Callable[[], ServerState]) -> dict[str, Any]:
        """Return which packet has all that is here now, once it is there.

        It comes within ``incremental_flush_sec`` though nothing may have changed since the
        last one. The caller holds updates back. Nothing is returned if the folder cannot be
        read.
        """
        if self._number is None:
            try:
                self._see_number(open_storage(self.url))
            except PersiaError as exc:
                _logger.warning("%s: this checkpoint has no place in it: %s", self.url, exc)
                return {}
        with self._changed:
            self._is_awaited = True
            self._state = state()
            self._start()
            # Packets up to this number may have begun before.
            packet = self._begun + 1
            about = self._about_history()
        return {"change_log": {"url": self._dir, "packet": packet, **about}}

    def _start(self) -> None:
        """Start the thread, with the lock held, unless it runs."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._run, name="persia-incremental", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        due = time.monotonic() + self._flush_s
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._thread is not me
                        or (self._num_changes >= self._threshold and not self._num_failed)
                    ),
                    max(0.0, due - time.monotonic()),
                )
                if self._thread is not me:
                    return
            due = time.monotonic() + self._flush_s
            self._try()
            if self._num_failed:
                pause_s = self._flush_s * 2.0 ** min(self._num_failed, 16)
                due = time.monotonic() + max(min(pause_s, LONGEST_PAUSE_S), self._flush_s)

    def _try(self) -> None:
        try:
            self.flush()
        except Exception:
            _logger.exception("%s: a packet failed; its rows come with the next one", self.url)

    def flush(self) -> None:
        """Write what has changed, if anything has."""
        with self._writing:
            with self._changed:
                state = self._state
                is_due = self._num_changes or self._has_failed or self._is_awaited
                if state is None or not is_due:
                    return
                self._num_changes, self._has_failed = 0, True
                self._num_failed += 1
            storage = open_storage(self.url)
            self._claim(storage)
            identity = self._next_id()
            with self._whole_rows:
                begun = self._now(identity)
                snapshot = self._begin_snapshot(state)
            with snapshot:  # an open one that is not read would stop training
                snapshot.allow(room_for_copies(snapshot))
                self._write(storage, state, snapshot, begun)
            with self._changed:
                self._has_failed, self._num_failed = False, 0
            if self._is_full_due():
                self._begin_full(storage, state)

    def _claim(self, storage: Storage) -> None:
        """Keep other writers out, and see whether the next packet can follow the last one."""
        self._lock = self._lock or WriterLock(storage)
        self._lock.acquire()
        if self._base is not None:
            if self._is_claimed:
                is_there = self._is_published(storage, self._base)
            else:  # another one may have written meanwhile
                is_there = catalog.latest(storage) in (self._base, self._last_full)
            if not is_there:
                self._base = None
        if not self._is_claimed:
            self._see_number(storage)
            self._is_claimed = True

    @staticmethod
    def _is_published(storage: Storage, identity: str) -> bool:
        try:
            return storage.size(f"{identity}.json") > 0
        except CheckpointError:  # it was removed, perhaps with the folder
            return False

    def _see_number(self, storage: Storage) -> None:
        """Number packets beyond all that are there."""
        largest = number_of(catalog.new_id(storage))[0] - 1
        with self._changed:
            self._number = max(self._number or 0, largest)
            self._begun = max(self._begun, largest)

    def _next_id(self) -> str:
        """Return the id of the next packet, before its snapshot begins."""
        with self._changed:
            # A cut that comes from here on is not in this one, for all that it knows.
            self._begun = self._number = (self._number or 0) + 1
            self._is_awaited = False
            return catalog.id_of(self._number)

    def _now(self, identity: str) -> _Begun:
        with self._changed:  # a load that ends later is not in this packet
            return _Begun(identity, self._clock(), self._about_history())

    def _begin_snapshot(self, state: ServerState) -> Snapshot:
        store = state.store
        if store is not self._store:  # rows of another store are no delta to those written
            with suppress(StoreError):  # it logs changes already
                store.open_changes(CONSUMER)
            self._store, self._base = store, None
        # A delta is read by the schema of its base: another learning rate makes another one.
        is_other = self._base is None or state.settings.saved_schema() != self._schema
        return store.begin_snapshot(CONSUMER, full=is_other)

    def _write(
        self,
        storage: Storage,
        state: ServerState,
        snapshot: Snapshot,
        begun: _Begun,
        full: _FullPacket | None = None,
    ) -> None:
        """Write and publish a packet."""
        (identity, created, about), settings = begun, state.settings
        base = None if snapshot.is_full else self._base
        extras: dict[str, Any] = {HISTORY: about, "servers": settings.to_json()}
        if (run := env.run_id()) is not None:
            extras[RUN] = run
        note: Callable[[int], None] = _note_nothing
        if full is not None:
            extras["after"], note = full.after, full.check
        try:
            parts, deleted = write_rows(
                storage,
                f"{identity}/rows",
                snapshot,
                settings,
                self._replica,
                self._requests,
                note,
            )
            manifest = Manifest(
                id=identity,
                kind="full" if snapshot.is_full else "delta",
                base=base,
                step=0,
                created=time_text(created),
                num_servers=self._num_replicas,
                schema=settings.saved_schema(),
                parts=parts,
                deleted=deleted,
                extras=extras,
            )
            catalog.publish(storage, manifest)
        except BaseException:
            catalog.discard(storage, identity)
            raise
        self._note_written(manifest)
        if full is None:
            snapshot.commit()
            self._base, self._schema = identity, manifest.schema
        if snapshot.is_full:
            self._prune(storage)

    def _note_written(self, manifest: Manifest) -> None:
        with self._changed:
            if manifest.kind == "delta":
                self._sizes[1] += manifest.num_bytes
                self._sizes[2] += 1
            elif manifest.after is None:
                self._sizes = [manifest.num_bytes, 0, 0]
            else:
                self._sizes[0] = manifest.num_bytes
        _logger.info("%s: %s of %d rows", self.url, manifest.kind, manifest.num_rows)

    # --- full packets beside the deltas -----------------------------------------------------

    def _is_full_due(self) -> bool:
        if self._full is not None:
            if not self._full.is_over.is_set():
                return False
            self._end_full(self._full)
        with self._changed:
            full, deltas, count = self._sizes
            is_long = (deltas > full or count >= MAX_DELTAS) and not self._is_closed
        return is_long and time.monotonic() >= self._no_full_before

    def _end_full(self, full: _FullPacket) -> None:
        """Note what came of it."""
        self._full = None
        if full.is_written:
            self._failed_fulls = 0
            return
        with self._changed:
            self._sizes[1] += full.sizes[1]
            self._sizes[2] += full.sizes[2]
        self._failed_fulls += 1
        pause_s = min(2.0 ** min(self._failed_fulls, 16), LONGEST_PAUSE_S)
        self._no_full_before = time.monotonic() + pause_s

    def _begin_full(self, storage: Storage, state: ServerState) -> None:
        """Begin a packet of all rows beside the deltas; the one just written is ``_base``."""
        identity = self._next_full_id()
        with self._changed:
            sizes, self._sizes = tuple(self._sizes), [self._sizes[0], 0, 0]
        self._full = full = _FullPacket(identity, self._base or "", sizes)
        self._last_full = identity
        snapshot: Snapshot | None = None
        try:
            with self._whole_rows:
                begun = self._now(identity)
                snapshot = state.store.begin_snapshot()
            snapshot.allow(room_for_copies(snapshot))
            threading.Thread(
                target=self._run_full,
                args=(open_storage(self.url), state, snapshot, begun, full),
                name="persia-full-packet",
                daemon=True,
            ).start()
        except BaseException:
            if snapshot is not None:
                snapshot.close()
            full.is_over.set()
            raise

    def _next_full_id(self) -> str:
        with self._changed:
            self._number = (self._number or 0) + 1
            return catalog.id_of(self._number)

    def _run_full(
        self,
        storage: Storage,
        state: ServerState,
        snapshot: Snapshot,
        begun: _Begun,
        full: _FullPacket,
    ) -> None:
        try:
            with snapshot:
                self._write(storage, state, snapshot, begun, full)
            full.is_written = True
        except Exception:
            _logger.exception("%s: a full packet failed; deltas go on without it", self.url)
        finally:
            full.is_over.set()

    def _prune(self, storage: Storage) -> None:
        """Remove what no reader needs any more; what cannot be removed stays for now."""
        writing = () if self._full is None else (self._full.identity,)
        with self._pruning:
            try:
                self._kept.prune(storage, writing)
            except CheckpointError as exc:
                _logger.warning("%s: old packets could not be removed: %s", self.url, exc)

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left, and end."""
        with self._changed:
            self._is_closed = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(LAST_PACKET_S)
            if thread.is_alive():
                _logger.error(
                    "%s: a packet of changed rows is not there after %g s; this server ends "
                    "without it",
                    self.url,
                    LAST_PACKET_S,
                )
                return
        self._try()
        self._release()

    def flush_and_release(self) -> None:
        """Write what has changed, and unlock the folder though that fails."""
        try:
            self.flush()
        finally:
            self._release()

    def _release(self) -> None:
        """Unlock the folder for another writer, and end the thread, until the next change."""
        with self._changed:
            self._thread = None
            self._changed.notify_all()
        with self._writing:
            if self._full is not None:
                self._full.finish()
                self._end_full(self._full)
            if self._lock is not None:
                self._lock.release()
            self._is_claimed = False


class _Begun(NamedTuple):
    """A packet's id, and its moment: when it was, and what the rows had of logs."""

    identity: str
    created: float
    about: dict[str, Any]


def _note_nothing(num_rows: int) -> None:
    pass


class _FullPacket:
    """A full packet that is written beside the deltas.

    Args:
        identity: Its id.
        after: The delta that it has whole.
        sizes: What was counted of the deltas before it, in case that it fails.
    """

    def __init__(self, identity: str, after: str, sizes: tuple[int, ...]) -> None:
        self.identity, self.after, self.sizes = identity, after, sizes
        self.is_over = threading.Event()
        self.is_written = False
        self._is_cancelled = False

    def check(self, num_rows: int) -> None:
        """Called as rows are written; raises once it is given up."""
        if self._is_cancelled:
            raise CheckpointError("a full packet was cancelled: its writer ends")

    def finish(self) -> None:
        """Wait for it, without training beside it not long, and then give it up."""
        if not self.is_over.wait(LAST_PACKET_S):
            self._is_cancelled = True
            self.is_over.wait(LAST_PACKET_S)


class _KeptPackets:
    """Which packets of a catalog stay: the last full ones, those after them, and young ones.

    A packet is as old as the clock says when it is seen first, and ages by another clock, which
    is never set: one that was made while the clock was wrong goes in the end.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._known: dict[str, tuple[bool, float]] = {}  # is full; made when, monotonic

    def prune(self, storage: Storage, writing: tuple[str, ...]) -> None:
        """Remove the others; none if one cannot be read."""
        known = {one: self._known.get(one) for one in catalog.ids(storage)}
        for identity, entry in known.items():
            if entry is None:
                manifest = catalog.load(storage, identity)
                age_s = max(0.0, self._clock() - manifest.created_s)
                known[identity] = manifest.kind == "full", time.monotonic() - age_s
        self._known = {one: entry for one, entry in known.items() if entry is not None}
        since = time.monotonic() - self._keep_s
        fulls = [one for one, (is_full, _) in self._known.items() if is_full]
        young = [one for one, (_, made) in self._known.items() if made > since]
        oldest = number_of(young[0]) if young else None
        for first in reversed(fulls[: -_NUM_FULLS + 1]):
            if oldest is None or number_of(first) <= oldest:
                catalog.drop_before(storage, first, writing)
                return
