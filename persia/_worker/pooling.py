"""Rows pooled to what a model gets, and its gradients summed to one per sign.

Sums run in the order (feature in the batch, sample, position), whatever the number of servers:
the order in which rows are stored does not enter into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats, joined
from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.kernels.pooling import PoolCalls, gather, nonfinite
from persia._rpc.messages import (
    BatchGradients,
    Floats,
    Indices,
    JaggedOutput,
    Numbers,
    PooledOutput,
    RawOutput,
    SlotOutput,
    TableGradients,
    UpdateRequest,
)
from persia._worker.packing import FeaturePlan, LookedUp, Maxima, PackedBatch, PackedFeature
from persia.config import Padding

Mask = NDArray[np.bool_]
# Summed gradients [U, dim] of a table, in the order of its signs; which signs take a step, None
# for all of them.
Sums = tuple[Floats, Mask | None]


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


# --- rows to outputs ------------------------------------------------------------------------


def pool_outputs(
    batch: PackedBatch, rows: Sequence[Floats], threads: ThreadPool
) -> tuple[tuple[SlotOutput, ...], Maxima]:
    """Make the outputs of a batch, in the order of its features, and find the maxima.

    ``rows`` [U, dim] are by table of the plan, in the order of its signs. Pooled outputs of a
    table share one array; jagged ones are slices of the rows where these lie as the ids do.
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
            out,
        )
        # Of one id a sample every pooling gives its vector.
        repeats = ids.offsets is None and ids.weights is None
        outputs[place] = PooledOutput(slot.name, out, ids.inverse if repeats else None)
    calls.run(threads)

    def make(share: Iterable[int]) -> None:
        for place in (others[at] for at in share):
            plan = batch.plan.features[place]
            outputs[place] = _unpooled(batch.features[place], plan, rows[plan.table])

    if others:
        weights = [batch.features[place].ids.num_ids for place in others]
        threads.run(make, shares(weights, threads.num_threads))
    return tuple([output for output in outputs if output is not None]), tuple(maxima)


def _unpooled(feature: PackedFeature, plan: FeaturePlan, rows: Floats) -> SlotOutput:
    """Return the output of a feature that is raw or jagged."""
    slot, ids = plan.slot, feature.ids
    source = rows[feature.start : feature.stop]
    if slot.pooling == "raw":
        vectors = np.empty((ids.num_distinct + 1, slot.dim), np.float32)
        vectors[0] = 0.0
        gather(source, feature.slots, feature.rounds, vectors[1:])
        index = _padded_index(ids, slot.sample_fixed_size, slot.padding)
        return RawOutput(slot.name, vectors, index, slot.sample_fixed_size)
    vectors = source
    if feature.slots is not None:
        vectors = np.empty((ids.num_distinct, slot.dim), np.float32)
        gather(source, feature.slots, feature.rounds, vectors)
    return JaggedOutput(slot.name, vectors, ids.inverse.astype(np.int64), _offsets(ids))


def _offsets(ids: FeatureBatch) -> Indices:
    if ids.offsets is None:
        return np.arange(ids.batch_size + 1, dtype=np.int64)
    return ids.offsets.astype(np.int64)


def _padded_index(ids: FeatureBatch, width: int, padding: Padding) -> Indices:
    """1 + the number of the id at each of ``width`` positions a sample, 0 where none is."""
    index = np.zeros(ids.batch_size * width, np.int64)
    offsets = _offsets(ids)
    samples = np.arange(ids.batch_size, dtype=np.int64)
    # What is added to an id's number in the batch to get its place: a sample's ids begin where
    # its places do, or end where they end.
    first = samples * width - offsets[:-1]
    if padding == "front":
        first = (samples + 1) * width - offsets[1:]
    places = np.arange(ids.num_ids, dtype=np.int64)
    places += np.repeat(first, np.diff(offsets))
    index[places] = ids.inverse
    index[places] += 1
    return index


# --- gradients to sums ----------------------------------------------------------------------


def sum_gradients(
    batch: PackedBatch,
    gradients: Sequence[Floats | None],
    maxima: Maxima,
    threads: ThreadPool,
) -> tuple[list[Sums], dict[str, int], dict[str, int]]:
    """Sum the gradients of a batch's outputs per sign, leaving out what is not finite.

    A row of a gradient with NaN or Inf is left out whole; so is a sum that overflows. A sign
    for which nothing is left takes no step: to most optimizers a step by zero is one too.

    Gradients are by feature, f32 [B, dim] if it is pooled, else [D, dim], None if it is
    skipped. Returns the sums by table, and by feature how many rows and sums were left out.
    """
    nan_samples: dict[str, int] = {}
    nan_rows: dict[str, int] = {}
    present = {place: g for place, g in enumerate(gradients) if g is not None}
    given = _sums_already(batch, present)
    all_sums = [
        given[number] if number in given else empty_floats(len(table.signs), plan.dim)
        for number, (table, plan) in enumerate(
            zip(batch.tables, batch.plan.tables, strict=True)
        )
    ]
    # A term that is not finite makes its sum so: where all sums are finite, so were the
    # gradients, and need no look one by one.
    skips: dict[int, NDArray[np.uint8]] = {}
    is_finite = _add(batch, present, maxima, {}, all_sums, threads, given)
    if not is_finite or any(nonfinite(sums).any() for sums in given.values()):
        skips = {place: nonfinite(gradient) for place, gradient in present.items()}
        for number, sums in given.items():
            all_sums[number] = np.empty_like(sums)
        _add(batch, present, maxima, skips, all_sums, threads)
    found: list[Sums] = []
    for number, (table, sums) in enumerate(zip(batch.tables, all_sums, strict=True)):
        places = batch.plan.tables[number].places
        here = [place for place in places if place in present]
        keep = None
        if skips or len(here) < len(places):
            keep = np.zeros(len(table.signs), np.bool_)
            for place in here:
                _mark_reached(batch, place, skips.get(place), keep, nan_samples)
            overflowed = nonfinite(sums).astype(np.bool_)
            _count_overflows(batch, number, here, overflowed, nan_rows)
            keep &= ~overflowed
        found.append((sums, keep))
    return found, nan_samples, nan_rows


def _sums_already(batch: PackedBatch, gradients: Mapping[int, Floats]) -> dict[int, Floats]:
    """Return by table the gradients that are its sums as they are: a row for each sign."""
    found = {}
    for number, (table, plan) in enumerate(zip(batch.tables, batch.plan.tables, strict=True)):
        places = plan.places
        if table.order is not None or plan.num_pooled or not gradients.keys() >= set(places):
            continue
        if any(batch.features[place].slots is not None for place in places):
            continue
        sums = joined([gradients[place] for place in places])
        if sums is not None:
            found[number] = sums
    return found


def _add(
    batch: PackedBatch,
    gradients: Mapping[int, Floats],
    maxima: Maxima,
    skips: Mapping[int, NDArray[np.uint8]],
    all_sums: Sequence[Floats],
    threads: ThreadPool,
    given: Collection[int] = (),
) -> bool:
    """Fill the sums of all tables without the rows in ``skips``; return if all are finite.

    Those of the tables ``given`` are there. Groups share no row, and within a group features
    are added in their order: so the sums do not depend on the number of threads.
    """
    calls = PoolCalls()
    scattered = []  # sums whose rows are sorted by server
    for number, (table, plan, sums) in enumerate(
        zip(batch.tables, batch.plan.tables, all_sums, strict=True)
    ):
        if number in given:
            continue
        if table.order is not None:
            sums[:] = 0.0
            scattered.append(sums)
        for group, (start, stop) in zip(plan.groups, pairwise(table.bases), strict=True):
            # Sorted by server, the rows of a group lie among those of others.
            calls.begin_sums(sums[start:stop] if table.order is None else None)
            for place in group.features:
                if place not in gradients:
                    continue
                gradient, skip = gradients[place], skips.get(place)
                ids, slots, first, end, rounds = batch.features[place]
                out = sums[first:end]
                if batch.plan.features[place].pooled >= 0:
                    pooling = batch.plan.features[place].slot.pooling
                    argmax = maxima[place]
                    calls.pool_grad(pooling, gradient, slots, rounds, ids, argmax, skip, out)
                    continue
                if skip is not None:
                    gradient = np.where(skip[:, None] != 0, np.float32(0.0), gradient)
                calls.scatter_add(gradient, slots, rounds, out)
    is_finite = calls.run(threads)
    return is_finite and not any(nonfinite(sums).any() for sums in scattered)


def _mark_reached(
    batch: PackedBatch,
    place: int,
    skip: NDArray[np.uint8] | None,
    keep: Mask,
    nan_samples: dict[str, int],
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
            nan_samples[plan.slot.name] = num_left_out
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
    nan_rows: dict[str, int],
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
        nan_rows[name] = int(count)


def split_update(
    batch: PackedBatch,
    gradients: BatchGradients,
    all_sums: Sequence[Sums],
    looked_up: LookedUp,
    servers: Iterable[int],
) -> dict[int, UpdateRequest]:
    """Return by server the steps to make; servers without one are absent.

    Sums are by table; there are no hints where servers have kept them. Of ``gradients`` the
    update id and learning rates are used.
    """
    rates = {rate.table: rate.lr for rate in gradients.learning_rates}
    requests: dict[int, UpdateRequest] = {}
    for server in servers:
        parts = []
        for table, plan, (sums, keep), hints in zip(
            batch.tables, batch.plan.tables, all_sums, looked_up.hints, strict=True
        ):
            window = slice(*table.starts[server : server + 2])
            signs, summed = table.signs[window], sums[window]
            own: Numbers | None = hints
            if len(hints) != len(signs):  # of several servers, or kept by them
                own = hints[window] if len(hints) else None
            places = None
            if keep is not None:
                kept = keep[window]
                places = np.flatnonzero(kept).astype(np.uint32)
                signs, summed = signs[kept], summed[kept]
                own = None if own is None else own[kept]
            if len(signs):
                rate = rates.get(plan.number)
                parts.append(TableGradients(plan.number, signs, own, summed, rate, places))
        if parts:
            load_id = looked_up.load_ids[server]
            requests[server] = UpdateRequest(gradients.update_id, tuple(parts), load_id=load_id)
    return requests
