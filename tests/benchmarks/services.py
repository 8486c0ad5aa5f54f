"""Local mode against embedded mode on the same two cores: the whole step of a DLRM.

    python -m tests.benchmarks.services [--quick] [--pairs 5] [--threads 1 2] [--keys]

Runs alternate between the modes and the dense net alone, which is given its embeddings. In
local mode all four roles are processes that talk over ``ipc``. CPU time, user and system, is
what ``/proc`` says of all processes of a run at two marks of the trainer. What the dense net
takes alone is subtracted; the rest is the sparse path's: ids, transport, rows, updates.

With ``--keys`` local mode runs with and without keys in turn, and nothing else does.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from persia._rpc.curve import make_keys
from tests.benchmarks.interleaved import Series, parser, ratio, row, table
from tests.benchmarks.local.dlrm import SLOTS, TIMED
from tests.benchmarks.workload import BATCH, sizes
from tests.support.processes import ROOT, Cluster, _children

HERE = Path(__file__).parent / "local"
TICKS = os.sysconf("SC_CLK_TCK")
MODES = ("dense", "embedded", "local")
GUARDED = ("local", "keys")


class Measured(NamedTuple):
    samples_per_s: float
    cpu: dict[str, float]  # by role, seconds per million samples


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of those that descend from it and live."""
    ticks = 0
    for each in (pid, *_children(pid)):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def run(mode: str, arguments: Sequence[str]) -> Measured:
    """Run one job in one mode and return what it measured."""
    variables = {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        # Threads of torch that wait shall leave their core to threads with work.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    settings = {"embedding_worker_config": {"forward_buffer_size": 1000}}
    with Cluster({"slots_config": SLOTS}, settings, environment=variables) as job:
        train = [str(HERE / "train.py"), *arguments]
        if mode == "keys":
            make_keys(job.place / "keys")
            job.variables["PERSIA_KEYS"] = str(job.place / "keys")
        environment = job.environment
        if mode in GUARDED:
            job.start_servers()
            job.start_loaders(HERE / "data_loader.py", 1, *arguments)
            train = ["-m", "persia.launcher", "nn-worker", *train]
        else:
            for name in job.variables.keys() - variables.keys():
                environment.pop(name)
        words = [sys.executable, *train, *(["--dense"] if mode == "dense" else [])]
        how: dict[str, Any] = {
            "cwd": ROOT,
            "env": environment,
            "text": True,
            "start_new_session": True,
        }
        with (job.place / "trainer.log").open("w") as log:
            trainer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, **how)
        job.processes["trainer"] = trainer
        return _read(job.processes)


def _read(processes: dict[str, subprocess.Popen[str]]) -> Measured:
    output = processes["trainer"].stdout
    num_samples = TIMED * BATCH
    marks: list[dict[str, float]] = []
    for line in output or ():
        if line.strip() in ("begin", "end"):
            marks.append({role: cpu_seconds(p.pid) for role, p in processes.items()})
        if line.startswith("seconds "):
            before, after = marks
            cpu = {role: (after[role] - before[role]) / num_samples * 1e6 for role in after}
            return Measured(num_samples / float(line.split()[1]), cpu)
    raise RuntimeError("the trainer ended without a result")


def middle(values: Iterable[float]) -> str:
    return f"{statistics.median(values):.2f}"


def by_role(runs: list[Measured]) -> str:
    return ", ".join(f"{role} {middle(run.cpu[role] for run in runs)}" for role in runs[0].cpu)


def report(runs: dict[str, list[Measured]]) -> list[object]:
    """Return the cells of a table's row."""
    rates = {
        mode: Series([run.samples_per_s / 1e3 for run in own]) for mode, own in runs.items()
    }
    used = {mode: Series([sum(run.cpu.values()) for run in own]) for mode, own in runs.items()}
    cells: list[object] = [f"{own.rate:.2f}" for own in rates.values()]
    if "keys" in runs:
        cells.append(ratio(rates["keys"], rates["local"]))
        cells += [f"{own.rate:.2f}" for own in used.values()]
        cells.append(ratio(used["keys"], used["local"]))
        return [*cells, *map(by_role, runs.values())]
    cells += [ratio(rates["local"], rates["embedded"]), f"{used['dense'].rate:.2f}"]
    for mode in ("embedded", "local"):
        cells.append(middle(np.subtract(used[mode].rates, used["dense"].rates).tolist()))
    return [*cells, by_role(runs["local"])]


def main() -> None:
    command = parser(__doc__, 5)
    command.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    command.add_argument("--keys", action="store_true", help="local mode with and without")
    options = command.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    columns = (
        *("threads", "dense alone, k samples/s", "embedded", "local", "local / embedded"),
        *("CPU s per M samples: dense", "embedded, sparse", "local, sparse"),
        "all of local, by role",
    )
    if options.keys:
        columns = (
            *("threads", "local, k samples/s", "with keys", "with / without"),
            *("CPU s per M samples", "with keys", "with / without", "by role", "with keys"),
        )
    title = f"{sum(sizes(options.quick)):,} rows, {options.pairs} runs of each, staleness 10"
    table(title, *columns)
    for threads in options.threads:
        arguments = ["--threads", str(threads), *(["--quick"] if options.quick else [])]
        runs: dict[str, list[Measured]] = {
            mode: [] for mode in (GUARDED if options.keys else MODES)
        }
        for _ in range(options.pairs):
            for mode, measured in runs.items():
                measured.append(run(mode, arguments))
        row(threads, *report(runs))


if __name__ == "__main__":
    main()
