"""Plain Python models of ``persia._core.shard.eviction`` and ``persia._core.shard.sketch``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tests.reference.hashing import mix64

Kind = tuple[str, str | None, int]  # lru, lfu or a library with a scorer; clock, ttl

SKETCH = 0x5CE7C4F0A11D0C75
LINE = 64


class Lru:
    """The signs of one policy, by class."""

    def __init__(self) -> None:
        self.classes: list[OrderedDict[int, None]] = [OrderedDict()]

    def __len__(self) -> int:
        return sum(map(len, self.classes))

    def __iter__(self) -> Iterator[int]:
        """Signs in the order of eviction."""
        for one in self.classes:
            yield from one

    def class_of(self, sign: int) -> int:
        return next(i for i, one in enumerate(self.classes) if sign in one)

    def remove(self, sign: int) -> None:
        for one in self.classes:
            one.pop(sign, None)

    def use(self, sign: int, is_known: bool, key: int) -> None:
        self.remove(sign)
        self.classes[0][sign] = None

    def age(self) -> None:
        pass


class Lfu(Lru):
    """Sixteen classes; class c is entered from below once in 2**(c - 1) uses."""

    def __init__(self) -> None:
        self.classes = [OrderedDict() for _ in range(16)]
        self.num_uses = 0

    def use(self, sign: int, is_known: bool, key: int) -> None:
        """Count one; a sign that is known was used under this policy before."""
        self.num_uses += 1
        grade = self.class_of(sign) if is_known else 0
        grade += is_known and grade < 15 and (key ^ mix64(sign)) % 2**grade == 0
        self.remove(sign)
        self.classes[grade][sign] = None

    def age(self) -> None:
        if self.num_uses >= 10 * len(self):
            self.num_uses = 0
            lowest, following, *others = self.classes
            self.classes = [OrderedDict([*lowest.items(), *following.items()]), *others]
            self.classes.append(OrderedDict())


class Scored(Lru):
    """By a user's scorer, tests/support/kernels/scorer.c."""

    def __init__(self) -> None:
        self.classes = [OrderedDict() for _ in range(16)]

    def use(self, sign: int, is_known: bool, key: int) -> None:
        grade = sign % 3
        if is_known:
            grade = min(self.class_of(sign) + ((key ^ mix64(sign)) & 1), 15)
        self.remove(sign)
        self.classes[grade][sign] = None


def order_of(kind: Kind) -> Lru:
    """What ranks the rows of a policy."""
    if kind[0].startswith("native:"):
        return Scored()
    return Lfu() if kind[0] == "lfu" else Lru()


class Sketch:
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
