"""Local mode against embedded mode on the same two cores: the whole step of a DLRM.

    python -m tests.benchmarks.services [--quick] [--pairs 5] [--threads 1 2] [--keys]

Runs alternate between the modes and the dense net alone, which is given its embeddings. In
local mode all four roles are processes that talk over ``ipc``. CPU time, user and system, is
what ``/proc`` says of all processes of a run at two marks of the trainer. What the dense net
takes alone is subtracted; the rest is the sparse path's: ids, transport, rows, updates.

With ``--keys`` local mode runs with and without keys in turn, and nothing else does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from persia._rpc.curve import make_keys
from tests.benchmarks.local.dlrm import NUM_FEATURES
from tests.benchmarks.workload import BATCH, DIM, sizes

HERE = Path(__file__).parent / "local"
ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
MODES = ("dense", "embedded", "local")
GUARDED = ("local", "keys")


@dataclass(frozen=True)
class Measured:
    """One run."""

    samples_per_s: float
    cpu: dict[str, float]  # by role, seconds per million samples

    @property
    def all_cpu(self) -> float:
        """CPU seconds of all processes per million samples."""
        return sum(self.cpu.values())


def cpu_seconds(root: int) -> float:
    """Return the CPU time of a process and of those that descend from it and live."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    total = 0.0
    for pid, used in seconds.items():
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        total += used if above == root else 0.0
    return total


def launcher(*arguments: str) -> list[str]:
    """Return a command of persia-launcher."""
    return [sys.executable, "-m", "persia.launcher", *arguments]


def run(mode: str, arguments: Sequence[str], num_timed: int, cores: set[int]) -> Measured:
    """Run one job in one mode and return what it measured."""
    with tempfile.TemporaryDirectory(prefix="persia-bench-") as directory:
        place = Path(directory)
        slots = {f"feature_{number}": {"dim": DIM} for number in range(NUM_FEATURES)}
        (place / "embedding.yml").write_text(
            yaml.safe_dump({"slots_config": slots}, sort_keys=False)
        )
        (place / "global.yml").write_text(
            "embedding_worker_config: {forward_buffer_size: 1000}\n"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
            "OMP_NUM_THREADS": "1",
            # Threads of torch that wait shall leave their core to threads with work.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        train = str(HERE / "train.py")
        only = ["--dense"] if mode == "dense" else []
        commands = {"trainer": [sys.executable, train, *arguments, *only]}
        if mode == "keys":
            make_keys(place / "keys")
            environment["PERSIA_KEYS"] = str(place / "keys")
        if mode in GUARDED:
            environment |= {
                "PERSIA_EMBEDDING_CONFIG": str(place / "embedding.yml"),
                "PERSIA_GLOBAL_CONFIG": str(place / "global.yml"),
                "PERSIA_EMBEDDING_PARAMETER_SERVERS": f"ipc://{directory}/server",
                "PERSIA_EMBEDDING_WORKERS": f"ipc://{directory}/worker",
                "PERSIA_NN_WORKERS": f"ipc://{directory}/trainer",
            }
            commands = {
                "server": launcher("embedding-parameter-server"),
                "worker": launcher("embedding-worker"),
                "loader": launcher("data-loader", str(HERE / "data_loader.py"), *arguments),
                "trainer": launcher("nn-worker", train, *arguments),
            }
        log = place / "log"
        processes: dict[str, subprocess.Popen[str]] = {}
        with log.open("w") as output:
            for role, command in commands.items():
                processes[role] = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=ROOT,
                    text=True,
                    stdout=subprocess.PIPE if role == "trainer" else output,
                    stderr=output,
                    preexec_fn=lambda: os.sched_setaffinity(0, cores),
                )
        try:
            return _read(processes, num_timed)
        except Exception:
            sys.stderr.write(log.read_text())
            raise
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait(30)


def _read(processes: dict[str, subprocess.Popen[str]], num_timed: int) -> Measured:
    output = processes["trainer"].stdout
    num_samples = num_timed * BATCH
    marks: list[dict[str, float]] = []
    for line in output or ():
        if line.strip() in ("begin", "end"):
            marks.append({role: cpu_seconds(p.pid) for role, p in processes.items()})
        if line.startswith("seconds "):
            before, after = marks
            cpu = {role: (after[role] - before[role]) / num_samples * 1e6 for role in after}
            return Measured(num_samples / float(line.split()[1]), cpu)
    raise RuntimeError("the trainer ended without a result")


def median(runs: Sequence[Measured], value: Callable[[Measured], float]) -> float:
    """Return the median of a value over runs."""
    return statistics.median(map(value, runs))


def report(runs: dict[str, list[Measured]]) -> list[str]:
    """Return the cells of a table's row."""
    ratios = sorted(
        two.samples_per_s / one.samples_per_s
        for one, two in zip(runs["embedded"], runs["local"], strict=True)
    )
    rates = [median(runs[mode], lambda run: run.samples_per_s) / 1e3 for mode in MODES]
    dense = median(runs["dense"], lambda run: run.all_cpu)
    sparse = [
        statistics.median(
            run.all_cpu - alone.all_cpu
            for run, alone in zip(runs[mode], runs["dense"], strict=True)
        )
        for mode in ("embedded", "local")
    ]
    roles = [
        f"{role} {median(runs['local'], lambda run: run.cpu[role]):.1f}"  # noqa: B023
        for role in runs["local"][0].cpu
    ]
    return [
        *(f"{rate:.1f}" for rate in rates),
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
        f"{dense:.2f}",
        *(f"{seconds:.2f}" for seconds in sparse),
        ", ".join(roles),
    ]


def report_keys(runs: dict[str, list[Measured]]) -> list[str]:
    """Return the cells of a row about keys."""

    def ratio(value: Callable[[Measured], float]) -> str:
        pairs = zip(runs["local"], runs["keys"], strict=True)
        ratios = sorted(value(two) / value(one) for one, two in pairs)
        return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"

    def used(mode: str) -> str:
        roles = [
            f"{role} {median(runs[mode], lambda run: run.cpu[role]):.2f}"  # noqa: B023
            for role in runs[mode][0].cpu
        ]
        return ", ".join(roles)

    rates = [median(runs[mode], lambda run: run.samples_per_s) / 1e3 for mode in GUARDED]
    return [
        *(f"{rate:.1f}" for rate in rates),
        ratio(lambda run: run.samples_per_s),
        *(f"{median(runs[mode], lambda run: run.all_cpu):.2f}" for mode in GUARDED),
        ratio(lambda run: run.all_cpu),
        *map(used, GUARDED),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 %% of the rows")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--timed", type=int, default=100)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--keys", action="store_true", help="local mode with and without")
    options = parser.parse_args()
    modes, of = (GUARDED, report_keys) if options.keys else (MODES, report)
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    print(f"{sum(sizes(options.quick)):,} rows, {options.pairs} runs of each, staleness 10\n")
    head = (
        "threads | dense alone, k samples/s | embedded | local | local / embedded "
        "| CPU s per M samples: dense | embedded, sparse | local, sparse "
        "| all of local, by role"
    )
    if options.keys:
        head = (
            "threads | local, k samples/s | with keys | with / without "
            "| CPU s per M samples | with keys | with / without | by role | with keys"
        )
    print(f"| {head} |")
    print("|" + " --- |" * len(head.split(" | ")), flush=True)
    for threads in options.threads:
        arguments = ["--warm", str(options.warm), "--timed", str(options.timed)]
        arguments += ["--threads", str(threads), *(["--quick"] if options.quick else [])]
        runs: dict[str, list[Measured]] = {mode: [] for mode in modes}
        for _ in range(options.pairs):
            for mode, measured in runs.items():
                measured.append(run(mode, arguments, options.timed, cores))
        print(f"| {threads} | {' | '.join(of(runs))} |", flush=True)


if __name__ == "__main__":
    main()
