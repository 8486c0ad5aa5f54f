"""The embedding-parameter-server: rows of its share of the signs, and the steps on them.

A plain object; embedded mode calls it, a transport serves it. It is empty until it is
configured (the seed of its rows arrives with ``HyperParameters``) and trains once it has an
optimizer too. Evaluation needs neither: what is not there is zeros, and is counted.

A request is checked whole before anything changes, so a refused one has changed nothing.
Any thread may call any method.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats, zero_floats
from persia._core.base.hashing import owners, route
from persia._core.kernels.initial import Initializer
from persia._core.store.request import kept_numbers
from persia._core.store.store import EmbeddingStore
from persia._files.allowed_roots import ANYWHERE, AllowedRoots
from persia._metrics.timings import Timings
from persia._rpc.messages import (
    CutInfo,
    CutRequest,
    CutStatus,
    HyperParameters,
    LoadRequest,
    LoadStatus,
    LookupReply,
    LookupRequest,
    OptimizerSettings,
    Signs,
    TableEntries,
    TableGradients,
    TableRows,
    TableSigns,
    UpdateReply,
    UpdateRequest,
    WriteRequest,
)
from persia._server.applied_updates import AppliedUpdates
from persia._server.incremental import IncrementalWriter
from persia._server.loads import LoadManager, settings_of
from persia._server.optimizers import TableOptimizers
from persia._server.recovery import check_facts, facts_of, noted_settings
from persia._server.row_policies import REMEMBERED, RowPolicies, TrainingClock
from persia._server.snapshot import ServerState, Snapshots
from persia._server.state_file import RECENT, StateFile
from persia._server.update_record import UpdateRecord
from persia.config import EmbeddingSchema, ParameterServerConfig, Table, schema_fingerprint
from persia.errors import (
    ConfigError,
    DataTypeError,
    DimMismatch,
    NotConfigured,
    StoreError,
)
from persia.logger import get_logger

Element = TypeVar("Element", bound=np.generic)

_logger = get_logger("persia.parameter_server")

# Training lookups between two looks at whether the memory limit evicts: the look takes each
# shard's lock once.
_MEMORY_CHECK_INTERVAL = 64


@dataclass(frozen=True, slots=True)
class _Configured:
    """What was set, as one value, so that a request sees all of it or nothing.

    Every row of the store is one of the optimizers beside it.
    """

    settings: HyperParameters
    store: EmbeddingStore
    initializers: tuple[Initializer, ...]  # by table
    policies: RowPolicies
    optimizers: TableOptimizers | None


class ParameterServer:
    """Implements ``messages.ParameterServer`` over an ``EmbeddingStore``.

    Args:
        schema: The embedding config.
        settings: Section ``embedding_parameter_server_config``.
        replica_index: Number of this server.
        replica_size: Number of servers that share the signs.
        num_threads: Threads that one request may use.
        num_checkpoint_threads: Files of a checkpoint that are checked at the same time.
        clock: Seconds that never go back, by which rows expire.
        state: Where all of it outlives the process. What a process that was killed left there
            is taken up again, if it is whole and of the same schema.
        roots: Where clients may have checkpoints written and loaded.

    Raises:
        ConfigError: If ``replica_index`` is not in ``0..replica_size - 1``.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        settings: ParameterServerConfig,
        *,
        replica_index: int = 0,
        replica_size: int = 1,
        num_threads: int = 1,
        num_checkpoint_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
        state: StateFile | None = None,
        roots: AllowedRoots = ANYWHERE,
    ) -> None:
        if not 0 <= replica_index < replica_size:
            raise ConfigError(
                f"replica_index must be in 0..replica_size - 1 = {replica_size - 1}, "
                f"got {replica_index}"
            )
        self._schema = schema
        self._settings = settings
        self._roots = roots
        self._replica_index = replica_index
        self._replica_size = replica_size
        self._num_threads = num_threads
        self._owners = owners(replica_size)
        self._fingerprint = schema_fingerprint(schema)
        # Held while settings change; requests read the next field without it.
        self._settings_lock = threading.Lock()
        self._configured: _Configured | None = None
        self._registered: OptimizerSettings | None = None
        self._counts_lock = threading.Lock()  # guards the counts
        self._counts = dict.fromkeys(
            (
                "lookups",
                "looked_up_ids",
                "misses",
                "updates",
                "repeated_updates",
                "missing",
                "update_missing",
            ),
            0,
        )
        self.timings = Timings(
            "lookup_hashmap_time_cost_sec",
            "persia_update_rows_seconds",
            "set_embedding_time_cost_sec",
        )
        self._warned_of_memory = False
        self._cuts = Snapshots(replica_index, self._num_requests)
        self._loads = LoadManager(
            replica_index, replica_size, num_checkpoint_threads, self._note_missing
        )
        self._incremental: IncrementalWriter | None = None
        if settings.enable_incremental_update:
            self._incremental = IncrementalWriter(
                replica_index,
                replica_size,
                settings,
                self._loads.whole_rows,
                self._num_requests,
            )
        self._warned_of_state = False
        self._recovered_rows = 0
        self._state = state
        self._facts = facts_of(schema, settings, replica_index, replica_size)
        if state is not None and state.why_not is not None:
            self._begin_state(state)
        elif state is not None:
            self._recover(state, clock)
            return
        self._keep_updates(state, clock)

    def _keep_updates(self, state: StateFile | None, clock: Callable[[], float]) -> None:
        self._record = None if state is None else UpdateRecord(state)
        self._ledger = AppliedUpdates(record=self._record)
        recent = None
        if state is not None and state.back(RECENT, 24 * REMEMBERED):
            recent = state.array(RECENT, REMEMBERED, 3)
        self._clock = TrainingClock(clock, recent)

    @property
    def replica_index(self) -> int:
        """Number of this server."""
        return self._replica_index

    @property
    def replica_size(self) -> int:
        """Number of servers that share the signs."""
        return self._replica_size

    @property
    def schema_fingerprint(self) -> str:
        """What this server takes signs and tables to mean; see ``plan``."""
        return self._fingerprint

    # --- settings ---------------------------------------------------------------------------

    def configure(self, settings: HyperParameters) -> None:
        """Take the settings of rows; the same settings again change nothing.

        A table's own initialization and admission come before these. Eviction policies and
        the size of the sketch are those of the schema, whatever the settings.

        Raises:
            ConfigError: If the seed differs from that of the rows held, or a value cannot be
                used.
            CheckpointError: If the seed differs and a load is replacing rows.
        """
        with self._settings_lock:
            old = self._configured
            if old is not None and old.settings == settings:
                return
            if old is not None and old.settings.seed != settings.seed and len(old.store):
                raise ConfigError(
                    f"seed: expected {old.settings.seed}, which the {len(old.store)} rows held "
                    f"began with, got {settings.seed}; clear_embeddings() first"
                )
            if not 0.0 <= settings.admit_probability <= 1.0:
                raise ConfigError(
                    f"admit_probability must be in 0..1, got {settings.admit_probability}"
                )
            tables = self._schema.tables
            initializers = tuple(_initializer(table, settings) for table in tables)
            policies = RowPolicies.of(tables, self._settings, settings.admit_probability)
            optimizers = None
            if self._registered is not None:
                optimizers = TableOptimizers(
                    self._schema, self._registered, settings.weight_bound
                )
            is_other = old is not None and old.settings.seed != settings.seed
            with self._replacing(is_other):
                if old is None:
                    store = self._new_store(settings.seed, policies)
                elif is_other:
                    store = self._another_store(old.store, settings.seed, policies)
                else:
                    store = old.store
                if self._state is not None:
                    # Before there is a row of it.
                    self._state.note(configured=dataclasses.asdict(settings))
                self._configured = _Configured(
                    settings, store, initializers, policies, optimizers
                )

    def _replacing(self, is_replaced: bool) -> AbstractContextManager[None]:
        """Surround what takes another store, if it does: no load may be filling this one."""
        return self._loads.whole_rows(or_missing=True) if is_replaced else nullcontext()

    def _another_store(
        self, old: EmbeddingStore, seed: int, policies: RowPolicies
    ) -> EmbeddingStore:
        """Return an empty store in the place of one that is empty."""
        if self._state is None:
            return self._new_store(seed, policies)
        # Two stores cannot share the file. If a lookup under way enters a row with what was set
        # before, a later request finds it of another shape, and says so.
        old.clear()
        old.reseed(seed)
        return old

    def _new_store(
        self, seed: int, policies: RowPolicies, attach: bool = False
    ) -> EmbeddingStore:
        return EmbeddingStore(
            self._settings.capacity,
            num_shards=self._settings.num_hashmap_internal_shards,
            seed=seed,
            memory_limit=self._settings.memory_limit_bytes(),
            num_threads=self._num_threads,
            policies=policies.kinds,
            sketch_bytes=policies.sketch_bytes,
            state_file=None if self._state is None else self._state.descriptor,
            attach=attach,
        )

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Take the optimizer; the same one again changes nothing, nor does it touch a row.

        Another learning rate, or any other option that leaves the state what it is, takes
        effect with the next update that brings no rate of its own.

        Raises:
            ConfigError: If an option cannot be used, or rows are held whose state another
                optimizer keeps.
            CheckpointError: If a load is replacing rows that it would have to drop.
        """
        with self._settings_lock:
            if self._registered == settings:
                return
            configured = self._configured
            # Without a weight bound, which is still to come, this only refuses bad options.
            bound = 0.0 if configured is None else configured.settings.weight_bound
            new = TableOptimizers(self._schema, settings, bound)
            old = None if configured is None else configured.optimizers
            with self._replacing(old is not None and new.first_changed(old) is not None):
                if configured is not None:
                    configured = self._with_optimizers(configured, new)
                if self._state is not None:
                    self._state.note(optimizer=dataclasses.asdict(settings))
                self._configured = configured
                self._registered = settings

    def _with_optimizers(self, configured: _Configured, new: TableOptimizers) -> _Configured:
        old, store = configured.optimizers, configured.store
        changed = None if old is None else new.first_changed(old)
        if old is not None and changed is not None:
            if len(store):
                number, dim = changed.number, changed.dim
                before, after = old.of(number), new.of(number)
                raise ConfigError(
                    f"optimizer {after.name} keeps {after.state_words(dim)} words of state "
                    f"beside {dim} floats, but the {len(store)} rows held have "
                    f"{before.state_words(dim)} of {before.name}; register {before.name} "
                    f"again with the options that shape its state, or clear_embeddings() first"
                )
            # A lookup under way may still insert rows with the old state: into the old store.
            store = self._another_store(store, configured.settings.seed, configured.policies)
        return dataclasses.replace(configured, store=store, optimizers=new)

    def ready_for_serving(self) -> bool:
        """Whether training lookups and updates can be answered."""
        configured = self._configured
        has_all = configured is not None and configured.optimizers is not None
        return has_all and not self._loads.is_loading

    def _for_training(self, what: str) -> tuple[_Configured, TableOptimizers]:
        configured = self._configured
        optimizers = None if configured is None else configured.optimizers
        if configured is None or optimizers is None:
            expected = "configure" if configured is None else "register_optimizer"
            raise NotConfigured(
                f"{what} came to parameter server {self._replica_index} before {expected}, "
                f"which says what a new row is"
            )
        return configured, optimizers

    # --- requests ---------------------------------------------------------------------------

    def lookup(self, request: LookupRequest) -> LookupReply:
        """Return the rows asked for, inserting those that are admitted if it is training.

        Raises:
            NotConfigured: If it is training and settings or optimizer have not arrived.
            StoreError: If a table is unknown or comes twice, a sign is another server's, or
                the batch's id is negative.
            DataTypeError: If signs are not u64 [n].
        """
        begin = time.perf_counter()
        tables = [
            self._table("a lookup", part.table, [other.table for other in request.tables])
            for part in request.tables
        ]
        signs = [self._signs("a lookup", part.table, part.signs) for part in request.tables]
        if request.is_training:
            if not 0 <= request.batch_id < 1 << 64:
                raise StoreError(
                    f"a lookup: batch_id: expected 0..2^64-1, got {request.batch_id}"
                )
            with self._loads.whole_rows():
                replies = self._lookup_train(request.batch_id, tables, signs)
        else:
            replies = self._lookup_eval(tables, signs)
        self._count(lookups=1, looked_up_ids=sum(map(len, signs)))
        self.timings["lookup_hashmap_time_cost_sec"].add(time.perf_counter() - begin)
        return LookupReply(tuple(replies))

    def _lookup_train(
        self, batch_id: int, tables: list[Table], signs: list[Signs]
    ) -> list[TableRows]:
        configured, optimizers = self._for_training("a training lookup")
        policies = configured.policies
        repeated = policies.need_steps and self._clock.begin_step(batch_id, signs)
        configured.store.set_clocks(*self._clock.now())
        replies = []
        num_misses = 0
        for table, asked in zip(tables, signs, strict=True):
            rows = empty_floats(len(asked), table.dim)
            hints = kept_numbers(len(asked))
            misses = configured.store.lookup_train(
                asked,
                configured.initializers[table.number],
                policies.probabilities[table.number],
                batch_id,
                rows,
                hints,
                optimizers.of(table.number),
                policy=policies.numbers[table.number],
                admit_at=policies.admit_at[table.number],
                repeated=repeated,
                dtype=table.dtype,
            )
            num_misses += sum(misses)
            replies.append(TableRows(table.number, rows, hints))
        self._count(misses=num_misses)
        if self._state is not None and not self._warned_of_state:
            self._look_at_state(configured.store)
        if not self._warned_of_memory and self._counts["lookups"] % _MEMORY_CHECK_INTERVAL == 0:
            self._warn_of_memory(configured.store)
        return replies

    def _lookup_eval(self, tables: list[Table], signs: list[Signs]) -> list[TableRows]:
        configured = self._configured
        if configured is not None:
            configured.store.set_clocks(*self._clock.now())
        replies = []
        num_missing = 0
        for table, asked in zip(tables, signs, strict=True):
            if configured is None:
                rows = zero_floats(len(asked), table.dim)
                num_missing += len(asked)
            else:
                rows = empty_floats(len(asked), table.dim)
                num_missing += configured.store.lookup_eval(asked, rows, dtype=table.dtype)
            replies.append(TableRows(table.number, rows, None))
        self._count(missing=num_missing, misses=num_missing)
        return replies

    def update(self, request: UpdateRequest) -> UpdateReply:
        """Step each row by its gradient, once per update id.

        Raises:
            NotConfigured: If settings or optimizer have not arrived.
            StoreError: If a table is unknown or comes twice, lengths differ, a sign is
                another server's, or the id is too old to tell whether it was applied.
            DimMismatch: If gradients are not of the table's dim.
            DataTypeError: If an array has another dtype than its message says.
            ConfigError: If a learning rate cannot be used.
        """
        configured, optimizers = self._for_training("an update")
        begin = time.perf_counter()
        parts = []
        for part in request.tables:
            arrays = self._gradients(part, [other.table for other in request.tables])
            parts.append((*arrays, optimizers.of(part.table, part.lr)))
        dtypes = [self._schema.tables[part.table].dtype for part in request.tables]
        # Rounding of two-byte rows depends on it, and so on nothing that servers differ in.
        number = request.update_id[1]

        def apply() -> int:
            slot = tag = 0
            if self._record is not None:
                slot, tag = self._record.begin(request.update_id, len(parts))
            return sum(
                configured.store.update(
                    *part, dtype=dtype, number=number, slot=slot, tag=slot and tag + place
                )
                for place, (part, dtype) in enumerate(zip(parts, dtypes, strict=True))
            )

        # Refused outside the ledger: sent again after the load, it is applied.
        with self._loads.whole_rows():
            num_missing, repeated = self._ledger.run(request.update_id, apply)
        if repeated:
            self._count(repeated_updates=1)
        else:
            self._count(updates=1, update_missing=num_missing)
            if self._incremental is not None:
                num_rows = sum(len(part.signs) for part in request.tables)
                self._incremental.note(num_rows, self._held)
            self.timings["persia_update_rows_seconds"].add(time.perf_counter() - begin)
        return UpdateReply(num_missing, repeated)

    def _gradients(
        self, part: TableGradients, numbers: list[int]
    ) -> tuple[Signs, NDArray[np.uint32] | None, NDArray[np.float32]]:
        table = self._table("an update", part.table, numbers)
        signs = self._signs("an update", part.table, part.signs)
        gradients = self._matrix("gradients", table, signs, part.gradients)
        if part.hints is None:
            return signs, None, gradients
        hints = _array("hints", table, part.hints, np.uint32, 1)
        if len(hints) != len(signs):
            raise StoreError(
                f"table {table.number}: expected {len(signs)} hints, one a sign, "
                f"got {len(hints)}"
            )
        return signs, hints, gradients

    # --- whole rows -------------------------------------------------------------------------

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, in place of what was there.

        Raises:
            NotConfigured: If settings or optimizer have not arrived.
            StoreError: If a table is unknown, lengths differ, or a sign is of another table
                or another server.
            DimMismatch: If values are not of the table's dim, or states not of the
                optimizer's width for it.
            DataTypeError: If an array has another dtype than its message says.
        """
        configured, optimizers = self._for_training("set_embedding")
        begin = time.perf_counter()
        writes = []
        for part in tables:
            table = self._table("set_embedding", part.table, [part.table])
            signs = self._signs("set_embedding", part.table, part.signs)
            self._check_groups(table, signs)
            optimizer = optimizers.of(table.number)
            values = self._matrix("values", table, signs, part.values)
            states = part.states
            if states is not None:
                states = _array("states", table, states, np.uint32, 2)
                expected = (len(signs), optimizer.state_words(table.dim))
                if states.shape != expected:
                    raise DimMismatch(
                        f"table {table.number}: expected states {list(expected)} for "
                        f"{optimizer.name}, got {list(states.shape)}"
                    )
            writes.append((table, (signs, values, states, optimizer)))
        configured.store.set_clocks(*self._clock.now())
        with self._loads.whole_rows():
            for table, write in writes:
                policy = configured.policies.numbers[table.number]
                configured.store.write(*write, policy=policy, dtype=table.dtype)
        self.timings["set_embedding_time_cost_sec"].add(time.perf_counter() - begin)

    def _check_groups(self, table: Table, signs: Signs) -> None:
        """Check that each sign's feature bits are of a group with rows in this table."""
        groups = [self._schema.groups[group] for group in self._schema.groups_of(table.number)]
        bits = signs >> np.uint64(64 - self._schema.prefix_bits)
        known = np.isin(bits, np.array([group + 1 for group in groups], np.uint64))
        if not known.all():
            sign = int(signs[~known][0])
            raise StoreError(
                f"table {table.number}: sign {sign:#018x} has feature bits "
                f"{sign >> (64 - self._schema.prefix_bits)}, which no slot of it has"
            )

    def read_embedding(self, tables: Sequence[TableSigns]) -> tuple[TableEntries, ...]:
        """Return those of the rows asked for that exist, whole, without using them.

        Raises:
            NotConfigured: If settings or optimizer have not arrived.
            StoreError: If a table is unknown or a sign is another server's.
            DataTypeError: If signs are not u64 [n].
        """
        configured, optimizers = self._for_training("read_embedding")
        configured.store.set_clocks(*self._clock.now())
        entries = []
        for part in tables:
            table = self._table("read_embedding", part.table, [part.table])
            signs = self._signs("read_embedding", part.table, part.signs)
            words = optimizers.of(table.number).state_words(table.dim)
            found, values, states = configured.store.read(
                signs, table.dim, words, dtype=table.dtype
            )
            entries.append(
                TableEntries(table.number, signs[found], values[found], states[found])
            )
        return tuple(entries)

    def get_embedding_size(self) -> int:
        """Return the number of rows held."""
        configured = self._configured
        return 0 if configured is None else len(configured.store)

    def clear_embeddings(self) -> None:
        """Drop every row; settings, optimizer and applied updates stay.

        Raises:
            CheckpointError: If a load is replacing them.
        """
        configured = self._configured
        if configured is not None:
            with self._loads.whole_rows(or_missing=True):
                configured.store.clear()
                self._loads.cleared()

    # --- checkpoints ------------------------------------------------------------------------

    def _held(self) -> ServerState:
        """Return what is held, and what it means."""
        configured, optimizers = self._for_training("a checkpoint")
        registered = self._registered
        if registered is None:
            raise NotConfigured("a checkpoint was asked for before register_optimizer")
        configured.store.set_clocks(*self._clock.now())
        return ServerState(
            configured.store,
            self._schema,
            configured.settings,
            registered,
            optimizers,
            configured.policies,
        )

    def begin_cut(self, request: CutRequest) -> CutInfo:
        """Begin a snapshot of this moment; the caller holds updates back meanwhile.

        Raises:
            NotConfigured: If settings or optimizer have not arrived.
            CheckpointError: If another cut of its kind is being written, or a load goes on.
        """
        with self._loads.whole_rows():
            return self._cuts.begin(request, self._held)

    def write_cut(self, request: WriteRequest) -> None:
        """Write a cut's parts, in a thread of its own.

        Raises:
            CheckpointError: If there is no such cut, or the folder is outside the roots.
        """
        self._roots.check(request.url, request.prefix)
        self._cuts.write(request)

    def cut_status(self, cut_id: int) -> CutStatus:
        """Return how far a cut is, and why it failed if it did.

        Raises:
            CheckpointError: If there is no such cut.
        """
        return self._cuts.status(cut_id)

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """End a cut, whose files are in a manifest if it is committed."""
        self._cuts.end(cut_id, committed)

    def load(self, request: LoadRequest) -> LoadStatus:
        """Begin a step of a load, in a thread of its own, or return how far it is.

        Raises:
            NotConfigured: If settings or optimizer have not arrived.
            CheckpointError: If the step does not follow from the one before, or the folder is
                outside the roots.
        """
        self._roots.check(request.url, request.checkpoint)
        if request.step == "verify" and not self.ready_for_serving():
            self._configure_as(request)
        if request.step == "commit":
            self._clock.forget()
        return self._loads.load(request, self._held)

    def flush_changes(self) -> None:
        """Write the rows that have changed since they were written last, if that is asked for.

        This is the end of a job, whose folder is free afterwards, though the server may go on.

        Raises:
            CheckpointError: If they cannot be written.
        """
        if self._incremental is not None:
            try:
                self._incremental.flush()
            finally:
                self._incremental.release()

    def close(self) -> None:
        """Write what has changed, and end the threads; nothing may be asked afterwards."""
        if self._incremental is not None:
            self._incremental.close()

    def load_checkpoint(self, url: str) -> None:
        """Load this server's share of a checkpoint now, with the settings that it names.

        Raises:
            CheckpointError: If something is missing, damaged, or does not fit.
            ConfigError: If the embedding config is another one; says what differs.
        """
        request = LoadRequest(0, "verify", url, "", None)
        self._configure_as(request)
        for note in self._loads.load_now(request, self._held):
            _logger.warning("%s: %s", url, note)

    def _configure_as(self, request: LoadRequest) -> None:
        """Take the settings that nobody has given from the checkpoint, as for inference."""
        hyper, optimizer = settings_of(request)
        if self._configured is None:
            self.configure(hyper)
        if self._registered is None:
            self.register_optimizer(optimizer)

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and what is held now.

        ``rows``, ``bytes``, ``inserted``, ``evicted`` (``evicted_lru`` and ``evicted_lfu``),
        ``expired``, ``refused`` (not admitted) and ``memory_limited`` are the store's;
        ``recovered_rows``, if any, are those that this process found when it started;
        ``looked_up_ids`` are distinct ids, request by request, of which ``misses`` had no row;
        ``missing`` counts zeros that
        evaluation answered with, ``update_missing`` gradients without a row.
        """
        configured = self._configured
        held = {} if configured is None else configured.store.stats()
        names = (
            "rows",
            "bytes",
            "inserted",
            "evicted",
            "evicted_lru",
            "evicted_lfu",
            "expired",
            "refused",
            "memory_limited",
        )
        with self._counts_lock:
            counts = {**{name: int(held.get(name, 0)) for name in names}, **self._counts}
        if self._recovered_rows:
            counts["recovered_rows"] = self._recovered_rows
        return counts

    def limits(self) -> tuple[int, int]:
        """Return how many rows this server keeps, and in how much memory; 0 is any."""
        return self._settings.capacity, self._settings.memory_limit_bytes()

    def checkpointed_at(self) -> float | None:
        """Return when its rows were last a checkpoint's, by ``time.monotonic``."""
        times = self._cuts.committed_at, self._loads.loaded_at
        return max((at for at in times if at is not None), default=None)

    def why_not_ready(self) -> str:
        """Say why training lookups and updates cannot be answered; "" if they can."""
        if self._loads.is_loading:
            return "a load is replacing its rows"
        if self._loads.missing is not None:
            return "rows are missing: a load was not finished on every server"
        if not self.ready_for_serving():
            return "a trainer has not given it settings and optimizer yet"
        return ""

    # --- a process that was killed ----------------------------------------------------------

    def _begin_state(self, state: StateFile) -> None:
        state.note(facts=self._facts)

    def _note_missing(self, missing: dict[str, Any] | None) -> None:
        if self._state is not None:
            self._state.note(missing=missing)

    def _recover(self, state: StateFile, clock: Callable[[], float]) -> None:
        """Take up what is in the file, all of it; or nothing, and say why."""
        begin = time.perf_counter()
        who = f"parameter server {self._replica_index} of {self._replica_size}"
        try:
            self._attach(state, clock)
        except MemoryError as error:
            # The rows are whole. Where there is memory, the next process has them.
            state.close()
            raise StoreError(
                f"{who}: {state.path} has the rows of a process that ended, and there is not "
                f"enough memory to take them up: {error}. The file is kept: start this server "
                "again once there is more, or remove the file to begin empty"
            ) from error
        except (StoreError, ConfigError) as error:
            _logger.error(
                "%s: %s was left by a process that ended, and CANNOT BE USED: %s; this server "
                "begins empty",
                who,
                state.path,
                error,
            )
            self._configured = self._registered = None
            self._loads.recovered(None)
            self._state = state = state.renewed()
            self._begin_state(state)
            self._keep_updates(state, clock)
            return
        self._recovered_rows = self.get_embedding_size()
        _logger.warning(
            "%s: has the %d rows of a process that ended, after %.2f s; %d updates were cut "
            "short and wait to be sent again",
            who,
            self._recovered_rows,
            time.perf_counter() - begin,
            0 if self._record is None else len(self._record.cut_short),
        )

    def _attach(self, state: StateFile, clock: Callable[[], float]) -> None:
        notes = state.notes
        check_facts(notes.get("facts"), self._facts)
        self._loads.recovered(notes.get("missing"))
        settings, optimizer = noted_settings(notes)
        self._keep_updates(state, clock)
        if settings is not None:
            tables = self._schema.tables
            policies = RowPolicies.of(tables, self._settings, settings.admit_probability)
            store = self._new_store(settings.seed, policies, attach=True)
            self._clock.resume(store.clock_times()[1])
            initializers = tuple(_initializer(table, settings) for table in tables)
            self._configured = _Configured(settings, store, initializers, policies, None)
        if optimizer is not None:
            self.register_optimizer(optimizer)

    def _look_at_state(self, store: EmbeddingStore) -> None:
        if self._state is None or not (store.state_is_void() or self._state.is_void):
            return
        self._warned_of_state = True
        self._state.make_void()
        _logger.error(
            "parameter server %d of %d: %s has no room any more, and rows are in the memory of "
            "this process alone from now on: IF IT IS KILLED, ALL ROWS ARE LOST. Give the "
            "tmpfs more room (docker: --shm-size), or lower memory_limit",
            self._replica_index,
            self._replica_size,
            self._state.path.parent,
        )

    @property
    def state(self) -> StateFile | None:
        """Where all of it outlives the process."""
        return self._state

    # --- checks -----------------------------------------------------------------------------

    def _table(self, what: str, number: int, numbers: list[int]) -> Table:
        if not 0 <= number < len(self._schema.tables):
            raise StoreError(
                f"{what}: expected a table in 0..{len(self._schema.tables) - 1}, got {number}"
            )
        if numbers.count(number) != 1:
            raise StoreError(f"{what}: table {number} comes {numbers.count(number)} times")
        return self._schema.tables[number]

    def _signs(self, what: str, number: int, signs: Signs) -> Signs:
        """Check signs; one that another server owns would make a second row of it here."""
        signs = _array("signs", self._schema.tables[number], signs, np.uint64, 1)
        if self._replica_size > 1:
            order, starts = route(signs, self._owners, self._replica_size)
            index = self._replica_index
            if starts[index + 1] - starts[index] != len(signs):
                foreign = 0 if starts[index] else int(starts[index + 1])
                raise StoreError(
                    f"{what}: sign {int(signs[order[foreign]]):#018x} of table {number} is not "
                    f"of server {index} of {self._replica_size}; is the list of servers the "
                    f"same everywhere?"
                )
        return signs

    def _matrix(
        self, name: str, table: Table, signs: Signs, matrix: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        matrix = _array(name, table, matrix, np.float32, 2)
        if matrix.shape[1] != table.dim:
            raise DimMismatch(
                f"table {table.number}: expected {name} of dim {table.dim}, "
                f"got {matrix.shape[1]}"
            )
        if matrix.shape[0] != len(signs):
            raise StoreError(
                f"table {table.number}: expected {len(signs)} rows of {name}, one a sign, "
                f"got {matrix.shape[0]}"
            )
        return matrix

    def _num_requests(self) -> int:
        """Return how many requests have come, of those that pay for what runs beside them."""
        return self._counts["lookups"] + self._counts["updates"]

    def _count(self, **counts: int) -> None:
        with self._counts_lock:
            for name, count in counts.items():
                self._counts[name] += count

    def _warn_of_memory(self, store: EmbeddingStore) -> None:
        stats = store.stats()
        if not stats["memory_limited"]:
            return
        self._warned_of_memory = True
        _logger.warning(
            "parameter server %d of %d: %d rows take %.2f GB and reach the memory limit of "
            "%.2f GB; from now on rows are evicted",
            self._replica_index,
            self._replica_size,
            stats["rows"],
            stats["bytes"] / 1e9,
            self._settings.memory_limit_bytes() / 1e9,
        )


def _initializer(table: Table, settings: HyperParameters) -> Initializer:
    own = table.initialization
    if own is None:
        return Initializer(settings.initialization.method, **settings.initialization.options)
    return Initializer(own.method, **own.options)


def _array(
    name: str, table: Table, array: NDArray[Element], dtype: type[Element], ndim: int
) -> NDArray[Element]:
    """Return ``array`` in C order.

    Raises:
        DataTypeError: If it has another dtype or number of dimensions.
    """
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        got = (
            f"{array.dtype} with {array.ndim}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise DataTypeError(
            f"table {table.number}: expected {name} as {np.dtype(dtype)} with {ndim} "
            f"dimensions, got {got}"
        )
    return np.ascontiguousarray(array)
