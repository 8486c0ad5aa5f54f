"""Plain Python model of ``persia.sampling.FrequencyEstimator``."""

from __future__ import annotations

import math
from collections import Counter

from tests.reference.hashing import WORD, mix64


class Frequencies:
    """Cells by table and place: the last use, the mean interval, the uses that it is of."""

    def __init__(self, num_cells: int, num_hashes: int, window: int, seed: int) -> None:
        first = mix64(seed)
        self.keys = [mix64((first + table) & WORD) for table in range(num_hashes)]
        self.num_cells, self.window = num_cells, window
        self.num_samples = 0
        self.cells: dict[tuple[int, int], tuple[int, float, int]] = {}

    def places(self, one: int) -> list[tuple[int, int]]:
        return [(t, mix64(one ^ key) % self.num_cells) for t, key in enumerate(self.keys)]

    def observe(self, ids: list[int]) -> list[float]:
        self.num_samples += len(ids)
        for place, count in Counter(p for one in ids for p in self.places(one)).items():
            last, interval, uses = self.cells.get(place, (0, 0.0, 0))
            # The mean of ``uses`` intervals, and of ``count`` more over the samples since.
            total = uses * interval + (self.num_samples - last)
            interval = total / (uses + count)
            self.cells[place] = self.num_samples, interval, min(uses + count, self.window)
        return [self.log_q(one) for one in ids]

    def log_q(self, one: int) -> float:
        intervals = [
            self.cells[place][1] if place in self.cells else max(self.num_samples, 1)
            for place in self.places(one)
        ]
        return -math.log(max(intervals))
