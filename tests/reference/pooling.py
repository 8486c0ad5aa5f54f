"""Plain model of pooling: f32 additions one row at a time, in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Floats = NDArray[np.float32]
Numbers = NDArray[np.uint32]


@dataclass(frozen=True)
class Bags:
    """One feature: ``places`` and ``offsets`` as given to the core, possibly None."""

    places: Numbers | None
    rounds: int
    inverse: Numbers
    offsets: Numbers | None
    weights: Floats | None = None

    def rows_of(self, distinct: int) -> list[int]:
        if self.places is None:
            return [distinct]
        begin = distinct * self.rounds
        return [int(row) for row in self.places[begin : begin + self.rounds]]

    def samples(self) -> list[list[int]]:
        """The distinct ids of each sample."""
        return self._by_sample([int(number) for number in self.inverse])

    def weights_of_samples(self) -> list[list[np.float32]]:
        """The weight of each id of each sample."""
        weights = (
            np.ones(len(self.inverse), np.float32) if self.weights is None else self.weights
        )
        return self._by_sample(list(weights))

    def _by_sample(self, values: list[T]) -> list[list[T]]:
        if self.offsets is None:
            return [[one] for one in values]
        bounds = [int(offset) for offset in self.offsets]
        return [values[a:b] for a, b in itertools.pairwise(bounds)]


def vector(bags: Bags, rows: Floats, distinct: int) -> Floats:
    first, *others = bags.rows_of(distinct)
    total: Floats = rows[first].copy()
    for row in others:
        total += rows[row]
    return total


def divisor(mode: str, num_ids: int) -> np.float32:
    count = np.float32(max(num_ids, 1))
    root: np.float32 = np.sqrt(count)
    return count if mode == "mean" else root if mode == "sqrt" else np.float32(1)


def pool(mode: str, bags: Bags, rows: Floats) -> tuple[Floats, NDArray[np.int32] | None]:
    samples, weights, dim = bags.samples(), bags.weights_of_samples(), rows.shape[1]
    out = np.zeros((len(samples), dim), np.float32)
    argmax = np.full((len(samples), dim), -1, np.int32)
    for b, sample in enumerate(samples):
        for place, distinct in enumerate(sample):
            one = vector(bags, rows, distinct) * weights[b][place]
            if place == 0:
                out[b], argmax[b] = one, distinct
            elif mode == "max":
                wins = one > out[b]
                out[b][wins], argmax[b][wins] = one[wins], distinct
            else:
                out[b] += one
        out[b] /= divisor(mode, len(sample))
    return out, argmax if mode == "max" else None


def pool_grad(
    mode: str,
    bags: Bags,
    grad: Floats,
    argmax: NDArray[np.int32] | None,
    skip: NDArray[np.uint8] | None,
    out: Floats,
) -> Floats:
    out = out.copy()
    weights = bags.weights_of_samples()
    for b, sample in enumerate(bags.samples()):
        if skip is not None and skip[b]:
            continue
        if argmax is not None:
            for j, distinct in enumerate(argmax[b]):
                for row in bags.rows_of(int(distinct)) if distinct >= 0 else []:
                    out[row, j] += grad[b, j]
            continue
        scaled = grad[b] / divisor(mode, len(sample))
        for weight, distinct in zip(weights[b], sample, strict=True):
            for row in bags.rows_of(distinct):
                out[row] += scaled * weight
    return out


def gather(bags: Bags, rows: Floats, num_distinct: int) -> Floats:
    vectors = [vector(bags, rows, distinct) for distinct in range(num_distinct)]
    return np.array(vectors, np.float32).reshape(num_distinct, rows.shape[1])


def scatter_add(bags: Bags, grad: Floats, out: Floats) -> Floats:
    out = out.copy()
    for distinct, row_grad in enumerate(grad):
        for row in bags.rows_of(distinct):
            out[row] += row_grad
    return out
