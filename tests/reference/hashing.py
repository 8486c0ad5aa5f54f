"""Plain Python model of ``persia._core.base.hashing``."""

from __future__ import annotations

from collections.abc import Sequence

WORD = 2**64 - 1
NUM_BUCKETS = 1 << 14


def mix64(x: int) -> int:
    """First output of SplitMix64 whose state is ``x``."""
    z = (x + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def unmix64(hash_: int) -> int:
    """The sign whose ``mix64`` is ``hash_``."""
    z = hash_ ^ (hash_ >> 31) ^ (hash_ >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & WORD
    z = z ^ (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & WORD
    z = z ^ (z >> 30) ^ (z >> 60)
    return (z - 0x9E3779B97F4A7C15) & WORD


def bucket(sign: int) -> int:
    return mix64(sign) >> 50


def shard(sign: int, num_shards: int) -> int:
    ten_bits = (mix64(sign) >> 40) % 1024
    return ten_bits * num_shards // 1024


def owners(num_servers: int) -> list[int]:
    return [number * num_servers // NUM_BUCKETS for number in range(NUM_BUCKETS)]


def route(
    signs: Sequence[int], owner: Sequence[int], num_servers: int
) -> tuple[list[int], list[int]]:
    by_server: list[list[int]] = [[] for _ in range(num_servers)]
    for position, sign in enumerate(signs):
        by_server[owner[bucket(sign)]].append(position)
    starts = [0]
    for positions in by_server:
        starts.append(starts[-1] + len(positions))
    return [position for positions in by_server for position in positions], starts
