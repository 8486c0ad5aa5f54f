"""Rates of the optimizer kernels as parts of plain Adagrad's, on rows in a batch's order.

    python -m tests.benchmarks.optimizers [DIM] [--only WORD ...] [--pairs 21] [--cpu-time]

`cached` steps 2,048 rows again and again, so that arithmetic counts; `memory` steps 2^24
values in order, so that bytes count. A ratio above 1 is faster than Adagrad. The last three are
Adagrad in C by persia_kernels.h, as a user has it: one that guards its rows, one whose rows are
copied to be put back, and that one without a guard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from persia._core.base import cpu
from persia._core.kernels.optim import RowOptimizer
from tests.benchmarks.interleaved import Clock, interleave, parser, ratio, row, table
from tests.support import kernels

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
    "adagrad in C": ("", {"lr": 0.01}),
    "adagrad in C, copied": ("-DPLAIN", {"lr": 0.01}),
    "adagrad in C, no guard": ("-DPLAIN", {"lr": 0.01, "guard": False}),
}


def chosen(kernel: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a kernel; that of a user is compiled."""
    name, options = KERNELS[kernel]
    if "in C" in kernel:
        name = kernels.load("adagrad", *name.split())
    return name, options


def steps(kernel: str, dim: int, count: int, times: int, clock: Clock) -> Callable[[], float]:
    """Return what steps all of ``count`` rows, and returns million rows a second."""
    name, options = chosen(kernel)
    optimizer = RowOptimizer(name, 10.0, **options)
    rows = np.zeros((count, dim + optimizer.state_words(dim)), np.float32)
    rows[:, dim:] = optimizer.new_state(dim).view(np.float32)
    grads = np.random.default_rng(1).standard_normal((count, dim), dtype=np.float32)

    def step() -> float:
        start = clock()
        for _ in range(times):
            optimizer.step_rows(rows, grads)
        return times * count / (clock() - start) / 1e6

    return step


def main() -> None:
    options = parser(__doc__, PAIRS, cpu_time=True)
    options.add_argument("dim", nargs="?", type=int, default=16)
    options.add_argument("--only", nargs="+", default=[""], help="optimizers with these words")
    args = options.parse_args()
    title = f"dim {args.dim}, {cpu.available()[-1]}, medians of {args.pairs} interleaved pairs"
    columns = ("cached ns/row", "of adagrad", "memory ns/row", "of adagrad")
    table(title, "optimizer", "state words", *columns)
    num_values = 1 << (18 if args.quick else 24)
    for kernel in KERNELS:
        if not any(word in kernel for word in args.only):
            continue
        name, settings = chosen(kernel)
        cells: list[object] = [kernel, RowOptimizer(name, **settings).state_words(args.dim)]
        for count, times in ((2048, 20), (num_values // args.dim, 1)):
            make = functools.partial(
                steps, dim=args.dim, count=count, times=times, clock=args.clock
            )
            series = interleave({"own": make(kernel), "base": make("adagrad")}, args.pairs)
            own, base = series["own"], series["base"]
            cells += [f"{1e3 / own.rate:.1f}", ratio(own, base)]
        row(*cells)


if __name__ == "__main__":
    main()
