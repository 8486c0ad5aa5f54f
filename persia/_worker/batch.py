"""One batch between its features and the rows of the servers.

``pack_batch`` turns the ids of each feature into the distinct signs of each table, sorted by
server. ``pool_outputs`` turns rows into what the model gets, ``sum_gradients`` turns the
model's gradients into one gradient per sign. How a feature finds its rows:

    distinct id d, round r  ->  number slots[d * rounds + r]  ->  rows[start:stop][number]

Without a hash stack, a shared group or a second server that is the identity: ``slots`` is
None, and the feature's rows are the slice alone.

Sums run in the order (feature in the batch, sample, position), whatever the number of
servers, because the order in which rows are stored does not enter into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import route
from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch, number_all
from persia._core.ids.signs import hash_stack, merge, pack_all
from persia._core.kernels.pool_calls import PoolCalls
from persia._core.kernels.pooling import gather, nonfinite
from persia._rpc.messages import (
    Floats,
    Indices,
    JaggedOutput,
    Numbers,
    PooledOutput,
    RawOutput,
    Signs,
    SlotOutput,
)
from persia._worker.batch_plan import BatchPlan, FeaturePlan, TablePlan
from persia.config import EmbeddingSchema
from persia.errors import DataError

Mask = NDArray[np.bool_]


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


@dataclass(frozen=True, slots=True)
class TableSums:
    """Summed gradients [U, dim] of one table, in the order of its signs."""

    sums: Floats
    keep: Mask | None  # which signs take a step; None: all


@dataclass(slots=True)
class GradientCounts:
    """What was left out, by feature."""

    samples: dict[str, int] = field(default_factory=dict)  # rows of the gradient
    rows: dict[str, int] = field(default_factory=dict)  # sums that overflowed


def shares(weights: Sequence[int], count: int) -> list[list[int]]:
    """Deal places out so that ``count`` shares weigh about the same; none is empty.

    Heaviest first, each to the lightest share so far (Graham 1969): at most 4/3 of the best.
    """
    dealt: list[list[int]] = [[] for _ in range(count)]
    total = [0] * count
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        lightest = total.index(min(total))
        dealt[lightest].append(place)
        # Never 0, so that places without weight spread as well.
        total[lightest] += weights[place] + 1
    return [places for places in dealt if places]


def pack_batch(
    features: Sequence[FeatureBatch],
    plan: BatchPlan,
    schema: EmbeddingSchema,
    owners: NDArray[np.uint16],
    num_servers: int,
    crew: ThreadPool,
) -> PackedBatch:
    """Number, hash, pack, merge and route the ids of a batch.

    Raises:
        DataError: If two features differ in batch size, a feature that is not summed has
            weights, or an id does not fit the index bits and the schema is strict.
    """
    number_all(features, crew)
    batch_size = features[0].batch_size if features else 0
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

    num_masked: dict[str, int] = {}
    found: list[PackedFeature | None] = [None] * len(kept)
    tables = []
    for table in plan.tables:
        signs, bases, numbers = _pack_table(table, values, plan, schema, num_masked, crew)
        order, starts = None, (0, len(signs))
        if num_servers > 1:
            order, bounds = route(signs, owners, num_servers)
            signs, starts = signs[order], tuple(bounds.tolist())
            place_of = np.empty(len(signs), np.uint32)
            place_of[order] = np.arange(len(signs), dtype=np.uint32)
        for place, slots in numbers.items():
            group = plan.features[place].group
            start, stop = bases[group], bases[group + 1]
            rounds = plan.features[place].slot.hash_stack_rounds or 1
            if order is not None:
                places = place_of[start:stop]
                slots = places if slots is None else places[slots]
                start, stop = 0, len(signs)
            found[place] = PackedFeature(kept[place], slots, start, stop, rounds)
        tables.append(PackedTable(signs, starts, order, tuple(bases)))
    placed = tuple(feature for feature in found if feature is not None)
    return PackedBatch(plan, placed, tuple(tables), batch_size, num_masked)


def _pack_table(
    table: TablePlan,
    values: Sequence[Signs],
    plan: BatchPlan,
    schema: EmbeddingSchema,
    num_masked: dict[str, int],
    crew: ThreadPool,
) -> tuple[Signs, list[int], dict[int, Numbers | None]]:
    """Pack one table; count masked ids in ``num_masked``.

    Returns:
        The signs, where those of each group begin, and by feature the number of each of its
        values among its group's; None where they are 0, 1, 2, ...
    """
    given = [values[place] for place in table.places]
    signs, masked = pack_all(given, table.prefixes, schema.prefix_bits, crew)
    if any(masked):
        slots = [plan.features[place].slot for place in table.places]
        for slot, ids, count in zip(slots, given, masked, strict=True):
            if count and schema.strict_ids:
                _refuse_wide_id(slot.name, ids, schema.prefix_bits)
            if count:
                num_masked[slot.name] = count
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


def is_same_batch(one: PackedBatch, other: PackedBatch) -> bool:
    """Whether two batches have the same features with the same ids in the same places."""
    if one.plan is not other.plan or one.batch_size != other.batch_size:
        return False
    for mine, theirs in zip(one.tables, other.tables, strict=True):
        if not np.array_equal(mine.signs, theirs.signs):
            return False
    for a, b in zip(one.features, other.features, strict=True):
        ours, other_ids = a.ids, b.ids
        if (ours.offsets is None) is not (other_ids.offsets is None):
            return False
        if not np.array_equal(_offsets(ours), _offsets(other_ids)):
            return False
        if not np.array_equal(ours.inverse, other_ids.inverse):
            return False
        if ours.weights is None or other_ids.weights is None:
            if ours.weights is not other_ids.weights:
                return False
        elif not np.array_equal(ours.weights, other_ids.weights):
            return False
    return True


# --- rows to outputs ------------------------------------------------------------------------


def pool_outputs(
    batch: PackedBatch, rows: Sequence[Floats], crew: ThreadPool
) -> tuple[tuple[SlotOutput, ...], tuple[NDArray[np.int32] | None, ...]]:
    """Make the outputs of a batch, in the order of its features.

    Args:
        batch: The batch.
        rows: Per table of the plan, rows [U, dim] in the order of its signs.
        crew: Threads; each takes some of the features.

    Returns:
        The outputs, which own their memory (pooled ones of a table share one array), and per
        feature what ``pool`` says about the maxima.
    """
    pooled = [
        empty_floats(table.num_pooled, batch.batch_size, table.dim)
        for table in batch.plan.tables
    ]
    outputs: list[SlotOutput | None] = [None] * len(batch.features)
    maxima: list[NDArray[np.int32] | None] = [None] * len(batch.features)
    calls = PoolCalls()
    others = []
    for place, (feature, plan) in enumerate(
        zip(batch.features, batch.plan.features, strict=True)
    ):
        if plan.pooled < 0:
            others.append(place)
            continue
        slot, ids, out = plan.slot, feature.ids, pooled[plan.table][plan.pooled]
        maxima[place] = calls.pool(
            slot.pooling,
            rows[plan.table][feature.start : feature.stop],
            feature.slots,
            feature.rounds,
            ids,
            None,
            out,
        )
        outputs[place] = PooledOutput(slot.name, out)
    calls.run(crew)

    def make(share: Iterable[int]) -> None:
        for place in (others[at] for at in share):
            plan = batch.plan.features[place]
            outputs[place] = _unpooled(batch.features[place], plan, rows[plan.table])

    if others:
        weights = [batch.features[place].ids.num_ids for place in others]
        crew.run(make, shares(weights, crew.num_threads))
    return tuple(output for output in outputs if output is not None), tuple(maxima)


def _unpooled(feature: PackedFeature, plan: FeaturePlan, rows: Floats) -> SlotOutput:
    """Return the output of a feature that is raw or jagged."""
    slot, ids = plan.slot, feature.ids
    source = rows[feature.start : feature.stop]
    if slot.pooling == "raw":
        vectors = np.empty((ids.num_distinct + 1, slot.dim), np.float32)
        vectors[0] = 0.0
        gather(source, feature.slots, feature.rounds, vectors[1:])
        index = _padded_index(ids, slot.sample_fixed_size)
        return RawOutput(slot.name, vectors, index, slot.sample_fixed_size)
    vectors = np.empty((ids.num_distinct, slot.dim), np.float32)
    gather(source, feature.slots, feature.rounds, vectors)
    return JaggedOutput(slot.name, vectors, ids.inverse.astype(np.int64), _offsets(ids))


def _offsets(ids: FeatureBatch) -> Indices:
    if ids.offsets is None:
        return np.arange(ids.batch_size + 1, dtype=np.int64)
    return ids.offsets.astype(np.int64)


def _padded_index(ids: FeatureBatch, width: int) -> Indices:
    """1 + the number of the id at each of ``width`` positions a sample, 0 where none is."""
    index = np.zeros(ids.batch_size * width, np.int64)
    offsets = _offsets(ids)
    first = np.arange(ids.batch_size, dtype=np.int64) * width - offsets[:-1]
    places = np.arange(ids.num_ids, dtype=np.int64)
    places += np.repeat(first, np.diff(offsets))
    index[places] = ids.inverse
    index[places] += 1
    return index


# --- gradients to sums ----------------------------------------------------------------------


def sum_gradients(
    batch: PackedBatch,
    gradients: Sequence[Floats | None],
    maxima: Sequence[NDArray[np.int32] | None],
    crew: ThreadPool,
) -> tuple[tuple[TableSums, ...], GradientCounts]:
    """Sum the gradients of a batch's outputs per sign, leaving out what is not finite.

    A row of a gradient with NaN or Inf is left out whole; so is a sum that overflows. A sign
    for which nothing is left takes no step: to most optimizers a step by zero is one too.

    Args:
        batch: The batch.
        gradients: Per feature f32 [B, dim] if it is pooled, else [D, dim]; None: skipped.
        maxima: What ``pool_outputs`` returned.
        crew: Threads; each takes some of the groups, whose rows are their own.
    """
    counts = GradientCounts()
    present = {place: g for place, g in enumerate(gradients) if g is not None}
    all_sums = [
        empty_floats(len(table.signs), plan.dim)
        for table, plan in zip(batch.tables, batch.plan.tables, strict=True)
    ]
    # No finite sum has a term that is not: where all sums are finite, so were the gradients,
    # and they need not be looked at one by one.
    skips: dict[int, NDArray[np.uint8]] = {}
    if not _add(batch, present, maxima, {}, all_sums, crew):
        skips = {place: nonfinite(gradient) for place, gradient in present.items()}
        _add(batch, present, maxima, skips, all_sums, crew)
    found = []
    for number, (table, sums) in enumerate(zip(batch.tables, all_sums, strict=True)):
        places = batch.plan.tables[number].places
        here = [place for place in places if place in present]
        keep = None
        if skips or len(here) < len(places):
            keep = np.zeros(len(table.signs), np.bool_)
            for place in here:
                _mark_reached(batch, place, skips.get(place), keep, counts)
            overflowed = nonfinite(sums).astype(np.bool_)
            _count_overflows(batch, number, here, overflowed, counts)
            keep &= ~overflowed
        found.append(TableSums(sums, keep))
    return tuple(found), counts


def _add(
    batch: PackedBatch,
    gradients: Mapping[int, Floats],
    maxima: Sequence[NDArray[np.int32] | None],
    skips: Mapping[int, NDArray[np.uint8]],
    all_sums: Sequence[Floats],
    crew: ThreadPool,
) -> bool:
    """Fill the sums of all tables; return whether they are finite.

    Groups share no row, and within a group features are added in their order: so the sums
    do not depend on the number of threads.
    """
    calls = PoolCalls()
    for table, plan, sums in zip(batch.tables, batch.plan.tables, all_sums, strict=True):
        if table.order is not None:
            sums[:] = 0.0
        for group, (start, stop) in zip(plan.groups, pairwise(table.bases), strict=True):
            # Sorted by server, the rows of a group lie among those of others.
            calls.begin_sums(sums[start:stop] if table.order is None else None)
            for place in group.features:
                if place in gradients:
                    skip = skips.get(place)
                    _accumulate(
                        calls, batch, place, gradients[place], maxima[place], skip, sums
                    )
    return calls.run(crew) and not any(
        table.order is not None and nonfinite(sums).any()
        for table, sums in zip(batch.tables, all_sums, strict=True)
    )


def _accumulate(
    calls: PoolCalls,
    batch: PackedBatch,
    place: int,
    gradient: Floats,
    argmax: NDArray[np.int32] | None,
    skip: NDArray[np.uint8] | None,
    sums: Floats,
) -> None:
    """Add one feature's gradient to the sums of its table, without the rows in ``skip``."""
    feature, plan = batch.features[place], batch.plan.features[place]
    out = sums[feature.start : feature.stop]
    if plan.pooled >= 0:
        calls.pool_grad(
            plan.slot.pooling,
            gradient,
            feature.slots,
            feature.rounds,
            feature.ids,
            None,
            argmax,
            skip,
            out,
        )
        return
    if skip is not None:
        gradient = np.where(skip[:, None] != 0, np.float32(0.0), gradient)
    calls.scatter_add(gradient, feature.slots, feature.rounds, out)


def _mark_reached(
    batch: PackedBatch,
    place: int,
    skip: NDArray[np.uint8] | None,
    keep: Mask,
    counts: GradientCounts,
) -> None:
    """Set ``keep`` for each sign that a row of this gradient reaches; count those left out."""
    feature, plan = batch.features[place], batch.plan.features[place]
    ids = feature.ids
    reached = np.ones(ids.num_distinct, np.bool_)
    if skip is not None:
        taken = skip == 0
        num_left_out = int(len(taken) - np.count_nonzero(taken))
        if plan.pooled >= 0:
            lengths = np.diff(_offsets(ids))
            # The row of a sample without ids reaches nothing and is not missed.
            num_left_out = int(np.count_nonzero(~taken & (lengths > 0)))
            reached = np.zeros(ids.num_distinct, np.bool_)
            reached[ids.inverse[np.repeat(taken, lengths)]] = True
        else:
            reached = taken
        if num_left_out:
            counts.samples[plan.slot.name] = num_left_out
    window = keep[feature.start : feature.stop]
    if feature.slots is None:
        window |= reached
    else:
        window[feature.slots.reshape(-1, feature.rounds)[reached].ravel()] = True


def _count_overflows(
    batch: PackedBatch,
    number: int,
    present: Iterable[int],
    overflowed: Mask,
    counts: GradientCounts,
) -> None:
    """Count each sum that overflowed under the first feature of its group with a gradient."""
    table = batch.tables[number]
    signs = np.flatnonzero(overflowed)
    if table.order is not None:
        signs = table.order[signs].astype(np.int64)
    groups = np.searchsorted(np.asarray(table.bases), signs, side="right") - 1
    features: list[FeaturePlan] = [batch.plan.features[place] for place in present]
    for group, count in zip(*np.unique(groups, return_counts=True), strict=True):
        name = next(plan.slot.name for plan in features if plan.group == group)
        counts.rows[name] = int(count)
