"""The embedding-parameter-server: rows of its share of the signs, and the steps on them.

A plain object; embedded mode calls it, a transport serves it. It is empty until it is
configured (the seed of its rows arrives with ``HyperParameters``) and trains once it has an
optimizer too. Evaluation needs neither: rows that are not there are zeros, and are counted.
A request is checked whole before anything changes, so a refused one has changed nothing; types
and dtypes are the codec's to check.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import owners, route
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.request import kept_numbers
from persia._core.store.store import EmbeddingStore
from persia._files.open import ANYWHERE, AllowedRoots
from persia._metrics.timings import Timings
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
    TableGradients,
    TableRows,
    TableSigns,
    UpdateReport,
    UpdateRequest,
    WriteRequest,
)
from persia._server.applied_updates import (
    NUM_RECENT,
    AppliedUpdates,
    TrainingClock,
    UpdateRecord,
)
from persia._server.incremental import IncrementalWriter
from persia._server.kept_lookups import KeptLookups
from persia._server.packets import recover_rows
from persia._server.restore import LoadManager, settings_of
from persia._server.row_access import RowAccess
from persia._server.row_settings import (
    RowKind,
    RowSettings,
    ServerSettings,
    ServerState,
    identity,
)
from persia._server.snapshot import Snapshots
from persia._server.state_file import RECENT, StateFile, StateRecovery
from persia.config import EmbeddingSchema, ParameterServerConfig, schema_fingerprint
from persia.errors import ConfigError, DataTypeError, DimMismatch, KernelError, StoreError
from persia.logger import get_logger

# A table of an update, with its optimizer at the update's rate, and the dtype of its rows.
_Step = tuple[TableGradients, RowOptimizer, str]
Element = TypeVar("Element", bound=np.generic)

_logger = get_logger("persia.parameter_server")

_NO_SIGNS = np.empty(0, np.uint64)

# Training lookups between two looks at whether capacity or the memory limit evicts: the look
# takes each shard's lock once.
_LIMITS_CHECK_INTERVAL = 64

_COUNTS = (
    *("lookups", "looked_up_ids", "misses", "missing"),
    *("updates", "repeated_updates", "update_missing"),
)
_STORE_COUNTS = (
    *("rows", "bytes", "inserted", "evicted", "evicted_lru", "evicted_lfu"),
    *("evicted_native", "expired", "refused", "memory_limited"),
)
_TIMINGS = (
    "lookup_hashmap_time_cost_sec",
    "persia_update_rows_seconds",
    "set_embedding_time_cost_sec",
)


class ParameterServer:
    """Implements ``messages.ParameterServer`` over an ``EmbeddingStore``.

    A request raises NotConfigured where it needs settings or an optimizer that have not come,
    a StoreError, DimMismatch or ConfigError where it cannot be served, and a CheckpointError
    while a load replaces rows or has left some of them out; evaluation a ServiceBusy while one
    replaces rows.

    Args:
        schema: The embedding config.
        config: Section ``embedding_parameter_server_config``.
        replica_index: Number of this server, of ``replica_size`` that share the signs.
        num_threads: Threads that one request may use.
        num_checkpoint_threads: Files of a checkpoint that are checked at the same time.
        clock: Seconds that never go back, by which rows expire.
        state_file: Where all of it outlives the process. The state of a process that was killed
            is recovered from it, if it is whole and of the same schema.
        roots: Where clients may have checkpoints written and loaded.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        config: ParameterServerConfig,
        *,
        replica_index: int = 0,
        replica_size: int = 1,
        num_threads: int = 1,
        num_checkpoint_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
        state_file: StateFile | None = None,
        roots: AllowedRoots = ANYWHERE,
    ) -> None:
        if not 0 <= replica_index < replica_size:
            raise ConfigError(
                f"replica_index must be in 0..replica_size - 1 = {replica_size - 1}, "
                f"got {replica_index}"
            )
        self._schema, self._config, self._roots = schema, config, roots
        self.replica_index, self.replica_size = replica_index, replica_size
        self.schema_fingerprint = schema_fingerprint(schema)
        self._num_tables, self._owners = len(schema.tables), owners(replica_size)
        self._kept = KeptLookups(clock)
        self._counts_lock = threading.Lock()  # guards the counts
        self._counts = dict.fromkeys(_COUNTS, 0)
        self.timings = Timings(*_TIMINGS)
        self._lookup_time, self._update_time, self._set_time = self.timings.values()
        recovery = self._recovery = StateRecovery(
            state_file, identity(schema, config, replica_index, replica_size)
        )
        self._snapshots = Snapshots(replica_index, self._num_requests)
        self._loads = LoadManager(
            replica_index, replica_size, num_checkpoint_threads, recovery, self._state_to_save
        )
        name = f"parameter server {replica_index}"
        self._settings = ServerSettings(
            schema, config, name, num_threads, recovery, self._loads.any_rows
        )
        self._incremental: IncrementalWriter | None = None
        if config.enable_incremental_update:
            self._incremental = IncrementalWriter(
                replica_index,
                replica_size,
                config,
                self._loads.whole_rows,
                self._num_requests,
                note_history=lambda noted: recovery.note(change_log=noted),
            )
        self._recovery.run(lambda notes: self._attach(notes, clock))

    def _attach(self, notes: Mapping[str, Any], clock: Callable[[], float]) -> tuple[int, int]:
        """Begin with what the state file has; returns the counts of rows and cut updates."""
        file, record, recent = self._recovery.file, None, None
        if file is not None:
            record = UpdateRecord(file)
            if file.allocate(RECENT, 24 * NUM_RECENT):
                recent = file.array(RECENT, NUM_RECENT, 3)
        self._record = record
        self._applied = AppliedUpdates(record=record)
        self._clock = TrainingClock(clock, recent)
        self._rows = RowAccess(self._schema, self._settings, self._clock, self._loads)
        self._loads.recover(notes.get("missing"), notes.get("loads"))
        if self._incremental is not None:
            self._incremental.resume(notes.get("change_log"))
        self._settings.attach(notes)
        if (state := self._settings.state) is not None:
            self._clock.resume(state.store.clock_times()[1])
        return self.get_embedding_size(), 0 if record is None else len(record.cut_short)

    @property
    def state_file(self) -> StateFile | None:
        """The one in use: another one than it was given, if that could not be recovered."""
        return self._recovery.file

    # --- settings ---------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Take the settings of rows; the same settings again change nothing."""
        self._settings.configure(settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Take the optimizer of rows; the same one again changes nothing."""
        self._settings.register_optimizer(settings)

    def ready_for_serving(self) -> bool:
        """Whether training lookups and updates can be answered."""
        return self._settings.state is not None and not self._loads.is_loading

    def readiness(self) -> str | None:
        """Return why training lookups and updates cannot be answered; None if they can."""
        if self._loads.problem is None and self._settings.state is None:
            return "a trainer has not given it settings and optimizer yet"
        return self._loads.problem

    # --- requests ---------------------------------------------------------------------------
    # A training step waits for lookup and update: each Python call there costs it 0.1 us or
    # more, so checks and counts stand in line.

    def lookup(self, request: LookupRequest) -> LookupReply:
        """Return the rows asked for, inserting those that are admitted if it is training."""
        begin = time.perf_counter()
        num_ids = self._check_signs("a lookup", request.tables)
        if request.is_training:
            if not 0 <= request.batch_id < 1 << 64:
                raise StoreError(
                    f"a lookup: batch_id: expected 0..2^64-1, got {request.batch_id}"
                )
            with self._loads.whole_rows as load_id:
                replies, num_misses = self._lookup_train(request)
            if request.ref is not None:
                replies = self._kept.keep(request.ref, request.tables, replies)
        else:
            with self._loads.shown_rows as load_id:
                replies, num_misses = self._lookup_eval(request)
        with self._counts_lock:
            self._counts["lookups"] += 1
            self._counts["looked_up_ids"] += num_ids
            self._counts["misses"] += num_misses
            self._counts["missing"] += 0 if request.is_training else num_misses
        self._lookup_time.add(time.perf_counter() - begin)
        return LookupReply(tuple(replies), load_id=load_id)

    def _check_signs(
        self,
        what: str,
        parts: Sequence[TableSigns | TableGradients | TableEntries | RowsRequest],
        may_repeat: bool = False,
    ) -> int:
        """Check the tables of a request, and that its signs are this server's.

        A sign that another server owns would make a second row of it here.
        Returns the number of signs.
        """
        num_signs = 0
        seen: set[int] = set()
        num_tables, index, size = self._num_tables, self.replica_index, self.replica_size
        for part in parts:
            number, signs = part.table, part.signs
            if not 0 <= number < num_tables:
                raise StoreError(
                    f"{what}: expected a table in 0..{num_tables - 1}, got {number}"
                )
            if number in seen and not may_repeat:
                raise StoreError(f"{what}: table {number} comes more than once")
            seen.add(number)
            num_signs += len(signs)
            if size == 1:
                continue
            order, starts = route(signs, self._owners, size)
            if starts[index + 1] - starts[index] != len(signs):
                foreign = 0 if starts[index] else int(starts[index + 1])
                raise StoreError(
                    f"{what}: sign {int(signs[order[foreign]]):#018x} of table {number} is not "
                    f"of server {index} of {size}; is the list of servers the "
                    f"same everywhere?"
                )
        return num_signs

    def _lookup_train(self, request: LookupRequest) -> tuple[list[TableRows], int]:
        state = self._settings.state
        if state is None:
            raise self._settings.not_configured("a training lookup")
        store, batch_id, tables = state.store, request.batch_id, request.tables
        repeated = state.settings.need_steps and self._clock.begin_step(batch_id, tables)
        store.set_clocks(*self._clock.now())
        replies = []
        num_misses = 0
        for part in tables:
            kind = state.settings.kinds[part.table]
            rows = empty_floats(len(part.signs), kind.dim)
            hints = kept_numbers(len(part.signs))
            inserted, refused = store.lookup_train(
                part.signs,
                kind.initializer,
                kind.admit_probability,
                batch_id,
                rows,
                hints,
                kind.optimizer,
                policy=kind.policy,
                admit_at=kind.admit_at,
                repeated=repeated,
                dtype=kind.dtype,
            )
            num_misses += inserted + refused
            replies.append(TableRows(part.table, rows, hints))
        if not self._recovery.is_void:
            self._recovery.check_room(store)
        num_lookups = self._counts["lookups"]
        if num_lookups % _LIMITS_CHECK_INTERVAL == 0 and not self._settings.warned_of_memory:
            self._settings.check_limits(store)
        return replies, num_misses

    def _lookup_eval(self, request: LookupRequest) -> tuple[list[TableRows], int]:
        state = self._settings.state
        if state is not None:
            state.store.set_clocks(*self._clock.now())
        replies = []
        num_missing = 0
        for part in request.tables:
            rows = empty_floats(len(part.signs), self._schema.tables[part.table].dim)
            if state is None:
                rows.fill(0.0)
                num_missing += len(part.signs)
            else:
                dtype = state.settings.kinds[part.table].dtype
                num_missing += state.store.lookup_eval(part.signs, rows, dtype=dtype)
            replies.append(TableRows(part.table, rows, None))
        return replies, num_missing

    def update(self, request: UpdateRequest) -> UpdateReport:
        """Step each row by its gradient, once per update id."""
        state = self._settings.state
        if state is None:
            raise self._settings.not_configured("an update")
        begin = time.perf_counter()
        settings, update_id, ref = state.settings, request.update_id, request.ref
        tables = request.tables if ref is None else self._kept.with_signs(ref, request.tables)
        num_ids = self._check_signs("an update", tables)
        steps = []
        for part in tables:
            kind, count = settings.kinds[part.table], len(part.signs)
            if part.gradients.shape != (count, kind.dim):
                _check_shape("gradients", part.table, part.gradients, count, kind.dim)
            if part.hints is not None and len(part.hints) != count:
                raise _wrong_hints(part.table, count, len(part.hints))
            optimizer = kind.optimizer
            if part.lr is not None:
                optimizer = settings.at_rate(part.table, part.lr)
            steps.append((part, optimizer, kind.dtype))
        # Refused outside of ``run``, which notes failures.
        with self._loads.whole_rows:
            self._loads.check_current(update_id, request.load_id, tables)
            num_missing, repeated = self._applied.run(
                update_id, partial(_apply, state.store, self._record, update_id, steps)
            )
        if ref is not None:
            self._kept.drop(ref)
        if repeated:
            with self._counts_lock:
                self._counts["repeated_updates"] += 1
            return UpdateReport(num_missing, repeated=True)
        with self._counts_lock:
            self._counts["updates"] += 1
            self._counts["update_missing"] += num_missing
        if self._incremental is not None:
            self._incremental.note(num_ids, self._state_to_save)
        self._update_time.add(time.perf_counter() - begin)
        return UpdateReport(num_missing)

    # --- whole rows -------------------------------------------------------------------------

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, in place of what was there."""
        begin = time.perf_counter()
        state = self._settings.state_at(self._clock, "set_embedding")
        self._check_signs("set_embedding", tables, may_repeat=True)
        writes = [_checked_rows(state.settings, part) for part in tables]
        with self._loads.whole_rows:
            for part, (kind, values, states) in zip(tables, writes, strict=True):
                state.store.write(
                    part.signs,
                    values,
                    states,
                    kind.optimizer,
                    policy=kind.policy,
                    dtype=kind.dtype,
                    keep_states=part.keeps_states,
                )
        self._note_replaced()
        self._set_time.add(time.perf_counter() - begin)

    def read_embedding(self, tables: Sequence[TableSigns]) -> tuple[TableEntries, ...]:
        """Return those of the rows asked for that exist, whole, without using them."""
        state = self._settings.state_at(self._clock, "read_embedding")
        self._check_signs("read_embedding", tables, may_repeat=True)
        entries = []
        for part in tables:
            kind = state.settings.kinds[part.table]
            words = kind.optimizer.state_words(kind.dim)
            found, values, states = state.store.read(
                part.signs, kind.dim, words, dtype=kind.dtype
            )
            entries.append(
                TableEntries(part.table, part.signs[found], values[found], states[found])
            )
        return tuple(entries)

    def read_rows(self, request: RowsRequest) -> FoundRows:
        """Return rows in the order asked for, without using them."""
        self._check_signs("read_rows", (request,))
        return self._rows.read(request)

    def delete_rows(self, part: TableSigns) -> int:
        """Drop the rows of these signs, as an eviction does; returns how many there were."""
        self._check_signs("delete_rows", (part,))
        num_rows = self._rows.delete(part)
        self._note_replaced()
        return num_rows

    def scan_rows(self, request: ScanRequest) -> RowPiece:
        """Return a piece of the rows of a group."""
        self._check_signs("scan_rows", (TableSigns(request.table, _NO_SIGNS),))
        return self._rows.scan(request)

    def count_rows(self, table: int, prefix: int) -> int:
        """Return the number of rows of a group, which is a look at each row."""
        self._check_signs("count_rows", (TableSigns(table, _NO_SIGNS),))
        return self._rows.count(table, prefix)

    def get_embedding_size(self) -> int:
        """Return the number of rows held."""
        state = self._settings.state
        return 0 if state is None else len(state.store)

    def clear_embeddings(self) -> None:
        """Drop every row; settings, optimizer and applied updates stay."""
        state = self._settings.state
        if state is not None:
            with self._loads.any_rows:
                state.store.clear()
                self._rows.renew()
                self._loads.clear_missing()
            self._note_replaced()

    # --- checkpoints ------------------------------------------------------------------------

    def _state_to_save(self) -> ServerState:
        return self._settings.state_at(self._clock, "a checkpoint")

    def begin_cut(self, request: CutRequest) -> CutInfo:
        """Begin a snapshot of this moment; the caller holds updates back meanwhile."""
        with self._loads.whole_rows:
            return self._snapshots.begin(request, self._state_to_save, self._log_position)

    def _log_position(self) -> dict[str, Any]:
        log = self._incremental
        return {} if log is None else log.begin_wait(self._state_to_save)

    def write_cut(self, request: WriteRequest) -> None:
        """Write the parts of a snapshot, in a thread of its own."""
        self._roots.check(request.url, request.prefix)
        self._snapshots.write(request)

    def cut_status(self, cut_id: int) -> CutStatus:
        """Return how far a snapshot is, and why it failed if it did."""
        return self._snapshots.status(cut_id)

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """End a snapshot, whose files are in a manifest if it is committed."""
        self._snapshots.end(cut_id, committed)

    def load(self, request: LoadRequest) -> LoadStatus:
        """Begin a step of a load, in a thread of its own, or return how far it is."""
        self._roots.check(request.url, request.checkpoint)
        if request.step == "verify" and not self.ready_for_serving():
            self._settings.complete(*settings_of(request))
        if request.step == "commit":
            self._clock.forget_recent()
        if request.step == "finish":
            self._rows.renew()  # before rows can be read again
        status = self._loads.load(request)
        if request.step == "finish":
            self._note_loaded()
        return status

    def _note_loaded(self) -> None:
        if self._incremental is not None:
            self._incremental.note_loaded(self._loads.reached)
        self._note_replaced()

    def _note_replaced(self) -> None:
        """Have rows written that did not change by training, if those that do are."""
        if self._incremental is not None:
            self._incremental.note_replaced(self._state_to_save)

    def flush_changes(self) -> None:
        """Write the rows that have changed since they were written last, if that is asked for.

        This is the end of a job, whose folder is free afterwards, though the server may go on.
        """
        if self._incremental is not None:
            self._incremental.flush_and_release()

    def close(self) -> None:
        """Write what has changed and end the threads; no call may come afterwards."""
        if self._incremental is not None:
            self._incremental.close()

    def recover(self) -> None:
        """Load what a process before this one has written of its rows, if it has none."""
        if self._config.recovery and recover_rows(
            self._config, self._loads, self._settings, self._recovery
        ):
            self._note_loaded()

    # --- what is measured -------------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and what is held now.

        ``looked_up_ids`` are distinct ids, request by request, of which ``misses`` had no row;
        ``missing`` counts zeros that evaluation answered with, ``update_missing`` gradients
        without a row; ``recovered_rows`` are those that this process found when it started.
        """
        state = self._settings.state
        held = {} if state is None else state.store.stats()
        with self._counts_lock:
            counts = {name: int(held.get(name, 0)) for name in _STORE_COUNTS} | self._counts
        counts["replaced_updates"] = self._loads.num_refused
        if self._recovery.num_rows:
            counts["recovered_rows"] = self._recovery.num_rows
        return counts

    def limits(self) -> tuple[int, int]:
        """Return how many rows this server keeps, and in how much memory; 0 is any."""
        return self._config.capacity, self._config.memory_limit_bytes()

    def checkpointed_at(self) -> float | None:
        """Return when its rows were last a checkpoint's, by ``time.monotonic``."""
        times = self._snapshots.committed_at, self._loads.loaded_at
        return max((at for at in times if at is not None), default=None)

    def row_ages(self) -> Mapping[int, float]:
        """Return nothing: its rows are those that are trained."""
        return {}

    def _num_requests(self) -> int:
        """Return the requests so far of those that dumps slow down."""
        return self._counts["lookups"] + self._counts["updates"]


def _as_rows(
    name: str, part: TableEntries, matrix: NDArray[Element], dtype: type[Element], width: int
) -> NDArray[Element]:
    """Return ``matrix`` in C order, if it is one row a sign."""
    got = matrix.dtype if isinstance(matrix, np.ndarray) else type(matrix).__name__
    if got != dtype:
        expected = np.dtype(dtype)
        raise DataTypeError(f"table {part.table}: expected {name} as {expected}, got {got}")
    _check_shape(name, part.table, matrix, len(part.signs), width)
    return np.ascontiguousarray(matrix)


def _check_shape(
    name: str, table: int, matrix: NDArray[Any], num_signs: int, width: int
) -> None:
    if matrix.shape[1:] != (width,):
        got = ", ".join(map(str, matrix.shape[1:])) or "vectors"
        raise DimMismatch(f"table {table}: expected {name} of dim {width}, got {got}")
    if matrix.shape[0] != num_signs:
        raise StoreError(
            f"table {table}: expected {num_signs} rows of {name}, one a sign, "
            f"got {matrix.shape[0]}"
        )


def _wrong_hints(table: int, num_signs: int, got: int) -> StoreError:
    return StoreError(f"table {table}: expected {num_signs} hints, one a sign, got {got}")


def _apply(
    store: EmbeddingStore,
    record: UpdateRecord | None,
    update_id: tuple[int, int],
    steps: Sequence[_Step],
) -> int:
    """Step the rows; returns the number of signs without a row.

    If a kernel of a user fails for a row, all others are stepped before that is raised.
    """
    slot = tag = num_missing = 0
    failure: KernelError | None = None
    if record is not None:
        slot, tag = record.begin(update_id, len(steps))
    for place, (part, optimizer, dtype) in enumerate(steps):
        try:
            num_missing += store.update(
                part.signs,
                part.hints,
                part.gradients,
                optimizer,
                dtype=dtype,
                number=update_id[1],  # keys rounding: nothing that differs between servers
                slot=slot,
                tag=tag + place if slot else 0,
            )
        except KernelError as exc:
            failure = failure or exc
    if failure is not None:
        raise failure
    return num_missing


def _checked_rows(
    settings: RowSettings, part: TableEntries
) -> tuple[RowKind, NDArray[np.float32], NDArray[np.uint32] | None]:
    """Check rows that are written; in embedded mode they are a user's, which no codec saw."""
    kind, states = settings.kinds[part.table], None
    is_other = settings.tables_of(part.signs) != part.table
    if is_other.any():
        sign = int(part.signs[is_other][0])
        raise StoreError(
            f"table {part.table}: sign {sign:#018x} has feature bits "
            f"{sign >> (64 - settings.schema.prefix_bits)}, which no slot of it has"
        )
    values = _as_rows("values", part, part.values, np.float32, kind.dim)
    if part.states is not None:
        words = kind.optimizer.state_words(kind.dim)
        of = f"states of {kind.optimizer.name}"
        states = _as_rows(of, part, part.states, np.uint32, words)
    return kind, values, states
