"""A parameter server's share of a dump: snapshots of its rows, and their files.

    begin_cut    a snapshot of this moment; the caller holds updates back for it
    write_cut    starts a thread that reads the snapshot block by block, while training goes on
    cut_status   how far that is, its failure, and in the end what it wrote
    end_cut      the files are in a manifest, or never will be

The same call again is answered as before, so that a lost reply does no harm. A snapshot's state
has one writer, the thread that works, once it runs; it is set before the thread starts, and a
failure is the last thing that happens to it: no status is overwritten by an older one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from persia._files.catalog import folder_of
from persia._files.entries import ServerFiles, sketch_name
from persia._files.open import open_storage
from persia._files.part_writer import PartWriter
from persia._files.parts import read_file, take, write_columns, write_deleted
from persia._files.schema import table_name
from persia._files.storage import Storage
from persia._files.tensors import Column, decode
from persia._rpc.messages import CutInfo, CutRequest, CutStatus, WriteRequest
from persia._server.throttle import Throttle, give_room
from persia.errors import CheckpointError, PersiaError
from persia.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from persia._core.store.blocks import RowBlock
    from persia._core.store.snapshot import Snapshot
    from persia._files.entries import Deleted, File, Part
    from persia._server.row_settings import RowSettings, ServerState

Sketch = tuple["NDArray[np.uint8]", "NDArray[np.uint64]"]

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
    def begin(request: CutRequest, now: ServerState) -> _Dump:
        """Return a snapshot of this moment, with what has to be of the same one."""
        settings = now.settings
        snapshot = now.store.begin_snapshot(request.changes)
        try:
            give_room(snapshot)  # it may be seconds until it is written
            info = CutInfo(snapshot.num_rows, snapshot.is_full, settings.about())
            sketch = now.store.sketch() if settings.sketch_bytes else None
            return _Dump(request, settings, snapshot, info, sketch)
        except BaseException:
            snapshot.close()  # an open one that is not read would stop training
            raise

    def status(self) -> CutStatus:
        """Return how far it is."""
        return CutStatus(
            self.state, self.num_rows, self.error, np.frombuffer(self.meta, np.uint8)
        )


class Snapshots:
    """The snapshots of one server, one of each consumer at a time; any thread may call it.

    Args:
        replica: Number of the server.
        requests: Returns how many requests of training have come.
    """

    def __init__(self, replica: int, requests: Callable[[], int]) -> None:
        self._replica = replica
        self._requests = requests
        self._lock = threading.Lock()  # guards the snapshots and their state
        self._dumps: dict[int, _Dump] = {}  # by id
        self.committed_at: float | None = None  # the last of all rows that was; monotonic

    def begin(self, request: CutRequest, now: Callable[[], ServerState]) -> CutInfo:
        """Begin a snapshot of what ``now`` returns; the same request again changes nothing."""
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
            dump = self._dumps[request.cut_id] = _Dump.begin(request, now())
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
            return self._find(cut_id).status()

    def end(self, cut_id: int, committed: bool) -> None:
        """End a snapshot; nothing if it has ended."""
        with self._lock:
            dump = self._dumps.get(cut_id)
            if dump is not None:
                self._end(dump, committed)
        # Only here: the caller says that there is no manifest. A writing thread does it itself.
        if dump is not None and dump.state == "written" and not committed:
            self._remove_files(dump)

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
            self._remove_files(dump)
            with self._lock:
                dump.state, dump.error = "failed", str(exc) or repr(exc)
        finally:
            with self._lock:
                if dump.is_ended or dump.request.changes is None:
                    dump.snapshot.close()

    def _prefix(self, request: WriteRequest) -> str:
        return f"{request.prefix}/{folder_of(self._replica)}"

    def _remove_files(self, dump: _Dump) -> None:
        """Remove what was written of a snapshot in no manifest: a disk may be full."""
        if dump.target is None:
            return
        prefix = self._prefix(dump.target)
        try:
            open_storage(dump.target.url).remove_folder(prefix)
        except PersiaError as exc:
            _logger.warning("%s: what was written of a dump is left: %s", prefix, exc)

    def _write(self, dump: _Dump, request: WriteRequest) -> None:
        storage, prefix = open_storage(request.url), self._prefix(request)

        def note(num_rows: int) -> None:
            with self._lock:
                dump.num_rows += num_rows
                if dump.is_ended:
                    raise CheckpointError("the dump was given up")

        parts, deleted = write_rows(
            storage,
            prefix,
            dump.snapshot,
            dump.settings,
            self._replica,
            self._requests,
            note,
        )
        files = {}
        if dump.sketch is not None:
            name = sketch_name(self._replica)
            file = write_sketch(storage, f"{prefix}/{name}", dump.sketch)
            storage.sync(prefix)
            files[name] = file
        with self._lock:
            if dump.is_ended:
                raise CheckpointError("the dump was given up")
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
    """Write the rows of a snapshot, and unless it is full its deletions, beside training.

    Args:
        storage: Where to.
        prefix: Folder of the files.
        snapshot: What is read.
        settings: What its rows are.
        replica: Number of the server.
        requests: Returns how many requests of training have come.
        note: Takes the number of rows of each block that is written.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    storage.on_progress = rest = Throttle(requests).beside(snapshot)
    with PartWriter(storage, prefix, server=replica, begin=rest) as writer:
        for block in snapshot.blocks(BLOCK_ROWS):
            for name, piece in split_by_table(settings, block):
                writer.add(name, piece)
            note(len(block))
            rest()
        parts = writer.finish()
    deleted = (
        () if snapshot.is_full else write_deleted(storage, prefix, snapshot.deleted(), replica)
    )
    return parts, deleted


def write_sketch(storage: Storage, path: str, sketch: Sketch) -> File:
    """Write counts of ids that are not admitted yet."""
    counts, numbers = sketch
    columns = {"counts": Column.of(counts), "numbers": Column.of(numbers)}
    return write_columns(storage, path, columns, {"format": "persia-sketch", "version": "1"})


def read_sketch(storage: Storage, file: File) -> Sketch:
    """Return what ``write_sketch`` wrote.

    Raises:
        CheckpointError: If the file is damaged or no sketch.
    """
    name = storage.at(file.path)
    arrays, _ = decode(read_file(storage, file), name)
    found = []
    for key, expected in (("counts", "U8"), ("numbers", "U64")):
        code, array = arrays.get(key, ("none", None))
        if code != expected or array is None or array.ndim != 2:
            shape = None if array is None else list(array.shape)
            raise CheckpointError(
                f"{name}: {key}: expected {expected} with 2 dimensions, got {code} {shape}"
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
