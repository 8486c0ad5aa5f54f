"""PERSIA, its peers and the ceiling on one workload, interleaved in one run.

    python -m tests.benchmarks [--quick] [--threads 1 2] [--only NAME ...] [--pairs 20]
                               [--kinds train evaluate] [--patterns single multi cold]
    python -m tests.benchmarks --only persia ceiling --threads 1      two minutes, all rows
    python -m tests.benchmarks --wire [--quick] [--json FILE]

Prints Markdown tables: million ids per second, one figure for each number of threads, and in
brackets how many times torch's rate that is and what part of the ceiling's; then page faults a
step (the worst cell of the row) and resident bytes per row; with --quick those are mostly code,
not rows. The last table is PERSIA's part of the ceiling with its interval. How ratios are taken
is in interleaved.py, what the ceiling is in ceiling.c. The last form asks how far calls are
from bare pyzmq instead; see wire.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from persia._core.base import cpu
from tests.benchmarks.ceiling import Ceiling
from tests.benchmarks.contenders import Persia
from tests.benchmarks.interleaved import (
    Clock,
    Ratio,
    Series,
    again,
    measure,
    pin_malloc,
    ratio,
    settled,
)
from tests.benchmarks.memory import OPTIMIZERS, in_fresh_process
from tests.benchmarks.native import compiler
from tests.benchmarks.peers import INSTALL_PEERS, TorchMerged, is_installed, peers
from tests.benchmarks.tfra import INSTALL_TFRA
from tests.benchmarks.wire import TRANSPORTS, wire
from tests.benchmarks.workload import PATTERNS, Batch, Contender, batches, sizes

PERSIA = "PERSIA, exact Adagrad"
TORCH = "torch EmbeddingBag + Adagrad, merged"
CEILING = "ceiling (C), exact Adagrad"
KINDS = {
    "train": "Training step: lookup, pooling, update",
    "evaluate": "Evaluation: lookup, pooling",
}


@dataclass(frozen=True)
class Cell:
    """One contender on one pattern; medians over the repetitions."""

    rate: float  # million ids a second
    faults: float  # a step
    to_torch: Ratio | None  # None where torch was not measured
    to_ceiling: Ratio | None


def build(
    quick: bool, threads: int, only: list[str], warm: Batch
) -> tuple[dict[str, Contender], dict[str, float]]:
    """Return the contenders by name, filled with rows, and resident bytes per row of each."""
    makers: dict[str, Callable[[], Contender]] = {
        PERSIA: lambda: Persia(sizes(quick), threads),
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


def column(
    everyone: dict[str, Contender], kind: str, data: list[Batch], pairs: int, clock: Clock
) -> dict[str, Cell]:
    """Measure all contenders on one kind of step and one pattern."""
    steps = {
        name: [
            contender.train_step(batch) if kind == "train" else contender.evaluate_step(batch)
            for batch in data
        ]
        for name, contender in everyone.items()
    }
    series = measure(
        {name: again(own) for name, own in steps.items()},
        sum(batch.num_ids for batch in data),
        pairs,
        clock,
    )

    def to(own: Series, reference: str) -> Ratio | None:
        return ratio(own, series[reference]) if reference in series else None

    return {
        name: Cell(own.rate, own.fault, to(own, TORCH), to(own, CEILING))
        for name, own in series.items()
    }


@dataclass(frozen=True)
class Plan:
    """What of the workload is measured."""

    quick: bool
    threads: list[int]
    only: list[str]
    kinds: list[str]
    patterns: list[str]
    pairs: int
    clock: Clock


@dataclass(frozen=True)
class Measured:
    """What ``speed`` found."""

    cells: dict[tuple[str, int, str], dict[str, Cell]]  # by kind, threads, pattern; by name
    bytes_per_row: dict[str, float]
    ids: dict[str, str]  # which ids a contender takes


def speed(plan: Plan) -> Measured:
    """Measure every contender with each number of threads."""
    data = {
        pattern: batches(pattern, plan.quick, 4 if plan.quick else 8) for pattern in PATTERNS
    }
    found = Measured({}, {}, {})
    for threads in plan.threads:
        torch.set_num_threads(threads)
        everyone, per_row = build(plan.quick, threads, plan.only, data["multi"][0])
        for name, contender in everyone.items():
            # A later one may reuse what an earlier one freed.
            found.bytes_per_row.setdefault(name, per_row[name])
            found.ids[name] = contender.ids
        for kind in plan.kinds:
            for pattern in plan.patterns:
                print(f"measuring {kind}, {pattern}, {threads} thread(s)", file=sys.stderr)
                cells = column(everyone, kind, data[pattern], plan.pairs, plan.clock)
                found.cells[kind, threads, pattern] = cells
        del everyone, contender
    return found


def report(plan: Plan, found: Measured) -> None:
    """Print a table of each kind, and one of PERSIA beside the ceiling."""
    units = "M ids/s (times torch; of the ceiling)"
    threads_text = " / ".join(str(threads) for threads in plan.threads)
    for kind in plan.kinds:
        print(f"\n{KINDS[kind]}; {threads_text} thread(s), {units}\n")
        print(f"| | ids | {' | '.join(plan.patterns)} | faults a step | B/row |")
        print("|---|---|" + "---|" * len(plan.patterns) + "---|---|")
        for name in found.ids:
            row = [name, found.ids[name]]
            for pattern in plan.patterns:
                own = [found.cells[kind, threads, pattern][name] for threads in plan.threads]
                rates = " / ".join(f"{cell.rate:.1f}" for cell in own)
                to_torch = " / ".join(medians(cell.to_torch) for cell in own)
                to_ceiling = " / ".join(medians(cell.to_ceiling) for cell in own)
                row.append(f"{rates} ({to_torch}; {to_ceiling})")
            worst = max(
                column[name].faults for at, column in found.cells.items() if at[0] == kind
            )
            row += [f"{worst:.0f}", f"{found.bytes_per_row[name]:.0f}"]
            print(f"| {' | '.join(row)} |")
    if {PERSIA, CEILING} <= found.ids.keys():
        print(f"\nPERSIA of the ceiling, median of {plan.pairs} pairs [95 %]\n")
        print(f"| | {' | '.join(plan.patterns)} |")
        print("|---|" + "---|" * len(plan.patterns))
        for kind in plan.kinds:
            for threads in plan.threads:
                parts = [
                    str(found.cells[kind, threads, pattern][PERSIA].to_ceiling)
                    for pattern in plan.patterns
                ]
                print(f"| {kind}, {threads} thread(s) | {' | '.join(parts)} |")


def medians(ratio: Ratio | None) -> str:
    """Return what a cell says of a ratio."""
    return "-" if ratio is None else f"{ratio.median:.2f}"


def as_rows(found: Measured) -> list[dict[str, object]]:
    """Return the cells for a JSON file."""
    return [
        {
            "contender": name,
            "kind": kind,
            "threads": threads,
            "pattern": pattern,
            "bytes_per_row": found.bytes_per_row[name],
            **asdict(cell),
        }
        for (kind, threads, pattern), cells in found.cells.items()
        for name, cell in cells.items()
    ]


def memory(quick: bool) -> dict[str, dict[str, float]]:
    """Measure a store's bytes per row in fresh processes and print the table."""
    at = 500_000 if quick else 10_000_000
    results = {what: in_fresh_process(what, at) for what in OPTIMIZERS}
    results["empty"] = in_fresh_process("empty", 0)
    print("\nResident bytes per row of PERSIA's store, a process each\n")
    print(f"| optimizer | at {at:,} rows | worst from {at // 2:,} to {2 * at:,} |")
    print("|---|---|---|")
    for what in OPTIMIZERS:
        per_row = results[what]
        print(
            f"| {what} | {per_row['bytes_per_row']:.1f} | "
            f"{per_row['worst_bytes_per_row']:.1f} |"
        )
    empty = results["empty"]
    print(
        f"\nEmpty store of capacity 1e9: {empty['store_bytes'] / 1e6:.1f} MB, its process "
        f"{empty['process_bytes'] / 1e6:.1f} MB."
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 %% of the rows, for CI")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="default: 1 and 2, or 1 with --quick"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="words in the names to measure; no memory then"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--pairs", type=int, help="repetitions; default: 20, or 3 with --quick")
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine, 1 thread: not the clock"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--wire", action="store_true", help="the wire, and nothing else")
    args = parser.parse_args()
    if args.cpu_time and args.threads != [1]:
        parser.error("--cpu-time adds the threads up: use it with --threads 1")
    pairs = args.pairs or (3 if args.quick else 20)

    if args.wire:
        cells = wire(args.quick, [*TRANSPORTS], args.pairs or (3 if args.quick else 9))
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")
        return
    plan = Plan(
        args.quick,
        args.threads or ([1] if args.quick else [1, 2]),
        args.only,
        args.kinds,
        args.patterns,
        pairs,
        time.process_time if args.cpu_time else time.perf_counter,
    )
    pinned = pin_malloc()
    # Said aloud, or torch warns.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    for package in ("fbgemm-gpu-cpu", "torchrec"):
        if is_installed(package.replace("-cpu", "").replace("-", "_")):
            versions[package] = importlib.metadata.version(package)
        else:
            print(f"{package} is not installed; to measure it too: {INSTALL_PEERS}")
    if is_installed("tensorflow_recommenders_addons"):
        for package in ("tensorflow", "tensorflow-recommenders-addons"):
            versions[package] = importlib.metadata.version(package)
    else:
        print(f"TFRA is not installed; to measure it too: {INSTALL_TFRA}")
    conditions = {
        "versions": versions,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "isa": cpu.selected(),
        "load_at_start": os.getloadavg()[0],
        "rows": sum(sizes(args.quick)),
        "malloc_pinned": pinned,
    }
    print(f"{conditions}")
    if compiler() is None:
        print("no C compiler here: the ceiling is not measured")
    held = {} if args.only else memory(args.quick)
    found = speed(plan)
    report(plan, found)
    results = {"conditions": conditions, "memory": held, "speed": as_rows(found)}
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
