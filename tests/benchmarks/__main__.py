"""PERSIA and its peers on one workload, interleaved in one run.

    python -m tests.benchmarks [--quick] [--threads 1 2] [--json FILE]

Prints million ids per second (median of the repetitions), the ratio to torch in brackets, page
faults per step, and bytes per row.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.contenders import INSTALL_PEERS, Contender, TorchMerged, contenders
from tests.benchmarks.memory import in_fresh_process
from tests.benchmarks.workload import PATTERNS, batches, sizes

# glibc's mallopt: without these, some contenders give their big buffers back after each batch
# and pay for the pages again. Alike for all, and the faults are counted.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30


def pin_malloc() -> bool:
    """Make malloc keep freed memory; returns whether this C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, KEEP_BYTES) for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))


def measure(
    everyone: list[Contender], kind: str, pattern: str, quick: bool, repetitions: int
) -> dict[str, dict[str, float]]:
    """Return rate and faults by contender. Each repetition runs them one after another."""
    data = batches(pattern, quick, 4 if quick else 8)
    num_ids = sum(batch.num_ids for batch in data)
    rates: dict[str, list[float]] = {contender.name: [] for contender in everyone}
    faults: dict[str, list[float]] = {contender.name: [] for contender in everyone}
    for repetition in range(repetitions + 1):
        for contender in everyone:
            step = contender.train if kind == "train" else contender.evaluate
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter()
            for batch in data:
                step(batch)
            seconds = time.perf_counter() - start
            if repetition:  # the first warms caches and buffers
                after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                rates[contender.name].append(num_ids / seconds / 1e6)
                faults[contender.name].append((after - before) / len(data))
    return {
        name: {
            "rate": statistics.median(rates[name]),
            "faults": statistics.median(faults[name]),
        }
        for name in rates
    }


def speed(quick: bool, threads: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Measure every contender with each number of threads and print the tables."""
    results = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        everyone = contenders(quick, num_threads)
        for kind, title in (("train", "training step"), ("evaluate", "evaluation lookup")):
            print(f"\n{title}, {num_threads} thread(s), M ids/s (to torch; faults a step)")
            print(f"{'':38}{'ids':14}" + "".join(f"{pattern:>22}" for pattern in PATTERNS))
            measured = {
                pattern: measure(everyone, kind, pattern, quick, repetitions)
                for pattern in PATTERNS
            }
            for contender in everyone:
                line = f"{contender.name:38}{contender.ids:14}"
                for pattern in PATTERNS:
                    of = measured[pattern]
                    rate, torch_rate = of[contender.name]["rate"], of[TorchMerged.name]["rate"]
                    faults = of[contender.name]["faults"]
                    cell = f"{rate:.1f} ({rate / torch_rate:.2f}x; {faults:.0f})"
                    line += f"{cell:>22}"
                    results.append(
                        {
                            "contender": contender.name,
                            "kind": kind,
                            "threads": num_threads,
                            "pattern": pattern,
                            **of[contender.name],
                        }
                    )
                print(line, flush=True)
    return results


def memory(quick: bool) -> dict[str, Any]:
    """Measure bytes per row in fresh processes and print the table."""
    at, upto = (500_000, 1_000_000) if quick else (10_000_000, 20_000_000)
    results: dict[str, Any] = {}
    print(
        f"\nmemory, dim 16, bytes per row at {at:,} rows; worst from {upto // 4:,} to {upto:,}"
    )
    for what in ("adagrad", "sgd", "shared"):
        per_row = in_fresh_process(what, at)["bytes_per_row"]
        worst = in_fresh_process(what, upto)["worst_bytes_per_row"]
        results[what] = {"bytes_per_row": per_row, "worst_bytes_per_row": worst}
        print(f"{what:10} {per_row:6.1f}   worst {worst:6.1f}", flush=True)
    empty = in_fresh_process("empty", 0)
    results["empty"] = empty
    print(
        f"empty server, capacity 1e9: store {empty['store_bytes'] / 1e6:.1f} MB, "
        f"process {empty['process_bytes'] / 1e6:.1f} MB"
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 %% of the rows, for CI")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    args = parser.parse_args()

    pinned = pin_malloc()
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # said aloud, or torch warns
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, numpy "
        f"{np.__version__}, {platform.machine()}, {sum(sizes(args.quick)):,} rows of dim 16, "
        f"malloc {'pinned' if pinned else 'as it is'}"
    )
    if importlib.util.find_spec("fbgemm_gpu") is None:
        print(f"FBGEMM is not installed; to measure it too: {INSTALL_PEERS}")
    results = {
        "memory": memory(args.quick),
        "speed": speed(args.quick, args.threads, args.repetitions),
    }
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
