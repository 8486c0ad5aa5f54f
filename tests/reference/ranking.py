"""AUC and GAUC as they are defined: every pair is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def auc(scores: Sequence[float], targets: Sequence[int]) -> Fraction | None:
    """The share of (positive, negative) pairs in the right order; equal ones count half."""
    positive = [score for score, target in zip(scores, targets, strict=True) if target]
    negative = [score for score, target in zip(scores, targets, strict=True) if not target]
    if not positive or not negative:
        return None
    won = sum(
        Fraction(1) if high > low else Fraction(1, 2) if high == low else Fraction(0)
        for high in positive
        for low in negative
    )
    return Fraction(won) / (len(positive) * len(negative))


def gauc(
    scores: Sequence[float], targets: Sequence[int], groups: Sequence[int]
) -> Fraction | None:
    """The mean AUC of the groups that have one, by their numbers of samples."""
    total, weight = Fraction(0), 0
    for group in set(groups):
        places = [place for place, of in enumerate(groups) if of == group]
        own = auc([scores[place] for place in places], [targets[place] for place in places])
        if own is not None:
            total += own * len(places)
            weight += len(places)
    return total / weight if weight else None
