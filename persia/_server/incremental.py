"""Changed rows, written out by each server as training goes on.

    update --note--> so many since the last packet?      the store's change log
                              |                                  |
                              +--> thread: cut of the changes --> a delta to the one before

The first packet has all rows, and so has one that follows when the deltas since the last such
packet have become as large as it was: the folder stays within a small multiple of the table.
Each packet is a checkpoint of the server's own catalog, ``incremental_dir/s<replica>``: whole
or not there, and of no other moment than its own. Servers do not wait for each other.

A packet that fails is told in the log; what it had comes again in the next one. While a load
replaces rows, and while rows are missing because one was cut short, there is none: it would be
half of a load. A server keeps others out of its folder from its first packet to its end, or to
that of the job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from persia._files import catalog
from persia._files.checkpoint_paths import below, folder_of
from persia._files.manifest import Manifest
from persia._files.part_writer import PartWriter
from persia._files.parts import write_deleted
from persia._files.storage import Storage, open_storage
from persia._files.writer_lock import WriterLock
from persia._server.snapshot import BLOCK_ROWS, by_table
from persia._server.throttle import Throttle, give_room
from persia.errors import StoreError
from persia.logger import get_logger

if TYPE_CHECKING:
    from persia._core.store.snapshot import Cut
    from persia._core.store.store import EmbeddingStore
    from persia._files.schema import SavedSchema
    from persia._server.snapshot import ServerState
    from persia.config import ParameterServerConfig

_logger = get_logger("persia.incremental")

CONSUMER = "incremental"
# Seconds after which changes are written though they are few.
FLUSH_S = 60.0
# How long the end of a server waits for a packet that is being written.
LAST_PACKET_S = 120.0


class IncrementalWriter:
    """One server's. Any thread may call ``note`` and ``flush``.

    Args:
        replica: Number of the server, of ``num_replicas``.
        num_replicas: How many servers there are.
        settings: Where, and after how many changes.
        whole_rows: Returns a context in which no load replaces rows; it raises a
            CheckpointError where one does.
        requests: Returns how many requests of training have come.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        settings: ParameterServerConfig,
        whole_rows: Callable[[], AbstractContextManager[None]],
        requests: Callable[[], int],
    ) -> None:
        self._whole_rows = whole_rows
        self._requests = requests
        self._replica = replica
        self._num_replicas = num_replicas
        self._threshold = settings.incremental_buffer_size
        self.url = below(settings.incremental_dir, folder_of(replica))
        self._writing = threading.Lock()  # held over a packet; guards the next six
        self._lock: WriterLock | None = None  # of the folder
        self._is_owed = False  # the packet begun last has failed
        self._store: EmbeddingStore | None = None  # whose changes are logged
        self._base: str | None = None  # the packet written last; None before a full one
        self._schema: SavedSchema | None = None  # of that packet
        self._sizes = [0, 0]  # bytes of the last full packet, and of the deltas since
        self._changed = threading.Condition()  # guards all below
        self._num_changes = 0  # upper bound, since the last packet
        self._held: ServerState | None = None  # as it was at the last change
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def note(self, num_rows: int, held: Callable[[], ServerState]) -> None:
        """Note that rows have changed."""
        with self._changed:
            self._num_changes += num_rows
            self._held = held()
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
            _logger.exception(
                "changed rows of parameter server %d were not written to %s; they are written "
                "with the next ones",
                self._replica,
                self.url,
            )

    def flush(self) -> None:
        """Write what has changed, if anything has.

        Raises:
            CheckpointError: If it cannot be written.
        """
        with self._writing:
            with self._changed:
                held, count = self._held, self._num_changes
                self._num_changes = 0
            if held is None or not (count or self._is_owed):
                return
            self._is_owed = True
            storage = open_storage(self.url)
            self._lock = self._lock or WriterLock(storage)
            self._lock.take()
            with self._whole_rows():
                begun = self._cut(held)
            with begun as cut:
                self._write(storage, held, cut)
            self._is_owed = False

    def _cut(self, held: ServerState) -> Cut:
        store = held.store
        if store is not self._store:  # rows of another store are no delta to those written
            try:
                store.open_changes(CONSUMER)
            except StoreError:
                _logger.debug("the store logs changes already")
            self._store, self._base = store, None
        is_long = self._sizes[1] > self._sizes[0]
        # A delta is read by the schema of its base: another learning rate makes another one.
        is_other = self._base is None or held.saved_schema() != self._schema
        cut = store.begin_cut(CONSUMER, full=is_other or is_long)
        give_room(cut)
        return cut

    def _write(self, storage: Storage, held: ServerState, cut: Cut) -> None:
        identity = catalog.new_id(storage)
        try:
            manifest = self._publish(storage, identity, held, cut)
        except BaseException:
            catalog.discard(storage, identity)
            raise
        cut.commit()
        is_full = cut.is_full
        self._base, self._schema = identity, manifest.schema
        self._sizes = [manifest.num_bytes, 0] if is_full else self._sizes
        self._sizes[1] += 0 if is_full else manifest.num_bytes
        if is_full:
            catalog.keep_last(storage, 2)
        _logger.info(
            "%s: %s of %d rows, %d deleted",
            self.url,
            manifest.kind,
            manifest.num_rows,
            sum(deleted.num_signs for deleted in manifest.deleted),
        )

    def _publish(
        self, storage: Storage, identity: str, held: ServerState, cut: Cut
    ) -> Manifest:
        prefix = f"{identity}/rows"
        storage.breathe = rest = Throttle(self._requests).beside(cut)
        with PartWriter(storage, prefix, server=self._replica, begin=rest) as writer:
            for block in cut.blocks(BLOCK_ROWS):
                for name, piece in by_table(held, block):
                    writer.add(name, piece)
                rest()
            parts = writer.finish()
        is_full = cut.is_full
        manifest = Manifest(
            id=identity,
            kind="full" if is_full else "delta",
            base=None if is_full else self._base,
            step=0,
            num_servers=self._num_replicas,
            schema=held.saved_schema(),
            parts=parts,
            deleted=()
            if is_full
            else write_deleted(storage, prefix, cut.deleted(), self._replica),
            extras={"servers": held.settings_as_json()},
        )
        catalog.publish(storage, manifest)
        return manifest

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
                    "parameter server %d: a packet of changed rows is not in %s after %g s; "
                    "this server ends without it",
                    self._replica,
                    self.url,
                    LAST_PACKET_S,
                )
                return
        self._try()
        self.release()

    def release(self) -> None:
        """Let another writer have the folder, and its thread end, until the next change."""
        with self._changed:
            self._thread = None
            self._changed.notify_all()
        with self._writing:
            if self._lock is not None:
                self._lock.release()
