"""Where rows of modules are: the embedding-worker that is asked, and what is in flight there.

    in a context with a slot of the name    that context's worker, permits and update ids
    services mode                           the job's embedding-workers
    PERSIA_EMBEDDING_CONFIG with the slot   a store of this process, made from the config
    otherwise                               a store of this process, of declared tables

A store's tables are fixed when it is made. A table declared later, or whose rows have another
optimizer, gets a further store; nothing outside this module sees a difference.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import logging
import secrets
import tempfile
import threading
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from persia import _context_stack, env
from persia._cluster.embedded import build_embedding_worker
from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch
from persia._modules.tables import ModuleTable, all_tables, note_name
from persia._process_exit import mark_participated
from persia._rpc.messages import (
    HyperParameters,
    IDFeatures,
    JaggedOutput,
    OptimizerSettings,
    PooledOutput,
    RawOutput,
)
from persia._rpc.worker_pool import EmbeddingWorkers
from persia._training.backward import BackwardPipeline
from persia._training.checkpoint import CheckpointReader, CheckpointWriter
from persia._training.inflight import InFlightBatch, InFlightTracker
from persia.config import EmbeddingSchema, GlobalConfig
from persia.ctx.connection import Connection
from persia.ctx.embedding import EmbeddingCtx
from persia.embedding import EmbeddingConfig, Normal
from persia.embedding.optim import SGD
from persia.errors import ConfigError, InternalError, NotConfigured, did_you_mean
from persia.logger import get_logger
from persia.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import EmbeddingWorker, Floats, LookupResult, SlotOutput
    from persia.ctx.session import Session

_logger = get_logger("persia.nn")

# Group bits of a store of this process: ids keep 56 bits, and it has at most 255 tables.
_PREFIX_BITS = 8
_MAX_TABLES = (1 << _PREFIX_BITS) - 1
_BACKWARD_WORKERS = 8
_BACKWARD_CAPACITY = 64

_lock = threading.RLock()  # guards homes while they are made


@dataclass(frozen=True, slots=True)
class SlotRows:
    """What the servers mean by a table's name."""

    dim: int
    table: int  # number of its row settings, which a learning rate is for
    # Jagged ones give rows as they are; of others each distinct id is sent as a sample.
    output: type[JaggedOutput | RawOutput | PooledOutput]
    has_own_optimizer: bool  # by the embedding config


class RowHome:
    """An embedding-worker as modules ask it. Any thread may look up; updates have one thread.

    Args:
        worker: The embedding-worker.
        slots: What it means by the names of tables.
        session: Of the context that the worker is of; None outside any.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        slots: dict[str, SlotRows],
        session: Session | None = None,
    ) -> None:
        self.worker = worker
        self.slots = slots
        self.session = session
        self._are_jagged = all(slot.output is JaggedOutput for slot in slots.values())
        self._keeps_ids = isinstance(worker, EmbeddingWorkers)
        self._numbers = itertools.count()
        self.optimizer: OptimizerSettings | None = None  # registered there by modules
        # Held by loads, and by lookups ahead, which servers would refuse meanwhile.
        self.load_lock = threading.RLock() if session is None else session.connection.load_lock
        # Of a store that modules have made.
        self.tables: weakref.WeakSet[ModuleTable] = weakref.WeakSet()
        rank = env.get_rank() or 0
        self._rank, self._world_size = rank, env.get_world_size() or 1
        self.tracker = InFlightTracker(worker) if session is None else session.tracker
        if self.trains and "compensated_updates" in worker.stats():
            _warn_of_compensation()
        self._own_engine: BackwardPipeline | None = None
        if session is None:
            self._own_engine = BackwardPipeline(
                worker,
                self.tracker,
                client=secrets.randbits(47) << 16 | rank,
                num_workers=_BACKWARD_WORKERS,
                capacity=_BACKWARD_CAPACITY,
                device=torch.device("cpu"),
            )

    @property
    def engine(self) -> BackwardPipeline:
        """What sends the updates."""
        engine = self._own_engine
        if engine is None and self.session is not None:
            engine = self.session.connection.backward
        if engine is None:
            raise ConfigError(
                "rows of modules are stepped inside the `with TrainCtx(...)` only"
            )
        return engine

    @property
    def trains(self) -> bool:
        """Whether rows can be trained here: not in a context that evaluates."""
        return self.session is None or self.session.connection.backward is not None

    @property
    def num_loads(self) -> int:
        """How often the context has loaded rows; tables count those of ``persia.nn.load``."""
        return 0 if self.session is None else self.session.connection.num_loads

    # --- lookups ----------------------------------------------------------------------------

    def look_up(self, features: Sequence[FeatureBatch]) -> list[Floats]:
        """Return the rows [D, dim] of the distinct ids of each feature; nothing is inserted."""
        self.wait()
        result = self.worker.lookup_direct(
            IDFeatures(self._request(features), next(self._numbers), False)
        )
        return self._rows(features, result.outputs)

    def look_up_to_train(
        self, features: Sequence[FeatureBatch]
    ) -> tuple[InFlightBatch, list[Floats], int]:
        """Return rows as ``look_up`` does, inserted if need be, and what takes the update.

        Its gradients are of requests with as many samples as the last value says.
        """
        self.wait()
        batch = InFlightBatch(num_samples=features[0].batch_size, is_by_id=True)
        self._number(batch)
        asked = self._request(features)
        request = IDFeatures(asked, batch.batch_id, True)
        if self._keeps_ids:
            worker = self.worker
            batch.register_again = lambda error: worker.register(request)
        with self._says_what_to_write(features[0].name):
            result: LookupResult = self.worker.lookup_direct(request)
        if result.ref is None:
            raise InternalError(f"the lookup of batch {batch.batch_id} left no ref")
        batch.ref = result.ref
        self.tracker.open(batch)
        return batch, self._rows(features, result.outputs), asked[0].batch_size

    def _number(self, batch: InFlightBatch) -> None:
        if self.session is None:
            batch.number = next(self._numbers)
        else:
            batch.number = self.session.lookups.next_number()
        batch.batch_id = batch.number * self._world_size + self._rank

    def _request(self, features: Sequence[FeatureBatch]) -> tuple[FeatureBatch, ...]:
        """Return features that fit into one request: all of them with as many samples."""
        are_jagged = self._are_jagged or all(
            self.slots[feature.name].output is JaggedOutput for feature in features
        )
        if are_jagged and len({feature.batch_size for feature in features}) == 1:
            return tuple(features)
        size = 1 if are_jagged else max(1, *(one.num_distinct for one in features))
        return tuple(self._spread(feature, size) for feature in features)

    def _spread(self, feature: FeatureBatch, size: int) -> FeatureBatch:
        """Return the distinct ids as ``size`` samples: of one id each, or all in the first."""
        count = feature.num_distinct
        if self.slots[feature.name].output is JaggedOutput:
            offsets = np.full(size + 1, count, np.int64)
            offsets[0] = 0
        else:
            offsets = np.minimum(np.arange(size + 1, dtype=np.int64), count)
        return FeatureBatch.from_csr(feature.name, feature.distinct, offsets)

    @staticmethod
    def _rows(features: Sequence[FeatureBatch], outputs: Sequence[SlotOutput]) -> list[Floats]:
        rows = []
        for feature, output in zip(features, outputs, strict=True):
            if isinstance(output, JaggedOutput):
                rows.append(output.rows)
            elif isinstance(output, RawOutput):
                rows.append(output.rows[1:])
            else:
                rows.append(output.values[: feature.num_distinct])
        return rows

    def fit_gradient(self, name: str, gradient: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the gradient of distinct ids as the worker takes it from this slot."""
        if self.slots[name].output is not PooledOutput or len(gradient) == batch:
            return gradient
        return torch.nn.functional.pad(gradient, (0, 0, 0, batch - len(gradient)))

    # --- rows and updates -------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until all updates are acknowledged; raise what one of them raised."""
        if self.session is not None:
            self.session.connection.flush()
        elif self._own_engine is not None:
            self._own_engine.flush()

    def read(self, name: str, ids: NDArray[np.uint64]) -> Floats:
        """Return rows by id, as the next lookup would find them; it inserts none."""
        missing = "initial" if self.trains else "zeros"
        with self._says_what_to_write(name):
            return Table(self.worker, name, flush=self.wait).read(ids, missing)

    def write(self, name: str, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Write rows by id; new ones get the state that training begins them with."""
        with self._says_what_to_write(name):
            Table(self.worker, name, flush=self.wait).write(ids, values)

    @contextlib.contextmanager
    def _says_what_to_write(self, name: str) -> Iterator[None]:
        """Say of servers without an optimizer what gives them one."""
        try:
            yield
        except NotConfigured as exc:
            if self.session is not None:
                raise
            raise NotConfigured(
                f"table {name!r}: its servers know no optimizer yet, without which a new row "
                "has no state; make one of persia.optim first, as "
                "persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.05), or call "
                "the model in eval()"
            ) from exc

    def check_optimizer(self, table: ModuleTable) -> None:
        """Refuse to step rows of a context whose servers have another optimizer for them."""
        registered = self.optimizer
        if (
            registered is None
            or table.optimizer is None
            or self.slots[table.name].has_own_optimizer
        ):
            return
        if registered.name != table.optimizer.name:
            raise ConfigError(
                f"table {table.name!r}: its servers step rows by {registered.name}, and the "
                f"optimizer of persia.optim is {table.optimizer.name}; use the same, or write "
                f"`{table.name}: {{optimizer: {{name: {table.optimizer.name}}}}}` under "
                "group_settings of the embedding config"
            )

    def close(self) -> None:
        """Send what is queued, and end threads and connections of its own."""
        engine, self._own_engine = self._own_engine, None
        if engine is not None:
            engine.close()
            if isinstance(self.worker, EmbeddingWorkers):
                self.worker.close()


@functools.cache  # said once
def _warn_of_compensation() -> None:
    _logger.warning(
        "delay_compensation: gradients of modules of persia.nn are not corrected, as they come "
        "by id and not by sample; the option is for features of a persia.data.DataLoader "
        "(said once)"
    )


# --- which home a table has -----------------------------------------------------------------

_own: list[RowHome] = []  # stores of this process that modules have made
_job: RowHome | None = None  # of the job's servers
_threads = ThreadPool(1)  # as many as the stores have; one runs its work in the caller's
# By id of a session, which the home keeps: of contexts that are entered.
_of_sessions: dict[int, RowHome] = {}


@atexit.register
def _close_own() -> None:
    """Send what is queued before the interpreter ends threads wherever they are."""
    while _own:
        _own.pop().close()


def home_of(table: ModuleTable) -> RowHome:
    """Return where a table's rows are now, made if this is its first use."""
    (home,) = homes_of([table])
    return home


def homes_of(tables: Sequence[ModuleTable]) -> list[RowHome]:
    """Return where the rows of each table are now, made if this is its first use."""
    contexts = [
        one
        for one in reversed(_context_stack.entered())
        if isinstance(one, EmbeddingCtx) and one._session is not None
    ]
    if not contexts:
        return [table.home or _own_home(table) for table in tables]
    return [
        _home_in_context(table, contexts) or table.home or _own_home(table) for table in tables
    ]


def _own_home(table: ModuleTable) -> RowHome:
    """Return where a table's rows are outside contexts."""
    with _lock:
        found: RowHome = table.home or _find_home(table)
    return found


def store_threads() -> ThreadPool:
    """Return the threads by which rows are pooled and gradients summed."""
    return _threads


def has_home(table: ModuleTable) -> bool:
    """Whether the table has been used."""
    return table.home is not None


def _home_in_context(table: ModuleTable, contexts: Sequence[EmbeddingCtx]) -> RowHome | None:
    for ctx in contexts:
        session = ctx._session
        if session is None:  # left meanwhile, by another thread
            continue
        home = _of_sessions.get(id(session))
        if home is None or home.session is not session:
            entered = {id(one._session) for one in contexts}
            for gone in _of_sessions.keys() - entered:
                del _of_sessions[gone]
            worker = session.connection.worker
            home = _of_sessions[id(session)] = RowHome(worker, slots_of(worker), session)
            optimizer = getattr(ctx, "embedding_optimizer", None)
            home.optimizer = None if optimizer is None else optimizer.settings()
        if table.name in home.slots:
            check_slot(table, home)
            if table.first_rows and home.trains:
                with _lock:
                    _write_first_rows(table, home)
            return home
    return None


def _find_home(table: ModuleTable) -> RowHome:
    """Give a table, and with it all others that can share its store, a home."""
    global _job
    if env.get_mode() == "services":
        if _job is None:
            worker = Connection.to_job(None, None).worker
            _job = RowHome(worker, slots_of(worker))
            atexit.register(_job.close)
        check_slot(table, _job)
        _configure(_job, table)
        _write_first_rows(table, _job)
        table.home = _job
        return _job
    config = env.embedding_config_path()
    if config is not None:
        schema = EmbeddingSchema.load(config)
        if table.name in schema.slots:
            return _build([one for one in all_tables() if one.name in schema.slots], schema)
    sharing = {
        one.name: one for one in all_tables() if one.home is None and _kind(one) == _kind(table)
    }
    sharing[table.name] = table  # another may have its name by now
    ordered = sorted(sharing.values(), key=lambda one: one is not table)
    return _build(ordered[:_MAX_TABLES], None)


def _kind(table: ModuleTable) -> object:
    """Return what tables of one store have in common."""
    optimizer = table.optimizer
    if optimizer is not None:
        options = {k: v for k, v in optimizer.options.items() if k != "lr"}
        return optimizer.name, tuple(sorted(options.items())), table.weight_bound
    return None, (), table.weight_bound


def _build(tables: list[ModuleTable], schema: EmbeddingSchema | None) -> RowHome:
    """Make a store of this process for tables, and write their first rows."""
    global _threads
    optimizer = tables[0].optimizer
    if schema is None:
        for table in tables:
            table.has_own_rate |= _rate_of(table) != _rate_of(tables[0])
        alone = [table.name for table in tables if table.has_own_rate]
        schema = EmbeddingSchema.load(
            {
                "feature_index_prefix_bit": _PREFIX_BITS,
                "slots_config": {table.name: _slot(table) for table in tables},
                # Tables that differ in nothing are one to the store, and asked for and stepped
                # in one go. An entry of its own gives one a learning rate of its own.
                "group_settings": {name: {"optimizer": {}} for name in alone},
            }
        )
    path = env.global_config_path()
    config = GlobalConfig.load({} if path is None else path)
    _threads = ThreadPool(config.embedded_config.num_threads)
    worker = build_embedding_worker(schema, config)
    home = RowHome(worker, slots_of(worker))
    # What torch.manual_seed decides for nn.Embedding, it decides here.
    seed = (torch.initial_seed() + len(_own)) % (1 << 64)
    initial = Normal(0.0, 1.0).settings()
    worker.configure(HyperParameters(initial, 1.0, tables[0].weight_bound, seed))
    worker.register_optimizer(SGD(lr=0.0).settings() if optimizer is None else optimizer)
    home.optimizer = optimizer
    for idle in [one for one in _own if not one.tables]:
        _own.remove(idle)  # its tables went with their modules
        idle.close()
    _own.append(home)
    home.tables.update(tables)
    for table in tables:
        check_slot(table, home)
        table.home = home
        _write_first_rows(table, home)
    return home


def _rate_of(table: ModuleTable) -> object:
    """Return the learning rate that its optimizer was made with."""
    return None if table.optimizer is None else table.optimizer.options["lr"]


def _write_first_rows(table: ModuleTable, home: RowHome) -> None:
    while table.first_rows:
        ids, values = table.first_rows[0]
        home.write(table.name, ids, values)
        del table.first_rows[0]  # not before: servers may have refused them


def _slot(table: ModuleTable) -> dict[str, object]:
    initial = table.initialization.settings()
    return {
        "dim": table.dim,
        "pooling": "jagged",
        "initialization": {"method": initial.method, **initial.options},
    }


_OUTPUTS: dict[str, type[JaggedOutput | RawOutput]] = {
    "jagged": JaggedOutput,
    "raw": RawOutput,
}


def slots_of(worker: EmbeddingWorker) -> dict[str, SlotRows]:
    """Return what an embedding-worker means by the names of its slots."""
    schema: EmbeddingSchema | None = getattr(worker, "schema", None)
    if schema is not None:
        return {
            name: SlotRows(
                slot.dim,
                slot.table,
                _OUTPUTS.get(slot.pooling, PooledOutput),
                schema.tables[slot.table].settings.optimizer is not None,
            )
            for name, slot in schema.slots.items()
            if not slot.hash_stack_rounds
        }
    if not isinstance(worker, EmbeddingWorkers):
        raise ConfigError(f"modules look up at embedding-workers, not at {worker!r}")
    try:
        meaning = json.loads(worker.schema_fingerprint)
    except ValueError:
        raise ConfigError(
            "the servers' embedding config is too long for modules to read its slots"
        ) from None
    settings = meaning["settings"]
    plain = {name: slot for name, slot in meaning["slots"].items() if not slot[3]}
    # The fingerprint leaves out pooling: an evaluation lookup of one id shows it.
    probes = tuple(FeatureBatch.from_single(name, np.zeros(1, np.uint64)) for name in plain)
    outputs = worker.lookup_direct(IDFeatures(probes, 0, False)).outputs
    found = {}
    for (name, (dim, group, table, *_)), output in zip(plain.items(), outputs, strict=True):
        has_own = settings.get(group, {}).get("optimizer") is not None
        found[name] = SlotRows(dim, table, type(output), has_own)
    return found


def check_slot(table: ModuleTable, home: RowHome) -> None:
    """Refuse a table that the servers do not have, or of another dim."""
    slot = home.slots.get(table.name)
    if slot is None:
        raise ConfigError(
            f"table {table.name!r} is no slot of the servers' embedding config, or has a hash "
            f"stack{did_you_mean(table.name, home.slots)}; write `{table.name}: {{dim: "
            f"{table.dim}, pooling: jagged}}` under slots_config"
        )
    if slot.dim != table.dim:
        raise ConfigError(
            f"table {table.name!r}: embedding_dim is {table.dim}, and the embedding config's "
            f"slot has dim {slot.dim}"
        )


def _configure(home: RowHome, table: ModuleTable) -> None:
    """Register settings and the optimizer at the job's servers."""
    if table.optimizer is None or home.optimizer == table.optimizer:
        return
    if home.optimizer is not None:
        same = replace(
            table.optimizer,
            options={**table.optimizer.options, "lr": home.optimizer.options["lr"]},
        )
        if same == home.optimizer:
            return  # its rate goes with each update
        raise ConfigError(
            f"table {table.name!r}: the servers step rows by {home.optimizer.name}, registered "
            f"for other tables; write `{table.name}: {{optimizer: {{name: "
            f"{table.optimizer.name}}}}}` under group_settings of the embedding config"
        )
    mark_participated()
    # The seed is that of contexts: ranks, and scripts one after another, must agree on it, and
    # torch's is another in each process.
    seed = EmbeddingConfig().seed
    initial = Normal(0.0, 1.0).settings()
    home.worker.configure(HyperParameters(initial, 1.0, table.weight_bound, seed))
    home.worker.register_optimizer(table.optimizer)
    home.optimizer = table.optimizer


# --- another optimizer ----------------------------------------------------------------------


def attach_optimizer(
    tables: Sequence[ModuleTable], optimizer: OptimizerSettings, weight_bound: float
) -> None:
    """Have an optimizer step these tables; rows that are there move to a store that has it."""
    lacking = [table for table in tables if table.lacks_state]
    if lacking:
        _logger.warning(
            "%s: the checkpoint has state of an optimizer, which was not read, as this one is "
            "made after persia.nn.load: call persia.nn.load once more, or state begins again",
            ", ".join(f"table {table.name!r}" for table in lacking),
        )
    with _lock:
        moving: dict[RowHome, list[ModuleTable]] = {}
        for table in tables:
            before = _kind(table)
            table.optimizer, table.weight_bound = optimizer, weight_bound
            table.lacks_state = False
            home = table.home
            if home is None or _kind(table) == before:
                continue
            if home in _own:
                moving.setdefault(home, []).append(table)
            else:
                _configure(home, table)
        for home, leaving in moving.items():
            _move(leaving, home)


def separate_rates(rates: Mapping[ModuleTable, float]) -> None:
    """Move tables whose rate is no longer that of those with which they are one to a store."""
    if len(set(rates.values())) == 1 or env.embedding_config_path() is not None:
        return
    with _lock:
        known: dict[tuple[RowHome, int], float] = {}
        moving: dict[RowHome, list[ModuleTable]] = {}
        for table, rate in rates.items():
            home = home_of(table)
            if (
                home in _own
                and known.setdefault((home, home.slots[table.name].table), rate) != rate
            ):
                table.has_own_rate = True
                moving.setdefault(home, []).append(table)
        for home, leaving in moving.items():
            _move(leaving, home)


def _move(tables: list[ModuleTable], old: RowHome) -> None:
    """Move rows to a new store, with state that begins again, as a checkpoint is loaded.

    Rows that no optimizer has stepped have no state, and nothing to be said of it.
    """
    old.wait()
    has_rows = sum(old.worker.get_embedding_size()) > 0
    for table in tables:
        old.tables.discard(table)
        table.home = None
    new = _build(tables, None)
    if has_rows and old.optimizer is None:
        for table in tables:
            for ids, values in Table(old.worker, table.name).blocks():
                new.write(table.name, ids, values)
    elif has_rows:
        with tempfile.TemporaryDirectory(prefix="persia-rows-") as folder:
            writer = CheckpointWriter(old.worker)
            writer.finish(writer.begin(0, dict), folder, 1, blocking=True)
            reader = CheckpointReader(new.worker)
            reader.verify("", folder, tuple(table.name for table in tables))
            notes = reader.commit(blocking=True, level_of=lambda _: logging.DEBUG)
        for note in notes:
            if note.kind == "optimizer":
                _logger.warning("%s", note.text)


@contextlib.contextmanager
def renamed(names: Mapping[ModuleTable, str]) -> Iterator[None]:
    """Give tables other names, and stores of these without rows, for what the block loads.

    If the block fails, they have the names and rows of before.

    Raises:
        ConfigError: If an embedding config or servers decide what names there are.
    """
    before = {table: (table.name, home_of(table)) for table in names}
    try:
        with _lock:
            leaving: dict[RowHome, list[ModuleTable]] = {}
            for table, (name, home) in before.items():
                if home not in _own or env.embedding_config_path() is not None:
                    raise ConfigError(
                        f"table {name!r}: it is {names[table]!r} in the checkpoint, and the "
                        "servers' slots have names of their own; give its module that name"
                    )
                leaving.setdefault(home, []).append(table)
            for tables in leaving.values():
                for table in tables:
                    table.name = names[table]
                _build(tables, None)
        yield
    except BaseException:
        for table, (name, home) in before.items():
            if table.home is not home:
                table.home.tables.discard(table)
            table.name, table.home = name, home
        raise
    for table, (name, home) in before.items():
        home.tables.discard(table)
        note_name(table, name)


def write_rows(
    table: ModuleTable, ids: NDArray[np.uint64], values: NDArray[np.float32]
) -> None:
    """Write rows by id: now, or before the table's first lookup."""
    if has_home(table) or _context_stack.current() is not None:
        home_of(table).write(table.name, ids, values)
    else:
        if table.first_rows and np.array_equal(table.first_rows[-1][0], ids):
            table.first_rows.pop()
        table.first_rows.append((ids, values))
    table.padding_rows.clear()
    table.note_change()


def read_rows(table: ModuleTable, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return rows by id, as training would find them."""
    if (
        not has_home(table)
        and table.first_rows
        and np.array_equal(table.first_rows[-1][0], ids)
    ):
        return table.first_rows[-1][1]
    return home_of(table).read(table.name, ids)
