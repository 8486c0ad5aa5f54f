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

import importlib.metadata
import itertools
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
    again,
    measure,
    parser,
    pin_malloc,
    ratio,
    row,
    settled,
    table,
)
from tests.benchmarks.memory import OPTIMIZERS, in_fresh_process
from tests.benchmarks.native import compiler
from tests.benchmarks.peers import (
    INSTALL_PEERS,
    INSTALL_TFRA,
    TorchMerged,
    is_installed,
    peers,
)
from tests.benchmarks.wire import TRANSPORTS, wire
from tests.benchmarks.workload import PATTERNS, Batch, Contender, batches, sizes

PERSIA = "PERSIA, exact Adagrad"
TORCH = "torch EmbeddingBag + Adagrad, merged"
CEILING = "ceiling (C), exact Adagrad"
TFRA_PACKAGES = ("tensorflow", "tensorflow-recommenders-addons")
KINDS = {
    "train": "Training step: lookup, pooling, update",
    "evaluate": "Evaluation: lookup, pooling",
}


@dataclass(frozen=True)
class Cell:
    """One contender on one pattern; medians over the repetitions."""

    contender: str
    kind: str
    threads: int
    pattern: str
    rate: float  # million ids a second
    faults: float  # a step
    to_torch: Ratio | None  # None where torch was not measured
    to_ceiling: Ratio | None


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

    cells: list[Cell]
    bytes_per_row: dict[str, float]
    ids: dict[str, str]  # which ids a contender takes

    def of(self, contender: str, kind: str, pattern: str) -> list[Cell]:
        """Return a cell for each number of threads."""
        wanted = (contender, kind, pattern)
        return [x for x in self.cells if (x.contender, x.kind, x.pattern) == wanted]


def speed(plan: Plan) -> Measured:
    """Measure every contender with each number of threads."""
    data = {
        pattern: batches(pattern, plan.quick, 4 if plan.quick else 8) for pattern in PATTERNS
    }
    found = Measured([], {}, {})
    for threads in plan.threads:
        torch.set_num_threads(threads)
        everyone, per_row = build(plan.quick, threads, plan.only, data["multi"][0])
        for name, contender in everyone.items():
            # A later one may reuse what an earlier one freed.
            found.bytes_per_row.setdefault(name, per_row[name])
            found.ids[name] = contender.ids
        for kind, pattern in itertools.product(plan.kinds, plan.patterns):
            print(f"measuring {kind}, {pattern}, {threads} thread(s)", file=sys.stderr)
            steps = {
                name: again([getattr(one, f"{kind}_step")(batch) for batch in data[pattern]])
                for name, one in everyone.items()
            }
            num_ids = sum(batch.num_ids for batch in data[pattern])
            series = measure(steps, num_ids, plan.pairs, plan.clock)
            for name, own in series.items():
                to = [
                    ratio(own, series[other]) if other in series else None
                    for other in (TORCH, CEILING)
                ]
                cell = Cell(name, kind, threads, pattern, own.rate, own.fault, *to)
                found.cells.append(cell)
        del everyone, contender, steps
    return found


def report(plan: Plan, found: Measured) -> None:
    """Print a table of each kind, and one of PERSIA beside the ceiling."""
    units = "M ids/s (times torch; of the ceiling)"
    threads_text = " / ".join(str(threads) for threads in plan.threads)
    for kind in plan.kinds:
        title = f"{KINDS[kind]}; {threads_text} thread(s), {units}"
        table(title, "", "ids", *plan.patterns, "faults a step", "B/row")
        for name in found.ids:
            cells = [name, found.ids[name]]
            for pattern in plan.patterns:
                own = found.of(name, kind, pattern)
                rates = " / ".join(f"{cell.rate:.1f}" for cell in own)
                to_torch = " / ".join(medians(cell.to_torch) for cell in own)
                to_ceiling = " / ".join(medians(cell.to_ceiling) for cell in own)
                cells.append(f"{rates} ({to_torch}; {to_ceiling})")
            own = [cell for pattern in plan.patterns for cell in found.of(name, kind, pattern)]
            worst = max(cell.faults for cell in own)
            row(*cells, f"{worst:.0f}", f"{found.bytes_per_row[name]:.0f}")
    if {PERSIA, CEILING} <= found.ids.keys():
        title = f"PERSIA of the ceiling, median of {plan.pairs} pairs [95 %]"
        table(title, "", *plan.patterns)
        for kind, (place, threads) in itertools.product(plan.kinds, enumerate(plan.threads)):
            own = [found.of(PERSIA, kind, pattern)[place] for pattern in plan.patterns]
            row(f"{kind}, {threads} thread(s)", *(cell.to_ceiling for cell in own))


def medians(ratio: Ratio | None) -> str:
    """Return what a cell says of a ratio."""
    return "-" if ratio is None else f"{ratio.median:.2f}"


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
    for module, packages, install in (
        ("fbgemm_gpu", ("fbgemm-gpu-cpu",), INSTALL_PEERS),
        ("torchrec", ("torchrec",), INSTALL_PEERS),
        ("tensorflow_recommenders_addons", TFRA_PACKAGES, INSTALL_TFRA),
    ):
        if is_installed(module):
            versions |= {package: importlib.metadata.version(package) for package in packages}
        else:
            print(f"{module} is not installed; to measure it too: {install}")
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
    options.add_argument("--wire", action="store_true", help="the wire, and nothing else")
    args = options.parse_args()
    if args.clock is time.process_time and args.threads != [1]:
        options.error("--cpu-time adds the threads up: use it with --threads 1")

    results: object
    if args.wire:
        cells = wire(args.quick, [*TRANSPORTS], args.pairs or (3 if args.quick else 9))
        results = [asdict(cell) for cell in cells]
    else:
        threads = args.threads or ([1] if args.quick else [1, 2])
        pairs = args.pairs or (3 if args.quick else 20)
        wanted = (args.only, args.kinds, args.patterns)
        plan = Plan(args.quick, threads, *wanted, pairs, args.clock)
        # Said aloud, or torch warns.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        here = conditions(args.quick)
        print(here)
        held = {} if args.only else memory(args.quick)
        found = speed(plan)
        report(plan, found)
        print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")
        rows = [
            {"bytes_per_row": found.bytes_per_row[cell.contender], **asdict(cell)}
            for cell in found.cells
        ]
        results = {"conditions": here, "memory": held, "speed": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
