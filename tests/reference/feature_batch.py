"""Plain Python model of ``persia._core.ids.feature_batch``: a list of lists of ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from tests.reference.ids import number

T = TypeVar("T")


@dataclass(frozen=True)
class FeatureBatch:
    samples: list[list[int]]
    weights: list[list[float]] | None = None  # one for each id

    @property
    def ids(self) -> list[int]:
        return [one for sample in self.samples for one in sample]

    @property
    def distinct(self) -> list[int]:
        return number(self.ids)[0]

    @property
    def inverse(self) -> list[int]:
        return number(self.ids)[1]

    @property
    def lengths(self) -> list[int]:
        return [len(sample) for sample in self.samples]

    @property
    def offsets(self) -> list[int] | None:
        """``None`` says that each sample has exactly one id."""
        if all(length == 1 for length in self.lengths):
            return None
        edges = [0]
        for length in self.lengths:
            edges.append(edges[-1] + length)
        return edges

    def truncated(self, limit: int, last: bool = False) -> FeatureBatch:
        def kept(some: list[T]) -> list[T]:
            return some[max(0, len(some) - limit) :] if last else some[:limit]

        weights = self.weights and [kept(some) for some in self.weights]
        return FeatureBatch([kept(sample) for sample in self.samples], weights)
