"""Metrics as they are defined: every pair is looked at, and every order of equal scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from statistics import fmean


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


def log_loss(probabilities: Sequence[float], targets: Sequence[int]) -> float:
    """The mean of -log(probability of what came), in nats."""
    return fmean(
        -math.log(p if target else 1 - p)
        for p, target in zip(probabilities, targets, strict=True)
    )


def normalized_entropy(probabilities: Sequence[float], targets: Sequence[int]) -> float | None:
    """The log loss by that of the mean of the targets."""
    rate = sum(targets) / max(len(targets), 1)
    if rate in (0, 1):
        return None
    return log_loss(probabilities, targets) / log_loss([rate] * len(targets), targets)


def calibration(probabilities: Sequence[float], targets: Sequence[int]) -> float | None:
    """Clicks that were predicted by those that came."""
    return math.fsum(probabilities) / sum(targets) if any(targets) else None


def orders(scores: Sequence[float]) -> Iterator[list[int]]:
    """Each order of the places whose scores do not rise."""
    ties = [
        [place for place, score in enumerate(scores) if score == level]
        for level in sorted(set(scores), reverse=True)
    ]
    for parts in itertools.product(*(itertools.permutations(tie) for tie in ties)):
        yield [place for part in parts for place in part]


def recall(scores: Sequence[float], gains: Sequence[float], k: int) -> float | None:
    """The share of the relevant ones among the first k."""
    found = [sum(gains[place] for place in order[:k]) for order in orders(scores)]
    return fmean(found) / sum(gains) if any(gains) else None


def ndcg(scores: Sequence[float], gains: Sequence[float], k: int | None) -> float | None:
    """Gains by log2(place + 1), the first place being 1, by those of the best order."""

    def dcg(ordered: list[float]) -> float:
        return sum(gain / math.log2(place + 1) for place, gain in enumerate(ordered[:k], 1))

    found = [dcg([gains[place] for place in order]) for order in orders(scores)]
    best = dcg(sorted(gains, reverse=True))
    return fmean(found) / best if best else None


def mean_of_groups(
    value: Callable[[list[float], list[float]], float | None],
    scores: Sequence[float],
    gains: Sequence[float],
    groups: Sequence[int],
) -> float | None:
    """The mean of the groups that have a value."""
    values = []
    for group in set(groups):
        places = [place for place, of in enumerate(groups) if of == group]
        one = value([scores[place] for place in places], [gains[place] for place in places])
        if one is not None:
            values.append(one)
    return fmean(values) if values else None
