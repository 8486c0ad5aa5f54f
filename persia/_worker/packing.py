"""The ids of a batch, packed into what each parameter server is asked for.

``pack_batch`` turns the ids of each feature into the distinct signs of each table, sorted by
server. Requests are slices of those arrays. How a feature finds its rows:

    distinct id d, round r  ->  number slots[d * rounds + r]  ->  rows[start:stop][number]

Without a hash stack, a shared group or a second server that is the identity: ``slots`` is
None, and the feature's rows are the slice alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import route
from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch, number_all
from persia._core.ids.signs import hash_stack, merge, pack_all
from persia._rpc.messages import (
    Floats,
    LookupReply,
    LookupRequest,
    Numbers,
    Signs,
    TableEntries,
    TableSigns,
)
from persia._worker.batch_plan import BatchPlan, TablePlan
from persia.config import EmbeddingSchema
from persia.errors import DataError, DataTypeError, StoreError

_NO_HINTS = np.empty(0, np.uint32)


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


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch as the servers see it."""

    plan: BatchPlan
    features: tuple[PackedFeature, ...]
    tables: tuple[PackedTable, ...]
    batch_size: int
    num_masked: dict[str, int]  # distinct ids that did not fit the index bits, per feature

    def num_bytes(self) -> int:
        """Return the bytes of its arrays."""
        ids = sum(part.nbytes for x in self.features for part in x.ids.parts())
        slots = sum(x.slots.nbytes for x in self.features if x.slots is not None)
        orders = sum(x.order.nbytes for x in self.tables if x.order is not None)
        return ids + slots + orders + sum(x.signs.nbytes for x in self.tables)

    def has_same_ids(self, other: PackedBatch) -> bool:
        """Whether another batch has the same features, ids and places of them."""
        if self.plan is not other.plan or self.batch_size != other.batch_size:
            return False
        pairs: list[tuple[Any, Any]] = [
            (one.signs, two.signs) for one, two in zip(self.tables, other.tables, strict=True)
        ]
        for a, b in zip(self.features, other.features, strict=True):
            pairs.append((a.ids.offsets, b.ids.offsets))
            pairs.append((a.ids.inverse, b.ids.inverse))
            pairs.append((a.ids.weights, b.ids.weights))
        return all(
            one is two if one is None or two is None else np.array_equal(one, two)
            for one, two in pairs
        )


def pack_batch(
    features: Sequence[FeatureBatch],
    plan: BatchPlan,
    schema: EmbeddingSchema,
    owners: NDArray[np.uint16],
    num_servers: int,
    threads: ThreadPool,
) -> PackedBatch:
    """Number, hash, pack, merge and route the ids of a batch.

    Raises:
        DataError: If two features differ in batch size, a feature that is not summed has
            weights, or an id does not fit the index bits and the schema is strict.
    """
    number_all(features, threads)
    batch_size = features[0].batch_size if features else 0
    kept, values = _select_ids(features, plan, batch_size)
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
    return PackedBatch(plan, in_order, tuple(tables), batch_size, num_masked)


def _select_ids(
    features: Sequence[FeatureBatch], plan: BatchPlan, batch_size: int
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
            ids = ids.truncated(slot.sample_fixed_size)
        kept.append(ids)
        if slot.hash_stack_rounds:
            values.append(
                hash_stack(ids.distinct, slot.hash_stack_rounds, slot.hash_stack_size)
            )
        else:
            values.append(ids.distinct)
    return kept, values


def _pack_table(
    table: TablePlan,
    values: Sequence[Signs],
    plan: BatchPlan,
    schema: EmbeddingSchema,
    num_masked: dict[str, int],
    threads: ThreadPool,
) -> tuple[Signs, list[int], dict[int, Numbers | None]]:
    """Pack one table; count masked ids in ``num_masked``.

    Returns:
        The signs, where those of each group begin, and by feature the number of each of its
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


def _refuse_wide_id(name: str, ids: Signs, prefix_bits: int) -> None:
    index_bits = 64 - prefix_bits
    wide = ids[ids >> np.uint64(index_bits) != 0]
    raise DataError(
        f"feature {name!r}: id {int(wide[0])} needs {int(wide[0]).bit_length()} bits, "
        f"expected at most {index_bits} (64 - feature_index_prefix_bit) with strict_ids"
    )


# --- requests -------------------------------------------------------------------------------


def split_lookup(
    packed: PackedBatch, batch_id: int, is_training: bool, num_servers: int
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
            requests[server] = LookupRequest(batch_id, is_training, tuple(parts))
    return requests


def join_rows(
    packed: PackedBatch, replies: Mapping[int, LookupReply]
) -> tuple[list[Floats], tuple[Numbers, ...]]:
    """Return rows and hints (empty in evaluation) by table, in the order of its signs."""
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
    """Return rows by the server that owns their signs.

    Raises:
        StoreError: If lengths differ.
        DataTypeError: If signs are no uint64 array.
    """
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
                entries = TableEntries(
                    part.table,
                    signs[chosen],
                    part.values[chosen],
                    None if states is None else states[chosen],
                )
                requests.setdefault(server, []).append(entries)
    return requests
