"""How many instructions the sparse path takes, against what was committed.

    python -m tests.benchmarks.instructions [--update | --caches]

Times on a shared machine say nothing about 3 %; instructions under callgrind are the same from
run to run. One process under valgrind trains a small table (1 % of the workload's rows) and
callgrind counts each part on its own; interpreter and numpy are counted too, they are part of a
step. More than TOLERANCE above the committed count fails. Less is said, so that --update can
keep it.

Counts belong to an architecture, a compiler and a Python; of another one they are only
reported. The kernels' variant is pinned as well, because valgrind knows no AVX-512.

--caches prints what an id costs on all rows of the workload instead, with the caches of an
Ice Lake server simulated: lines that were in no cache when they were read or written, and
branches. Prefetches are not simulated: a line that was prefetched counts as a miss.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import native
from tests.support.processes import run

BASELINE = Path(__file__).with_name("instructions.json")
SHIM = Path(__file__).with_name("callgrind.c")
TOLERANCE = 0.03
WIDEST = "avx2"  # that valgrind knows
DEADLINE_S = 900
# Bytes, ways and bytes of a line. LL is the third level; callgrind simulates two.
CACHES = ("--I1=32768,8,64", "--D1=49152,12,64", "--LL=50331648,12,64")
COLUMNS = {
    "instructions": ("Ir",),
    "D1 misses": ("D1mr", "D1mw"),
    "LL misses": ("DLmr", "DLmw"),
    "branches": ("Bc", "Bi"),
    "mispredicted": ("Bcm", "Bim"),
}
# Nothing that could differ from run to run: no hash seeds, no threads of numpy's.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Part:
    """What one part took; the events by callgrind's names."""

    num_ids: int
    events: dict[str, int]


def parts(quick: bool) -> Iterator[tuple[str, int]]:
    """Yield the kernels' variant, and then the name and ids of each part that has run."""
    # Imported here: the process that starts valgrind needs none of it.
    import numpy as np

    from persia._core.base import cpu
    from tests.benchmarks.contenders import Persia
    from tests.benchmarks.workload import PATTERNS, Step, batches, raw_ids, sizes

    shim = native.load(SHIM)
    cpu.select(WIDEST if WIDEST in cpu.available() else "baseline")
    yield cpu.selected(), 0

    def counted(name: str, warm: Sequence[Step], steps: Sequence[Step]) -> str:
        """Run all, the second ones between two ends."""
        shim.part_begin()  # here too: simulated caches begin empty
        for step in warm:
            step()
        gc.collect()
        gc.disable()
        shim.part_begin()
        for step in steps:
            step()
        shim.part_end(name.encode())
        gc.enable()
        return name

    num_warm, num_counted = (1, 1) if quick else (2, 3)
    num_rows = sum(sizes(quick))
    persia = Persia(sizes(quick), 1)
    for pattern in PATTERNS:
        data = batches(pattern, quick, num_warm + num_counted)
        num_ids = sum(batch.num_ids for batch in data[num_warm:])
        for kind, step in (("train", persia.train_step), ("evaluate", persia.evaluate_step)):
            steps = [step(batch) for batch in data]
            name = counted(f"{kind} {pattern}", steps[:num_warm], steps[num_warm:])
            yield name, num_ids
    if not quick:  # so few inserts would find the third level empty
        return
    full = Persia(sizes(quick), 1, capacity=num_rows // 2)
    new = [raw_ids(np.arange(num_rows * at, num_rows * at + 10_000)) for at in (1, 2)]
    first, last = (functools.partial(full.insert, 0, ids) for ids in new)
    yield counted("insert and evict", [first], [last]), len(new[1])


def measure(caches: bool) -> tuple[str, dict[str, Part]]:
    """Return the kernels' variant and what each part took, counted in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        if caches:
            command += ["--cache-sim=yes", "--branch-sim=yes", *CACHES]
        command += [f"--callgrind-out-file={place}/out", sys.executable, "-m"]
        command += ["tests.benchmarks.instructions", "--child"]
        command += ["--caches"] if caches else []
        done = run(*command, env=os.environ | ENVIRONMENT, timeout_s=DEADLINE_S)
        if done.returncode != 0:
            raise RuntimeError(f"valgrind ended with {done.returncode}:\n{done.stderr[-2000:]}")
        counts = {}
        for file in Path(place).glob("out.*"):
            text = file.read_text()
            name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
            events = re.search(r"^events: (.*)$", text, re.M)
            count = re.search(r"^(?:summary|totals): (.*)$", text, re.M)
            if name is not None and events is not None and count is not None:
                numbers = map(int, count[1].split())
                counts[name[1]] = dict(zip(events[1].split(), numbers, strict=True))
    (level, _), *ran = (line.split("\t") for line in done.stdout.splitlines())
    return level, {name: Part(int(num_ids), counts[name]) for name, num_ids in ran}


def setting(level: str) -> str:
    """Return what a count belongs to."""
    command = native.compiler() or ["cc"]
    version = run(*command, "--version").stdout.split("\n")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{platform.machine()} {level}, {version}, python {python}"


def missing() -> str | None:
    """Return why nothing can be counted here, or None."""
    if shutil.which("valgrind") is None:
        return "no valgrind here (on Debian or Ubuntu: sudo apt install valgrind)"
    if native.compiler() is None:
        return "no C compiler here"
    try:
        native.load(SHIM)
    except subprocess.CalledProcessError:
        return "valgrind is here, its header <valgrind/callgrind.h> is not"
    return None


def compare(counts: dict[str, int], known: dict[str, int]) -> bool:
    """Print a table; returns whether no part takes more than it may."""
    print("| part | M instructions | committed | change |")
    print("|---|---|---|---|")
    is_good = True
    for name, count in counts.items():
        committed, verdict = "-", "-"
        if name in known:
            change = count / known[name] - 1
            committed, verdict = f"{known[name] / 1e6:.2f}", f"{change:+.1%}"
            if change > TOLERANCE:
                verdict += f" above {TOLERANCE:.0%}"
                is_good = False
        print(f"| {name} | {count / 1e6:.2f} | {committed} | {verdict} |")
    return is_good


def per_id(level: str, ran: dict[str, Part]) -> None:
    """Print a table of what an id of each part took."""
    print(f"Per id, kernels of {level}; {' '.join(CACHES)}\n")
    print(f"| part | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name, part in ran.items():
        sums = [sum(part.events[event] for event in each) for each in COLUMNS.values()]
        first, *rest = (each / part.num_ids for each in sums)
        print(f"| {name} | {first:.0f} | {' | '.join(f'{each:.2f}' for each in rest)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--update", action="store_true", help="commit to what is counted now")
    chosen.add_argument(
        "--caches", action="store_true", help="misses and branches per id on all rows"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for name, num_ids in parts(quick=not args.caches):
            print(name, num_ids, sep="\t", flush=True)
        return 0
    reason = missing()
    if reason is not None:
        print(f"instructions: skipped, {reason}")
        return 0
    level, ran = measure(args.caches)
    if args.caches:
        per_id(level, ran)
        return 0
    counts = {name: part.events["Ir"] for name, part in ran.items()}
    where = setting(level)
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if args.update:
        baseline[where] = counts
        BASELINE.write_text(json.dumps(baseline, indent=2, sort_keys=True) + "\n")
    if where not in baseline:
        print(f"instructions: nothing committed for {where}: only reported")
    return 0 if compare(counts, baseline.get(where, {})) else 1


if __name__ == "__main__":
    sys.exit(main())
