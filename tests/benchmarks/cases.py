"""What happens beside the plain workload: other optimizers, eviction, input, scaling, latency.

    python -m tests.benchmarks.cases [NAME ...] [--quick] [--pairs 20] [--threads 1]

Each case prints a table with a ratio, taken pair by pair as interleaved.py says.

    optimizers   SGD and Adam against Adagrad, training
    eviction     new ids in every batch at full capacity, against no new ids
    inputs       an IDTypeFeature from 4096 arrays, from CSR and from one array
    rows         the same batch on tables of more and more rows, and the ceiling's there
    distinct     batches of as many ids, of which more and more are distinct
    latency      see latency.py
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from persia._core.ids.feature_batch import FeatureBatch
from persia.embedding.data import IDTypeFeature
from tests.benchmarks.ceiling import Ceiling
from tests.benchmarks.contenders import ADAGRAD, Persia
from tests.benchmarks.interleaved import Clock, Series, again, measure, pin_malloc, ratio
from tests.benchmarks.latency import latency
from tests.benchmarks.native import compiler
from tests.benchmarks.workload import (
    BATCH,
    LR,
    PATTERNS,
    Batch,
    Contender,
    Step,
    batches,
    fresh,
    sizes,
    uniform,
)

NUM_BATCHES = 8
UNSEEN = itertools.count(1 << 40, 1 << 20)  # row numbers of no feature
NEW = 0.1  # of the distinct ids of a batch, or of all of them


@dataclass(frozen=True)
class Options:
    quick: bool
    pairs: int
    threads: int
    clock: Clock
    max_rows: int


def table(title: str, *columns: str) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def training(contender: Contender, data: list[Batch]) -> Callable[[], Sequence[Step]]:
    return again([contender.train_step(batch) for batch in data])


def num_ids(data: list[Batch]) -> int:
    return sum(batch.num_ids for batch in data)


def optimizers(options: Options) -> None:
    table("Training, M ids/s (times Adagrad's rate [95 %])", "optimizer", *PATTERNS)
    everyone = {
        str(settings["name"]): Persia(sizes(options.quick), options.threads, settings)
        for settings in (ADAGRAD, {"name": "sgd", "lr": LR}, {"name": "adam", "lr": LR})
    }
    columns = []
    for pattern in PATTERNS:
        data = batches(pattern, options.quick, NUM_BATCHES)
        steps = {name: training(persia, data) for name, persia in everyone.items()}
        columns.append(measure(steps, num_ids(data), options.pairs, options.clock))
    for name in everyone:
        cells = [
            f"{own[name].rate:.1f} ({ratio(own[name], own['adagrad'])})" for own in columns
        ]
        row(name, *cells)


class Renewed:
    """Steps on batches of which a part of the ids was never seen before."""

    def __init__(self, persia: Persia, data: list[Batch], of_distinct: bool) -> None:
        self._persia = persia
        self._data = [data[-1], *data]
        self._of_distinct = of_distinct
        self._rng = np.random.default_rng(0)

    def __call__(self) -> list[Step]:
        return [
            self._persia.train_step(
                fresh(batch, self._rng, next(UNSEEN), NEW, self._of_distinct)
            )
            for batch in self._data
        ]


def eviction(options: Options) -> None:
    """At full capacity every new row takes the place of one that is evicted."""
    table(
        "Training with 10 % new ids at full capacity, M ids/s",
        "new",
        "no new ids",
        "growing",
        "evicting",
        "evicting of no new ids [95 %]",
        "evicting of growing [95 %]",
    )
    table_sizes = sizes(options.quick)
    data = batches("single", options.quick, NUM_BATCHES)
    steady = Persia(table_sizes, options.threads)
    full = Persia(table_sizes, options.threads, capacity=sum(table_sizes))
    for of_distinct in (True, False):
        series = measure(
            {
                "steady": training(steady, data),
                "growing": Renewed(steady, data, of_distinct),
                "evicting": Renewed(full, data, of_distinct),
            },
            num_ids(data),
            options.pairs,
            options.clock,
        )
        rates = [f"{series[name].rate:.1f}" for name in ("steady", "growing", "evicting")]
        row(
            "of distinct ids" if of_distinct else "of all ids",
            *rates,
            ratio(series["evicting"], series["steady"]),
            ratio(series["evicting"], series["growing"]),
        )

    if full.num_rows > sum(table_sizes) or steady.num_rows <= sum(table_sizes):
        raise RuntimeError("expected one table to grow and the other not to")


def inputs(options: Options) -> None:
    table(
        "Building one feature of 4096 samples", "input", "M ids/s", "of FeatureBatch.from_csr"
    )
    batch = batches("multi", True, 1)[0]
    ids = batch.features[0]
    offsets = ids.offsets if ids.offsets is not None else np.zeros(0, np.int64)
    lists = [array.copy() for array in np.split(ids.values, offsets[1:-1])]
    single = ids.values[:BATCH]
    makers: dict[str, tuple[Step, int]] = {
        "FeatureBatch.from_csr": (
            lambda: void(FeatureBatch.from_csr("f", ids.values, offsets)),
            len(ids.values),
        ),
        "IDTypeFeature.from_csr": (
            lambda: void(IDTypeFeature.from_csr("f", ids.values, offsets)),
            len(ids.values),
        ),
        "IDTypeFeature of 4096 arrays": (
            lambda: void(IDTypeFeature("f", lists)),
            len(ids.values),
        ),
        "FeatureBatch.from_single": (
            lambda: void(FeatureBatch.from_single("f", single)),
            len(single),
        ),
    }
    repeat = 20
    # A unit is a feature here, because not all have as many ids.
    series = measure(
        {name: again([step] * repeat) for name, (step, _) in makers.items()},
        repeat,
        options.pairs,
        options.clock,
    )
    for name, (_, count) in makers.items():
        scaled = Series([rate * count for rate in series[name].rates], [])
        base = series["FeatureBatch.from_csr"]
        same = Series([rate * len(ids.values) for rate in base.rates], [])
        row(name, f"{scaled.rate:.1f}", ratio(scaled, same))


def void(_: object) -> None:
    """Forget what a step made."""


def rows(options: Options) -> None:
    """One feature, ids uniform over it."""
    table(
        "A batch of 106,496 uniform ids of one feature, training, M ids/s",
        "rows",
        "PERSIA",
        "ceiling",
        "PERSIA of the ceiling [95 %]",
    )
    steps = [options.max_rows // 4**power for power in (3, 2, 1, 0)]
    for num_rows in steps:
        data = [uniform(num_rows, num_rows, seed) for seed in range(NUM_BATCHES)]
        everyone: dict[str, Contender] = {"persia": Persia([num_rows], options.threads)}
        # 170 bytes a row each; both at once up to here.
        if compiler() is not None and num_rows <= 40_000_000:
            everyone["ceiling"] = Ceiling([num_rows], options.threads)
        series = measure(
            {name: training(own, data) for name, own in everyone.items()},
            num_ids(data),
            options.pairs,
            options.clock,
        )
        persia, ceiling = series["persia"], series.get("ceiling")
        of_ceiling = ["-", "-"]
        if ceiling is not None:
            of_ceiling = [f"{ceiling.rate:.1f}", str(ratio(persia, ceiling))]
        row(f"{num_rows:,}", f"{persia.rate:.1f}", *of_ceiling)
        del everyone


def distinct(options: Options) -> None:
    table(
        "A batch of 106,496 ids of one feature, training",
        "distinct ids",
        "us a batch",
        "times as many ids as above",
        "times as long [95 %]",
    )
    num_rows = 100_000 if options.quick else 10_000_000
    persia = Persia([num_rows], options.threads)
    spans = (1000, 4000, 16_000, 64_000, num_rows)
    data = [[uniform(num_rows, span, seed) for seed in range(NUM_BATCHES)] for span in spans]
    series = measure(
        {str(span): training(persia, own) for span, own in zip(spans, data, strict=True)},
        num_ids(data[0]),
        options.pairs,
        options.clock,
    )
    counts = [np.mean([len(np.unique(batch.merged_rows)) for batch in own]) for own in data]
    for at, span in enumerate(spans):
        own = series[str(span)]
        grown = ["-", "-"]
        if at > 0:
            grown = [
                f"{counts[at] / counts[at - 1]:.2f}",
                str(ratio(series[str(spans[at - 1])], own)),
            ]
        row(f"{counts[at]:,.0f}", f"{num_ids(data[0]) / NUM_BATCHES / own.rate:.0f}", *grown)


CASES: dict[str, Callable[[Options], None]] = {
    "optimizers": optimizers,
    "eviction": eviction,
    "inputs": inputs,
    "rows": rows,
    "distinct": distinct,
    "latency": lambda options: latency(options.quick, options.threads, options.pairs),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="1 %% of the rows")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-rows", type=int, help="of rows; default: 64 million, 1 %% quick")
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine; not latency"
    )
    args = parser.parse_args()
    for name in args.names:
        if name not in CASES:
            parser.error(f"expected of {', '.join(CASES)}, got {name}")
    pin_malloc()
    options = Options(
        args.quick,
        args.pairs,
        args.threads,
        time.process_time if args.cpu_time else time.perf_counter,
        args.max_rows or (640_000 if args.quick else 64_000_000),
    )
    for name in args.names or CASES:
        CASES[name](options)


if __name__ == "__main__":
    main()
