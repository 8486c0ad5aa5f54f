"""Changed rows, written out by each server as training goes on.

    update --note--> enough changes since the last packet? --> a thread writes their snapshot,
                                                               a delta to the one before

The first packet has all rows, and so has one that follows when the deltas since the last such
packet have become as large as it was. Each packet is a checkpoint of the server's own catalog,
``incremental_dir/s<replica>``: whole or not there, and of no other moment than its own. One
that fails is logged; what it had comes again in the next one. While a load replaces rows, and
while rows are missing because one was cut short, there is none. A server keeps other writers
out of its folder from its first packet to its end, or to that of the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from persia._core.store.snapshot import Snapshot
from persia._core.store.store import EmbeddingStore
from persia._files import catalog
from persia._files.catalog import below, folder_of
from persia._files.manifest import Manifest
from persia._files.open import open_storage
from persia._files.schema import SavedSchema
from persia._files.storage import Storage
from persia._files.writer_lock import WriterLock
from persia._server.row_settings import ServerState
from persia._server.snapshot import room_for_copies, write_rows
from persia.config import ParameterServerConfig
from persia.errors import StoreError
from persia.logger import get_logger

_logger = get_logger("persia.incremental")

CONSUMER = "incremental"
# Seconds after which changes are written though they are few.
FLUSH_S = 60.0
# Seconds that the end of a server waits for a packet that is being written.
LAST_PACKET_S = 120.0


class IncrementalWriter:
    """Writes the changes of one server. Any thread may call ``note`` and ``flush``."""

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        config: ParameterServerConfig,
        whole_rows: AbstractContextManager[None],
        requests: Callable[[], int],
    ) -> None:
        self._whole_rows, self._requests = whole_rows, requests
        self._replica, self._num_replicas = replica, num_replicas
        self._threshold = config.incremental_buffer_size
        self.url = below(config.incremental_dir, folder_of(replica))
        self._writing = threading.Lock()  # held over a packet; guards the next six
        self._lock: WriterLock | None = None  # of the folder
        self._has_failed = False  # the packet begun last
        self._store: EmbeddingStore | None = None  # whose changes are logged
        self._base: str | None = None  # the packet written last; None before a full one
        self._schema: SavedSchema | None = None  # of that packet
        self._sizes = [0, 0]  # bytes of the last full packet, and of the deltas since
        self._changed = threading.Condition()  # guards all below
        self._num_changes = 0  # upper bound, since the last packet
        self._state: ServerState | None = None  # as it was at the last change
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def note(self, num_rows: int, state: Callable[[], ServerState]) -> None:
        """Note that rows have changed; ``state`` returns what the server holds now."""
        with self._changed:
            self._num_changes += num_rows
            # Under the lock: a state read before could replace one that came after it.
            self._state = state()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="persia-incremental", daemon=True
                )
                self._thread.start()
            if self._num_changes >= self._threshold:
                self._changed.notify_all()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._thread is not me or self._num_changes >= self._threshold,
                    FLUSH_S,
                )
                if self._thread is not me:
                    return
            self._try()

    def _try(self) -> None:
        try:
            self.flush()
        except Exception:
            _logger.exception("%s: a packet failed; its rows come with the next one", self.url)

    def flush(self) -> None:
        """Write what has changed, if anything has."""
        with self._writing:
            with self._changed:
                state, count = self._state, self._num_changes
                self._num_changes = 0
            if state is None or not (count or self._has_failed):
                return
            self._has_failed = True
            storage = open_storage(self.url)
            self._lock = self._lock or WriterLock(storage)
            self._lock.acquire()
            with self._whole_rows:
                begun = self._begin_snapshot(state)
            with begun as snapshot:  # an open one that is not read would stop training
                snapshot.allow(room_for_copies(snapshot))
                self._write(storage, state, snapshot)
            self._has_failed = False

    def _begin_snapshot(self, state: ServerState) -> Snapshot:
        store = state.store
        if store is not self._store:  # rows of another store are no delta to those written
            with suppress(StoreError):  # it logs changes already
                store.open_changes(CONSUMER)
            self._store, self._base = store, None
        is_long = self._sizes[1] > self._sizes[0]
        # A delta is read by the schema of its base: another learning rate makes another one.
        is_other = self._base is None or state.settings.saved_schema() != self._schema
        return store.begin_snapshot(CONSUMER, full=is_other or is_long)

    def _write(self, storage: Storage, state: ServerState, snapshot: Snapshot) -> None:
        identity, settings = catalog.new_id(storage), state.settings
        try:
            parts, deleted = write_rows(
                storage, f"{identity}/rows", snapshot, settings, self._replica, self._requests
            )
            manifest = Manifest(
                id=identity,
                kind="full" if snapshot.is_full else "delta",
                base=None if snapshot.is_full else self._base,
                step=0,
                num_servers=self._num_replicas,
                schema=settings.saved_schema(),
                parts=parts,
                deleted=deleted,
                extras={"servers": settings.to_json()},
            )
            catalog.publish(storage, manifest)
        except BaseException:
            catalog.discard(storage, identity)
            raise
        snapshot.commit()
        self._base, self._schema = identity, manifest.schema
        if snapshot.is_full:
            self._sizes = [manifest.num_bytes, 0]
            catalog.keep_last(storage, 2)
        else:
            self._sizes[1] += manifest.num_bytes
        _logger.info("%s: %s of %d rows", self.url, manifest.kind, manifest.num_rows)

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
            if self._lock is not None:
                self._lock.release()
