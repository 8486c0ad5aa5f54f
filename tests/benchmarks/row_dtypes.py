"""Rows of two-byte values beside f32: rate on cold ids, and bytes.

    python -m tests.benchmarks.row_dtypes [--quick] [--pairs 20] [--optimizer adagrad]

Whole sparse steps from raw ids, as in the main benchmark, one dtype after the other.
"""

from __future__ import annotations

import gc

from persia._core.base.halves import DTYPES
from tests.benchmarks.contenders import ADAGRAD, Persia
from tests.benchmarks.interleaved import again, measure, parser, ratio
from tests.benchmarks.workload import LR, batches, sizes

OPTIMIZERS = {"sgd": {"name": "sgd", "lr": LR}, "adagrad": ADAGRAD}


def main() -> None:
    """Measure one optimizer."""
    options = parser(__doc__, 20)
    options.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    chosen = options.parse_args()
    optimizer = OPTIMIZERS[chosen.optimizer]
    data = batches("cold", chosen.quick, 6)
    everyone = {
        dtype: Persia(sizes(chosen.quick), 1, optimizer, dtype=dtype) for dtype in DTYPES
    }
    for dtype, one in everyone.items():
        stats = one.stats()
        print(f"{chosen.optimizer} {dtype}: {stats['bytes'] / stats['rows']:.1f} B a row")
    gc.disable()
    num_ids = sum(batch.num_ids for batch in data)
    for kind in ("train", "evaluate"):
        steps = {
            dtype: again([getattr(one, f"{kind}_step")(batch) for batch in data])
            for dtype, one in everyone.items()
        }
        series = measure(steps, num_ids, chosen.pairs)
        for dtype, own in series.items():
            of_f32 = ratio(own, series["float32"])
            print(f"{kind} {dtype}: {own.rate:.1f} M ids/s, {of_f32} of f32")


if __name__ == "__main__":
    main()
