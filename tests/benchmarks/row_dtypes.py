"""Rows of two-byte values beside f32: rate on cold ids, and bytes.

    python -m tests.benchmarks.row_dtypes [--quick] [--pairs 20] [--optimizer adagrad]

Whole sparse steps from raw ids, as in the main benchmark, one dtype after the other, in turns
that start with another one each time; medians of the ratios within a turn, with quartiles.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from persia._core.base.halves import DTYPES
from tests.benchmarks.contenders import ADAGRAD, Persia
from tests.benchmarks.workload import LR, Batch, batches, sizes

OPTIMIZERS = {"sgd": {"name": "sgd", "lr": LR}, "adagrad": ADAGRAD}


def measure(everyone: dict[str, Persia], kind: str, data: list[Batch], pairs: int) -> None:
    """Print each dtype's rate and its ratio to f32's."""
    steps = {
        dtype: [
            one.train_step(batch) if kind == "train" else one.evaluate_step(batch)
            for batch in data
        ]
        for dtype, one in everyone.items()
    }
    seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for turn in range(pairs):
        for shift in range(len(DTYPES)):
            dtype = DTYPES[(turn + shift) % len(DTYPES)]
            steps[dtype][turn % len(data)]()  # leaves the caches as this one does
            start = time.perf_counter()
            for offset in (1, 2):
                steps[dtype][(turn + offset) % len(data)]()
            seconds[dtype].append(time.perf_counter() - start)
    for dtype, taken in seconds.items():
        rate = 2 * data[0].num_ids / np.median(taken) / 1e6
        low, middle, high = np.percentile(
            np.divide(seconds["float32"], taken), [25, 50, 75]
        ).tolist()
        print(
            f"{kind} {dtype}: {rate:.1f} M ids/s, {middle:.2f} of f32 ({low:.2f}..{high:.2f})"
        )


def main() -> None:
    """Measure one optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    chosen = parser.parse_args()
    optimizer = OPTIMIZERS[chosen.optimizer]
    data = batches("cold", chosen.quick, 6)
    everyone = {
        dtype: Persia(sizes(chosen.quick), 1, optimizer, dtype=dtype) for dtype in DTYPES
    }
    for dtype, one in everyone.items():
        stats = one.stats()
        print(f"{chosen.optimizer} {dtype}: {stats['bytes'] / stats['rows']:.1f} B a row")
    gc.disable()
    for kind in ("train", "evaluate"):
        measure(everyone, kind, data, chosen.pairs)


if __name__ == "__main__":
    main()
