"""What rows are: how they begin, how they step, which are admitted and which are evicted.

The config names eviction policies by group and the store numbers the distinct ones. An update
says at which learning rate its rows step, if not at the registered one. So a rate takes effect
with the update that was computed under it, whatever else is in flight, and a restarted server
learns it from the update.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._build import kernel_library
from persia._core.kernels.initial import Initializer
from persia._core.kernels.native import is_native
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia._files.schema import SavedSchema
from persia._rpc.messages import HyperParameters, InitializationSettings, OptimizerSettings
from persia._server.applied_updates import TrainingClock
from persia._server.state_file import StateRecovery
from persia.config import (
    EmbeddingSchema,
    Initialization,
    ParameterServerConfig,
    TableSettings,
    schema_fingerprint,
)
from persia.errors import ConfigError, ExtensionError, NotConfigured
from persia.logger import get_logger

_logger = get_logger("persia.parameter_server")

# Words of state of rows that were loaded, by dim: what is to be known of their optimizer.
KeptWords = Mapping[int, int]

# (policy, clock, ttl) of rows that no group says anything about; number 0 of every store.
_PLAIN_LRU = ("lru", None, 0)


def eviction_kinds(tables: Sequence[TableSettings]) -> tuple[tuple[str, str | None, int], ...]:
    """Return the distinct eviction policies beside plain LRU, from number 1 on."""
    evictions = [table.settings.eviction for table in tables]
    kinds = dict.fromkeys(one.kind() for one in evictions if one is not None)
    kinds.pop(_PLAIN_LRU, None)
    return tuple(kinds)


def need_scorers(kinds: Sequence[tuple[str, str | None, int]]) -> None:
    """Load the libraries by which rows are evicted."""
    for policy, _, _ in kinds:
        kernel_library.need(policy)


def sketch_bytes(tables: Sequence[TableSettings], config: ParameterServerConfig) -> int:
    """Return the bytes of the sketch for admission by count; 0 where no table has it."""
    admissions = [table.settings.admission for table in tables]
    by_count = any(one is not None and (one.threshold or 1) > 1 for one in admissions)
    return config.sketch_bytes() if by_count else 0


@dataclass(frozen=True, slots=True)
class RowKind:
    """The rows of one table, as the store's requests take it."""

    dim: int
    dtype: str
    initializer: Initializer
    optimizer: RowOptimizer
    policy: int  # number of the one that evicts them
    admit_at: int  # appearance at which an id is admitted; 1 where it is not by count
    admit_probability: float  # 1.0 where it is by count


@dataclass(frozen=True, slots=True)
class RowSettings:
    """All that was set, as one value: a request sees all of it or nothing."""

    schema: EmbeddingSchema
    hyper: HyperParameters
    registered: OptimizerSettings
    kinds: tuple[RowKind, ...]  # by table
    eviction_kinds: tuple[tuple[str, str | None, int], ...]
    sketch_bytes: int
    need_steps: bool  # whether it matters how many steps there were, or which were repeated
    # By table, its optimizer at the last other rate: a schedule gives a step's updates one.
    at_rates: dict[int, RowOptimizer] = field(default_factory=dict)

    @staticmethod
    def of(
        schema: EmbeddingSchema,
        config: ParameterServerConfig,
        hyper: HyperParameters,
        registered: OptimizerSettings,
        kept_words: KeptWords | None = None,
    ) -> RowSettings:
        """Combine what the config and the trainer say.

        A table's own initialization and admission come before the trainer's. Eviction policies
        and the size of the sketch are those of the config.
        """
        tables = schema.tables
        initializers = initializers_of(schema, hyper)
        optimizers = optimizers_of(schema, registered, hyper.weight_bound, kept_words)
        evictions, num_bytes = eviction_kinds(tables), sketch_bytes(tables, config)
        kinds = []
        for table, initializer, optimizer in zip(tables, initializers, optimizers, strict=True):
            eviction, admission = table.settings.eviction, table.settings.admission
            policy = _PLAIN_LRU if eviction is None else eviction.kind()
            number = (_PLAIN_LRU, *evictions).index(policy)
            chance, admit_at = table.admit_probability, 1
            if admission is not None:
                admit_at = admission.threshold or 1
                chance = 1.0 if admission.probability is None else admission.probability
            if chance is None:
                chance = hyper.admit_probability
            kinds.append(
                RowKind(
                    table.dim, table.dtype, initializer, optimizer, number, admit_at, chance
                )
            )
        need_steps = num_bytes > 0 or any(clock == "steps" for _, clock, _ in evictions)
        return RowSettings(
            schema, hyper, registered, tuple(kinds), evictions, num_bytes, need_steps
        )

    def at_rate(self, table: int, lr: float) -> RowOptimizer:
        """Return the optimizer of a table at this learning rate; any thread may call it."""
        optimizer = self.kinds[table].optimizer
        if lr == optimizer.options["lr"]:
            return optimizer
        at_rate = self.at_rates.get(table)
        if at_rate is None or lr != at_rate.options["lr"]:
            at_rate = self.at_rates[table] = optimizer.with_lr(lr)
        return at_rate

    def first_changed(self, old: RowSettings) -> TableSettings | None:
        """Return a table whose rows under the old optimizers do not fit these, or None.

        Equal width is not enough: the words of two optimizers mean different things.
        """
        for table in self.schema.tables:
            before = old.kinds[table.number].optimizer
            after = self.kinds[table.number].optimizer
            words = before.state_words(table.dim)
            if words != after.state_words(table.dim) or (words and before.name != after.name):
                return table
        return None

    def mismatch(self, old: RowSettings) -> str | None:
        """Return why rows of the old settings cannot be held under these, or None."""
        if old.hyper.seed != self.hyper.seed:
            return (
                f"seed: expected {old.hyper.seed}, which the rows held began with, got "
                f"{self.hyper.seed}"
            )
        changed = self.first_changed(old)
        if changed is None:
            return None
        number, dim = changed.number, changed.dim
        before, after = old.kinds[number].optimizer, self.kinds[number].optimizer
        return (
            f"optimizer {after.name} keeps {after.state_words(dim)} words of state beside "
            f"{dim} floats, but the rows held have {before.state_words(dim)} of {before.name}; "
            f"register {before.name} again with the options that shape its state"
        )

    def saved_schema(self) -> SavedSchema:
        """Return what a manifest says of these rows."""
        optimizers = [kind.optimizer for kind in self.kinds]
        policies = [kind.policy for kind in self.kinds]
        return SavedSchema.of(self.schema, optimizers, self.eviction_kinds, policies)

    def to_json(self) -> dict[str, Any]:
        """Return what trainer and config set, for the extras of a manifest."""
        found: dict[str, Any] = {
            "hyper_parameters": dataclasses.asdict(self.hyper),
            "optimizer": dataclasses.asdict(self.registered),
            "slots": self.slots_to_json(),
        }
        initializers = self.native_initializers()
        if initializers:
            found["native_initializers"] = initializers
        return found

    def native_initializers(self) -> dict[str, str]:
        """Return the libraries by which rows begin, by feature; others have none."""
        names = {
            slot.name: self.kinds[slot.table].initializer.name
            for slot in self.schema.slots.values()
        }
        return {feature: name for feature, name in names.items() if is_native(name)}

    def slots_to_json(self) -> dict[str, dict[str, str | int]]:
        """Return what the model receives of rows, by feature: notes of a load compare it."""
        found: dict[str, dict[str, str | int]] = {}
        for slot in self.schema.slots.values():
            one = found[slot.name] = {"pooling": slot.pooling}
            if slot.pooling == "raw":
                one |= {"sample_fixed_size": slot.sample_fixed_size, "padding": slot.padding}
        return found

    def about(self) -> str:
        """Return schema and settings as JSON, for the writer of a manifest."""
        schema = self.saved_schema().to_json()
        return json.dumps({"schema": schema, "settings": self.to_json()})

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


@dataclass(frozen=True, slots=True)
class ServerState:
    """The rows of a server, and what they mean."""

    settings: RowSettings
    store: EmbeddingStore


def initializers_of(schema: EmbeddingSchema, hyper: HyperParameters) -> list[Initializer]:
    """Return how new rows begin, by table."""
    if not 0.0 <= hyper.admit_probability <= 1.0:
        raise ConfigError(f"admit_probability must be in 0..1, got {hyper.admit_probability}")
    return [
        initializer_of(table.initialization or hyper.initialization) for table in schema.tables
    ]


def initializer_of(chosen: Initialization | InitializationSettings) -> Initializer:
    """Return how new rows begin, with the library that this may need."""
    kernel_library.need(chosen.method)
    return Initializer(chosen.method, **chosen.options)


def optimizers_of(
    schema: EmbeddingSchema,
    registered: OptimizerSettings,
    weight_bound: float,
    kept_words: KeptWords | None = None,
) -> list[RowOptimizer]:
    """Return how rows step, by table.

    With ``kept_words`` rows that are loaded need no library to be evaluated: where there is
    none, nothing steps them.
    """
    try:
        kernel_library.need(registered.name)
        kept_words = None
    except ExtensionError as exc:
        if kept_words is None:
            raise
        _logger.warning("rows are loaded to be evaluated, and cannot be trained: %s", exc)
    optimizers = []
    for table in schema.tables:
        name, options = registered.name, dict(registered.options)
        own = table.settings.optimizer
        if own is not None:
            name, options = own.resolve(name, options)
        words = kept_words if name == registered.name else None
        try:
            optimizers.append(RowOptimizer(name, weight_bound, kept_words=words, **options))
            optimizers[-1].state_words(table.dim)  # refuses a dim that it cannot keep
        except ConfigError as exc:
            if own is None:
                raise
            (group,) = schema.groups_of(table.number)
            raise ConfigError(f"group_settings.{group}.optimizer: {exc}") from None
    return optimizers


def settings_from_json(
    hyper: Mapping[str, Any] | None, optimizer: Mapping[str, Any] | None
) -> tuple[HyperParameters | None, OptimizerSettings | None]:
    """Read what ``dataclasses.asdict`` made of settings; None where there is none."""
    known = registered = None
    try:
        if hyper is not None:
            initialization = InitializationSettings(**hyper["initialization"])
            known = HyperParameters(**{**hyper, "initialization": initialization})
        if optimizer is not None:
            registered = OptimizerSettings(optimizer["name"], dict(optimizer["options"]))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"expected hyper_parameters and optimizer, got {exc!r}") from exc
    return known, registered


def identity(
    schema: EmbeddingSchema, config: ParameterServerConfig, index: int, size: int
) -> dict[str, Any]:
    """Return what has to be the same for a state file to be a server's, as JSON has it."""
    return {
        "schema": schema_fingerprint(schema),
        "replica_index": index,
        "replica_size": size,
        "capacity": config.capacity,
        "num_hashmap_internal_shards": config.num_hashmap_internal_shards,
        "policies": [list(kind) for kind in eviction_kinds(schema.tables)],
        "sketch_bytes": sketch_bytes(schema.tables, config),
    }


class ServerSettings:
    """Takes what a trainer sets, and has the state that follows from it; thread-safe.

    Requests read ``state`` once, so that all of a request is served by the same settings.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        config: ParameterServerConfig,
        name: str,
        num_threads: int,
        recovery: StateRecovery,
        any_rows: AbstractContextManager[object],
    ) -> None:
        self._schema, self._config, self._name = schema, config, name
        self._num_threads, self._recovery, self._any_rows = num_threads, recovery, any_rows
        self._lock = threading.Lock()  # guards writes of the next four
        self.hyper: HyperParameters | None = None
        self.registered: OptimizerSettings | None = None
        self._kept_words: KeptWords | None = None  # of an optimizer that a load has named
        self.state: ServerState | None = None  # once both have come
        self.warned_of_memory = self.warned_of_capacity = False

    def configure(self, hyper: HyperParameters) -> None:
        """Take the settings of rows; the same settings again change nothing."""
        with self._lock:
            if hyper != self.hyper:
                self._set(hyper, self.registered, configured=dataclasses.asdict(hyper))

    def register_optimizer(self, registered: OptimizerSettings) -> None:
        """Take the optimizer of rows; the same one again changes nothing."""
        with self._lock:
            if registered != self.registered or self._kept_words is not None:
                self._set(self.hyper, registered, optimizer=dataclasses.asdict(registered))

    def attach(self, notes: Mapping[str, Any]) -> None:
        """Begin with what is noted in the state file, and with its rows."""
        self.hyper = self.registered = self.state = None
        words = notes.get("kept_words")
        self._set(
            *settings_from_json(notes.get("configured"), notes.get("optimizer")),
            None if words is None else {int(dim): count for dim, count in words.items()},
            attach=True,
        )

    def _set(
        self,
        hyper: HyperParameters | None,
        registered: OptimizerSettings | None,
        kept_words: KeptWords | None = None,
        *,
        attach: bool = False,
        **noted: object,
    ) -> None:
        """Check settings, of which None have not come, note them and use them.

        With ``attach`` the rows are those in the state file.
        """
        if registered is not None:
            noted["kept_words"] = kept_words
        if hyper is None or registered is None:
            # What cannot be used is refused now, not when the other one comes.
            if hyper is not None:
                initializers_of(self._schema, hyper)
                need_scorers(eviction_kinds(self._schema.tables))
            if registered is not None:
                optimizers_of(self._schema, registered, 0.0, kept_words)
            self._recovery.note(**noted)
            self.hyper, self.registered, self._kept_words = hyper, registered, kept_words
            return
        settings = RowSettings.of(self._schema, self._config, hyper, registered, kept_words)
        need_scorers(settings.eviction_kinds)
        old = self.state
        mismatch = None if old is None else settings.mismatch(old.settings)
        # No load may be filling a store that is replaced.
        with nullcontext() if mismatch is None else self._any_rows:
            if old is None:
                store = self._new_store(settings, attach)
            elif mismatch is None:
                store = old.store
            elif len(old.store):
                raise ConfigError(
                    f"{mismatch}; {len(old.store)} rows are held: clear_embeddings() first"
                )
            elif self._recovery.file is None:
                # A lookup in flight may still insert rows by the old settings: into the old
                # store.
                store = self._new_store(settings)
            else:
                # Two stores cannot share the file. If a lookup in flight inserts a row by the
                # old settings, a later request finds it of another shape, and says so.
                store = old.store
                store.clear()
                store.reseed(hyper.seed)
            self._recovery.note(**noted)  # before there is a row of it
            self.hyper, self.registered, self._kept_words = hyper, registered, kept_words
            self.state = ServerState(settings, store)

    def _new_store(self, settings: RowSettings, attach: bool = False) -> EmbeddingStore:
        config, file = self._config, self._recovery.file
        return EmbeddingStore(
            config.capacity,
            num_shards=config.num_hashmap_internal_shards,
            seed=settings.hyper.seed,
            memory_limit=config.memory_limit_bytes(),
            num_threads=self._num_threads,
            policies=settings.eviction_kinds,
            sketch_bytes=settings.sketch_bytes,
            state_file=None if file is None else file.descriptor,
            attach=attach,
        )

    def complete(
        self,
        hyper: HyperParameters,
        registered: OptimizerSettings,
        kept_words: KeptWords | None = None,
    ) -> None:
        """Take those settings that have not come, as for inference."""
        if self.hyper is None:
            self.configure(hyper)
        with self._lock:
            if self.registered is None:
                noted = dataclasses.asdict(registered)
                self._set(self.hyper, registered, kept_words, optimizer=noted)

    def state_at(self, clock: TrainingClock, what: str) -> ServerState:
        """Return the state, as of now for rows that expire."""
        state = self.state
        if state is None:
            raise self.not_configured(what)
        state.store.set_clocks(*clock.now())
        return state

    def check_limits(self, store: EmbeddingStore) -> None:
        """Say once in the log that rows are evicted: by capacity, or at the memory limit."""
        stats = store.stats()
        if not stats["memory_limited"]:
            if stats["evicted"] and not self.warned_of_capacity:
                self._warn_of_capacity(stats)
            return
        self.warned_of_memory = True
        _logger.warning(
            "%s: %d rows take %.2f GB and reach the memory limit of %.2f GB; from now on rows "
            "are evicted",
            self._name,
            stats["rows"],
            stats["bytes"] / 1e9,
            self._config.memory_limit_bytes() / 1e9,
        )

    def _warn_of_capacity(self, stats: Mapping[str, int]) -> None:
        self.warned_of_capacity = True
        _logger.warning(
            "%s: %d rows reach capacity, %d: rows are evicted, %d so far, and an id that "
            "comes again begins untrained; unless that is wanted, write a larger "
            "embedding_parameter_server_config: capacity: in the global config (logged once)",
            self._name,
            stats["rows"],
            self._config.capacity,
            stats["evicted"],
        )

    def not_configured(self, what: str) -> NotConfigured:
        """Return the error of a request that needs ``state``."""
        expected = "configure" if self.hyper is None else "register_optimizer"
        return NotConfigured(
            f"{what} came to {self._name} before {expected}, which says what a new row is: "
            "enter the TrainCtx first, `with TrainCtx(...) as ctx:`"
        )
