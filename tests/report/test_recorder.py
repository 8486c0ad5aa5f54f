"""Curves of a recorded run."""

from __future__ import annotations

import math

import pytest

from persia._report.recorder import MOST, Curve


@pytest.mark.parametrize("number", [0, 1, MOST - 1, MOST, MOST + 1, 3 * MOST + 5])
def test_a_curve_stays_small_and_keeps_the_mean(number: int) -> None:
    curve = Curve()
    for x in range(number):
        curve.add(x, 2.0 * x)
        curve.add(x, math.nan)
    points = curve.points()
    assert len(points) < MOST + 1
    assert curve.num_not_finite == number
    assert all(y == 2 * x for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    whole, rest = divmod(number, curve.every)
    weights = [curve.every] * whole + [rest] * bool(rest)
    assert len(points) == len(weights)
    if number:
        mean = sum(x * w for (x, _), w in zip(points, weights, strict=True)) / number
        assert mean == pytest.approx((number - 1) / 2)
