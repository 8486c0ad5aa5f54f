"""Plain Python model of ``persia._core.ids.numbering``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def number(values: Iterable[int]) -> tuple[list[int], list[int]]:
    """Distinct values in first-seen order, and the number of each value among them."""
    numbers: dict[int, int] = {}
    numbered = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), numbered
