"""What is measured: 26 features of very different size, ids by Zipf's law or uniform.

Batches come as raw ids of any width for PERSIA, and as row numbers for peers that hold arrays;
the ids of a row are the same in both. Every pattern has 4096 samples of 26 features:

    single   one id a feature
    multi    1 to 9 ids a feature, 5 in the mean
    cold     as many ids as single, uniform over all rows, in whatever feature the row is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BATCH = 4096
DIM = 16
EXPONENT = 1.05
LR = 0.01
ACCUMULATOR = 1e-8  # where Adagrad starts, so small that peers that start at 0 do the same
PATTERNS = ("single", "multi", "cold")
_SIZES = [10_000_000] + 4 * [1_000_000] + 6 * [100_000] + 7 * [10_000] + 5 * [1000] + 3 * [100]


def sizes(quick: bool) -> list[int]:
    """Return the number of ids of each feature: 14.7 million, or 1 % of it."""
    return [max(100, size // 100) for size in _SIZES] if quick else list(_SIZES)


def raw_ids(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return ids that look like hashes (56 bits, one to one) for a feature's row numbers."""
    spread = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ids: NDArray[np.uint64] = np.bitwise_and(spread, np.uint64(2**56 - 1))
    return ids


def all_ids(table_sizes: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """Yield the ids of all rows, at most half a million of one feature at a time."""
    for number, size in enumerate(table_sizes):
        for first in range(0, size, 500_000):
            yield number, raw_ids(np.arange(first, min(first + 500_000, size)))


def check_resident(num_rows: int, table_sizes: Sequence[int]) -> None:
    if num_rows != sum(table_sizes):
        raise RuntimeError(f"expected {sum(table_sizes)} rows resident, got {num_rows}")


@dataclass(frozen=True)
class Ids:
    """Ids of one feature in CSR form; ``offsets`` None says one id a sample."""

    values: NDArray[np.uint64]
    rows: NDArray[np.int64]  # the same ids as row numbers within the feature
    offsets: NDArray[np.int64] | None


@dataclass(frozen=True)
class Batch:
    features: list[Ids]
    merged_rows: NDArray[np.int64]  # row numbers in one table of all features
    merged_offsets: NDArray[np.int64]  # where each (feature, sample) begins
    gradient: NDArray[np.float32]  # of the pooled output: [26, BATCH, DIM]

    @property
    def num_ids(self) -> int:
        return len(self.merged_rows)


Step = Callable[[], object]


class Contender(Protocol):
    """What is measured. A step holds its batch in the form the contender needs, made before
    the clock starts; a training step is lookup, pooling and update, an evaluation step lookup
    and pooling."""

    ids: str  # which ids it takes

    def train_step(self, batch: Batch) -> Step: ...
    def evaluate_step(self, batch: Batch) -> Step: ...


def batches(pattern: str, quick: bool, count: int) -> list[Batch]:
    """Return ``count`` different batches; the same in every run."""
    rng = np.random.default_rng([PATTERNS.index(pattern), quick])
    return [_batch(rng, pattern, sizes(quick)) for _ in range(count)]


def uniform(num_rows: int, span: int, seed: int) -> Batch:
    """Return a batch of one feature, 26 ids a sample, from ``span`` of its rows."""
    rng = np.random.default_rng([len(PATTERNS), seed])
    rows = rng.integers(0, span, BATCH * len(_SIZES)) * (num_rows // span)
    offsets = np.arange(BATCH + 1) * len(_SIZES)
    gradient = rng.normal(0, 1e-3, (1, BATCH, DIM)).astype(np.float32)
    return Batch([Ids(raw_ids(rows), rows, offsets)], rows, offsets[:-1], gradient)


def fresh(
    batch: Batch, rng: np.random.Generator, first: int, part: float, of_distinct: bool
) -> Batch:
    """Return the batch with a part of its ids, or of its distinct ids, replaced.

    The new ones are those of row numbers from ``first`` on, which no feature has.
    """
    features = []
    for ids in batch.features:
        own, where = ids.values.copy(), None
        if of_distinct:
            own, where = np.unique(ids.values, return_inverse=True)
        chosen = np.flatnonzero(rng.random(len(own)) < part)
        own[chosen] = raw_ids(np.arange(first, first + len(chosen)))
        first += len(chosen)
        values = own if where is None else own[where]
        features.append(Ids(values, ids.rows, ids.offsets))
    return replace(batch, features=features)


def _batch(rng: np.random.Generator, pattern: str, table_sizes: list[int]) -> Batch:
    firsts = np.concatenate([[0], np.cumsum(table_sizes)])
    if pattern == "cold":
        drawn = np.sort(rng.integers(0, firsts[-1], BATCH * len(table_sizes)))
        ends = np.searchsorted(drawn, firsts)
    features = []
    for number, size in enumerate(table_sizes):
        offsets: NDArray[np.int64] | None = None
        if pattern == "single":
            rows = _zipf(rng, size, BATCH)
        elif pattern == "multi":
            offsets = _offsets(rng.integers(1, 10, BATCH))
            rows = _zipf(rng, size, int(offsets[-1]))
        else:
            rows = rng.permutation(drawn[ends[number] : ends[number + 1]]) - firsts[number]
            samples = rng.integers(0, BATCH, len(rows))
            offsets = _offsets(np.bincount(samples, minlength=BATCH))
        features.append(Ids(raw_ids(rows), rows, offsets))
    merged = [
        feature.rows + first for feature, first in zip(features, firsts[:-1], strict=True)
    ]
    lengths = [
        np.ones(BATCH, np.int64) if feature.offsets is None else np.diff(feature.offsets)
        for feature in features
    ]
    return Batch(
        features,
        np.concatenate(merged),
        _offsets(np.concatenate(lengths))[:-1],
        rng.normal(0, 1e-3, (len(table_sizes), BATCH, DIM)).astype(np.float32),
    )


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _zipf(rng: np.random.Generator, size: int, count: int) -> NDArray[np.int64]:
    power = 1 - EXPONENT
    x = (1 + rng.random(count) * ((size + 1.0) ** power - 1)) ** (1 / power)
    ranks: NDArray[np.int64] = np.minimum(x.astype(np.int64), size) - 1
    return ranks
