"""A parameter server for inference: rows of its share of the signs, which no request changes.

It answers evaluation lookups once it has a whole version, and nothing before; rows are
replaced beside those it answers with. Its rows are a checkpoint's, the newest one as they come,
or those that training servers write to a change log. What would change rows is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import owners, route
from persia._files.open import ANYWHERE, AllowedRoots
from persia._metrics.timings import Timings
from persia._rows.live_rows import Built, LiveRows
from persia._rows.row_source import RowSource
from persia._rpc.messages import (
    CutInfo,
    CutRequest,
    CutStatus,
    FoundRows,
    HyperParameters,
    LoadRequest,
    LoadStatus,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    RowPiece,
    RowsRequest,
    ScanRequest,
    TableEntries,
    TableRows,
    TableSigns,
    UpdateReport,
    UpdateRequest,
    WriteRequest,
)
from persia.config import EmbeddingSchema, InferConfig, schema_fingerprint
from persia.errors import CheckpointError, ConfigError, PersiaError, StoreError
from persia.logger import get_logger

_logger = get_logger("persia.parameter_server")

_TIMINGS = (
    "lookup_hashmap_time_cost_sec",
    "persia_update_rows_seconds",
    "set_embedding_time_cost_sec",
)
# Seconds between two looks at whether this process ends, while rows are loaded.
_LOOK_S = 0.1
# What servers that train count, too; here it stays 0.
_NEVER = (
    *("updates", "repeated_updates", "replaced_updates", "update_missing", "inserted"),
    *("evicted", "evicted_lru", "evicted_lfu", "evicted_native", "expired", "refused"),
    "memory_limited",
)


@dataclass(slots=True)
class _PendingLoad:
    """A load that a client asked for; its owner's lock guards it."""

    request: LoadRequest
    status: LoadStatus
    built: Built | None = None


class ReadOnlyParameterServer:
    """Implements ``messages.ParameterServer`` over ``LiveRows``; any thread may call it.

    A lookup raises ServiceBusy, which clients try again, until there are rows.

    A client's load of the newest checkpoint of a folder is followed by newer ones there, and of
    the configured folder by the change log too. An older checkpoint stays until another load.

    Replies say the checkpoint that rows are of, so that those of several servers are of one.
    Rows that follow a change log have the version "": each server shows a packet when it has
    it, so two servers may differ by what came last.

    Args:
        schema: The embedding config.
        config: Section ``infer_config``: where rows come from.
        replica_index: Number of this server, of ``replica_size`` that share the signs.
        num_threads: Threads that one request may use.
        roots: What clients may have loaded.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        config: InferConfig,
        *,
        replica_index: int = 0,
        replica_size: int = 1,
        num_threads: int = 1,
        roots: AllowedRoots = ANYWHERE,
    ) -> None:
        if not 0 <= replica_index < replica_size:
            raise ConfigError(
                f"replica_index must be in 0..replica_size - 1 = {replica_size - 1}, "
                f"got {replica_index}"
            )
        self._schema, self._roots = schema, roots
        self.replica_index, self.replica_size = replica_index, replica_size
        self.schema_fingerprint = schema_fingerprint(schema)
        self._owners = owners(replica_size)
        self._source = RowSource(
            checkpoint=config.embedding_checkpoint,
            follows_newer=True,
            change_log=config.incremental_dir,
        )
        self.rows = LiveRows(
            self._source,
            schema,
            dtype=config.row_dtype,
            owned=None if replica_size == 1 else (replica_index, replica_size),
            follow_interval_s=config.follow_interval_sec,
            num_threads=num_threads,
        )
        self.timings = Timings(*_TIMINGS)
        self._lookup_time = self.timings[_TIMINGS[0]]
        self._lock = threading.Lock()  # guards the rest
        self._counts = dict.fromkeys(("lookups", "looked_up_ids", "misses", "missing"), 0)
        self._load: _PendingLoad | None = None
        self._finished: int | None = None
        self._loaded_at: float | None = None

    # --- readiness --------------------------------------------------------------------------

    def start(self, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Load rows and follow what comes, in a thread; not long once ``has_ended``.

        Raises:
            ConfigError: Rows of the checkpoint that is there do not fit the config.
        """
        loaded: Future[None] = Future()

        def load() -> None:
            try:
                self.rows.load()
            except BaseException as exc:
                loaded.set_exception(exc)  # raised below
            else:
                loaded.set_result(None)

        threading.Thread(target=load, name="persia-load", daemon=True).start()
        while not wait([loaded], _LOOK_S).done:  # a storage that hangs must not hold an end up
            if has_ended():
                self.rows.close()
                return
        try:
            loaded.result()
        except ConfigError:
            raise
        except (PersiaError, OSError, MemoryError) as exc:
            _logger.warning("no rows yet, and no lookups until there are: %s", exc)
        self.rows.follow()

    def close(self) -> None:
        """Stop following."""
        self.rows.close()

    def ready_for_serving(self) -> bool:
        """Whether lookups can be answered."""
        return self.rows.is_ready

    def readiness(self) -> str | None:
        """Return why lookups cannot be answered; None if they can."""
        return self.rows.problem or None

    # --- requests ---------------------------------------------------------------------------

    def lookup(self, request: LookupRequest) -> LookupReply:
        """Return the rows asked for, all of one version."""
        if request.is_training:
            self._refuse("a training lookup")
        begin = time.perf_counter()
        self._check_signs("a lookup", request.tables)
        replies, num_ids, num_missing = [], 0, 0
        with self.rows.view(request.version) as view:
            for part in request.tables:
                count = len(part.signs)
                rows = empty_floats(count, self._schema.tables[part.table].dim)
                num_missing += view.lookup(part.table, part.signs, rows)
                num_ids += count
                replies.append(TableRows(part.table, rows, None))
            version = view.version
        with self._lock:
            self._counts["lookups"] += 1
            self._counts["looked_up_ids"] += num_ids
            self._counts["misses"] += num_missing
            self._counts["missing"] += num_missing
        self._lookup_time.add(time.perf_counter() - begin)
        return LookupReply(tuple(replies), version)

    def _check_signs(self, what: str, parts: Sequence[TableSigns]) -> None:
        """Check tables, and that signs are this server's: elsewhere they may have rows."""
        num_tables, index = len(self._schema.tables), self.replica_index
        for part in parts:
            if not 0 <= part.table < num_tables:
                raise StoreError(
                    f"{what}: expected a table in 0..{num_tables - 1}, got {part.table}"
                )
            if self.replica_size == 1:
                continue
            order, starts = route(part.signs, self._owners, self.replica_size)
            if starts[index + 1] - starts[index] != len(part.signs):
                foreign = 0 if starts[index] else int(starts[index + 1])
                sign = int(part.signs[order[foreign]])
                raise StoreError(
                    f"{what}: sign {sign:#018x} of table {part.table} is not of server {index} "
                    f"of {self.replica_size}; is the list of servers the same everywhere?"
                )

    def read_embedding(self, tables: Sequence[TableSigns]) -> tuple[TableEntries, ...]:
        """Return those of the rows asked for that exist; they have no state."""
        self._check_signs("read_embedding", tables)
        entries = []
        with self.rows.view() as view:
            for part in tables:
                rows = empty_floats(len(part.signs), self._schema.tables[part.table].dim)
                states = np.zeros(len(part.signs), np.uint8)
                view.lookup(part.table, part.signs, rows, states)
                found = states == 1
                entries.append(TableEntries(part.table, part.signs[found], rows[found], None))
        return tuple(entries)

    def read_rows(self, request: RowsRequest) -> FoundRows:
        """Return rows of a table in the order asked for; they have no state."""
        if request.with_states or request.with_initial:
            self._refuse("read_rows with states or initial values")
        self._check_signs("read_rows", (TableSigns(request.table, request.signs),))
        count = len(request.signs)
        values = empty_floats(count, self._schema.tables[request.table].dim)
        states = np.zeros(count, np.uint8)
        with self.rows.view() as view:
            view.lookup(request.table, request.signs, values, states)
        return FoundRows((states == 1).view(np.uint8), values, None)

    def scan_rows(self, request: ScanRequest) -> RowPiece:
        """Refuse: rows are replaced while they are served, so no walk has each once."""
        self._refuse("scan_rows; read by id, or export a checkpoint's rows with persia-ckpt")

    def count_rows(self, table: int, prefix: int) -> int:
        """Refuse, as ``scan_rows``."""
        self._refuse("count_rows; get_embedding_size has the rows of all features")

    def get_embedding_size(self) -> int:
        """Return the number of rows held."""
        return len(self.rows)

    # --- loads ------------------------------------------------------------------------------

    def load(self, request: LoadRequest) -> LoadStatus:
        """Begin a step of a load, or return how far it is; ``finish`` shows its rows.

        Rows are read in ``verify``, beside those that are served until then.
        """
        self._roots.check(request.url, request.checkpoint)
        if request.features is not None:
            raise ConfigError(
                f"parameter server {self.replica_index} is for inference: expected all "
                "features to be loaded, got some; leave features out"
            )
        with self._lock:
            load = self._load
            if load is not None and load.request.load_id != request.load_id:
                load = None
            if request.step == "drop":
                self._load = None if load is not None else self._load
                return LoadStatus("dropped", 0, 0, 0, "", ())
            if request.step == "verify":
                if load is None:
                    load = self._load = self._begin(request)
                return load.status
            if request.step == "finish" and self._finished == request.load_id:
                return LoadStatus("finished", 0, 0, 0, "", ())
            if load is None or load.built is None:
                raise CheckpointError(
                    f"parameter server {self.replica_index}: {request.step!r} of load "
                    f"{request.load_id:x}: expected one that it has verified; it was "
                    "restarted, or another load took its place"
                )
            if request.step == "commit":
                load.status = replace(load.status, state="loaded")
                return load.status
            built, self._load = load.built, None
        self.rows.show(built)
        with self._lock:
            self._finished, self._loaded_at = request.load_id, time.monotonic()
        return LoadStatus("finished", 0, 0, 0, "", ())

    def _begin(self, request: LoadRequest) -> _PendingLoad:
        load = _PendingLoad(request, LoadStatus("verifying", 0, 0, 0, "", ()))
        threading.Thread(
            target=self._build, args=(load,), name="persia-load", daemon=True
        ).start()
        return load

    def _build(self, load: _PendingLoad) -> None:
        source = self._source_of(load.request)
        try:
            built = self.rows.build(source)
        except BaseException as exc:
            if not isinstance(exc, PersiaError):
                _logger.exception("a load failed")
            with self._lock:
                load.status = replace(load.status, state="failed", error=str(exc) or repr(exc))
            return
        with self._lock:
            load.built = built
            load.status = replace(load.status, state="verified", num_rows=len(built.table))

    def _source_of(self, request: LoadRequest) -> RowSource:
        """Return what is loaded, and followed if it is the newest one of its folder.

        Then newer ones follow; and the change log too, which is of the configured folder.
        """
        is_configured = request.url.rstrip("/") == self._source.checkpoint.rstrip("/")
        return RowSource(
            checkpoint=request.url,
            checkpoint_id=request.checkpoint,
            follows_newer=True,
            is_explicit=True,
            change_log=self._source.change_log if is_configured else "",
        )

    # --- what only servers that train do ----------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise StoreError(
            f"parameter server {self.replica_index} is for inference (job_type: Infer): "
            f"expected lookups for evaluation, got {what}"
        )

    def configure(self, settings: HyperParameters) -> None:
        """Refuse: what a new row is, is nothing to a server that makes none."""
        self._refuse("settings of a trainer")

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Refuse: no row is stepped."""
        self._refuse("an optimizer")

    def update(self, request: UpdateRequest) -> UpdateReport:
        """Refuse: no row is stepped."""
        self._refuse("an update")

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Refuse: rows are the checkpoint's."""
        self._refuse("set_embedding")

    def delete_rows(self, part: TableSigns) -> int:
        """Refuse: rows are the checkpoint's."""
        self._refuse("delete_rows")

    def clear_embeddings(self) -> None:
        """Refuse: rows are the checkpoint's."""
        self._refuse("clear_embeddings")

    def begin_cut(self, request: CutRequest) -> CutInfo:
        """Refuse: rows have no optimizer state, without which there is no checkpoint."""
        self._refuse("a dump")

    def write_cut(self, request: WriteRequest) -> None:
        """Refuse, as ``begin_cut``."""
        self._refuse("a dump")

    def cut_status(self, cut_id: int) -> CutStatus:
        """Refuse, as ``begin_cut``."""
        self._refuse("a dump")

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """Do nothing: there is no cut to end."""

    # --- what is measured -------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and what is held now, named as of other servers."""
        with self._lock:
            counts = dict(self._counts)
        return dict.fromkeys(_NEVER, 0) | self.rows.stats() | counts

    def limits(self) -> tuple[int, int]:
        """Return 0, 0: any number of rows, in as much memory as they need."""
        return 0, 0

    def checkpointed_at(self) -> float | None:
        """Return when a client last had a checkpoint loaded, by ``time.monotonic``."""
        return self._loaded_at

    def row_ages(self) -> Mapping[int, float]:
        """Return seconds since the last packet applied was written, by training server."""
        return self.rows.ages(time.time())
