"""Gradients corrected for what their rows have moved by since the lookup.

The gradient of a sample was taken at rows that other updates have stepped meanwhile. To first
order a logistic loss changes it along itself, so those of sample ``b`` are all multiplied by

    s[b] = clamp(1 + strength * B * sum_f G[b, f] . D[b, f], 0, 2)

where ``G`` is the gradient of the batch's mean loss, of ``B`` samples, with respect to the
pooled output of feature ``f``, and ``D`` what that output has moved by: ``B G`` is the gradient
of the sample's own loss, whose outer product with itself is what a logistic loss has for a
Hessian in the mean. Raw and jagged features have one gradient for each id, not one for each
sample: they are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats
from persia._core.base.threads import ThreadPool
from persia._core.kernels.pooling import PoolCalls, gather
from persia._rpc.messages import Floats
from persia._worker.packing import FeaturePlan, Maxima, PackedBatch, PackedFeature

LARGEST = 2.0  # that a sample's gradients are multiplied by


def moved(seen: Sequence[Floats], now: Sequence[Floats]) -> list[Floats]:
    """Return by table what rows have moved by; one that is gone since has not moved."""
    found = []
    for before, after in zip(seen, now, strict=True):
        difference = after - before
        # Evaluation reads zeros where there is no row.
        difference[~after.any(axis=1)] = 0.0
        found.append(difference)
    return found


def compensated(
    batch: PackedBatch,
    gradients: Sequence[Floats | None],
    movement: Sequence[Floats],
    maxima: Maxima,
    strength: float,
    threads: ThreadPool,
) -> list[Floats | None]:
    """Return the gradients by feature, those of pooled ones times their sample's factor.

    Args:
        batch: What was looked up.
        gradients: By feature, f32 [B, dim] if it is pooled, else [D, dim]; None is skipped.
        movement: By table, f32 [U, dim], in the order of its signs.
        maxima: What pooling by maximum has chosen, by feature.
        strength: How much of the first order is used; 1 is all of it.
        threads: That pool the movement.
    """
    calls = PoolCalls()
    outputs: dict[int, Floats] = {}
    for place, (feature, plan) in enumerate(
        zip(batch.features, batch.plan.features, strict=True)
    ):
        if gradients[place] is None or plan.pooled < 0:
            continue
        rows = movement[plan.table][feature.start : feature.stop]
        argmax = maxima[place]
        if argmax is not None:
            outputs[place] = _of_maxima(feature, plan, rows, argmax)
            continue
        outputs[place] = out = empty_floats(batch.batch_size, plan.slot.dim)
        calls.pool(plan.slot.pooling, rows, feature.slots, feature.rounds, feature.ids, out)
    calls.run(threads)
    factors = _factors(batch.batch_size, gradients, outputs, strength)[:, None]
    with np.errstate(all="ignore"):  # what is not finite is looked for when sums are made
        return [
            gradient * factors if gradient is not None and place in outputs else gradient
            for place, gradient in enumerate(gradients)
        ]


def _of_maxima(
    feature: PackedFeature, plan: FeaturePlan, rows: Floats, argmax: NDArray[np.int32]
) -> Floats:
    """Return what each maximum has moved by: its row may be another one now."""
    vectors = np.zeros((feature.ids.num_distinct + 1, plan.slot.dim), np.float32)
    gather(rows, feature.slots, feature.rounds, vectors[:-1])
    # -1, of a sample without ids, is the last row, which is zeros.
    found: Floats = vectors[argmax, np.arange(plan.slot.dim)]
    return found


def _factors(
    batch_size: int,
    gradients: Sequence[Floats | None],
    outputs: dict[int, Floats],
    strength: float,
) -> Floats:
    """Return the factor of each sample; 1 where it would not be a number."""
    products = np.zeros(batch_size, np.float32)
    with np.errstate(all="ignore"):
        for place, output in outputs.items():
            gradient = gradients[place]
            if gradient is not None:
                products += np.einsum("bd,bd->b", gradient, output)
        factors: Floats = np.float32(1.0) + np.float32(strength * batch_size) * products
    factors[np.isnan(factors)] = 1.0
    np.clip(factors, 0.0, LARGEST, out=factors)
    return factors
