"""Plain model of ``persia._core.optim``: one row in numpy's f32, operation by operation.

Numpy rounds every f32 operation on its own, as the kernels must, so results are compared bit
for bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F32 = np.float32


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        exponent >>= 1
        base *= base
    return result


def mean_square(gradient: Floats) -> np.float32:
    """Lane k adds elements k, k + 8, ...; the lanes join in a fixed tree."""
    lane = np.zeros(8, np.float32)
    for j, g in enumerate(gradient):
        lane[j % 8] += g * g
    total = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + (
        (lane[1] + lane[5]) + (lane[3] + lane[7])
    )
    mean: np.float32 = F32(total / F32(len(gradient)))
    return mean


def bounded(values: Floats, weight_bound: float) -> Floats:
    return (
        values if weight_bound <= 0 else np.clip(values, -F32(weight_bound), F32(weight_bound))
    )


def state_words(name: str, options: dict[str, float], dim: int) -> int:
    if name == "sgd":
        return dim if options["momentum"] else 0
    if name == "adagrad":
        return 1 if options["vectorwise_shared"] else dim
    return 2 * dim + 1


def new_state(name: str, options: dict[str, float], dim: int) -> Floats:
    start = options["initial_accumulator_value"] if name == "adagrad" else 0.0
    return np.full(state_words(name, options, dim), start, np.float32)


def step(
    name: str,
    options: dict[str, float],
    weight_bound: float,
    values: Floats,
    state: Floats,
    gradient: Floats,
) -> tuple[Floats, Floats]:
    """One step of one row; returns its new values and state."""
    f = {key: F32(value) for key, value in options.items()}
    g = gradient + f["weight_decay"] * values if options["weight_decay"] else gradient
    if name == "sgd":
        if options["momentum"]:
            state = state * f["momentum"] + g
            g = state
        return bounded(values - f["lr"] * g, weight_bound), state
    if name == "adagrad":
        squares = mean_square(g) if options["vectorwise_shared"] else g * g
        after = state * f["g_square_momentum"] + squares
        if options["original_order"]:
            divisor = np.sqrt(state + f["eps"])
        else:
            divisor = np.sqrt(after) + f["eps"]
        return bounded(values - f["lr"] * g / divisor, weight_bound), after
    dim = len(values)
    count = min(int(state[2 * dim :].view(np.uint32)[0]) + 1, 2**32 - 1)
    step_size = F32(options["lr"] / (1.0 - power(options["beta1"], count)))
    inverse_root = F32(1.0 / math.sqrt(1.0 - power(options["beta2"], count)))
    m = f["beta1"] * state[:dim] + F32(1.0 - options["beta1"]) * g
    v = f["beta2"] * state[dim : 2 * dim] + F32(1.0 - options["beta2"]) * g * g
    values = values - step_size * m / (np.sqrt(v) * inverse_root + f["eps"])
    word = np.array([count], np.uint32).view(np.float32)
    return bounded(values, weight_bound), np.concatenate([m, v, word])
