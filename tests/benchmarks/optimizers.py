"""Rates of the optimizer kernels as parts of plain Adagrad's, on rows in a batch's order.

    python -m tests.benchmarks.optimizers [DIM [OPTIMIZER ...]]

`cached` steps 2,048 rows again and again, so that arithmetic counts; `memory` steps 2^24
values in order, so that bytes count. Pairs are interleaved and the medians of their ratios
shown: above 1 is faster than Adagrad.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import numpy as np

from persia._core.base import cpu
from persia._core.kernels.optim import RowOptimizer

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


class Rows:
    """Rows of one optimizer, and the time a step of all of them takes."""

    def __init__(self, kernel: str, dim: int, count: int, times: int) -> None:
        name, options = KERNELS[kernel]
        self.optimizer = RowOptimizer(name, 10.0, **options)
        self.words = self.optimizer.state_words(dim)
        rng = np.random.default_rng(1)
        self.rows = np.zeros((count, dim + self.words), np.float32)
        self.rows[:, dim:] = self.optimizer.new_state(dim).view(np.float32)
        self.grads = rng.standard_normal((count, dim), dtype=np.float32)
        self.times = times

    def step(self) -> float:
        start = time.perf_counter()
        for _ in range(self.times):
            self.optimizer.step_rows(self.rows, self.grads)
        return (time.perf_counter() - start) / self.times / len(self.rows) * 1e9


def compare(kernel: str, dim: int, count: int, times: int) -> tuple[float, float]:
    """Return ns a row, and Adagrad's time divided by it."""
    mine, base = Rows(kernel, dim, count, times), Rows("adagrad", dim, count, times)
    mine.step(), base.step()
    pairs = [(mine.step(), base.step()) for _ in range(PAIRS)]
    return median(a for a, _ in pairs), median(b / a for a, b in pairs)


def main() -> None:
    dim = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    print(f"dim {dim}, {cpu.available()[-1]}, medians of {PAIRS} interleaved pairs\n")
    print(
        "| optimizer | state words | cached ns/row | of adagrad | memory ns/row | of adagrad |"
    )
    print("|---|---|---|---|---|---|")
    for kernel in sys.argv[2:] or KERNELS:
        words = RowOptimizer(KERNELS[kernel][0], **KERNELS[kernel][1]).state_words(dim)
        cells = [
            compare(kernel, dim, 2048, 20),
            compare(kernel, dim, (1 << 28) // dim // 16, 1),
        ]
        shown = " | ".join(f"{ns:.1f} | {ratio:.2f}" for ns, ratio in cells)
        print(f"| {kernel} | {words} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
