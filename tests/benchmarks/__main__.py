"""PERSIA and its peers on one workload, interleaved in one run.

    python -m tests.benchmarks [--quick] [--threads 1 2] [--only NAME ...] [--json FILE]
    python -m tests.benchmarks --wire [--quick] [--json FILE]

Prints Markdown tables: million ids per second, one figure for each number of threads, and in
brackets how many times torch's rate that is. Both are medians over repetitions; a ratio is
taken within a repetition, where both met the same load. Then page faults a step (the worst
cell of the row) and resident bytes per row; with --quick those are mostly code, not rows.
The second form asks how far calls are from bare pyzmq instead; see wire.py.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from persia._core import cpu
from tests.benchmarks.contenders import Persia, TorchMerged
from tests.benchmarks.memory import OPTIMIZERS, in_fresh_process, resident
from tests.benchmarks.peers import INSTALL_PEERS, is_installed, peers
from tests.benchmarks.wire import TRANSPORTS, wire
from tests.benchmarks.workload import PATTERNS, Batch, Contender, Step, batches, sizes

PERSIA = "PERSIA, exact Adagrad"
TORCH = "torch EmbeddingBag + Adagrad, merged"
KINDS = {
    "train": "Training step: lookup, pooling, update",
    "evaluate": "Evaluation: lookup, pooling",
}
# glibc's mallopt: without these, some contenders give their big buffers back after each batch
# and pay for the pages again. Alike for all, and the faults are counted.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30


@dataclass(frozen=True)
class Cell:
    """One contender on one pattern; medians over the repetitions."""

    rate: float  # million ids a second
    to_torch: float
    faults: float  # a step


def libc_call(name: str, *arguments: int) -> bool:
    """Call a function of the C library; returns whether it is there and returned 1."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function is not None and function(*arguments) == 1


def pin_malloc() -> bool:
    """Make malloc keep freed memory; returns whether this C library can."""
    options = (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)
    return all(libc_call("mallopt", option, KEEP_BYTES) for option in options)


def settled() -> int:
    """Return the resident bytes of this process without what malloc keeps for later."""
    gc.collect()
    libc_call("malloc_trim", 0)
    return resident()


def build(
    quick: bool, threads: int, only: list[str], warm: Batch
) -> tuple[dict[str, Contender], dict[str, float]]:
    """Return the contenders by name, filled with rows, and resident bytes per row of each."""
    makers: dict[str, Callable[[], Contender]] = {
        PERSIA: lambda: Persia(quick, threads),
        TORCH: lambda: TorchMerged(quick),
        **peers(quick),
    }
    everyone, per_row = {}, {}
    for name, make in makers.items():
        if name == TORCH or not only or any(word.lower() in name.lower() for word in only):
            before = settled()
            everyone[name] = make()
            # Optimizers make their state in the first step.
            everyone[name].train_step(warm)()
            per_row[name] = (settled() - before) / sum(sizes(quick))
    return everyone, per_row


def run(steps: list[Step]) -> tuple[float, float]:
    """Return seconds and page faults of the steps.

    An untimed one goes before: it finds the caches as the contender before has left them, and
    that one's threads still looking for work.
    """
    steps[-1]()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    for step in steps:
        step()
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def measure(
    everyone: dict[str, Contender], kind: str, data: list[Batch], times: int
) -> dict[str, Cell]:
    """Measure one column: all contenders one after another, ``times`` over.

    Each repetition starts with another contender, so that none always follows the same one.
    """
    num_ids = sum(batch.num_ids for batch in data)
    steps = {
        name: [
            contender.train_step(batch) if kind == "train" else contender.evaluate_step(batch)
            for batch in data
        ]
        for name, contender in everyone.items()
    }
    names = list(steps)
    rates: dict[str, list[float]] = {name: [] for name in names}
    faults: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        run(steps[name])  # buffers grow to their size
    for repetition in range(times):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            seconds, faulted = run(steps[name])
            rates[name].append(num_ids / seconds / 1e6)
            faults[name].append(faulted / len(data))
    return {
        name: Cell(
            rate=statistics.median(rates[name]),
            to_torch=statistics.median(np.divide(rates[name], rates[TORCH]).tolist()),
            faults=statistics.median(faults[name]),
        )
        for name in names
    }


def speed(
    quick: bool, thread_counts: list[int], only: list[str], times: int
) -> list[dict[str, object]]:
    """Measure every contender with each number of threads and print a table of each kind."""
    data = {pattern: batches(pattern, quick, 4 if quick else 8) for pattern in PATTERNS}
    cells: dict[tuple[str, int, str], dict[str, Cell]] = {}
    bytes_per_row: dict[str, float] = {}
    ids: dict[str, str] = {}
    for threads in thread_counts:
        torch.set_num_threads(threads)
        everyone, per_row = build(quick, threads, only, data["multi"][0])
        bytes_per_row = bytes_per_row or per_row  # later ones may reuse what earlier ones freed
        ids = {name: contender.ids for name, contender in everyone.items()}
        for kind in KINDS:
            for pattern in PATTERNS:
                print(f"measuring {kind}, {pattern}, {threads} thread(s)", file=sys.stderr)
                column = measure(everyone, kind, data[pattern], times)
                cells[kind, threads, pattern] = column
        del everyone

    threads_text = " / ".join(str(threads) for threads in thread_counts)
    for kind, title in KINDS.items():
        print(f"\n{title}; {threads_text} thread(s), M ids/s (times torch)\n")
        print(f"| | ids | {' | '.join(PATTERNS)} | faults a step | B/row |")
        print("|---|---|" + "---|" * len(PATTERNS) + "---|---|")
        for name in ids:
            row = [name, ids[name]]
            for pattern in PATTERNS:
                own = [cells[kind, threads, pattern][name] for threads in thread_counts]
                rates = " / ".join(f"{cell.rate:.1f}" for cell in own)
                ratios = " / ".join(f"{cell.to_torch:.2f}" for cell in own)
                row.append(f"{rates} ({ratios})")
            worst = max(column[name].faults for at, column in cells.items() if at[0] == kind)
            row += [f"{worst:.0f}", f"{bytes_per_row[name]:.0f}"]
            print(f"| {' | '.join(row)} |")
    return [
        {
            "contender": name,
            "kind": kind,
            "threads": threads,
            "pattern": pattern,
            "bytes_per_row": bytes_per_row[name],
            **asdict(cell),
        }
        for (kind, threads, pattern), column in cells.items()
        for name, cell in column.items()
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
        "--only", nargs="+", default=[], help="words in the names to measure; torch always is"
    )
    parser.add_argument("--repetitions", type=int, help="default: 7, or 3 with --quick")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--wire", action="store_true", help="the wire, and nothing else")
    args = parser.parse_args()

    if args.wire:
        cells = wire(args.quick, [*TRANSPORTS], args.repetitions or (3 if args.quick else 9))
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")
        return
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
    results = {
        "conditions": conditions,
        "memory": memory(args.quick),
        "speed": speed(
            args.quick,
            args.threads or ([1] if args.quick else [1, 2]),
            args.only,
            args.repetitions or (3 if args.quick else 7),
        ),
    }
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
