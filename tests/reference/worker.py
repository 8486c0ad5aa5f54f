"""The sparse side of a job in plain Python: what worker and servers together must do.

One dict of rows, loops over samples and ids, float32 arithmetic one operation at a time. Only
two things are taken from the core, each with a model of its own: initial values of a row and
one optimizer step on one row.
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
from tests.reference.ids import hash_stack, number, pack
from tests.reference.pooling import divisor

Floats = NDArray[np.float32]
Samples = list[list[int]]
Weights = dict[str, list[NDArray[np.float32]]]  # per feature and sample one for each id


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
        if slot.hash_stack_rounds:
            values = hash_stack(values, slot.hash_stack_rounds, slot.hash_stack_size)
        return pack(values, slot.prefix, self.schema.prefix_bits)[0]

    def kept(self, name: str, samples: Samples) -> Samples:
        slot = self.schema.slots[name]
        if slot.pooling == "raw":
            return [sample[: slot.sample_fixed_size] for sample in samples]
        return samples

    def _insert(self, slot: Slot, sign: int) -> None:
        table = self.schema.tables[slot.table]
        own = table.initialization or self.settings.initialization
        values = Initializer(own.method, **own.options).values(
            self.settings.seed, sign, slot.dim
        )
        state = self.optimizer.new_state(slot.dim).view(np.float32)
        self.rows[sign] = np.concatenate([values, state])

    def vector(self, slot: Slot, x: int) -> Floats:
        total = np.zeros(slot.dim, np.float32)
        for turn, sign in enumerate(self.signs_of(slot, x)):
            row = self.rows.get(sign, np.zeros(slot.dim, np.float32))[: slot.dim]
            total = row.copy() if turn == 0 else total + row
        return total

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
        self, name: str, samples: Samples, weights: list[NDArray[np.float32]] | None
    ) -> tuple[NDArray[np.generic], ...]:
        slot = self.schema.slots[name]
        if slot.pooling in ("raw", "jagged"):
            order = distinct(samples)
            vectors = [self.vector(slot, x) for x in order]
            if slot.pooling == "raw":
                vectors.insert(0, np.zeros(slot.dim, np.float32))
                index = []
                for sample in samples:
                    row = [order.index(x) + 1 for x in sample]
                    index += row + [0] * (slot.sample_fixed_size - len(row))
                return np.stack(vectors), np.array(index, np.int64)
            offsets = np.cumsum([0] + [len(sample) for sample in samples])
            numbers = [order.index(x) for sample in samples for x in sample]
            return (
                np.array(vectors, np.float32).reshape(-1, slot.dim),
                np.array(numbers, np.int64),
                offsets.astype(np.int64),
            )
        out = np.zeros((len(samples), slot.dim), np.float32)
        for b, sample in enumerate(samples):
            for position, x in enumerate(sample):
                vector = self.vector(slot, x)
                if weights is not None:
                    vector = vector * weights[b][position]
                if position == 0:
                    out[b] = vector
                elif slot.pooling == "max":
                    out[b] = np.where(vector > out[b], vector, out[b])
                else:
                    out[b] = out[b] + vector
            out[b] = out[b] / divisor(slot.pooling, len(sample))
        return (out,)

    def update(
        self,
        batch: dict[str, Samples],
        gradients: dict[str, Floats | None],
        weights: Weights | None = None,
    ) -> Report:
        """One step for each sign that a finite gradient reaches."""
        report = Report()
        sums: dict[int, Floats] = {}
        for name, samples in batch.items():
            gradient = gradients[name]
            if gradient is None:
                continue
            samples = self.kept(name, samples)
            slot = self.schema.slots[name]
            if slot.pooling in ("raw", "jagged"):
                for d, x in enumerate(distinct(samples)):
                    self._add(name, slot, [x], None, gradient[d], sums, report)
            else:
                for b, sample in enumerate(samples):
                    own = None if weights is None or name not in weights else weights[name][b]
                    self._add(name, slot, sample, own, gradient[b], sums, report)
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

    def _add(
        self,
        name: str,
        slot: Slot,
        sample: list[int],
        weights: NDArray[np.float32] | None,
        gradient: Floats,
        sums: dict[int, Floats],
        report: Report,
    ) -> None:
        if not sample:
            return
        if not np.isfinite(gradient).all():
            report.nan_samples[name] = report.nan_samples.get(name, 0) + 1
            return
        for x in sample:
            for sign in self.signs_of(slot, x):
                sums.setdefault(sign, np.zeros(slot.dim, np.float32))
        if slot.pooling == "max":
            vectors = [self.vector(slot, x) for x in sample]
            for j in range(slot.dim):
                winner = max(range(len(sample)), key=lambda p: (vectors[p][j], -p))
                for sign in self.signs_of(slot, sample[winner]):
                    sums[sign][j] += gradient[j]
            return
        share: Any = gradient / divisor(slot.pooling, len(sample))
        for position, x in enumerate(sample):
            with np.errstate(over="ignore"):
                own = share if weights is None else share * weights[position]
                for sign in self.signs_of(slot, x):
                    sums[sign] = sums[sign] + own
