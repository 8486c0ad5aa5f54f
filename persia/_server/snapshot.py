"""A parameter server's share of a dump: snapshots of its rows, their files, and their pace.

    begin_cut    a snapshot of this moment; the caller holds updates back for it
    write_cut    starts a thread that reads the snapshot block by block, while training goes on
    cut_status   how far that is, its failure, and in the end what it wrote
    end_cut      the files are in a manifest, or never will be

The same call again is answered as before, so that a lost reply does no harm. A snapshot's state
has one writer, the thread that works, once it runs; a failure is the last thing that happens to
it: no status is overwritten by an older one.

Beside training a dump takes a share of the processors (``persia._files.throttle``). The fuller
the room for copies of rows that change meanwhile, the shorter its threads' pauses.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.store.blocks import RowBlock
from persia._core.store.snapshot import Snapshot
from persia._core.store.store import MAX_SIDE_BYTES
from persia._files.catalog import folder_of
from persia._files.manifest import Deleted, File, Part, ServerFiles, sketch_name
from persia._files.open import open_storage
from persia._files.part_writer import PartWriter
from persia._files.parts import read_file, take, write_deleted, write_file
from persia._files.schema import table_name
from persia._files.storage import Storage
from persia._files.tensors import Column, decode, encode
from persia._files.throttle import Throttle
from persia._rpc.messages import CutInfo, CutRequest, CutStatus, WriteRequest
from persia._server.row_settings import RowSettings, ServerState
from persia.errors import CheckpointError, PersiaError
from persia.logger import get_logger
from persia.utils import free_memory_bytes

Sketch = tuple[NDArray[np.uint8], NDArray[np.uint64]]

_logger = get_logger("persia.checkpoints")

# Rows read under a shard's lock at a time.
BLOCK_ROWS = 16_384


@dataclass(slots=True)
class _Dump:
    """A snapshot and its files; from ``state`` on, the lock of ``Snapshots`` guards it."""

    request: CutRequest
    settings: RowSettings
    snapshot: Snapshot
    info: CutInfo
    sketch: Sketch | None  # of ids not admitted yet, at that moment
    state: str = "begun"
    num_rows: int = 0
    error: str = ""
    meta: bytes = b""
    is_ended: bool = False
    target: WriteRequest | None = None  # where it is written, once it is
    begun_at: float = field(default_factory=time.monotonic)

    @staticmethod
    def begin(
        request: CutRequest, now: ServerState, log: Callable[[], dict[str, Any]]
    ) -> _Dump:
        """Return a snapshot of this moment, with what has to be of the same one."""
        settings = now.settings
        snapshot = now.store.begin_snapshot(request.changes)
        try:
            snapshot.allow(room_for_copies(snapshot))  # it may be seconds until it is written
            # After the snapshot: what the log has of a later moment, it has of this one.
            about = json.dumps({**json.loads(settings.about()), **log()})
            info = CutInfo(snapshot.num_rows, snapshot.is_full, about)
            sketch = now.store.sketch() if settings.sketch_bytes else None
            return _Dump(request, settings, snapshot, info, sketch)
        except BaseException:
            snapshot.close()  # an open one that is not read would stop training
            raise


class Snapshots:
    """The snapshots of one server, one of each consumer at a time; any thread may call it."""

    def __init__(self, replica: int, requests: Callable[[], int]) -> None:
        self._replica = replica
        self._requests = requests
        self._lock = threading.Lock()  # guards the snapshots and their state
        self._dumps: dict[int, _Dump] = {}  # by id
        self.committed_at: float | None = None  # the last of all rows that was; monotonic

    def begin(
        self,
        request: CutRequest,
        now: Callable[[], ServerState],
        log: Callable[[], dict[str, Any]] = dict,
    ) -> CutInfo:
        """Begin a snapshot of what ``now`` returns; the same request again changes nothing.

        ``log`` returns what else is to be known of this moment, as JSON for ``CutInfo.about``.
        """
        with self._lock:
            known = self._dumps.get(request.cut_id)
            if known is not None:
                return known.info
            for other in list(self._dumps.values()):
                if other.request.changes != request.changes:
                    continue
                if other.state == "writing":
                    raise CheckpointError(
                        f"parameter server {self._replica}: a snapshot is being written "
                        f"({other.num_rows} of {other.info.num_rows} rows): expected one at a "
                        "time; wait_for_dump_embedding() waits for it"
                    )
                self._end(other, False)  # its trainer is gone
            dump = self._dumps[request.cut_id] = _Dump.begin(request, now(), log)
            return dump.info

    def _find(self, cut_id: int) -> _Dump:
        dump = self._dumps.get(cut_id)
        if dump is None:
            raise CheckpointError(
                f"parameter server {self._replica} has no snapshot {cut_id:x}: it was "
                "restarted, or another dump took its place"
            )
        return dump

    def write(self, request: WriteRequest) -> None:
        """Begin to write; nothing if that was begun."""
        with self._lock:
            dump = self._find(request.cut_id)
            if dump.state != "begun":
                return
            # Before the thread runs: what it sets is never overwritten from here.
            dump.state, dump.target = "writing", request
        threading.Thread(
            target=self._run, args=(dump, request), name="persia-write-cut", daemon=True
        ).start()

    def status(self, cut_id: int) -> CutStatus:
        """Return how far a snapshot is."""
        with self._lock:
            dump = self._find(cut_id)
            meta = np.frombuffer(dump.meta, np.uint8)
            return CutStatus(dump.state, dump.num_rows, dump.error, meta)

    def end(self, cut_id: int, committed: bool) -> None:
        """End a snapshot; nothing if it has ended."""
        with self._lock:
            dump = self._dumps.get(cut_id)
            if dump is not None:
                self._end(dump, committed)
        # Only here: the caller says that there is no manifest. A writing thread does it itself.
        if dump is not None and dump.target and dump.state == "written" and not committed:
            self._remove_files(dump.target)

    def _end(self, dump: _Dump, committed: bool) -> None:
        """With the lock held. A thread that still writes notices at its next block."""
        del self._dumps[dump.request.cut_id]
        dump.is_ended = True
        if dump.state == "writing":
            return  # its thread closes the snapshot
        if committed and dump.state == "written":
            self.committed_at = dump.begun_at
            if dump.request.changes is not None:
                dump.snapshot.commit()
        dump.snapshot.close()

    # --- the thread -------------------------------------------------------------------------

    def _run(self, dump: _Dump, request: WriteRequest) -> None:
        try:
            self._write(dump, request)
        except BaseException as exc:
            if not isinstance(exc, PersiaError):
                _logger.exception("a snapshot could not be written")
            self._remove_files(request)
            with self._lock:
                dump.state, dump.error = "failed", str(exc) or repr(exc)
        finally:
            with self._lock:
                if dump.is_ended or dump.request.changes is None:
                    dump.snapshot.close()

    def _prefix(self, request: WriteRequest) -> str:
        return f"{request.prefix}/{folder_of(self._replica)}"

    def _remove_files(self, request: WriteRequest) -> None:
        """Remove what was written of a snapshot in no manifest: a disk may be full."""
        prefix = self._prefix(request)
        try:
            open_storage(request.url).remove_folder(prefix)
        except PersiaError as exc:
            _logger.warning(
                "%s: files of an unfinished dump could not be removed: %s", prefix, exc
            )

    def _write(self, dump: _Dump, request: WriteRequest) -> None:
        storage, prefix = open_storage(request.url), self._prefix(request)

        def note(num_rows: int) -> None:
            with self._lock:
                dump.num_rows += num_rows
                if dump.is_ended:
                    raise CheckpointError("the dump was cancelled")

        snapshot, settings = dump.snapshot, dump.settings
        parts, deleted = write_rows(
            storage, prefix, snapshot, settings, self._replica, self._requests, note
        )
        files = {}
        if dump.sketch is not None:
            name = sketch_name(self._replica)
            files[name] = write_sketch(storage, f"{prefix}/{name}", dump.sketch)
            storage.sync(prefix)
        with self._lock:
            if dump.is_ended:
                raise CheckpointError("the dump was cancelled")
            dump.meta = json.dumps(ServerFiles(parts, deleted, files).to_json()).encode()
            dump.state = "written"


def write_rows(
    storage: Storage,
    prefix: str,
    snapshot: Snapshot,
    settings: RowSettings,
    replica: int,
    requests: Callable[[], int],
    note: Callable[[int], None] = lambda num_rows: None,
) -> tuple[tuple[Part, ...], tuple[Deleted, ...]]:
    """Write the rows of a snapshot, and unless it is full its deletions, beside training."""
    storage.on_progress = rest = beside_training(snapshot, requests)
    with PartWriter(storage, prefix, server=replica, begin=rest) as writer:
        for block in snapshot.blocks(BLOCK_ROWS):
            for name, piece in split_by_table(settings, block):
                writer.add(name, piece)
            note(len(block))
            rest()
        parts = writer.finish()
    if snapshot.is_full:
        return parts, ()
    return parts, write_deleted(storage, prefix, snapshot.deleted(), replica)


def write_sketch(storage: Storage, path: str, sketch: Sketch) -> File:
    """Write counts of ids that are not admitted yet."""
    counts, numbers = sketch
    columns = {"counts": Column.of(counts), "numbers": Column.of(numbers)}
    metadata = {"format": "persia-sketch", "version": "1"}
    return write_file(storage, path, encode(columns, metadata))


def read_sketch(storage: Storage, file: File) -> Sketch:
    """Return what ``write_sketch`` wrote."""
    name = storage.at(file.path)
    arrays, _ = decode(read_file(storage, file), name)
    found = []
    for key, expected in (("counts", "U8"), ("numbers", "U64")):
        code, array = arrays.get(key, ("none", np.empty(0)))
        if code != expected or array.ndim != 2:
            got = f"{code} {list(array.shape)}"
            raise CheckpointError(
                f"{name}: {key}: expected {expected} with 2 dimensions, got {got}"
            )
        found.append(array)
    return found[0], found[1]


def split_by_table(settings: RowSettings, block: RowBlock) -> Iterator[tuple[str, RowBlock]]:
    """Yield the rows of each table of the config, with its name in files."""
    tables = settings.tables_of(block.signs)
    for number in (np.flatnonzero(np.bincount(tables + 1)) - 1).tolist():
        if number < 0:
            raise CheckpointError("rows of a group that the embedding config does not have")
        mine = tables == number
        yield table_name(number), block if mine.all() else take(block, mine)


# --- beside training -------------------------------------------------------------------------

# Copies may take this part of what is free; of the rows' memory where that is not known.
COPY_DIVISOR = 4
# Seconds between two looks at the memory that is free.
ROOM_S = 1.0
# How full that room is when a reader begins to hurry, and when it does not pause any more.
HURRY = 0.5, 0.75


def beside_training(snapshot: Snapshot, requests: Callable[[], int]) -> Callable[[], None]:
    """Return what the threads that read and write a snapshot call between two pieces."""
    throttle = Throttle(requests)
    due = time.monotonic()

    def rest() -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:  # two threads at once: the same, twice
            due = now + ROOM_S
            snapshot.allow(room_for_copies(snapshot))
        throttle.rest(lambda: urgency_of(snapshot))

    return rest


def room_for_copies(snapshot: Snapshot) -> int:
    """Return the bytes that copies of rows may take, which change before they are read.

    Where ids are uniform, a dump copies most rows: too little room would stop training. There
    is enough for all of them where a machine has that much memory left.
    """
    whole, free = snapshot.copied_bytes, free_memory_bytes()
    copied = int(snapshot.fill * snapshot.side_bytes)
    more = free // COPY_DIVISOR if free else whole // COPY_DIVISOR
    return max(MAX_SIDE_BYTES, min(whole, copied + more))


def urgency_of(snapshot: Snapshot) -> float:
    """Return from 0 to 1 how urgent it is to read on, before training has to wait for room."""
    begin, end = HURRY
    return min(1.0, max(0.0, (snapshot.fill - begin) / (end - begin)))
