"""Rows that are served while they change: pinned by each request, replaced as a whole.

    base              all rows, at one moment or after some packets of a change log
    overlay, base     a packet more: its rows and tombstones come before the base's

A packet goes into an overlay aside; one pointer shows it whole. Then the overlay is merged into
the base, which it still shadows, in small steps, once no request reads the base without it; and
one pointer shows the base alone. Other rows, of a newer checkpoint or after a gap in the log,
are built beside and shown by the same pointer. What fails leaves the rows as they were.

With a checkpoint and a log, rows are the checkpoint's until the log has come as far, and then
the log's. A newer checkpoint takes their place again once the log has stayed behind it, on
every server, for ``TAKEOVER_S``: training goes on, and that log does not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from persia._core.table.row_table import RowTable
from persia._files.change_log import ChangeLog, Packet
from persia._files.log_position import LogPosition
from persia._files.throttle import Throttle
from persia._rows.row_reader import RowReader
from persia._rows.row_source import Opened, RowSource, open_checkpoint, open_log
from persia._rows.storage_calls import StorageCalls
from persia.config import EmbeddingSchema
from persia.errors import (
    CheckpointError,
    LogNotReady,
    PersiaError,
    ServiceBusy,
    ServiceTimeout,
)
from persia.logger import get_logger

Signs = NDArray[np.uint64]

# When rows of this process were asked for last, whichever they were: such requests go first.
_last_view = 0.0
_logger = get_logger("persia.rows")

# Places of an overlay that are merged between two pauses: readers wait for none of it.
_MERGE_ROWS = 4096
# Of one processor, for all threads of this process that read rows beside requests.
_SHARE = 0.25
# Packets that wait from which on there is no time to rest.
_MANY_PACKETS = 8
# Seconds for which requests are taken to go on: many pieces of work end between two of them.
_REQUESTS_S = 0.1
# Seconds for which rows replaced by another checkpoint's stay after they were last asked for.
KEEP_PREVIOUS_S = 10.0
# Seconds between two attempts of what failed: the first, and at most.
_RETRY_S, _MAX_RETRY_S = 0.25, 30.0
# The longest while a log is not whole yet: a look is cheap, and rows are waited for.
_MAX_NOT_READY_S = 2.0
# Seconds that a load may take, a look at what is new, and reading one packet.
LOAD_TIMEOUT_S, _LOOK_S, _PACKET_S = 3600.0, 60.0, 600.0
# Seconds that requests get to end before what they read is changed.
_READERS_S = 60.0
# Seconds that a log may stay behind a checkpoint: its packet of the same moment comes within
# ``incremental_flush_sec``.
TAKEOVER_S = 180.0
_DELETED = 2  # the state of a tombstone
_COUNTS = (
    *("applied_packets", "applied_rows", "deleted_rows", "gaps", "resyncs", "loads"),
    *("failed_loads", "failed_polls", "damaged_loads", "kept_rows"),
)


def _requests() -> float:
    """Return a number that changes while requests come."""
    now = time.monotonic()
    return now if now < _last_view + _REQUESTS_S else _last_view


_throttle = Throttle(_requests, _SHARE)


class _Closed(PersiaError):
    """Rows are not wanted any more; what is half done is thrown away."""


@dataclass(slots=True)
class _Shown:
    """What requests see; its owner's lock guards ``num_readers``."""

    tables: tuple[RowTable, ...]  # the later ones are shadowed by those before
    version: str
    num_readers: int = 0


@dataclass(slots=True, eq=False)
class Built:
    """Rows built beside those that are shown."""

    source: RowSource  # what they are of
    version: str
    table: RowTable
    log: ChangeLog | None
    position: LogPosition = field(default_factory=LogPosition)  # of the checkpoint, in its log
    checkpoint: str = ""  # id of the newest one that these rows have, as far as it is known


@dataclass(slots=True)
class _Ahead:
    """A checkpoint that the log has not come to."""

    checkpoint: str
    position: LogPosition
    since: float  # monotonic


class RowView:
    """The rows of one moment, for one request."""

    def __init__(self, shown: _Shown) -> None:
        self._tables, self.version = shown.tables, shown.version

    def lookup(
        self,
        table: int,
        signs: Signs,
        rows_out: NDArray[np.float32],
        state_out: NDArray[np.uint8] | None = None,
    ) -> int:
        """Write each sign's row to ``rows_out`` [n, dim], zeros where there is none.

        ``state_out`` [n] gets 1 where there is a row, else 0. Returns how many are missing.
        """
        base = self._tables[-1]
        if len(self._tables) == 1:
            num_missing = base.lookup(table, signs, rows_out, state_out)
            if state_out is not None and base.num_deleted:
                state_out[state_out == _DELETED] = 0
            return num_missing
        if state_out is None:
            state_out = np.empty(len(signs), np.uint8)
        base.lookup(table, signs, rows_out, state_out)
        above, states = np.empty_like(rows_out), np.empty(len(signs), np.uint8)
        self._tables[0].lookup(table, signs, above, states)
        changed = np.flatnonzero(states)
        if len(changed):
            rows_out[changed] = above[changed]  # zeros of tombstones
            state_out[changed] = states[changed]
        state_out[state_out == _DELETED] = 0
        return len(signs) - int(np.count_nonzero(state_out == 1))


class _ShownRows:
    """What requests see of rows, and how packets and other rows come into it.

    Args:
        keep_previous_s: Seconds that rows replaced by another checkpoint's can be asked for.
    """

    def __init__(self, keep_previous_s: float) -> None:
        self._keep_previous_s = keep_previous_s
        self._lock = threading.Lock()  # guards what is shown, and all up to ``_working``
        self._changed = threading.Condition(self._lock)
        self._shown: _Shown | None = None
        self._previous: tuple[_Shown, float] | None = None  # and until when it may be asked for
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        self._problem = "its rows are not loaded yet"
        self._position: dict[int, int] = {}
        self._log: ChangeLog | None = None  # followed
        self._generation = 0  # how often all rows were replaced
        # Held by a thread that exchanges or merges rows, never over a call of a storage.
        self._working = threading.RLock()
        self._below: list[_Shown] = []  # what may read the base without the overlay
        self._is_behind = False  # packets wait: there is no time to rest
        self._stop = threading.Event()

    @property
    def version(self) -> str:
        """The checkpoint whose rows are shown; "" before there are any, and of a log's."""
        shown = self._shown
        return "" if shown is None else shown.version

    @property
    def is_ready(self) -> bool:
        return self._shown is not None

    @property
    def problem(self) -> str:
        """Why no rows are shown; "" once they are."""
        return "" if self._shown is not None else self._problem

    @contextmanager
    def view(self, version: str = "") -> Iterator[RowView]:
        """Pin the rows of this moment, or those of ``version`` if they are still here.

        Raises:
            ServiceBusy: No rows are loaded yet.
        """
        global _last_view
        with self._lock:
            shown = self._shown
            if shown is None:
                raise ServiceBusy(f"rows: {self._problem}")
            if version and version != shown.version and self._previous is not None:
                before, _ = self._previous
                if before.version == version:
                    shown = before
                    until = time.monotonic() + self._keep_previous_s
                    self._previous = before, until
            shown.num_readers += 1
        _last_view = time.monotonic()  # not of one that is refused: rows are to come soon then
        try:
            yield RowView(shown)
        finally:
            with self._lock:
                shown.num_readers -= 1
                if not shown.num_readers:
                    self._changed.notify_all()

    def _apply(
        self, log: ChangeLog, packet: Packet, overlay: RowTable, generation: int
    ) -> bool:
        """Show a packet whole, then make it part of the base; False if that was replaced."""
        with self._working:
            shown = self._shown
            if shown is None or generation != self._generation:
                return False
            self._exchange(shown, (overlay, shown.tables[-1]))
            log.applied(packet)
            with self._lock:
                self._position = log.position
                self._changed.notify_all()
            self._merge()
        return True

    def _merge(self) -> None:
        """Merge the overlay into the base, if there is one."""
        with self._working:
            shown = self._shown
            if shown is None or len(shown.tables) == 1:
                return
            self._wait_for_readers()
            overlay, base = shown.tables
            start = base.merge(overlay, 0, _MERGE_ROWS)
            while start:
                self._rest()
                start = base.merge(overlay, start, _MERGE_ROWS)
            self._exchange(shown, (base,))

    def _rest(self) -> None:
        """Leave the processors to requests, after a piece of work; end it if none is wanted."""
        if self._stop.is_set():
            raise _Closed("rows: closed before they were read")
        _throttle.rest(lambda: float(self._is_behind))

    def _exchange(self, before: _Shown, tables: tuple[RowTable, ...]) -> None:
        with self._lock:
            # Also of an older overlay over the base: the next one is not in what they read.
            self._below = [one for one in (*self._below, before) if one.num_readers]
            self._shown = _Shown(tables, before.version)

    def _wait_for_readers(self) -> None:
        """Wait for requests that read the base without the overlay."""

        def num_readers() -> int:
            return sum(one.num_readers for one in self._below)

        with self._lock:
            if not self._changed.wait_for(
                lambda: not num_readers() or self._stop.is_set(), _READERS_S
            ):
                raise ServiceTimeout(
                    f"rows: {num_readers()} requests have not ended within "
                    f"{_READERS_S:g} s; no further packet is applied"
                )
            if num_readers():
                raise ServiceTimeout("rows: closed while requests were being served")
            self._below = []

    def _forget_previous(self) -> None:
        with self._lock:
            if self._previous is not None and time.monotonic() >= self._previous[1]:
                self._previous = None

    @property
    def position(self) -> dict[int, int]:
        """Packets of the log that the rows contain, by server."""
        with self._lock:
            return dict(self._position)

    def contains(self, packets: Mapping[int, int]) -> bool:
        """Whether the rows shown have these packets of the log."""
        with self._lock:
            return self._contains(packets)

    def _contains(self, packets: Mapping[int, int]) -> bool:
        if self._shown is None:
            return False
        position, log = self._position, self._log
        if log is not None:  # which knows what is the same of another number of servers
            return not packets or log.contains(packets)
        return all(position.get(server, -1) >= number for server, number in packets.items())

    def wait_for(self, packets: Mapping[int, int], timeout_s: float) -> None:
        """Wait until the rows shown have these packets; ServiceTimeout if they do not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._contains(packets), timeout_s):
                raise ServiceTimeout(
                    f"rows: expected packets {dict(packets)} within {timeout_s:g} s, got "
                    f"{self._position}"
                )

    def __len__(self) -> int:
        shown = self._shown
        return 0 if shown is None else len(shown.tables[-1])

    def _count(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(counts)


class LiveRows(_ShownRows):
    """The rows of one model or server; any thread may call it.

    ``version`` is "" of rows that follow a log. Servers that follow one log by themselves may
    differ by what came last: there is no moment that they have in common.

    Args:
        source: Where rows come from.
        schema: The embedding config, whose groups and tables rows are mapped to by names.
        dtype: How values are held: float32, float16, bfloat16 or int8.
        owned: (replica, count): only rows of that one of ``count`` servers; None is all.
        follow_interval_s: Seconds between two looks for what is new.
        kept_groups: Feature groups whose rows stay though training has dropped them.
        load_timeout_s: Seconds that one load may take.
        num_threads: Threads that large lookups share.
    """

    def __init__(
        self,
        source: RowSource,
        schema: EmbeddingSchema,
        *,
        dtype: str = "float32",
        owned: tuple[int, int] | None = None,
        follow_interval_s: float = 1.0,
        kept_groups: Collection[str] = (),
        load_timeout_s: float = LOAD_TIMEOUT_S,
        keep_previous_s: float = KEEP_PREVIOUS_S,
        num_threads: int = 1,
    ) -> None:
        super().__init__(keep_previous_s)
        self._interval_s, self._load_timeout_s = follow_interval_s, load_timeout_s
        self._reader = RowReader(schema, dtype, owned, kept_groups, num_threads, self._rest)
        self._source = source  # of what is shown; the lock guards it, and the next
        self._checkpoint = ""  # the newest one that the rows have
        self._based_on = LogPosition()  # its place in the log
        self._polling = threading.Lock()  # held over ``poll``; guards the next
        self._ahead: _Ahead | None = None
        self._gap = ""  # why all rows are to be read again, until they are
        self._calls = StorageCalls(self._stop)
        self._thread: threading.Thread | None = None

    # --- rows that replace all others -------------------------------------------------------

    def load(self, timeout_s: float | None = None) -> None:
        """Load the source's rows and show them; what was shown stays if that fails.

        Raises:
            CheckpointError: The rows cannot be read. ConfigError: They do not fit the config.
            ServiceTimeout: They were not there in time.
        """
        with self._lock:
            source, generation = self._source, self._generation
        self.show(self.build(source, timeout_s), generation)

    def build(self, source: RowSource, timeout_s: float | None = None) -> Built:
        """Build the rows of a source beside those that are shown; errors as ``load``."""
        limit_s = self._load_timeout_s if timeout_s is None else timeout_s
        return self._build(source, self._open, limit_s)

    def _build(
        self,
        source: RowSource,
        open_rows: Callable[[RowSource, bool], _Found],
        limit_s: float,
    ) -> Built:
        def work(deadline: float) -> Built:
            built = self._read(source, open_rows, deadline)
            self._catch_up(built, source.packets, deadline)
            shown = self._shown
            if shown is not None and not source.is_explicit:
                num_kept = self._reader.keep_rows(built.table, shown.tables)
                self._count({"kept_rows": num_kept})
            return built

        try:
            place = source.checkpoint or source.change_log
            built = self._calls.run(place, limit_s, work)
        except BaseException as exc:
            with self._lock:
                self._counts["failed_loads"] += 1
                self._problem = str(exc)
            raise
        self._count({"loads": 1})
        if built.log is not None and built.log.damage:
            self._count({"damaged_loads": 1})
            _logger.warning(
                "%s is damaged: %s; rows are those before it, of packets %s",
                built.log.url,
                built.log.damage,
                built.log.position,
            )
        return built

    def _read(
        self,
        source: RowSource,
        open_rows: Callable[[RowSource, bool], _Found],
        deadline: float,
    ) -> Built:
        """Read rows whole; of a log that is damaged, those before the damage."""

        def check() -> None:
            if time.monotonic() > deadline or self._stop.is_set():
                raise ServiceTimeout("rows: a load was given up")

        def read(*, is_damaged: bool) -> Built:
            opened, source_of, checkpoint = open_rows(source, is_damaged)
            table = self._reader.read_all(opened, check)
            return Built(
                source_of, opened.version, table, opened.log, opened.position, checkpoint
            )

        try:
            return read(is_damaged=False)
        except LogNotReady:
            raise
        except CheckpointError as exc:
            if not source.change_log:
                raise
            _logger.info("%s: what can be read is looked for: %s", source.change_log, exc)
        return read(is_damaged=True)

    def _open(self, source: RowSource, is_damaged: bool) -> _Found:
        """Open the log of a source if it has come as far as its checkpoint, else that.

        Returns the source of what follows too, and the id of the checkpoint.
        """
        url = source.change_log
        if not source.checkpoint:
            return open_log(url, is_damaged=is_damaged), source, ""
        try:
            opened = open_checkpoint(source.checkpoint, source.checkpoint_id)
        except CheckpointError:
            if not url or source.is_explicit:
                raise
            return open_log(url, is_damaged=is_damaged), source, ""
        source = source.followed(opened)
        if source.change_log:
            try:
                log = _whole_log(url, opened.position, is_damaged=is_damaged)
            except CheckpointError as exc:
                if not is_damaged and not isinstance(exc, LogNotReady):
                    raise  # perhaps a part of it can be read
                _logger.info("%s: %s; rows are the checkpoint's", url, exc)
            else:
                return log or opened, source, opened.version
        return opened, source, opened.version

    def _open_log(
        self,
        source: RowSource,
        is_damaged: bool,
        *,
        before: ChangeLog | None,
        position: LogPosition,
        checkpoint: str,
    ) -> _Found:
        """Open the log in place of rows that are shown, which are never later ones.

        ``before`` is the log that they follow, if they do; ``position`` and ``checkpoint`` are
        what they are based on. A newer checkpoint does as well.
        """
        url = source.change_log
        opened = _whole_log(url, position, is_damaged=is_damaged)
        newer = source.newer_than(checkpoint) if opened is None else None
        if newer is not None:
            other = open_checkpoint(source.checkpoint, newer).position
            if other.packets:
                opened = _whole_log(url, other, is_damaged=is_damaged)
                checkpoint = newer
        if opened is None:
            raise LogNotReady(
                f"{url}: expected rows that go on from packets {dict(position.packets)} of the "
                "checkpoint, got others: a server has lost its rows, and has not loaded that "
                "checkpoint or a later one"
            )
        log = opened.log
        if before is not None and log is not None and log.progress(before) < bool(log.damage):
            raise CheckpointError(
                f"{url}: expected packets after {before.position}, got them up to "
                f"{log.position}: {log.damage or 'the others are not there any more'}"
            )
        return opened, source, checkpoint

    @staticmethod
    def _open_checkpoint(source: RowSource, is_damaged: bool) -> _Found:
        opened = open_checkpoint(source.checkpoint)
        return opened, source, opened.version

    def _catch_up(self, built: Built, packets: Mapping[int, int], deadline: float) -> None:
        """Apply packets to rows that no request sees yet.

        Without a position of the checkpoint in the log, until these packets are in them.
        """
        log = built.log
        if log is None:
            return
        wanted = {} if built.position.packets else packets
        while True:
            if not log.damage:  # else requests need not wait for what may never come
                update = log.poll()
                for packet in update.packets:
                    self._count(self._reader.read_into(built.table, packet))
                    log.applied(packet)
                if update.resync and wanted and not log.contains(wanted):
                    raise CheckpointError(f"the change log has a gap: {update.reason}")
            if not wanted or log.contains(wanted):
                return
            if log.damage or time.monotonic() >= deadline:
                raise ServiceTimeout(
                    f"{log.url}: expected packets {dict(wanted)}, got {log.position}: a load "
                    f"was given up{log.damage and ': '}{log.damage}"
                )
            if self._stop.wait(min(self._interval_s, 0.1)):
                raise ServiceTimeout("rows: closed while they were loaded")

    def show(self, built: Built, generation: int | None = None) -> bool:
        """Show rows that were built, in place of those shown so far.

        With ``generation``, only if all rows were not replaced since; returns whether it did.
        """
        with self._working, self._lock:
            if generation not in (None, self._generation):
                return False
            before, self._generation = self._shown, self._generation + 1
            self._below = []  # its base is not shown any more
            self._source, self._log = built.source, built.log
            self._checkpoint, self._based_on = built.checkpoint, built.position
            self._shown, self._problem = _Shown((built.table,), built.version), ""
            self._previous = None
            if before is not None and before.version != built.version:
                self._previous = before, time.monotonic() + self._keep_previous_s
            log = built.log
            position = built.position.packets if log is None else log.position
            self._position = dict(position)
            self._changed.notify_all()
        _logger.info(
            "rows of %s are served: %d rows, %d bytes",
            built.version or built.source.change_log,
            len(built.table),
            built.table.num_bytes,
        )
        return True

    # --- following --------------------------------------------------------------------------

    def poll(self) -> bool:
        """Look once for what is new, and show it; returns whether there was anything.

        Raises:
            PersiaError, OSError, MemoryError: It failed; the rows are as they were.
        """
        return self._poll(may_resync=True)

    def _poll(self, *, may_resync: bool) -> bool:
        with self._polling:
            self._forget_previous()
            with self._lock:
                is_loaded, generation = self._shown is not None, self._generation
                source, log, checkpoint = self._source, self._log, self._checkpoint
                based_on = self._based_on
            if not is_loaded:
                self.load()
                return True
            again = partial(
                self._open_log, before=log, position=based_on, checkpoint=checkpoint
            )
            if log is not None:
                is_new = self._poll_log(log, generation)
                if self._gap and may_resync:
                    is_new = self._resync(source, again, generation) or is_new
                return is_new or self._poll_behind(source, log, checkpoint, generation)
            if source.change_log and self._is_log_whole(source.change_log, based_on):
                built = self._build(source, again, self._load_timeout_s)
                return self.show(built, generation)
            if self._newer(source, checkpoint) is None:
                return False
            return self.show(self.build(source), generation)

    def _newer(self, source: RowSource, checkpoint: str) -> str | None:
        if not source.follows_newer or not source.checkpoint:
            return None
        return self._calls.run(
            source.checkpoint, _LOOK_S, lambda deadline: source.newer_than(checkpoint)
        )

    def _is_log_whole(self, url: str, position: LogPosition) -> bool:
        try:
            found = self._calls.run(
                url, _LOOK_S, lambda deadline: _whole_log(url, position) is not None
            )
        except (CheckpointError, ServiceTimeout) as exc:
            _logger.debug("%s: %s", url, exc)
            return False
        return found

    def _poll_log(self, log: ChangeLog, generation: int) -> bool:
        self._merge()
        update = self._calls.run(log.url, _LOOK_S, lambda deadline: log.poll())
        reason = update.reason if update.resync else ""
        if reason and not self._gap:
            self._count({"gaps": 1})
            _logger.warning("%s: %s; all rows are to be read again", log.url, reason)
        self._gap = reason
        for number, packet in enumerate(update.packets, 1):
            self._is_behind = len(update.packets) - number >= _MANY_PACKETS
            overlay, counts = self._calls.run(log.url, _PACKET_S, self._overlay_of(packet))
            self._count(counts)
            if not self._apply(log, packet, overlay, generation):
                return True
            del overlay  # its memory goes before the next one comes
        return bool(update.packets)

    def _resync(
        self, source: RowSource, again: Callable[[RowSource, bool], _Found], generation: int
    ) -> bool:
        if not self.show(self._build(source, again, self._load_timeout_s), generation):
            return False
        self._gap = ""
        self._count({"resyncs": 1})
        return True

    def _overlay_of(self, packet: Packet) -> Callable[[float], tuple[RowTable, Counter[str]]]:
        return lambda deadline: self._reader.read_overlay(packet)

    def _poll_behind(
        self, source: RowSource, log: ChangeLog, checkpoint: str, generation: int
    ) -> bool:
        """Show a newer checkpoint that the log does not come to."""
        newer = self._newer(source, checkpoint)
        if newer is None:
            return False
        ahead = self._ahead
        if ahead is None or ahead.checkpoint != newer:
            opened = self._calls.run(
                source.checkpoint, _LOOK_S, lambda _: open_checkpoint(source.checkpoint, newer)
            )
            since = time.monotonic() if ahead is None else ahead.since
            ahead = self._ahead = _Ahead(newer, opened.position, since)
            if not ahead.position.packets:
                _logger.warning(
                    "%s: checkpoint %s has no place in %s, whose rows stay",
                    source.checkpoint,
                    newer,
                    log.url,
                )
        if log.has(ahead.position):
            with self._lock:
                if generation == self._generation:
                    self._checkpoint, self._based_on = newer, ahead.position
            self._ahead = None
            return False
        # A server whose log goes on has rows that are newer than the checkpoint's.
        is_behind = log.is_behind(ahead.position)
        if not is_behind or time.monotonic() < ahead.since + TAKEOVER_S:
            return False
        _logger.warning(
            "%s has not come to %s of checkpoint %s within %g s; rows are the checkpoint's",
            log.url,
            dict(ahead.position.packets),
            newer,
            TAKEOVER_S,
        )
        self._ahead = None
        built = self._build(source, self._open_checkpoint, self._load_timeout_s)
        return self.show(built, generation)

    def follow(self) -> None:
        """Load if nothing is loaded, and show what is new from now on, in a thread."""
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._follow, name="persia-rows", daemon=True
            )
            self._thread.start()

    def _follow(self) -> None:
        pause_s, failure = self._interval_s, ""
        resync_s = resync_at = 0.0  # packets of other servers go on while that is tried again
        while not self._stop.wait(pause_s if self._shown is not None or failure else 0.0):
            may_resync = time.monotonic() >= resync_at
            try:
                self._poll(may_resync=may_resync)
            except Exception as exc:
                if self._stop.is_set():
                    return
                self._count({"failed_polls": 1})
                text = str(exc) or repr(exc)
                if text != failure:  # once, not every second
                    is_known = isinstance(exc, (PersiaError, OSError, MemoryError))
                    _logger.warning("rows stay as they are: %s", text, exc_info=not is_known)
                if self._gap and may_resync:
                    resync_s = min(max(_RETRY_S, 2 * resync_s), _MAX_RETRY_S)
                    resync_at, pause_s = time.monotonic() + resync_s, self._interval_s
                else:
                    longest_s = _MAX_RETRY_S
                    if isinstance(exc, LogNotReady):
                        longest_s = max(self._interval_s, _MAX_NOT_READY_S)
                    pause_s = min(max(_RETRY_S, 2 * pause_s if failure else 0.0), longest_s)
                failure = text
                continue
            pause_s = self._interval_s
            if self._gap:
                continue
            if failure:
                _logger.info("rows are followed again")
            resync_s, failure = 0.0, ""

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop following; rows can be read until the last reference is gone."""
        self._stop.set()
        with self._lock:
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    # --- what is measured -------------------------------------------------------------------

    def ages(self, now: float) -> dict[int, float]:
        """Return seconds since the moment of the packet applied last, by server."""
        log = self._log
        return {} if log is None else log.ages(now)

    def stats(self) -> dict[str, int]:
        """Return counts since the start, and ``rows`` and ``bytes`` held now."""
        shown = self._shown
        tables = () if shown is None else shown.tables
        with self._lock:
            counts = dict(self._counts)
        return {"rows": len(self), "bytes": sum(one.num_bytes for one in tables)} | counts


# What is opened, the source of what follows it, and the id of its checkpoint.
_Found = tuple[Opened, RowSource, str]


def _whole_log(url: str, position: LogPosition, *, is_damaged: bool = False) -> Opened | None:
    """Open a log; None if it has not come to this position."""
    opened = open_log(url, is_damaged=is_damaged)
    is_there = opened.log is not None and opened.log.has(position)
    return replace(opened, position=position) if is_there else None
