"""Plain Python models of ``persia._core.ids``: signs, numbers, texts, HyperLogLog."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from tests.reference.hashing import mix64

REGISTER_BITS = 12


def number(values: Iterable[int]) -> tuple[list[int], list[int]]:
    """Distinct values in first-seen order, and the number of each value among them."""
    numbers: dict[int, int] = {}
    numbered = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), numbered


def pack(ids: Sequence[int], prefix: int, prefix_bits: int) -> tuple[list[int], int]:
    span = 2 ** (64 - prefix_bits)
    return [one % span + prefix for one in ids], sum(one >= span for one in ids)


def hash_stack(ids: Sequence[int], rounds: int, embedding_size: int) -> list[int]:
    rows = []
    for one in ids:
        hashed = one
        for turn in range(rounds):
            hashed = mix64(hashed)
            rows.append(hashed % embedding_size + turn * embedding_size)
    return rows


def hash_of_half(x: int) -> int:
    """What ``tests/support/kernels/hash.c`` computes."""
    return mix64(x >> 1)


def merge(arrays: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    distinct, numbered = number(value for array in arrays for value in array)
    pieces = []
    for array in arrays:
        pieces.append(numbered[: len(array)])
        numbered = numbered[len(array) :]
    return distinct, pieces


def hash_text(text: bytes) -> int:
    h = mix64(len(text))
    for begin in range(0, len(text), 8):
        h = mix64(h ^ int.from_bytes(text[begin : begin + 8], "little"))
    return h


def parse_hex(text: bytes) -> int | None:
    """The number, or None if the text spells none."""
    digits = set(string.hexdigits.encode())
    if not 1 <= len(text) <= 16 or not set(text) <= digits:
        return None
    return int(text, 16)


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
