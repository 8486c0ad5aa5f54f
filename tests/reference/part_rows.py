"""What ``part_rows`` does, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.hashing import mix64


def copied(rows: Sequence[bytes], places: Sequence[int]) -> bytes:
    """The rows at these places, end to end."""
    return b"".join(rows[place] for place in places)


def stranger(signs: Sequence[int], first: int, end: int) -> int:
    """The place of the first sign of another bucket."""
    buckets = [mix64(sign) >> 50 for sign in signs]
    return next((i for i, each in enumerate(buckets) if not first <= each < end), -1)
