"""Plain Python model of ``persia._core.distinct``."""

from __future__ import annotations

from collections.abc import Iterable


def number(values: Iterable[int]) -> tuple[list[int], list[int]]:
    """Distinct values in first-seen order, and the number of each value among them."""
    numbers: dict[int, int] = {}
    numbered = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), numbered
