"""Threads that share the work of one call."""

from __future__ import annotations

from collections.abc import Sequence

from persia._core.base.threads import Crew as Crew


def shares(weights: Sequence[int], count: int) -> list[list[int]]:
    """Deal places out so that ``count`` shares weigh about the same; none is empty.

    Heaviest first, each to the lightest share so far (Graham 1969): at most 4/3 of the best.
    """
    dealt: list[list[int]] = [[] for _ in range(count)]
    total = [0] * count
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        lightest = total.index(min(total))
        dealt[lightest].append(place)
        # Never 0, so that places without weight spread as well.
        total[lightest] += weights[place] + 1
    return [places for places in dealt if places]
