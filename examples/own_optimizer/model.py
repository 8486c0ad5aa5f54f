"""What sophia.c computes, in NumPy: one step of one row.

python -m persia.cpp_extension check sophia.c --model model.py
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def step(
    values: Floats,
    state: Floats,
    gradient: Floats,
    lr: float,
    step: int,
    params: Mapping[str, float],
) -> tuple[Floats, Floats]:
    """Return the row's new values [dim] and its new state [2 dim]."""
    m, h = np.split(state, 2)
    beta1, beta2, rho, eps = (np.float32(params[x]) for x in ("beta1", "beta2", "rho", "eps"))
    m = beta1 * m + np.float32(1 - params["beta1"]) * gradient
    h = beta2 * h + np.float32(1 - params["beta2"]) * gradient * gradient
    ratio = np.clip(m / np.maximum(rho * h, eps), np.float32(-1), np.float32(1))
    return values - np.float32(lr) * ratio, np.concatenate([m, h])
