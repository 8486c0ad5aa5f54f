"""Plain Python model of the embedding store: rows by sign, and their orders of eviction.

Times are exact here. In the store they are those of a segment, which are exact too where the
ttl is below 16 (no two times share a segment). How many rows each of several policies gives up
when a shard is full depends on segments; the model is given the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tests.reference import halves, hashing, initial, optim
from tests.reference.hashing import mix64
from tests.reference.policies import Kind, Sketch, order_of

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

ADMISSION = 0xAD3175510B5E5EED
MIN_SHARD_ROWS = 64


def batch_key(seed: int, batch_id: int) -> int:
    return mix64(mix64(seed ^ ADMISSION) ^ batch_id)


def admits(seed: int, sign: int, batch_id: int, probability: float) -> bool:
    if probability >= 1:
        return True
    return mix64(batch_key(seed, batch_id) ^ mix64(sign)) < int(probability * 2.0**64)


def shard_capacities(capacity: int, num_shards: int) -> list[int]:
    count = max(1, min(num_shards, capacity // MIN_SHARD_ROWS))
    return [capacity // count + (number < capacity % count) for number in range(count)]


@lru_cache(maxsize=100_000)
def initial_row(seed: int, sign: int, dim: int) -> Floats:
    row = initial.values("uniform", {"lower": -0.01, "upper": 0.01}, seed, sign, dim)
    row.flags.writeable = False
    return row


shard_number = lru_cache(maxsize=100_000)(hashing.shard)


@dataclass
class Row:
    dtype: str
    values: Floats
    state: Floats  # words, whatever their type, as f32 bits
    policy: int = 0
    last_use: int = 0


class Shard:
    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.rows: dict[int, Row] = {}
        self.orders = [order_of(kind) for kind in kinds]


class Store:
    """What an ``EmbeddingStore`` should hold; initial values are uniform in (-0.01, 0.01).

    With several policies or a sketch it is of one shard.
    """

    def __init__(
        self,
        capacity: int,
        num_shards: int,
        seed: int,
        optimizer: str,
        options: dict[str, float],
        kinds: Sequence[Kind] = (),
        sketch_bytes: int = 0,
    ) -> None:
        self.capacities = shard_capacities(capacity, num_shards)
        self.num_shards = len(self.capacities)
        self.seed = seed
        self.optimizer = optimizer
        self.options = options
        self.kinds: list[Kind] = [("lru", None, 0), *kinds]
        self.sketch_bytes = sketch_bytes
        self.clocks: dict[str | None, int] = {None: 0, "milliseconds": 0, "steps": 0}
        names = ("evicted", "expired", "inserted", "refused", "missing")
        self.counts = dict.fromkeys(names, 0)
        self.clear()

    def clear(self) -> None:
        self.shards = [Shard(self.kinds) for _ in self.capacities]
        self.sketch = Sketch(self.sketch_bytes)

    def __len__(self) -> int:
        return sum(len(one.rows) for one in self.shards)

    def shard(self, sign: int) -> Shard:
        return self.shards[shard_number(sign, self.num_shards)]

    def set_clocks(self, milliseconds: int, steps: int) -> None:
        self.clocks["milliseconds"] = max(self.clocks["milliseconds"], milliseconds)
        self.clocks["steps"] = max(self.clocks["steps"], steps)

    def has_expired(self, row: Row) -> bool:
        _, clock, ttl = self.kinds[row.policy]
        return ttl > 0 and self.clocks[clock] >= row.last_use + ttl

    def get(self, sign: int) -> Row | None:
        """What a read sees."""
        row = self.shard(sign).rows.get(sign)
        return None if row is None or self.has_expired(row) else row

    def order(self, number: int) -> list[int]:
        """The signs of one shard, policy after policy, first the next to be evicted."""
        orders = self.shards[number].orders
        return [sign for order in orders for sign in order if self.get(sign) is not None]

    def new_state(self, dim: int) -> Floats:
        return optim.new_state(self.optimizer, self.options, dim)

    def _drop(self, sign: int) -> bool:
        """Whether it was there."""
        shard = self.shard(sign)
        row = shard.rows.pop(sign, None)
        if row is not None:
            shard.orders[row.policy].remove(sign)
        return row is not None

    def sweep(self) -> None:
        """Drop what has expired."""
        if not any(ttl for _, _, ttl in self.kinds):
            return
        for shard in self.shards:
            for sign in [sign for sign, row in shard.rows.items() if self.has_expired(row)]:
                self._drop(sign)
                self.counts["expired"] += 1

    def end_request(self, num_evicted: Sequence[int]) -> None:
        """Expire, evict as many of each policy as given, halve counts."""
        self.sweep()
        sizes = zip(self.shards, self.capacities, strict=True)
        excess = [max(len(shard.rows) - capacity, 0) for shard, capacity in sizes]
        assert sum(num_evicted) == sum(excess)
        self.counts["evicted"] += sum(excess)
        for shard, count in zip(self.shards, excess, strict=True):
            counts = num_evicted if len(self.kinds) > 1 else [count]
            for order, some in zip(shard.orders, counts, strict=True):
                for sign in list(islice(order, some)):
                    self._drop(sign)
                order.age()

    def _use(self, sign: int, row: Row, policy: int, key: int) -> None:
        """Have a row, which may be the one that is held, be the sign's, used now."""
        shard = self.shard(sign)
        before, is_held = shard.rows.get(sign), self.get(sign) is not None
        self.counts["inserted"] += not is_held
        self.counts["expired"] += before is not None and not is_held
        has_moved = before is not None and before.policy != policy
        if before is not None and has_moved:
            shard.orders[before.policy].remove(sign)
        shard.orders[policy].use(sign, is_held and not has_moved, key)
        row.policy, row.last_use = policy, self.clocks[self.kinds[policy][1]]
        shard.rows[sign] = row

    def lookup_train(
        self,
        signs: Sequence[int],
        dim: int,
        admit: float = 1.0,
        batch_id: int = 0,
        dtype: str = "float32",
        policy: int = 0,
        admit_at: int = 1,
        repeated: bool = False,
    ) -> tuple[Floats, list[bool], int, int]:
        """Rows, which signs got one, and how many were inserted and refused.

        ``end_request`` is still to come.
        """
        rows = np.zeros((len(signs), dim), np.float32)
        key = batch_key(self.seed, batch_id)
        before = self.counts["inserted"]
        held = []
        for i, sign in enumerate(signs):
            row = self.get(sign)
            is_admitted = row is not None or (
                admits(self.seed, sign, batch_id, admit)
                and (admit_at == 1 or self.sketch.admits(sign, admit_at, repeated))
            )
            held.append(is_admitted)
            if is_admitted:
                if row is None:
                    values = halves.held(dtype, initial_row(self.seed, sign, dim))
                    row = Row(dtype, values, self.new_state(dim))
                self._use(sign, row, policy, key)
                rows[i] = row.values
        self.counts["refused"] += held.count(False)
        return rows, held, self.counts["inserted"] - before, held.count(False)

    def lookup_eval(self, signs: Sequence[int], dim: int) -> tuple[Floats, int]:
        found = [self.get(sign) for sign in signs]
        missing = found.count(None)
        self.counts["missing"] += missing
        zeros = np.zeros(dim, np.float32)
        return np.array([zeros if row is None else row.values for row in found]), missing

    def update(self, signs: Sequence[int], gradients: Floats, number: int) -> int:
        """How many were missing; a row that has expired may still be there, and is stepped."""
        missing = 0
        for sign, gradient in zip(signs, gradients, strict=True):
            row = self.shard(sign).rows.get(sign)
            if row is None:
                missing += 1
                continue
            row.values, row.state = optim.step(
                self.optimizer, self.options, 0.0, row.values, row.state, gradient
            )
            if row.dtype != "float32":
                codes = halves.round_row(row.dtype, row.values, self.seed, number, sign)
                row.values = halves.widen(row.dtype, codes)
        self.counts["missing"] += missing
        return missing

    def write(
        self,
        signs: Sequence[int],
        values: Floats,
        states: Words | None,
        dtype: str,
        policy: int,
    ) -> None:
        """``end_request`` is still to come."""
        key, dim = batch_key(self.seed, 0), values.shape[1]
        for i, sign in enumerate(signs):
            state = self.new_state(dim) if states is None else states[i].view(np.float32).copy()
            self._use(sign, Row(dtype, halves.held(dtype, values[i]), state), policy, key)

    def delete(self, signs: Sequence[int]) -> int:
        return sum(map(self._drop, signs))
