"""PERSIA, its peers and the ceiling on one workload, interleaved in one run.

    python -m tests.benchmarks [--quick] [--threads 1 2] [--only NAME ...] [--pairs 20]
                               [--kinds train evaluate] [--patterns single multi cold]
    python -m tests.benchmarks --only persia ceiling --threads 1      two minutes, all rows

Prints Markdown tables: million ids per second, one figure for each number of threads, and in
brackets how many times torch's rate that is and what part of the ceiling's; then page faults a
step (the worst cell of the row) and resident bytes per row; with --quick those are mostly code,
not rows. The last table is PERSIA's part of the ceiling with its interval. How ratios are taken
is in interleaved.py, what the ceiling is in ceiling.c.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia._core.base import cpu
from tests.benchmarks.ceiling import Ceiling
from tests.benchmarks.contenders import ROWWISE, Persia
from tests.benchmarks.interleaved import (
    Ratio,
    measure_kind,
    parser,
    pin_malloc,
    ratio,
    row,
    settled,
    table,
)
from tests.benchmarks.memory import OPTIMIZERS, in_fresh_process
from tests.benchmarks.native import compiler
from tests.benchmarks.peers import TorchMerged, is_installed, peers
from tests.benchmarks.workload import PATTERNS, Batch, Contender, batches, sizes

PERSIA = "PERSIA, exact Adagrad"
PERSIA_ROWWISE = "PERSIA, row-wise Adagrad"
TORCH = "torch EmbeddingBag + Adagrad, merged"
CEILING = "ceiling (C), exact Adagrad"
KINDS = {
    "train": "Training step: lookup, pooling, update",
    "evaluate": "Evaluation: lookup, pooling",
}


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every contender with each number of threads; medians over the repetitions."""
    count = 4 if args.quick else 8
    data = {pattern: batches(pattern, args.quick, count) for pattern in PATTERNS}
    cells = []
    per_row: dict[str, float] = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        everyone, resident = build(args.quick, threads, args.only, data["multi"][0])
        per_row = resident | per_row  # a later one may reuse what an earlier one freed
        for kind, pattern in itertools.product(args.kinds, args.patterns):
            print(f"measuring {kind}, {pattern}, {threads} thread(s)", file=sys.stderr)
            series = measure_kind(everyone, kind, data[pattern], args)
            for name, own in series.items():
                cell = {"contender": name, "kind": kind, "threads": threads, "pattern": pattern}
                cell |= {"ids": everyone[name].ids, "bytes_per_row": per_row[name]}
                cell |= {"rate": own.rate, "faults": own.fault}  # million ids a second; a step
                for key, other in (("to_torch", TORCH), ("to_ceiling", CEILING)):
                    cell[key] = ratio(own, series[other]) if other in series else None
                cells.append(cell)
        del everyone
    return cells


def report(args: argparse.Namespace, cells: list[dict[str, Any]]) -> None:
    """Print a table of each kind, and one of PERSIA beside the ceiling."""

    def of(name: str, kind: str, pattern: str, key: str) -> list[Any]:
        wanted = (name, kind, pattern)
        found = (x for x in cells if (x["contender"], x["kind"], x["pattern"]) == wanted)
        return [cell[key] for cell in found]

    names = list(dict.fromkeys(cell["contender"] for cell in cells))
    threads_text = " / ".join(map(str, args.threads))
    for kind in args.kinds:
        title = (
            f"{KINDS[kind]}; {threads_text} thread(s), M ids/s (times torch; of the ceiling)"
        )
        table(title, "", "ids", *args.patterns, "faults a step", "B/row")
        for name in names:
            columns = []
            faults: list[float] = []
            for pattern in args.patterns:
                rates = " / ".join(f"{rate:.1f}" for rate in of(name, kind, pattern, "rate"))
                to_torch = " / ".join(map(medians, of(name, kind, pattern, "to_torch")))
                to_ceiling = " / ".join(map(medians, of(name, kind, pattern, "to_ceiling")))
                columns.append(f"{rates} ({to_torch}; {to_ceiling})")
                faults += of(name, kind, pattern, "faults")
            ids = of(name, kind, args.patterns[0], "ids")[0]
            per_row = of(name, kind, args.patterns[0], "bytes_per_row")[0]
            row(name, ids, *columns, f"{max(faults):.0f}", f"{per_row:.0f}")
    if {PERSIA, CEILING} <= set(names):
        title = f"PERSIA of the ceiling, median of {args.pairs} pairs [95 %]"
        table(title, "", *args.patterns)
        for kind, (place, threads) in itertools.product(args.kinds, enumerate(args.threads)):
            own = [of(PERSIA, kind, pattern, "to_ceiling")[place] for pattern in args.patterns]
            row(f"{kind}, {threads} thread(s)", *own)


def medians(ratio: Ratio | None) -> str:
    """Return what a cell says of a ratio."""
    return "-" if ratio is None else f"{ratio.median:.2f}"


def build(
    quick: bool, threads: int, only: list[str], warm: Batch
) -> tuple[dict[str, Contender], dict[str, float]]:
    """Return the contenders by name, filled with rows, and resident bytes per row of each."""
    makers: dict[str, Callable[[], Contender]] = {
        PERSIA: lambda: Persia(sizes(quick), threads),
        PERSIA_ROWWISE: lambda: Persia(sizes(quick), threads, ROWWISE),
        TORCH: lambda: TorchMerged(quick),
        **peers(quick),
    }
    if compiler() is not None:
        makers[CEILING] = lambda: Ceiling(sizes(quick), threads)
    everyone, per_row = {}, {}
    for name, make in makers.items():
        if not only or any(word.lower() in name.lower() for word in only):
            before = settled()
            everyone[name] = make()
            # Optimizers make their state in the first step.
            everyone[name].train_step(warm)()
            per_row[name] = (settled() - before) / sum(sizes(quick))
    return everyone, per_row


def memory(quick: bool) -> dict[str, dict[str, float]]:
    """Measure a store's bytes per row in fresh processes and print the table."""
    at = 500_000 if quick else 10_000_000
    results = {what: in_fresh_process(what, at) for what in OPTIMIZERS}
    table(
        "Resident bytes per row of PERSIA's store, a process each",
        *("optimizer", f"at {at:,} rows", f"worst from {at // 2:,} to {2 * at:,}"),
    )
    for what, per_row in results.items():
        row(what, *(f"{per_row[key]:.1f}" for key in ("bytes_per_row", "worst_bytes_per_row")))
    results["empty"] = empty = in_fresh_process("empty", 0)
    print(
        f"\nEmpty store of capacity 1e9: {empty['store_bytes'] / 1e6:.1f} MB, its process "
        f"{empty['process_bytes'] / 1e6:.1f} MB."
    )
    return results


def conditions(quick: bool) -> dict[str, object]:
    """Return what the numbers depend on, and say what is not measured here."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    for module, packages in (
        ("fbgemm_gpu", ("fbgemm-gpu-cpu",)),
        ("torchrec", ("torchrec",)),
        ("tensorflow_recommenders_addons", ("tensorflow", "tensorflow-recommenders-addons")),
    ):
        if is_installed(module):
            versions |= {package: importlib.metadata.version(package) for package in packages}
        else:
            print(f"{module} is not installed; how: docs/benchmarks/README.md")
    if compiler() is None:
        print("no C compiler here: the ceiling is not measured")
    return {
        "versions": versions,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "isa": cpu.selected(),
        "load_at_start": os.getloadavg()[0],
        "rows": sum(sizes(quick)),
        "malloc_pinned": pin_malloc(),
    }


def main() -> None:
    options = parser(__doc__, 0, cpu_time=True)
    options.add_argument(
        "--threads", type=int, nargs="+", help="default: 1 and 2, or 1 with --quick"
    )
    options.add_argument(
        "--only", nargs="+", default=[], help="words in the names to measure; no memory then"
    )
    options.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    options.add_argument("--json", type=Path, help="write the results to this file as well")
    args = options.parse_args()
    if args.clock is time.process_time and args.threads != [1]:
        options.error("--cpu-time adds the threads up: use it with --threads 1")

    args.threads = args.threads or ([1] if args.quick else [1, 2])
    args.pairs = args.pairs or (3 if args.quick else 20)
    # Said aloud, or torch warns.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    here = conditions(args.quick)
    print(here)
    results: dict[str, Any] = {"conditions": here}
    results["memory"] = {} if args.only else memory(args.quick)
    results["speed"] = cells = speed(args)
    report(args, cells)
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2, default=asdict) + "\n")


if __name__ == "__main__":
    main()
