"""A parameter server's share of a checkpoint: its cuts, and its loads.

    begin_cut    a snapshot of this moment; the caller holds updates back for it
    write_cut    starts a thread that reads the snapshot block by block, while training goes on
    cut_status   how far that is, its failure, and in the end what it wrote
    end_cut      the files are in a manifest, or never will be

A load is two threads, one after the other: ``verify`` reads everything and changes nothing,
``commit`` replaces the rows. Whoever asks with the same number again is told how far it is, so
that a lost answer does no harm.

State has one writer, the thread that works, once it runs; it is set before the thread starts,
and a failure is the last thing that happens to it: no status is overwritten by an older one.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from persia._files.checkpoint_paths import folder_of
from persia._files.entries import sketch_name
from persia._files.part_writer import PartWriter
from persia._files.parts import read_file, write_columns, write_deleted
from persia._files.schema import SavedSchema, table_name
from persia._files.storage import Storage, open_storage
from persia._files.tensors import Column, decode
from persia._rpc.messages import CutInfo, CutRequest, CutStatus, WriteRequest
from persia._server.throttle import Throttle, give_room
from persia.errors import CheckpointError, PersiaError
from persia.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from persia._core.store.blocks import RowBlock
    from persia._core.store.snapshot import Cut
    from persia._core.store.store import EmbeddingStore
    from persia._files.entries import Deleted, File
    from persia._rpc.messages import HyperParameters, OptimizerSettings
    from persia._server.optimizers import TableOptimizers
    from persia._server.row_policies import RowPolicies
    from persia.config import EmbeddingSchema

Sketch = tuple["NDArray[np.uint8]", "NDArray[np.uint64]"]

_logger = get_logger("persia.checkpoints")

# Rows read under a shard's lock at a time.
BLOCK_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server holds, and what it means."""

    store: EmbeddingStore
    schema: EmbeddingSchema
    settings: HyperParameters
    registered: OptimizerSettings
    optimizers: TableOptimizers
    policies: RowPolicies

    def saved_schema(self) -> SavedSchema:
        """Return what a manifest says of it."""
        return SavedSchema.of(
            self.schema,
            [self.optimizers.of(table.number) for table in self.schema.tables],
            self.policies.kinds,
            self.policies.numbers,
        )

    def settings_as_json(self) -> dict[str, Any]:
        """Return what the server was told, for a manifest's extras."""
        return {
            "hyper_parameters": dataclasses.asdict(self.settings),
            "optimizer": dataclasses.asdict(self.registered),
        }

    def about(self) -> str:
        """Return all of it as JSON."""
        schema = self.saved_schema().to_json()
        return json.dumps({"schema": schema, "settings": self.settings_as_json()})

    def tables_of(self, signs: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the table of each sign, by its feature bits; -1 where none has them."""
        bits = 64 - self.schema.prefix_bits
        # Feature bits are the group's number and 1; the last entry is for all beyond.
        table_of = np.full(len(self.schema.groups) + 2, -1, np.int64)
        for slot in self.schema.slots.values():
            table_of[slot.prefix >> bits] = slot.table
        group = np.minimum(signs >> np.uint64(bits), np.uint64(len(table_of) - 1))
        found: NDArray[np.int64] = table_of[group.astype(np.intp)]
        return found


@dataclass(slots=True)
class _Cut:
    """One cut; ``lock`` of its owner guards the fields below the first four."""

    request: CutRequest
    held: ServerState
    cut: Cut
    info: CutInfo
    sketch: Sketch | None  # of ids not admitted yet, at that moment
    state: str = "begun"
    num_rows: int = 0
    error: str = ""
    meta: bytes = b""
    is_ended: bool = False
    target: WriteRequest | None = None  # where it is written, once it is
    begun_at: float = field(default_factory=time.monotonic)

    def status(self) -> CutStatus:
        """Return what whoever asks is told."""
        return CutStatus(
            self.state, self.num_rows, self.error, np.frombuffer(self.meta, np.uint8)
        )


def _begun(request: CutRequest, held: ServerState) -> _Cut:
    """Return a cut of this moment, with what has to be of the same one."""
    cut = held.store.begin_cut(request.changes)
    try:
        give_room(cut)  # it may be seconds until it is written
        info = CutInfo(cut.num_rows, cut.is_full, held.about())
        sketch = held.store.sketch() if held.policies.sketch_bytes else None
        return _Cut(request, held, cut, info, sketch)
    except BaseException:
        cut.close()  # nobody will read it
        raise


class Snapshots:
    """The cuts of one server, one of each consumer at a time; any thread may call it.

    Args:
        replica: Number of the server.
        requests: Returns how many requests of training have come.
    """

    def __init__(self, replica: int, requests: Callable[[], int]) -> None:
        self._replica = replica
        self._requests = requests
        self._lock = threading.Lock()  # guards the cuts and their state
        self._cuts: dict[int, _Cut] = {}  # by id
        self.committed_at: float | None = None  # the last cut of all rows that was; monotonic

    def begin(self, request: CutRequest, held_now: Callable[[], ServerState]) -> CutInfo:
        """Begin a cut; the same one again is answered as before.

        Args:
            request: Of what.
            held_now: Returns what the server holds.

        Raises:
            NotConfigured: If there is nothing to cut.
            CheckpointError: If another cut of this consumer is being written.
        """
        with self._lock:
            known = self._cuts.get(request.cut_id)
            if known is not None:
                return known.info
            for other in [
                cut for cut in self._cuts.values() if cut.request.changes == request.changes
            ]:
                if other.state == "writing":
                    raise CheckpointError(
                        f"parameter server {self._replica}: a cut is being written "
                        f"({other.num_rows} of {other.info.num_rows} rows): expected one at a "
                        "time; wait_for_dump_embedding() waits for it"
                    )
                self._end(other, False)  # whoever asked for it is gone
            entry = self._cuts[request.cut_id] = _begun(request, held_now())
            return entry.info

    def _find(self, cut_id: int) -> _Cut:
        cut = self._cuts.get(cut_id)
        if cut is None:
            raise CheckpointError(
                f"parameter server {self._replica} has no cut {cut_id:x}: it was restarted, or "
                "another dump took its place"
            )
        return cut

    def write(self, request: WriteRequest) -> None:
        """Begin to write; nothing if that was begun.

        Raises:
            CheckpointError: If there is no such cut.
        """
        with self._lock:
            cut = self._find(request.cut_id)
            if cut.state != "begun":
                return
            # Before the thread runs: what it sets is never overwritten from here.
            cut.state, cut.target = "writing", request
        threading.Thread(
            target=self._run, args=(cut, request), name="persia-write-cut", daemon=True
        ).start()

    def status(self, cut_id: int) -> CutStatus:
        """Return how far a cut is.

        Raises:
            CheckpointError: If there is no such cut.
        """
        with self._lock:
            return self._find(cut_id).status()

    def end(self, cut_id: int, committed: bool) -> None:
        """End a cut; nothing if it has ended."""
        with self._lock:
            cut = self._cuts.get(cut_id)
            if cut is not None:
                self._end(cut, committed)
        # Only here: who asked says that there is no manifest. A writing thread does it itself.
        if cut is not None and cut.state == "written" and not committed:
            self._remove(cut)

    def _end(self, cut: _Cut, committed: bool) -> None:
        """With the lock held. A thread that still writes notices at its next block."""
        del self._cuts[cut.request.cut_id]
        cut.is_ended = True
        if cut.state == "writing":
            return  # its thread closes it
        if committed and cut.state == "written":
            self.committed_at = cut.begun_at
        if committed and cut.state == "written" and cut.request.changes is not None:
            cut.cut.commit()
        cut.cut.close()

    # --- the thread -------------------------------------------------------------------------

    def _run(self, cut: _Cut, request: WriteRequest) -> None:
        try:
            self._write(cut, request)
        except BaseException as exc:
            if not isinstance(exc, PersiaError):
                _logger.exception("a cut could not be written")
            self._remove(cut)
            with self._lock:
                cut.state, cut.error = "failed", str(exc) or repr(exc)
        finally:
            with self._lock:
                if cut.is_ended or cut.request.changes is None:
                    cut.cut.close()

    def _prefix(self, request: WriteRequest) -> str:
        return f"{request.prefix}/{folder_of(self._replica)}"

    def _remove(self, cut: _Cut) -> None:
        """Remove what this server wrote of a cut that is in no manifest: a disk may be full."""
        if cut.target is None:
            return
        prefix = self._prefix(cut.target)
        try:
            open_storage(cut.target.url).remove_folder(prefix)
        except PersiaError as exc:
            _logger.warning("%s: what was written of a dump is left: %s", prefix, exc)

    def _write(self, cut: _Cut, request: WriteRequest) -> None:
        storage = open_storage(request.url)
        prefix = self._prefix(request)
        storage.breathe = rest = Throttle(self._requests).beside(cut.cut)
        with PartWriter(storage, prefix, server=self._replica, begin=rest) as writer:
            for block in cut.cut.blocks(BLOCK_ROWS):
                for name, piece in by_table(cut.held, block):
                    writer.add(name, piece)
                with self._lock:
                    cut.num_rows += len(block)
                    if cut.is_ended:
                        raise CheckpointError("the dump was given up")
                rest()
            parts = writer.finish()
        deleted: tuple[Deleted, ...] = ()
        if not cut.info.is_full:
            deleted = write_deleted(storage, prefix, cut.cut.deleted(), self._replica)
        files = {}
        if cut.sketch is not None:
            name = sketch_name(self._replica)
            file = write_sketch(storage, f"{prefix}/{name}", cut.sketch)
            storage.sync(prefix)
            files[name] = file.to_json()
        meta = {
            "parts": [part.to_json() for part in parts],
            "deleted": [each.to_json() for each in deleted],
            "files": files,
        }
        with self._lock:
            if cut.is_ended:
                raise CheckpointError("the dump was given up")
            cut.meta = json.dumps(meta).encode()
            cut.state = "written"


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


def by_table(held: ServerState, block: RowBlock) -> Iterator[tuple[str, RowBlock]]:
    """Yield the rows of each table of the config."""
    tables = held.tables_of(block.signs)
    for number in (np.flatnonzero(np.bincount(tables + 1)) - 1).tolist():
        if number < 0:
            raise CheckpointError("rows of a group that the embedding config does not have")
        mine = tables == number
        piece = block
        if not mine.all():
            arrays = [array[mine] for array in block.arrays]
            piece = dataclasses.replace(block, **dict(zip(_ARRAYS, arrays, strict=True)))
        yield table_name(number), piece


_ARRAYS = ("signs", "values", "states", "orders", "uses", "ages")
