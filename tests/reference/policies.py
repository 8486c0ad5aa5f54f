"""Plain Python model of one shard with several policies (``persia._core.shard.eviction``).

Times are exact here. In the store they are those of a segment, which are exact too where the
ttl is below 16 (no two times share a segment). How many rows each policy gives up when the
shard is full depends on segments; the model is given the counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.hashing import mix64
from tests.reference.store import ADMISSION, initial_row

Floats = NDArray[np.float32]
Kind = tuple[str, str | None, int]  # lru or lfu, clock, ttl

LR = 0.5
SKETCH = 0x5CE7C4F0A11D0C75
LINE = 64


class Lru:
    def __init__(self) -> None:
        self.classes: list[OrderedDict[int, None]] = [OrderedDict()]

    def __len__(self) -> int:
        return sum(map(len, self.classes))

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Signs in the order of eviction."""
        for one in self.classes:
            yield from one

    def __contains__(self, sign: int) -> bool:
        return any(sign in one for one in self.classes)

    def remove(self, sign: int) -> None:
        for one in self.classes:
            one.pop(sign, None)

    def use(self, sign: int, is_new: bool, draw: int) -> None:
        self.remove(sign)
        self.classes[0][sign] = None

    def age(self) -> None:
        pass


class Lfu(Lru):
    """Sixteen classes; class c is entered from below once in 2**(c - 1) uses."""

    def __init__(self) -> None:
        self.classes = [OrderedDict() for _ in range(16)]
        self.num_uses = 0

    def use(self, sign: int, is_new: bool, draw: int) -> None:
        self.num_uses += 1
        grade = 0
        if sign in self and not is_new:
            grade = next(i for i, one in enumerate(self.classes) if sign in one)
            grade += grade < 15 and draw % 2**grade == 0
        self.remove(sign)
        self.classes[grade][sign] = None

    def age(self) -> None:
        if self.num_uses >= 10 * len(self):
            self.num_uses = 0
            lowest, following, *others = self.classes
            self.classes = [OrderedDict([*lowest.items(), *following.items()]), *others]
            self.classes.append(OrderedDict())


class Sketch:
    """Model of ``persia._core.shard.sketch``."""

    def __init__(self, num_bytes: int) -> None:
        self.lines = [[0] * LINE for _ in range(max(num_bytes // LINE, 1))]
        self.num_counted = 0

    def counters(self, sign: int) -> tuple[list[int], list[int]]:
        """The line of a sign, and the numbers of its counters in there."""
        key = mix64(mix64(sign) ^ SKETCH)
        line = self.lines[(key >> 32) * len(self.lines) >> 32]
        return line, [16 * row + (key >> 4 * row & 15) for row in range(4)]

    def admits(self, sign: int, threshold: int, repeated: bool) -> bool:
        line, places = self.counters(sign)
        count = min(line[place] for place in places)
        if repeated or count >= threshold:
            return count >= threshold
        for place in places:
            line[place] = max(line[place], count + 1)
        if self.num_counted % 8 == 7:
            number = self.num_counted // 8 % len(self.lines)
            self.lines[number] = [counter // 2 for counter in self.lines[number]]
        self.num_counted += 1
        return count + 1 >= threshold


class Shard:
    def __init__(
        self, capacity: int, kinds: Sequence[Kind], seed: int, dim: int, sketch_bytes: int
    ) -> None:
        self.capacity = capacity
        self.kinds = [("lru", None, 0), *kinds]
        self.seed = seed
        self.dim = dim
        self.sketch_bytes = sketch_bytes
        self.clocks: dict[str | None, int] = {None: 0, "milliseconds": 0, "steps": 0}
        self.counts = dict.fromkeys(("evicted", "expired", "inserted", "refused"), 0)
        self.clear()

    def clear(self) -> None:
        self.orders = [Lfu() if kind == "lfu" else Lru() for kind, _, _ in self.kinds]
        self.values: dict[int, Floats] = {}
        self.last_use: dict[int, int] = {}
        self.sketch = Sketch(self.sketch_bytes)

    def policy_of(self, sign: int) -> int:
        return next(i for i, order in enumerate(self.orders) if sign in order)

    def set_clocks(self, milliseconds: int, steps: int) -> None:
        self.clocks["milliseconds"] = max(self.clocks["milliseconds"], milliseconds)
        self.clocks["steps"] = max(self.clocks["steps"], steps)

    def has_expired(self, sign: int) -> bool:
        _, clock, ttl = self.kinds[self.policy_of(sign)]
        return bool(ttl) and self.clocks[clock] >= self.last_use[sign] + ttl

    def get(self, sign: int) -> Floats | None:
        """What a read sees."""
        if sign not in self.values or self.has_expired(sign):
            return None
        return self.values[sign]

    def order(self) -> list[int]:
        return [sign for order in self.orders for sign in order if not self.has_expired(sign)]

    def _drop(self, sign: int) -> None:
        self.orders[self.policy_of(sign)].remove(sign)
        del self.values[sign], self.last_use[sign]

    def _use(self, sign: int, policy: int, batch_key: int, is_new: bool) -> None:
        if is_new:
            self.counts["expired"] += sign in self.values
            self.counts["inserted"] += 1
            self.values[sign] = initial_row(self.seed, sign, self.dim)
        if sign in self.last_use and self.policy_of(sign) != policy:
            self.orders[self.policy_of(sign)].remove(sign)
        self.orders[policy].use(sign, is_new, batch_key ^ mix64(sign))
        self.last_use[sign] = self.clocks[self.kinds[policy][1]]

    def sweep(self) -> None:
        """Drop what has expired."""
        for sign in [sign for sign in self.values if self.has_expired(sign)]:
            self._drop(sign)
            self.counts["expired"] += 1

    def end_request(self, num_evicted: Sequence[int]) -> None:
        """Expire, evict as many of each policy as given, halve counts."""
        self.sweep()
        excess = max(len(self.values) - self.capacity, 0)
        assert sum(num_evicted) == excess
        self.counts["evicted"] += excess
        for order, count in zip(self.orders, num_evicted, strict=True):
            for sign in list(order)[:count]:
                self._drop(sign)
        for order in self.orders:
            order.age()

    def lookup_train(
        self, signs: Sequence[int], batch_id: int, policy: int, admit_at: int, repeated: bool
    ) -> Floats:
        """Rows; ``end_request`` is still to come."""
        rows = np.zeros((len(signs), self.dim), np.float32)
        key = mix64(mix64(self.seed ^ ADMISSION) ^ batch_id)
        for i, sign in enumerate(signs):
            is_new = self.get(sign) is None
            if is_new and admit_at > 1 and not self.sketch.admits(sign, admit_at, repeated):
                self.counts["refused"] += 1
                continue
            self._use(sign, policy, key, is_new)
            rows[i] = self.values[sign]
        return rows

    def write(self, signs: Sequence[int], values: Floats, policy: int) -> None:
        key = mix64(mix64(self.seed ^ ADMISSION))
        for sign, value in zip(signs, values, strict=True):
            self._use(sign, policy, key, self.get(sign) is None)
            self.values[sign] = value

    def update(self, signs: Sequence[int], gradients: Floats) -> None:
        """A row that has expired may still be there, and is stepped then."""
        for sign, gradient in zip(signs, gradients, strict=True):
            if sign in self.values:
                self.values[sign] = self.values[sign] - np.float32(LR) * gradient

    def delete(self, signs: Sequence[int]) -> None:
        for sign in signs:
            if sign in self.values:
                self._drop(sign)
