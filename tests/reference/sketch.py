"""Plain Python model of ``persia._core.shard.sketch``."""

from __future__ import annotations

from tests.reference.hashing import mix64

SKETCH = 0x5CE7C4F0A11D0C75
LINE = 64


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
