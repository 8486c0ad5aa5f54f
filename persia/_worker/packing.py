"""The ids of a batch, packed into what each parameter server is asked for.

A model sends the same features in each batch, so all that follows from their names is computed
once per list of names and kept (``BatchPlan``). Within a table, groups follow each other in the
order of their first feature in the batch, which also is the order of use of their rows:

    table 0, dim 16   | group of f0, f3 | group of f1 | ...      one array of signs
    table 1, dim 8    | group of f2 |

``pack_batch`` turns the ids of each feature into the distinct signs of each table, sorted by
server. Requests are slices of those arrays. How a feature finds its rows:

    distinct id d, round r  ->  number slots[d * rounds + r]  ->  rows[start:stop][number]

Without a hash, a shared group or a second server that is the identity: ``slots`` is
None, and the feature's rows are the slice alone.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia._build import kernel_library
from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import route
from persia._core.base.threads import ThreadPool
from persia._core.ids import cardinality
from persia._core.ids.feature_batch import FeatureBatch, number_all
from persia._core.ids.signs import hash_stack, merge, pack_all
from persia._core.kernels import native
from persia._rpc.messages import (
    FeatureStats,
    Floats,
    IDFeatures,
    LookupReply,
    LookupRequest,
    Numbers,
    Signs,
    TableEntries,
    TableSigns,
    UpdateReport,
)
from persia.config import USUAL_SIZE, EmbeddingSchema, Slot
from persia.errors import DataError, DataTypeError, KernelError, StoreError, did_you_mean
from persia.logger import get_logger

_logger = get_logger("persia.embedding_worker")

_NO_HINTS = np.empty(0, np.uint32)

# By feature: which id of each sample gave the maximum, None for other poolings.
Maxima = tuple[NDArray[np.int32] | None, ...]

# --- plan ------------------------------------------------------------------------------------

POOLED = frozenset(("sum", "mean", "sqrt", "max"))

# Batches after which a slot that none of them had is taken for a mistake: until then it may
# come from another data-loader.
UNSEEN_AFTER = 200


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """One feature of the batch."""

    slot: Slot
    table: int  # place in BatchPlan.tables
    group: int  # place in TablePlan.groups
    # Place among the pooled outputs of the table, or -1: raw and jagged have rows instead.
    pooled: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Features that share rows, by their places in the batch, in the batch's order."""

    features: tuple[int, ...]
    # Signs of one feature without a hash are distinct as soon as its ids are (unless some were
    # masked); all other groups are merged.
    is_plain: bool


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One table that the batch touches."""

    number: int  # the schema's
    dim: int
    groups: tuple[GroupPlan, ...]
    num_pooled: int
    # Its features, group after group, and their prefixes.
    places: tuple[int, ...]
    prefixes: tuple[int, ...]
    is_plain: bool  # all groups are


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One list of feature names, resolved against the schema."""

    names: tuple[str, ...]
    features: tuple[FeaturePlan, ...]
    tables: tuple[TablePlan, ...]
    uncut: set[str]  # raw features of the usual size with no sample too long yet; of all plans


class BatchPlanner:
    """Resolves lists of feature names; any thread may call it."""

    # A list of names is a few hundred bytes. Beyond this number plans are made again each time.
    MAX_PLANS = 1024

    def __init__(self, schema: EmbeddingSchema) -> None:
        self._schema = schema
        self._plans: dict[tuple[str, ...], BatchPlan] = {}
        self._unseen = set(schema.slots)
        # A slot that names its size, or which end it keeps, cuts on purpose.
        self._uncut = {
            slot.name
            for slot in schema.slots.values()
            if slot.pooling == "raw"
            and (slot.sample_fixed_size, slot.padding) == (USUAL_SIZE, "back")
        }
        self._numbers = itertools.count(1)  # of batches; a step of it is one for all threads

    def plan(self, names: tuple[str, ...]) -> BatchPlan:
        """Return the plan of a batch with these features, in this order."""
        plan = self._plans.get(names)
        if plan is None:
            plan = self._build(names)
            self._unseen -= set(names)
            if len(self._plans) < self.MAX_PLANS:
                self._plans[names] = plan
        if next(self._numbers) == UNSEEN_AFTER and self._unseen:
            _logger.warning(
                "%d of the embedding config's slots, such as %r, came in none of the first %d "
                "batches: if the model needs them, send them; if not, take them out",
                len(self._unseen),
                min(self._unseen),
                UNSEEN_AFTER,
            )
        return plan

    def _build(self, names: tuple[str, ...]) -> BatchPlan:
        check_names(names, self._schema.slots, "the embedding config")
        slots = [self._schema.slots[name] for name in names]
        tables: dict[int, dict[str, list[int]]] = {}  # number -> group -> places
        num_pooled: dict[int, int] = {}
        features = []
        for place, slot in enumerate(slots):
            groups = tables.setdefault(slot.table, {})
            groups.setdefault(slot.group, []).append(place)
            pooled = -1
            if slot.pooling in POOLED:
                pooled = num_pooled.get(slot.table, 0)
                num_pooled[slot.table] = pooled + 1
            table = list(tables).index(slot.table)
            features.append(FeaturePlan(slot, table, list(groups).index(slot.group), pooled))
        plans = []
        for number, groups in tables.items():
            group_plans = []
            for places in groups.values():
                first = slots[places[0]]
                is_hashed = first.id_hash is not None or first.hash_stack_rounds > 0
                is_plain = len(places) == 1 and not is_hashed
                group_plans.append(GroupPlan(tuple(places), is_plain))
            order = tuple(place for places in groups.values() for place in places)
            plan = TablePlan(
                number,
                self._schema.tables[number].dim,
                tuple(group_plans),
                num_pooled.get(number, 0),
                order,
                tuple(slots[place].prefix for place in order),
                all(group.is_plain for group in group_plans),
            )
            plans.append(plan)
        return BatchPlan(names, tuple(features), tuple(plans), self._uncut)


def need_hashes(schema: EmbeddingSchema) -> None:
    """Load the libraries by which ids are hashed; refuse one that has no hash."""
    for name in {slot.id_hash for slot in schema.slots.values() if slot.id_hash is not None}:
        kernel_library.need(name)
        native.hash_ids(name, np.empty(0, np.uint64))


def check_names(names: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise a DataError unless each name is in ``known`` and comes once."""
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise DataError(f"feature {name!r} is not in {where}{did_you_mean(name, known)}")
        if name in seen:
            raise DataError(f"feature {name!r} comes twice in one batch, expected once")
        seen.add(name)


# --- ids ------------------------------------------------------------------------------------


class PackedFeature(NamedTuple):  # quicker to make than a frozen dataclass
    """Where the ids of one feature (raw ones cut to size) find their rows."""

    ids: FeatureBatch
    slots: Numbers | None
    start: int  # the slice of the table's rows that ``slots`` counts from
    stop: int
    rounds: int


@dataclass(frozen=True, slots=True)
class PackedTable:
    """Distinct signs of one table; server s has ``signs[starts[s]:starts[s + 1]]``."""

    signs: Signs
    starts: tuple[int, ...]
    # Sign ``signs[i]`` was number ``order[i]`` before it was sorted by server; None where
    # there is one server. Group g has the numbers ``bases[g]`` and up.
    order: Numbers | None
    bases: tuple[int, ...]


class LookedUp(NamedTuple):
    """What an update needs of the last training lookup.

    One value, so that a lookup that is repeated beside an update replaces all or none.
    """

    hints: tuple[Numbers, ...]  # by table of the plan, in the order of its signs
    maxima: Maxima
    rows: Sequence[Floats] | None  # with a delay compensation
    load_ids: Mapping[int, int | None]  # by server, of its reply


@dataclass(slots=True)
class PackedBatch:
    """A batch as the servers see it, and what is known of its ref while it is in flight."""

    plan: BatchPlan
    features: tuple[PackedFeature, ...]
    tables: tuple[PackedTable, ...]
    batch_size: int
    num_masked: dict[str, int]  # distinct ids that did not fit the index bits, per feature
    batch_id: int
    requires_grad: bool
    # These two are set and guarded by ``ForwardBuffer``.
    ref: int = -1
    used_at: float = 0.0  # monotonic seconds
    looked_up: LookedUp | None = None  # by the last training lookup
    # One update at a time; the fields below are the update's.
    updating: threading.Lock = field(default_factory=threading.Lock)
    update_id: tuple[int, int] | None = None
    acknowledged: dict[int, UpdateReport] = field(default_factory=dict)  # by server
    report: UpdateReport | None = None  # set when all servers have acknowledged
    # What rows had moved by when the update came first: tried again, it is the same one.
    movement: Sequence[Floats] | None = None

    def num_bytes(self) -> int:
        """Return the bytes of its arrays."""
        ids = sum(part.nbytes for x in self.features for part in x.ids.parts())
        slots = sum(x.slots.nbytes for x in self.features if x.slots is not None)
        orders = sum(x.order.nbytes for x in self.tables if x.order is not None)
        looked_up = self.looked_up  # replaced by other threads
        rows = None if looked_up is None else looked_up.rows
        seen = 0 if rows is None else sum(part.nbytes for part in rows)
        return ids + slots + orders + seen + sum(x.signs.nbytes for x in self.tables)

    def is_same(self, other: PackedBatch) -> bool:
        """Whether another batch has the same features, ids, places and weights of them."""
        if self.plan is not other.plan or self.batch_size != other.batch_size:
            return False
        if self.requires_grad is not other.requires_grad:
            return False
        for one, two in zip(self.features, other.features, strict=True):
            mine, its = one.ids.parts(), two.ids.parts()
            if len(mine) != len(its) or not all(map(np.array_equal, mine, its)):
                return False
        return True


def pack_batch(
    request: IDFeatures,
    plan: BatchPlan,
    schema: EmbeddingSchema,
    owners: NDArray[np.uint16],
    num_servers: int,
    threads: ThreadPool,
) -> PackedBatch:
    """Number, hash, pack, merge and route the ids of a batch, or raise a DataError."""
    features = request.features
    number_all(features, threads)
    batch_size = features[0].batch_size if features else 0
    kept, values = _select_ids(features, plan, schema, batch_size)
    num_masked: dict[str, int] = {}
    packed: dict[int, PackedFeature] = {}  # by place
    tables = []
    for table in plan.tables:
        signs, bases, numbers = _pack_table(table, values, plan, schema, num_masked, threads)
        order, starts = None, (0, len(signs))
        if num_servers > 1:
            order, bounds = route(signs, owners, num_servers)
            signs, starts = signs[order], tuple(bounds.tolist())
            place_of = np.empty(len(signs), np.uint32)
            place_of[order] = np.arange(len(signs), dtype=np.uint32)
        for place, slots in numbers.items():
            feature = plan.features[place]
            start, stop = bases[feature.group], bases[feature.group + 1]
            rounds = feature.slot.hash_stack_rounds or 1
            if order is not None:
                places = place_of[start:stop]
                slots = places if slots is None else places[slots]
                start, stop = 0, len(signs)
            packed[place] = PackedFeature(kept[place], slots, start, stop, rounds)
        tables.append(PackedTable(signs, starts, order, tuple(bases)))
    in_order = tuple(map(packed.__getitem__, range(len(kept))))
    return PackedBatch(
        plan,
        in_order,
        tuple(tables),
        batch_size,
        num_masked,
        request.batch_id,
        request.requires_grad,
    )


def _select_ids(
    features: Sequence[FeatureBatch],
    plan: BatchPlan,
    schema: EmbeddingSchema,
    batch_size: int,
) -> tuple[list[FeatureBatch], list[Signs]]:
    """Check features; return each, cut to its slot's size, and the values that become signs."""
    kept: list[FeatureBatch] = []
    values: list[Signs] = []
    for ids, feature in zip(features, plan.features, strict=True):
        slot = feature.slot
        if ids.batch_size != batch_size:
            raise DataError(
                f"feature {slot.name!r} has {ids.batch_size} samples, expected {batch_size} "
                f"as in feature {plan.names[0]!r}"
            )
        if ids.weights is not None and slot.pooling != "sum":
            raise DataError(
                f"feature {slot.name!r} has weights, which only pooling 'sum' takes, got "
                f"{slot.pooling!r}; for a mean, divide the weights"
            )
        if slot.pooling == "raw":
            given = ids
            ids = given.truncated(slot.sample_fixed_size, last=slot.padding == "front")
            if ids is not given and slot.name in plan.uncut:
                _warn_of_cut(given, slot, plan.uncut)
        kept.append(ids)
        values.append(_values_of(slot, ids.distinct, schema))
    return kept, values


def _values_of(slot: Slot, ids: Signs, schema: EmbeddingSchema) -> Signs:
    """Return what signs are made of: ids or their hashes [n], or rows of a stack [n * rounds].

    All ids pass here: those of batches, for training, evaluation and serving, and those by
    which rows are read and written.
    """
    if slot.id_hash is not None:
        try:
            hashes = native.hash_ids(slot.id_hash, ids)
        except KernelError as exc:
            raise KernelError(f"feature {slot.name!r}: {exc}") from None
        ids = hashes & np.uint64((1 << (64 - schema.prefix_bits)) - 1)
    if slot.hash_stack_rounds:
        ids = hash_stack(ids, slot.hash_stack_rounds, slot.hash_stack_size)
    return ids


def _warn_of_cut(ids: FeatureBatch, slot: Slot, uncut: set[str]) -> None:
    # Single ids have no offsets, and are never cut.
    longest = 1 if ids.offsets is None else int(np.diff(ids.offsets).max())
    with suppress(KeyError):  # another thread has just said it
        uncut.remove(slot.name)
        _logger.warning(
            "feature %r: a sample has %d ids, of which the first %d are used, as its slot has "
            "no sample_fixed_size; write sample_fixed_size: %d to use all of them, or "
            "padding: front to use the last (said once)",
            slot.name,
            longest,
            slot.sample_fixed_size,
            longest,
        )


def _pack_table(
    table: TablePlan,
    values: Sequence[Signs],
    plan: BatchPlan,
    schema: EmbeddingSchema,
    num_masked: dict[str, int],
    threads: ThreadPool,
) -> tuple[Signs, list[int], dict[int, Numbers | None]]:
    """Pack one table; count masked ids in ``num_masked``.

    Returns the signs, where those of each group begin, and by feature the number of each of its
    values among its group's; None where they are 0, 1, 2, ...
    """
    given = [values[place] for place in table.places]
    signs, masked = pack_all(given, table.prefixes, schema.prefix_bits, threads)
    if any(masked):
        for place, ids, count in zip(table.places, given, masked, strict=True):
            name = plan.names[place]
            if count and schema.strict_ids:
                _refuse_wide_id(name, ids, schema.prefix_bits)
            if count:
                num_masked[name] = count
    elif table.is_plain:
        return signs, [0, *accumulate(map(len, given))], dict.fromkeys(table.places)
    numbers: dict[int, Numbers | None] = {}
    parts: list[Signs] = []
    bases = [0]
    at = 0
    is_merged = False
    for group in table.groups:
        pieces = []
        for place in group.features:
            pieces.append(signs[at : at + len(values[place])])
            at += len(values[place])
        # Masking folds ids onto each other, so that distinct ids may share a sign.
        if group.is_plain and plan.names[group.features[0]] not in num_masked:
            (distinct,) = pieces
            numbers[group.features[0]] = None
        else:
            distinct, merged = merge(pieces)
            numbers.update(zip(group.features, merged, strict=True))
            is_merged = True
        parts.append(distinct)
        bases.append(bases[-1] + len(distinct))
    return np.concatenate(parts) if is_merged else signs, bases, numbers


def signs_of(
    slot: Slot, ids: Signs, schema: EmbeddingSchema, threads: ThreadPool
) -> tuple[Signs, int]:
    """Return the signs of a feature's ids, id by id, and how many ids were masked.

    They are those that its batches have: [n], or with a hash stack [n * rounds].
    """
    values = _values_of(slot, ids, schema)
    signs, (num_masked,) = pack_all([values], [slot.prefix], schema.prefix_bits, threads)
    if num_masked and schema.strict_ids:
        _refuse_wide_id(slot.name, values, schema.prefix_bits)
    return signs, num_masked


def _refuse_wide_id(name: str, ids: Signs, prefix_bits: int) -> None:
    index_bits = 64 - prefix_bits
    wide = ids[ids >> np.uint64(index_bits) != 0]
    raise DataError(
        f"feature {name!r}: id {int(wide[0])} needs {int(wide[0]).bit_length()} bits, "
        f"expected at most {index_bits} (64 - feature_index_prefix_bit) with strict_ids"
    )


# --- requests -------------------------------------------------------------------------------


def split_lookup(
    packed: PackedBatch, is_training: bool, num_servers: int
) -> dict[int, LookupRequest]:
    """Return by server what it is asked for; servers without a sign of the batch are absent."""
    requests: dict[int, LookupRequest] = {}
    for server in range(num_servers):
        parts = []
        for table, plan in zip(packed.tables, packed.plan.tables, strict=True):
            start, stop = table.starts[server : server + 2]
            if stop > start:
                parts.append(TableSigns(plan.number, table.signs[start:stop]))
        if parts:
            requests[server] = LookupRequest(packed.batch_id, is_training, tuple(parts))
    return requests


def join_rows(
    packed: PackedBatch, replies: Mapping[int, LookupReply]
) -> tuple[list[Floats], tuple[Numbers, ...]]:
    """Return rows and hints by table, in the order of its signs.

    Hints are empty in evaluation, and where servers keep them.
    """
    all_rows: list[Floats] = []
    all_hints: list[Numbers] = []
    parts = {server: iter(reply.tables) for server, reply in replies.items()}
    for table, plan in zip(packed.tables, packed.plan.tables, strict=True):
        rows: Floats | None = None
        hints = _NO_HINTS
        num_signs = len(table.signs)
        for server in parts:
            start, stop = table.starts[server : server + 2]
            if stop == start:
                continue
            part = next(parts[server])
            if stop - start == num_signs:  # all rows of the table: not copied
                rows = part.rows
                if part.hints is not None:
                    hints = part.hints
                break
            if rows is None:
                rows = empty_floats(num_signs, plan.dim)
            rows[start:stop] = part.rows
            if part.hints is not None:
                if hints is _NO_HINTS:
                    hints = np.empty(num_signs, np.uint32)
                hints[start:stop] = part.hints
        all_rows.append(empty_floats(0, plan.dim) if rows is None else rows)
        all_hints.append(hints)
    return all_rows, tuple(all_hints)


def split_entries(
    tables: Sequence[TableEntries], owners: NDArray[np.uint16], num_servers: int
) -> dict[int, list[TableEntries]]:
    """Return rows by the server that owns their signs."""
    requests: dict[int, list[TableEntries]] = {}
    for part in tables:
        signs, states = part.signs, part.states
        lengths = {len(signs), len(part.values), len(signs if states is None else states)}
        if len(lengths) > 1:
            raise StoreError(
                f"table {part.table}: expected as many values and states as signs, "
                f"{len(signs)}, got {sorted(lengths)}"
            )
        if not isinstance(signs, np.ndarray) or signs.dtype != np.uint64:
            raise DataTypeError(f"table {part.table}: expected signs as uint64 array")
        order, starts = route(np.ascontiguousarray(signs), owners, num_servers)
        for server in range(num_servers):
            chosen = order[starts[server] : starts[server + 1]]
            if len(chosen):
                own = None if states is None else states[chosen]
                entries = TableEntries(
                    part.table, signs[chosen], part.values[chosen], own, part.keeps_states
                )
                requests.setdefault(server, []).append(entries)
    return requests


# --- statistics -----------------------------------------------------------------------------


class _Counts:
    """Of one feature."""

    def __init__(self) -> None:
        self.num_ids = self.num_distinct = self.num_masked = self.num_skipped = 0
        # Of training only.
        self.num_samples = self.num_empty = self.num_trained = 0
        self.registers = np.zeros(cardinality.NUM_REGISTERS, np.uint8)


class FeatureStatistics:
    """Counts by feature, for metrics and a report; any thread may add to it.

    Ids of all lookups are counted, and of training also samples and about how many distinct
    ids: a hash and a byte of a table that stays in the cache for each distinct id of a batch.
    """

    def __init__(self, schema: EmbeddingSchema) -> None:
        self._dims = {slot.name: slot.dim for slot in schema.slots.values()}
        self._index_bits = 64 - schema.prefix_bits
        self._lock = threading.Lock()  # guards all below
        self._has_warned = False  # of ids that were cut
        # In the order in which they came first.
        self._features: defaultdict[str, _Counts] = defaultdict(_Counts)

    def add(self, packed: PackedBatch, threads: ThreadPool) -> None:
        """Count the ids of a batch; warn when some are masked the first time."""
        masked = packed.num_masked
        sketches, distinct = [], []
        with self._lock:
            for feature in packed.features:
                ids = feature.ids
                counts = self._features[ids.name]
                counts.num_ids += ids.num_ids
                counts.num_distinct += ids.num_distinct
                if packed.requires_grad:
                    counts.num_samples += ids.batch_size
                    counts.num_trained += ids.num_ids
                    counts.num_empty += ids.num_empty
                    sketches.append(counts.registers)
                    distinct.append(ids.distinct)
            cardinality.add(sketches, distinct, threads)
        if masked:
            self.add_masked(masked)

    def add_masked(self, masked: Mapping[str, int]) -> None:
        """Count ids that were cut, by feature; warn the first time."""
        with self._lock:
            for name, num_masked in masked.items():
                self._features[name].num_masked += num_masked
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _logger.warning(
                "ids of a batch need more than %d bits and were cut to them, so that they may "
                "share rows: %s; later ones, of any feature, are only counted. Negative ids "
                "need 64: where -1 stands for none, leave it out of a feature, and in a module "
                "of persia.nn write padding_idx=0 and ids.clamp(min=0). In an embedding "
                "config, ids have 64 - feature_index_prefix_bit bits, and strict_ids: true "
                "makes this an error",
                self._index_bits,
                ", ".join(f"{count} of {name}" for name, count in masked.items()),
            )

    def add_skipped(self, names: Iterable[str]) -> None:
        """Count features of a batch that had no gradient."""
        with self._lock:
            for name in names:
                # A repeated registration may be updated before the first has been counted.
                self._features[name].num_skipped += 1

    def count_ids(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Return by feature: ids, distinct ids batch by batch, masked, gradients skipped."""
        with self._lock:
            return {
                name: (one.num_ids, one.num_distinct, one.num_masked, one.num_skipped)
                for name, one in self._features.items()
            }

    def read(self) -> tuple[FeatureStats, ...]:
        """Return what training saw, in the order in which features came; the others last."""
        with self._lock:
            trained = {name: x for name, x in self._features.items() if x.num_samples}
            features = trained | {name: _Counts() for name in self._dims if name not in trained}
            return tuple(
                FeatureStats(
                    name,
                    self._dims[name],
                    one.num_samples,
                    one.num_empty,
                    one.num_trained,
                    one.registers.copy(),
                )
                for name, one in features.items()
            )
