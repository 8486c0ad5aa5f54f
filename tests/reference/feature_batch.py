"""Plain Python model of ``persia._core.feature_batch``: a list of lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.reference.distinct import number


@dataclass(frozen=True)
class FeatureBatch:
    samples: list[list[int]]

    @classmethod
    def from_csr(cls, values: Sequence[int], offsets: Sequence[int]) -> FeatureBatch:
        edges = zip(offsets[:-1], offsets[1:], strict=True)
        return cls([list(values[start:end]) for start, end in edges])

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

    def truncated(self, limit: int) -> FeatureBatch:
        return FeatureBatch([sample[:limit] for sample in self.samples])
