"""Plain Python model of the embedding store: an OrderedDict per shard, oldest row first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tests.reference import halves, hashing, initial, optim

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

ADMISSION = 0xAD3175510B5E5EED
MIN_SHARD_ROWS = 64


def admits(seed: int, sign: int, batch_id: int, probability: float) -> bool:
    if probability >= 1:
        return True
    key = hashing.mix64(hashing.mix64(seed ^ ADMISSION) ^ batch_id)
    return hashing.mix64(key ^ hashing.mix64(sign)) < int(probability * 2.0**64)


def shard_capacities(capacity: int, num_shards: int) -> list[int]:
    count = max(1, min(num_shards, capacity // MIN_SHARD_ROWS))
    return [capacity // count + (number < capacity % count) for number in range(count)]


@lru_cache(maxsize=100_000)
def initial_row(seed: int, sign: int, dim: int) -> Floats:
    row = initial.values("uniform", {"lower": -0.01, "upper": 0.01}, seed, sign, dim)
    row.flags.writeable = False
    return row


@lru_cache(maxsize=100_000)
def shard_number(sign: int, num_shards: int) -> int:
    return hashing.shard(sign, num_shards)


@dataclass
class Row:
    values: Floats
    state: Floats  # words, whatever their type, as f32 bits

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), len(self.state)


class Store:
    """What an ``EmbeddingStore`` should hold; initial values are uniform in (-0.01, 0.01)."""

    def __init__(
        self,
        capacity: int,
        num_shards: int,
        seed: int,
        optimizer: str,
        options: dict[str, float],
        weight_bound: float = 0.0,
    ) -> None:
        self.capacities = shard_capacities(capacity, num_shards)
        self.num_shards = len(self.capacities)
        self.shards: list[OrderedDict[int, Row]] = [OrderedDict() for _ in self.capacities]
        self.seed = seed
        self.optimizer = optimizer
        self.options = options
        self.weight_bound = weight_bound
        self.counts = dict.fromkeys(("evicted", "inserted", "refused", "missing"), 0)

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def shard(self, sign: int) -> OrderedDict[int, Row]:
        return self.shards[shard_number(sign, self.num_shards)]

    def get(self, sign: int) -> Row | None:
        return self.shard(sign).get(sign)

    def new_state(self, dim: int) -> Floats:
        return optim.new_state(self.optimizer, self.options, dim)

    def _evict(self) -> None:
        for shard, capacity in zip(self.shards, self.capacities, strict=True):
            while len(shard) > capacity:
                shard.popitem(last=False)
                self.counts["evicted"] += 1

    def lookup_train(
        self,
        signs: Sequence[int],
        dim: int,
        probability: float,
        batch_id: int,
        dtype: str = "float32",
    ) -> tuple[Floats, list[bool], int, int]:
        """Rows, which signs got one, and how many were inserted and refused."""
        rows = np.zeros((len(signs), dim), np.float32)
        held = []
        inserted = refused = 0
        for i, sign in enumerate(signs):
            shard = self.shard(sign)
            if sign not in shard and not admits(self.seed, sign, batch_id, probability):
                refused += 1
                held.append(False)
                continue
            if sign not in shard:
                values = halves.held(dtype, initial_row(self.seed, sign, dim))
                shard[sign] = Row(values, self.new_state(dim))
                inserted += 1
            shard.move_to_end(sign)
            rows[i] = shard[sign].values
            held.append(True)
        self.counts["inserted"] += inserted
        self.counts["refused"] += refused
        self._evict()
        return rows, held, inserted, refused

    def lookup_eval(self, signs: Sequence[int], dim: int) -> tuple[Floats, int]:
        rows = np.zeros((len(signs), dim), np.float32)
        missing = 0
        for i, sign in enumerate(signs):
            row = self.get(sign)
            if row is None:
                missing += 1
            else:
                rows[i] = row.values
        self.counts["missing"] += missing
        return rows, missing

    def update(
        self,
        signs: Sequence[int],
        gradients: Floats,
        dtype: str = "float32",
        number: int = 0,
    ) -> int:
        missing = 0
        for sign, gradient in zip(signs, gradients, strict=True):
            row = self.get(sign)
            if row is None:
                missing += 1
            else:
                row.values, row.state = optim.step(
                    self.optimizer,
                    self.options,
                    self.weight_bound,
                    row.values,
                    row.state,
                    gradient,
                )
                if dtype != "float32":
                    codes = halves.round_row(dtype, row.values, self.seed, number, sign)
                    row.values = halves.widen(dtype, codes)
        self.counts["missing"] += missing
        return missing

    def write(
        self,
        signs: Sequence[int],
        values: Floats,
        states: Words | None,
        dtype: str = "float32",
    ) -> None:
        for i, sign in enumerate(signs):
            shard = self.shard(sign)
            state = (
                self.new_state(values.shape[1])
                if states is None
                else states[i].copy().view(np.float32)
            )
            self.counts["inserted"] += sign not in shard
            shard[sign] = Row(halves.held(dtype, values[i]), state)
            shard.move_to_end(sign)
        self._evict()

    def delete(self, signs: Sequence[int]) -> int:
        return sum(self.shard(sign).pop(sign, None) is not None for sign in signs)

    def clear(self) -> None:
        for shard in self.shards:
            shard.clear()

    def order(self, number: int) -> dict[tuple[int, int], list[int]]:
        """The signs of one shard, oldest first, by (dim, state words)."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for sign, row in self.shards[number].items():
            by_shape.setdefault(row.shape, []).append(sign)
        return by_shape
