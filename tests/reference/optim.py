"""Plain model of the row optimizers: one row in numpy's f32, operation by operation.

Numpy rounds every f32 operation on its own, as the kernels must, so results are compared bit
for bit.
"""

from __future__ import annotations

import math
from typing import Any

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


def state_words(name: str, options: dict[str, float], dim: int) -> int:
    if name == "sgd":
        return dim if options["momentum"] else 0
    if name == "adagrad":
        return 1 if options["vectorwise_shared"] else dim
    if name == "rmsprop":
        return 2 * dim if options["momentum"] else dim
    vectors, words = {
        "adam": (2, 1),
        "rowwise_adam": (1, 2),
        "ftrl": (2, 0),
        "lion": (1, 0),
        "nesterov": (1, 0),
        "adadelta": (2, 0),
        "adamw": (2, 1),
        "amsgrad": (3, 1),
        "lamb": (2, 1),
    }[name]
    return vectors * dim + words


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
    g = gradient
    if options["weight_decay"] and name not in ("lion", "adamw", "lamb"):
        g = g + f["weight_decay"] * values
    if name == "sgd":
        if options["momentum"]:
            g = state = state * f["momentum"] + g
        values = values - f["lr"] * g
    elif name == "adagrad":
        before = state
        state = state * f["g_square_momentum"]
        state = state + (mean_square(g) if options["vectorwise_shared"] else g * g)
        if options["original_order"]:
            divisor = np.sqrt(before + f["eps"])
        else:
            divisor = np.sqrt(state) + f["eps"]
        values = values - f["lr"] * g / divisor
    elif name == "ftrl":
        values, state = ftrl(f, values, state, g)
    elif name == "rmsprop":
        values, state = rmsprop(options, f, values, state, g)
    elif name == "lion":
        values, state = lion(options, f, values, state, g)
    elif name == "nesterov":
        state = f["momentum"] * state + g
        values = values - f["lr"] * (g + f["momentum"] * state)
    elif name == "adadelta":
        values, state = adadelta(options, f, values, state, g)
    elif name in ("adamw", "amsgrad", "lamb"):
        values, state = of_moments(name, options, f, values, state, g)
    else:
        rest = F32(1.0 - options["beta2"])
        squares = rest * mean_square(g) if name == "rowwise_adam" else rest * g * g
        values, state = adam(options, f, values, state, g, squares)
    if weight_bound > 0:
        values = np.clip(values, -F32(weight_bound), F32(weight_bound))
    return values, state


def adam(
    options: dict[str, float],
    f: dict[str, F32],
    values: Floats,
    state: Floats,
    g: Floats,
    squares: Any,
) -> tuple[Floats, Floats]:
    dim = len(values)
    count = min(int(state[-1:].view(np.uint32)[0]) + 1, 2**32 - 1)
    step_size = F32(options["lr"] / (1.0 - power(options["beta1"], count)))
    inverse_root = F32(1.0 / math.sqrt(1.0 - power(options["beta2"], count)))
    m = f["beta1"] * state[:dim] + F32(1.0 - options["beta1"]) * g
    v = f["beta2"] * state[dim:-1] + squares
    values = values - step_size * m / (np.sqrt(v) * inverse_root + f["eps"])
    word = np.array([count], np.uint32).view(np.float32)
    return values, np.concatenate([m, v, word])


def adadelta(
    options: dict[str, float], f: dict[str, F32], values: Floats, state: Floats, g: Floats
) -> tuple[Floats, Floats]:
    squares, steps = np.split(state, 2)
    rest = F32(1.0 - options["rho"])
    squares = f["rho"] * squares + rest * g * g
    move = np.sqrt(steps + f["eps"]) / np.sqrt(squares + f["eps"]) * g
    steps = f["rho"] * steps + rest * move * move
    return values - f["lr"] * move, np.concatenate([squares, steps])


def of_moments(
    name: str,
    options: dict[str, float],
    f: dict[str, F32],
    values: Floats,
    state: Floats,
    g: Floats,
) -> tuple[Floats, Floats]:
    """AdamW, AMSGrad and LAMB: Adam's moments and count, and what is theirs."""
    dim = len(values)
    count = min(int(state[-1:].view(np.uint32)[0]) + 1, 2**32 - 1)
    correction = 1.0 - power(options["beta1"], count)
    inverse_root = F32(1.0 / math.sqrt(1.0 - power(options["beta2"], count)))
    step_size = F32(options["lr"] / correction)
    m = f["beta1"] * state[:dim] + F32(1.0 - options["beta1"]) * g
    v = f["beta2"] * state[dim : 2 * dim] + F32(1.0 - options["beta2"]) * g * g
    kept = [m, v]
    if name == "amsgrad":
        largest = np.maximum(state[2 * dim : 3 * dim], v)
        kept.append(largest)
        values = values - step_size * m / (np.sqrt(largest) * inverse_root + f["eps"])
    elif name == "adamw":
        left = F32(1.0 - options["lr"] * options["weight_decay"])
        values = left * values - step_size * m / (np.sqrt(v) * inverse_root + f["eps"])
    else:
        move = m * F32(1.0 / correction) / (np.sqrt(v) * inverse_root + f["eps"])
        if options["weight_decay"]:
            move = move + f["weight_decay"] * values
        size, moved = np.sqrt(mean_square(values)), np.sqrt(mean_square(move))
        trust = size / moved if size > 0 and moved > 0 else F32(1)
        values = values - f["lr"] * trust * move
    word = np.array([count], np.uint32).view(np.float32)
    return values, np.concatenate([*kept, word])


def rmsprop(
    options: dict[str, float], f: dict[str, F32], values: Floats, state: Floats, g: Floats
) -> tuple[Floats, Floats]:
    dim = len(values)
    v = f["alpha"] * state[:dim] + F32(1.0 - options["alpha"]) * g * g
    divisor = np.sqrt(v) + f["eps"]
    if not options["momentum"]:
        return values - f["lr"] * g / divisor, v
    velocity = f["momentum"] * state[dim:] + g / divisor
    return values - f["lr"] * velocity, np.concatenate([v, velocity])


def lion(
    options: dict[str, float], f: dict[str, F32], values: Floats, m: Floats, g: Floats
) -> tuple[Floats, Floats]:
    """Weight decay is beside the step's sign, not in the gradient."""
    move = np.sign(f["beta1"] * m + F32(1.0 - options["beta1"]) * g)
    if options["weight_decay"]:
        move = move + f["weight_decay"] * values
    m = f["beta2"] * m + F32(1.0 - options["beta2"]) * g
    return values - f["lr"] * move, m


def ftrl(f: dict[str, F32], values: Floats, state: Floats, g: Floats) -> tuple[Floats, Floats]:
    """The paper's z, times lr; an element begins with the z that its value is the answer to."""
    dim = len(values)
    z, n = state[:dim], state[dim:]
    l1, fixed = f["lr"] * f["l1"], f["beta"] + f["lr"] * f["l2"]
    after = n + g * g
    root = np.sqrt(after)
    begin = F32(0) - (values * fixed + np.sign(values) * l1)
    z = np.where(n == 0, begin, z) + (f["lr"] * g - (root - np.sqrt(n)) * values)
    beyond = np.where(np.abs(z) <= l1, F32(0), np.where(z > 0, z - l1, z + l1))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(after == 0, values, F32(0) - beyond / (fixed + root))
    return values, np.concatenate([z, after])
