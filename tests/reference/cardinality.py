"""HyperLogLog as it is written down, one id at a time."""

from __future__ import annotations

from collections.abc import Iterable

from tests.reference.hashing import mix64

REGISTER_BITS = 12


def registers_of(ids: Iterable[int]) -> list[int]:
    """The highest rank of the ids of each register."""
    registers = [0] * (1 << REGISTER_BITS)
    low_bits = 64 - REGISTER_BITS
    for one in ids:
        number, rest = divmod(mix64(one), 1 << low_bits)
        rank = 1
        while rank <= low_bits and not rest & 1:
            rank, rest = rank + 1, rest >> 1
        registers[number] = max(registers[number], rank)
    return registers
