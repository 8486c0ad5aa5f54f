"""Beside the plain workload: optimizers, dtypes, eviction, input, scaling, latency.

    python -m tests.benchmarks.cases [NAME ...] [--quick] [--pairs 20] [--threads 1]

Each case prints a table with a ratio, taken pair by pair as interleaved.py says.

    optimizers   SGD and Adam against Adagrad, training
    kernels      Adagrad in C as a user has it, guarded and not, against the built-in, training
    dtypes       rows of two-byte values against float32, training and evaluation
    eviction     new ids in every batch at full capacity, against no new ids
    inputs       an IDTypeFeature from 4096 arrays, from CSR and from one array
    rows         the same batch on tables of more and more rows, and the ceiling's there
    distinct     batches of as many ids, of which more and more are distinct
    latency      how long a lookup takes while others train
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from persia._build import kernel_library
from persia._core.base.halves import DTYPES
from persia._core.ids.feature_batch import FeatureBatch
from persia.embedding.data import IDTypeFeature
from tests.benchmarks.ceiling import Ceiling
from tests.benchmarks.contenders import ADAGRAD, Persia
from tests.benchmarks.interleaved import (
    Ratio,
    again,
    measure,
    measure_kind,
    num_ids,
    parser,
    pin_malloc,
    ratio,
    row,
    table,
)
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
from tests.support.kernels import FOLDER

SGD = {"name": "sgd", "lr": LR}
NUM_BATCHES = 8
LOOKUPS = 60  # a slice
RESAMPLES = 500
UNSEEN = itertools.count(1 << 40, 1 << 20)  # row numbers of no feature
NEW = 0.1  # of the distinct ids of a batch, or of all of them


def training(contender: Contender, data: list[Batch]) -> Callable[[], Sequence[Step]]:
    return again([contender.train_step(batch) for batch in data])


def compare(
    options: argparse.Namespace,
    everyone: Mapping[str, Contender],
    columns: Sequence[tuple[str, list[Batch]]],
) -> None:
    """Print everyone's rates in each column, a kind of step on batches, and of the first's."""
    series = [measure_kind(everyone, kind, data, options) for kind, data in columns]
    first = next(iter(everyone))
    for name in everyone:
        row(name, *(f"{own[name].rate:.1f} ({ratio(own[name], own[first])})" for own in series))


def optimizers(options: argparse.Namespace) -> None:
    table("Training, M ids/s (times Adagrad's rate [95 %])", "optimizer", *PATTERNS)
    everyone = {
        str(settings["name"]): Persia(sizes(options.quick), options.threads, settings)
        for settings in (ADAGRAD, SGD, {"name": "adam", "lr": LR})
    }
    data = [("train", batches(each, options.quick, NUM_BATCHES)) for each in PATTERNS]
    compare(options, everyone, data)


def kernels(options: argparse.Namespace) -> None:
    """The same rows and state, and the same formula."""
    table("Training, M ids/s (times the built-in's rate [95 %])", "Adagrad", *PATTERNS)
    _, name = kernel_library.load_sources("kernels", FOLDER / "adagrad.c", None)
    in_c = {**ADAGRAD, "name": name}
    everyone = {
        "built in": Persia(sizes(options.quick), options.threads),
        "in C": Persia(sizes(options.quick), options.threads, in_c),
        "in C, no guard": Persia(
            sizes(options.quick), options.threads, {**in_c, "guard": False}
        ),
    }
    data = [("train", batches(each, options.quick, NUM_BATCHES)) for each in PATTERNS]
    compare(options, everyone, data)


def dtypes(options: argparse.Namespace) -> None:
    """Rows of two-byte values beside f32, on cold ids."""
    data = batches("cold", options.quick, NUM_BATCHES)
    for settings in (SGD, ADAGRAD):
        title = f"{settings['name']}, cold ids, M ids/s (times float32's rate [95 %])"
        table(title, "rows", "training", "evaluation")
        everyone = {}
        for dtype in DTYPES:
            one = Persia(sizes(options.quick), options.threads, settings, dtype=dtype)
            stats = one.stats()
            everyone[f"{dtype}, {stats['bytes'] / stats['rows']:.1f} B a row"] = one
        compare(options, everyone, [("train", data), ("evaluate", data)])
        del everyone, one  # before the next ones


def renewed(
    persia: Persia, data: list[Batch], of_distinct: bool = False
) -> Callable[[], Iterator[Step]]:
    """Steps on batches of which a part of the ids was never seen before."""
    rng = np.random.default_rng(0)

    def steps() -> Iterator[Step]:
        for batch in (data[-1], *data):
            yield persia.train_step(fresh(batch, rng, next(UNSEEN), NEW, of_distinct))

    return steps


def eviction(options: argparse.Namespace) -> None:
    """At full capacity every new row takes the place of one that is evicted."""
    table(
        "Training with 10 % new ids at full capacity, M ids/s",
        *("new", "no new ids", "growing", "evicting"),
        *("evicting of no new ids [95 %]", "evicting of growing [95 %]"),
    )
    table_sizes = sizes(options.quick)
    data = batches("single", options.quick, NUM_BATCHES)
    steady = Persia(table_sizes, options.threads)
    full = Persia(table_sizes, options.threads, capacity=sum(table_sizes))
    for of_distinct in (True, False):
        steps: dict[str, Callable[[], Iterable[Step]]] = {
            "no new ids": training(steady, data),
            "growing": renewed(steady, data, of_distinct),
            "evicting": renewed(full, data, of_distinct),
        }
        series = measure(steps, num_ids(data), options)
        new = "of distinct ids" if of_distinct else "of all ids"
        ratios = (ratio(series["evicting"], series[name]) for name in ("no new ids", "growing"))
        row(new, *(f"{own.rate:.1f}" for own in series.values()), *ratios)

    if full.num_rows > sum(table_sizes) or steady.num_rows <= sum(table_sizes):
        raise RuntimeError("expected one table to grow and the other not to")


def inputs(options: argparse.Namespace) -> None:
    table(
        "Building one feature of 4096 samples", "input", "M ids/s", "of FeatureBatch.from_csr"
    )
    batch = batches("multi", True, 1)[0]
    ids = batch.features[0]
    offsets = ids.offsets if ids.offsets is not None else np.zeros(0, np.int64)
    lists = [array.copy() for array in np.split(ids.values, offsets[1:-1])]
    single = ids.values[:BATCH]
    makers: dict[str, Step] = {
        "FeatureBatch.from_csr": lambda: FeatureBatch.from_csr("f", ids.values, offsets),
        "IDTypeFeature.from_csr": lambda: IDTypeFeature.from_csr("f", ids.values, offsets),
        "IDTypeFeature of 4096 arrays": lambda: IDTypeFeature("f", lists),
        "FeatureBatch.from_single": lambda: FeatureBatch.from_single("f", single),
    }
    repeat = 20
    # A unit is a feature here, because not all have as many ids.
    steps = {name: again([make] * repeat) for name, make in makers.items()}
    series = measure(steps, repeat, options)
    for name, own in series.items():
        num_ids_each = BATCH if "single" in name else len(ids.values)
        own.rates[:] = [rate * num_ids_each for rate in own.rates]
        row(name, f"{own.rate:.1f}", ratio(own, series["FeatureBatch.from_csr"]))


def rows(options: argparse.Namespace) -> None:
    """One feature, ids uniform over it."""
    table(
        "A batch of 106,496 uniform ids of one feature, training, M ids/s",
        *("rows", "PERSIA", "ceiling", "PERSIA of the ceiling [95 %]"),
    )
    most = 640_000 if options.quick else 64_000_000
    for num_rows in (most // 64, most // 16, most // 4, most):
        data = [uniform(num_rows, num_rows, seed) for seed in range(NUM_BATCHES)]
        everyone: dict[str, Contender] = {"persia": Persia([num_rows], options.threads)}
        # 170 bytes a row each; both at once up to here.
        if compiler() is not None and num_rows <= 40_000_000:
            everyone["ceiling"] = Ceiling([num_rows], options.threads)
        series = measure_kind(everyone, "train", data, options)
        persia, ceiling = series["persia"], series.get("ceiling")
        cells: tuple[object, ...] = ("-", "-")
        if ceiling is not None:
            cells = (f"{ceiling.rate:.1f}", ratio(persia, ceiling))
        row(f"{num_rows:,}", f"{persia.rate:.1f}", *cells)
        del everyone  # before the next, larger ones


def distinct(options: argparse.Namespace) -> None:
    table(
        "A batch of 106,496 ids of one feature, training",
        *("distinct ids", "us a batch", "times as many ids as above", "times as long [95 %]"),
    )
    num_rows = 100_000 if options.quick else 10_000_000
    persia = Persia([num_rows], options.threads)
    spans = (1000, 4000, 16_000, 64_000, num_rows)
    data = [[uniform(num_rows, span, seed) for seed in range(NUM_BATCHES)] for span in spans]
    steps = {str(span): training(persia, own) for span, own in zip(spans, data, strict=True)}
    series = measure(steps, num_ids(data[0]), options)
    counts = [np.mean([len(np.unique(batch.merged_rows)) for batch in own]) for own in data]
    grown: tuple[object, ...] = ("-", "-")
    for at, own in enumerate(series.values()):
        if at > 0:
            above = series[str(spans[at - 1])]
            grown = (f"{counts[at] / counts[at - 1]:.2f}", ratio(above, own))
        row(f"{counts[at]:,.0f}", f"{num_ids(data[0]) / NUM_BATCHES / own.rate:.0f}", *grown)


def slice_of(lookups: list[Step], steps: Iterator[Step]) -> tuple[list[float], float]:
    """Return the seconds of LOOKUPS lookups, and steps a second beside them."""
    is_over = threading.Event()
    done: list[float] = []  # when each step ended
    seconds = []

    def train() -> None:
        for step in steps:
            if is_over.is_set():
                return
            step()
            done.append(time.perf_counter())

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        begin = time.perf_counter()
        for lookup in itertools.islice(itertools.cycle(lookups), LOOKUPS):
            start = time.perf_counter()
            lookup()
            seconds.append(time.perf_counter() - start)
        end = time.perf_counter()
        is_over.set()
        training.result(60)
    return seconds, sum(at < end for at in done) / (end - begin)


def p99(slices: list[list[float]]) -> float:
    return float(np.percentile(np.concatenate(slices), 99))


def p99_ratio(own: list[list[float]], other: list[list[float]]) -> Ratio:
    """Return p99 over p99; slices that were taken together are drawn together."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(0, len(own), len(own))
        ratios.append(p99([own[at] for at in drawn]) / p99([other[at] for at in drawn]))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(p99(own) / p99(other), float(low), float(high))


def forever(make: Callable[[], Iterable[Step]]) -> Iterator[Step]:
    while True:
        yield from make()


def latency(options: argparse.Namespace) -> None:
    """Time lookups in slices, each while another thread of the process

    idle       does nothing
    trains     trains batches whose ids have rows
    grows      trains batches of which 10 % of the ids are new, below capacity
    evicts     does so at full capacity, so that each new row takes an old one's place

    Slices alternate. A p99 is over all slices of a kind; its ratio's interval is by the
    bootstrap over slices. What the threads take from each other (a core, the GIL, memory) is in
    `trains`; what growth and eviction add to it is the last column.
    """
    table_sizes = sizes(options.quick)
    data = batches("single", options.quick, NUM_BATCHES)
    roomy = Persia(table_sizes, options.threads)
    full = Persia(table_sizes, options.threads, capacity=sum(table_sizes))
    loads: dict[str, tuple[Persia, Iterator[Step]]] = {
        "idle": (roomy, iter(())),
        "trains": (roomy, forever(training(roomy, data))),
        "grows": (roomy, forever(renewed(roomy, data))),
        "evicts": (full, forever(renewed(full, data))),
    }
    slices: dict[str, list[list[float]]] = {name: [] for name in loads}
    rates: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(options.pairs + 1):
        for name, (persia, steps) in loads.items():
            seconds, rate = slice_of([persia.evaluate_step(batch) for batch in data], steps)
            if number > 0:  # the first only warms
                slices[name].append(seconds)
                rates[name].append(rate)
    table(
        f"A lookup of 4096 samples, {options.pairs * LOOKUPS} of each, ms",
        *("beside it", "steps/s", "p50", "p99", "p99 of idle [95 %]", "p99 of trains [95 %]"),
    )
    for name, own in slices.items():
        p50 = np.percentile(np.concatenate(own), 50) * 1e3
        times = (f"{np.median(rates[name]):.0f}", f"{p50:.2f}", f"{p99(own) * 1e3:.2f}")
        row(name, *times, *(p99_ratio(own, slices[base]) for base in ("idle", "trains")))


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    case.__name__: case
    for case in (optimizers, kernels, dtypes, eviction, inputs, rows, distinct, latency)
}


def main() -> None:
    options = parser(__doc__, 20, cpu_time=True)
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    if not set(args.names) <= CASES.keys():
        options.error(f"expected of {', '.join(CASES)}, got {args.names}")
    pin_malloc()
    for name in args.names or CASES:
        CASES[name](args)


if __name__ == "__main__":
    main()
