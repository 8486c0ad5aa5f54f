"""Rates of the optimizer kernels as parts of plain Adagrad's, on rows in a batch's order.

    python -m tests.benchmarks.optimizers [DIM]

`cached` steps 2,048 rows again and again, so that arithmetic counts; `memory` steps 2^24
values in order, so that bytes count. A ratio above 1 is faster than Adagrad.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from persia._core.base import cpu
from persia._core.kernels.optim import RowOptimizer
from tests.benchmarks.interleaved import interleave, ratio, row, table

PAIRS = 21
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "adagrad": ("adagrad", {}),
    "sgd": ("sgd", {"lr": 0.01}),
    "adam": ("adam", {}),
    "rowwise_adagrad": ("adagrad", {"vectorwise_shared": True}),
    "rowwise_adam": ("rowwise_adam", {}),
    "rmsprop": ("rmsprop", {}),
    "rmsprop, momentum": ("rmsprop", {"momentum": 0.9}),
    "ftrl": ("ftrl", {"l1": 0.1, "l2": 0.1}),
    "lion": ("lion", {}),
}


def steps(kernel: str, dim: int, count: int, times: int) -> Callable[[], float]:
    """Return what steps all of ``count`` rows, and returns million rows a second."""
    name, options = KERNELS[kernel]
    optimizer = RowOptimizer(name, 10.0, **options)
    rows = np.zeros((count, dim + optimizer.state_words(dim)), np.float32)
    rows[:, dim:] = optimizer.new_state(dim).view(np.float32)
    grads = np.random.default_rng(1).standard_normal((count, dim), dtype=np.float32)

    def step() -> float:
        start = time.perf_counter()
        for _ in range(times):
            optimizer.step_rows(rows, grads)
        return times * count / (time.perf_counter() - start) / 1e6

    return step


def main(dim: str = "16") -> None:
    width = int(dim)
    title = f"dim {width}, {cpu.available()[-1]}, medians of {PAIRS} interleaved pairs"
    columns = ("cached ns/row", "of adagrad", "memory ns/row", "of adagrad")
    table(title, "optimizer", "state words", *columns)
    for kernel, (name, options) in KERNELS.items():
        cells: list[object] = [kernel, RowOptimizer(name, **options).state_words(width)]
        for count, times in ((2048, 20), ((1 << 28) // width // 16, 1)):
            make = functools.partial(steps, dim=width, count=count, times=times)
            series = interleave({"own": make(kernel), "base": make("adagrad")}, PAIRS)
            own, base = series["own"], series["base"]
            cells += [f"{1e3 / own.rate:.1f}", ratio(own, base)]
        row(*cells)


if __name__ == "__main__":
    main(*sys.argv[1:])
