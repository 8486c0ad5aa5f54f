"""Plain Python model of ``persia._core.ids.signs``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.reference.distinct import number
from tests.reference.hashing import mix64

if TYPE_CHECKING:
    from collections.abc import Sequence


def prefix_of(group: int, prefix_bits: int) -> int:
    """Groups count from 0, prefixes from 1: an all-zero prefix belongs to no group."""
    if group + 1 >= 1 << prefix_bits:
        raise ValueError(group)
    return (group + 1) << (64 - prefix_bits)


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


def merge(arrays: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    distinct, numbered = number(value for array in arrays for value in array)
    pieces = []
    for array in arrays:
        pieces.append(numbered[: len(array)])
        numbered = numbered[len(array) :]
    return distinct, pieces
