"""Plain model of the initializers, with Python's own log, exp and normal quantile.

Those differ from the core's in the last bit of a double, so values agree to one f32 rounding;
uniform, poisson and constant values agree exactly.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tests.reference.hashing import WORD, mix64

STANDARD = NormalDist()
BELOW_MINUS_2 = STANDARD.cdf(-2.0)
POISSON_PIECE = 32.0


def unit(draw: int) -> float:
    """In [0, 1)."""
    return (draw >> 12) * 2.0**-52


def inner_unit(draw: int) -> float:
    """In (0, 1)."""
    return ((draw >> 12) + 0.5) * 2.0**-52


def gamma(stream: int, shape: float) -> float:
    boost, i = 1.0, 0
    if shape < 1:
        boost = math.exp(math.log(inner_unit(mix64(stream))) / shape)
        shape, i = shape + 1, 1
    d = shape - 1 / 3
    while True:
        x = STANDARD.inv_cdf(inner_unit(mix64((stream + i) & WORD)))
        u = inner_unit(mix64((stream + i + 1) & WORD))
        i += 2
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(u) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v * boost


def poisson(stream: int, lam: float) -> float:
    pieces = max(1, math.ceil(lam / POISSON_PIECE))
    threshold = math.exp(-lam / pieces)
    total, i = 0, 0
    for _ in range(pieces):
        product = 1.0
        while True:
            product *= inner_unit(mix64((stream + i) & WORD))
            i += 1
            if product <= threshold:
                break
            total += 1
    return float(total)


def value(method: str, options: dict[str, float], draw: int) -> float:
    if method == "uniform":
        lower, upper = np.float32(options["lower"]), np.float32(options["upper"])
        one = float(lower) + (float(upper) - float(lower)) * unit(draw)
        return float(min(np.float32(one), np.nextafter(upper, np.float32(-np.inf))))
    if method == "gamma":
        return options["scale"] * gamma(draw, options["shape"])
    if method == "poisson":
        return poisson(draw, options["lam"])
    if method in ("zeros", "constant"):
        return options.get("value", 0.0)
    p = inner_unit(draw)
    if method == "truncated_normal":
        p = BELOW_MINUS_2 + (1 - 2 * BELOW_MINUS_2) * p
    return options["mean"] + options["standard_deviation"] * STANDARD.inv_cdf(p)


def values(
    method: str, options: dict[str, float], seed: int, sign: int, dim: int
) -> NDArray[np.float32]:
    key = mix64(sign ^ mix64(seed))
    draws = [mix64((key + j) & WORD) for j in range(dim)]
    return np.array([value(method, options, draw) for draw in draws], np.float32)
