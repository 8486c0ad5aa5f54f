"""The sparse side of a job in plain Python: what worker and servers together must do.

One dict of rows, and pooling as its model does it. Only two things are taken from the core,
each with a model of its own: initial values of a row and one optimizer step on one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._rpc.messages import HyperParameters, OptimizerSettings
from persia.config import EmbeddingSchema, Slot
from tests.reference.ids import hash_of_half, hash_stack, number, pack
from tests.reference.pooling import Bags, gather, pool, pool_grad

Floats = NDArray[np.float32]
Samples = list[list[int]]
Weights = dict[str, list[Floats]]  # per feature and sample one for each id


def distinct(samples: Samples) -> list[int]:
    return number(x for sample in samples for x in sample)[0]


@dataclass
class Report:
    nan_samples: dict[str, int] = field(default_factory=dict)
    nan_rows: int = 0
    num_missing: int = 0


class ReferenceJob:
    def __init__(
        self, schema: EmbeddingSchema, settings: HyperParameters, optimizer: OptimizerSettings
    ) -> None:
        self.schema = schema
        self.settings = settings
        self.optimizer = RowOptimizer(
            optimizer.name, settings.weight_bound, **optimizer.options
        )
        self.rows: dict[int, Floats] = {}  # by sign: embedding and state

    def signs_of(self, slot: Slot, x: int) -> list[int]:
        """The signs of an id: one, or one for each round of the hash stack."""
        values = [x]
        if slot.id_hash is not None:
            values = [hash_of_half(x) % 2 ** (64 - self.schema.prefix_bits)]
        if slot.hash_stack_rounds:
            values = hash_stack(values, slot.hash_stack_rounds, slot.hash_stack_size)
        return pack(values, slot.prefix, self.schema.prefix_bits)[0]

    def kept(self, name: str, samples: Samples) -> Samples:
        slot = self.schema.slots[name]
        if slot.pooling != "raw":
            return samples
        size = slot.sample_fixed_size
        if slot.padding == "front":
            return [sample[-size:] for sample in samples]
        return [sample[:size] for sample in samples]

    def _insert(self, slot: Slot, sign: int) -> None:
        table = self.schema.tables[slot.table]
        own = table.initialization or self.settings.initialization
        values = Initializer(own.method, **own.options).values(
            self.settings.seed, sign, slot.dim
        )
        state = self.optimizer.new_state(slot.dim).view(np.float32)
        self.rows[sign] = np.concatenate([values, state])

    def _bags(self, slot: Slot, samples: Samples, weights: Any) -> tuple[list[int], Bags]:
        """The signs of a feature, and which of them make up each id of each sample."""
        order, inverse = number(x for sample in samples for x in sample)
        signs, places = number(sign for x in order for sign in self.signs_of(slot, x))
        flat = None if weights is None else np.concatenate([*weights, np.zeros(0, np.float32)])
        offsets = np.cumsum([0] + [len(sample) for sample in samples])
        arrays = (np.array(one, np.uint32) for one in (places, inverse, offsets))
        where, numbers, bounds = arrays
        return signs, Bags(where, slot.hash_stack_rounds or 1, numbers, bounds, flat)

    def _stack(self, rows: dict[int, Floats], signs: list[int], dim: int) -> Floats:
        zeros = np.zeros(dim, np.float32)
        found = [rows.get(sign, zeros)[:dim] for sign in signs]
        return np.array(found, np.float32).reshape(-1, dim)

    def lookup(
        self, batch: dict[str, Samples], is_training: bool, weights: Weights | None = None
    ) -> dict[str, tuple[NDArray[np.generic], ...]]:
        """Outputs by feature: (pooled,), (rows, index) for raw, (rows, index, offsets)."""
        batch = {name: self.kept(name, samples) for name, samples in batch.items()}
        if is_training:
            for name, samples in batch.items():
                slot = self.schema.slots[name]
                for x in distinct(samples):
                    for sign in self.signs_of(slot, x):
                        if sign not in self.rows:
                            self._insert(slot, sign)
        own = weights or {}
        return {
            name: self._output(name, samples, own.get(name)) for name, samples in batch.items()
        }

    def _output(
        self, name: str, samples: Samples, weights: list[Floats] | None
    ) -> tuple[NDArray[np.generic], ...]:
        slot = self.schema.slots[name]
        signs, bags = self._bags(slot, samples, weights)
        rows = self._stack(self.rows, signs, slot.dim)
        if slot.pooling not in ("raw", "jagged"):
            return (pool(slot.pooling, bags, rows)[0],)
        vectors = gather(bags, rows, len(distinct(samples)))
        numbers = bags.inverse.astype(np.int64)
        if slot.pooling == "jagged":
            assert bags.offsets is not None
            return vectors, numbers, bags.offsets.astype(np.int64)
        index = np.zeros((len(samples), slot.sample_fixed_size), np.int64)
        for row, some in zip(index, bags.samples(), strict=True):
            first = len(row) - len(some) if slot.padding == "front" else 0
            row[first : first + len(some)] = np.array(some, np.int64) + 1
        return np.concatenate([np.zeros((1, slot.dim), np.float32), vectors]), index.ravel()

    def _movement(
        self, slot: Slot, samples: Samples, weights: Any, seen: dict[int, Floats]
    ) -> Floats:
        """What the pooled output of each sample has moved by since rows were ``seen``.

        Rows that are gone have not moved; a maximum moves as the id that it was of.
        """
        signs, bags = self._bags(slot, samples, weights)
        here = {sign: self.rows.get(sign, seen.get(sign)) for sign in signs}
        now = {sign: row for sign, row in here.items() if row is not None}
        before = self._stack(seen, signs, slot.dim)
        moved = self._stack(now, signs, slot.dim) - before
        if slot.pooling != "max":
            return pool(slot.pooling, bags, moved)[0]
        vectors = gather(bags, moved, len(distinct(samples)))
        maxima = pool(slot.pooling, bags, before)[1]
        found = np.zeros((len(samples), slot.dim), np.float32)
        for (b, j), of in np.ndenumerate(maxima):
            if of >= 0:
                found[b, j] = vectors[of, j]
        return found

    def compensated(
        self,
        batch: dict[str, Samples],
        gradients: dict[str, Floats | None],
        seen: dict[int, Floats],
        strength: float,
        weights: Weights | None = None,
    ) -> dict[str, Floats | None]:
        """Gradients times clamp(1 + strength B sum_f G . D, 0, 2) of their sample."""
        pooled = {
            name: gradient
            for name, gradient in gradients.items()
            if gradient is not None and self.schema.slots[name].pooling not in ("raw", "jagged")
        }
        if not pooled:
            return gradients
        num_samples = len(batch[next(iter(pooled))])
        products = np.zeros(num_samples)
        for name, gradient in pooled.items():
            own = (weights or {}).get(name)
            movement = self._movement(self.schema.slots[name], batch[name], own, seen)
            with np.errstate(invalid="ignore"):
                products += (gradient.astype(np.float64) * movement).sum(1)
        factors = np.clip(1 + strength * num_samples * products, 0, 2)
        factors[np.isnan(factors)] = 1  # of a gradient that is left out
        scaled = factors.astype(np.float32)[:, None]
        return gradients | {name: gradient * scaled for name, gradient in pooled.items()}

    def update(
        self,
        batch: dict[str, Samples],
        gradients: dict[str, Floats | None],
        weights: Weights | None = None,
        seen: dict[int, Floats] | None = None,
    ) -> Report:
        """One step for each sign that a finite gradient reaches.

        ``seen`` are the rows at the lookup, which chose the maxima; those of now if it is None.
        """
        report = Report()
        sums: dict[int, Floats] = {}
        for name, samples in batch.items():
            gradient = gradients[name]
            if gradient is None:
                continue
            slot, own = self.schema.slots[name], (weights or {}).get(name)
            samples = self.kept(name, samples)
            if slot.pooling in ("raw", "jagged"):  # there is one for each id
                samples, own = [[x] for x in distinct(samples)], None
            is_finite = [bool(np.isfinite(row).all()) for row in gradient]
            given = list(zip(samples, is_finite, strict=True))
            if num_nan := sum(bool(sample) and not is_whole for sample, is_whole in given):
                report.nan_samples[name] = num_nan
            if own is not None:
                own = [one for one, is_whole in zip(own, is_finite, strict=True) if is_whole]
            reached = [sample for sample, is_whole in given if is_whole]
            signs, bags = self._bags(slot, reached, own)
            chosen_of = self._stack(self.rows if seen is None else seen, signs, slot.dim)
            maxima = pool(slot.pooling, bags, chosen_of)[1]
            before = self._stack(sums, signs, slot.dim)
            with np.errstate(over="ignore"):
                totals = pool_grad(
                    slot.pooling, bags, gradient[is_finite], maxima, None, before
                )
            sums.update(zip(signs, totals, strict=True))
        for sign, total in sums.items():
            if not np.isfinite(total).all():
                report.nan_rows += 1
            elif sign not in self.rows:
                report.num_missing += 1
            else:
                row = self.rows[sign][None].copy()
                self.optimizer.step_rows(row, total[None])
                self.rows[sign] = row[0]
        return report
