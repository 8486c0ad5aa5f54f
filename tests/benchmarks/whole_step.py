"""The whole step of a DLRM in embedded mode, against the ceiling with the same dense net.

    python -m tests.benchmarks.whole_step [--quick] [--threads 1 2] [--pairs 20]

PERSIA trains as users do, with raw ids in a PersiaBatch, a DataLoader, forward and backward;
what it does in other threads has to fit on as many cores as the dense net has threads. The
ceiling looks up and updates in between, one after the other, and its net takes its output as it
is. The dense net alone is given its embeddings. Slices of the three alternate. A slice of
PERSIA is an epoch: what is timed begins after its first batches and ends before its last, when
the pipeline is as full as it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from itertools import cycle, islice

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader
from tests.benchmarks.ceiling import Ceiling
from tests.benchmarks.interleaved import (
    Clock,
    interleave,
    parser,
    pin_malloc,
    ratio,
    row,
    table,
)
from tests.benchmarks.local.dlrm import NUM_DIFFERENT, Ideal, Raw, raw_batches
from tests.benchmarks.local.train import filled, step
from tests.benchmarks.workload import BATCH, sizes

STALENESS = 10
WARM, TIMED, BEHIND = 4, 16, STALENESS + 4


def persia_slice(ctx: TrainCtx, raws: list[Raw], clock: Clock) -> float:
    """Return the seconds of TIMED steps."""
    start = seconds = 0.0
    epoch = (raw.batch() for raw in islice(cycle(raws), WARM + TIMED + BEHIND))
    for number, batch in enumerate(DataLoader(epoch, embedding_staleness=STALENESS)):
        if number == WARM:
            start = clock()
        if number == WARM + TIMED:
            seconds = clock() - start
        step(ctx, batch)
    return seconds


def ideal_slice(ideal: Ideal, raws: list[Raw], clock: Clock) -> float:
    """Return the seconds of TIMED steps."""
    start = 0.0
    for number, raw in enumerate(islice(cycle(raws), WARM + TIMED)):
        if number == WARM:
            start = clock()
        ideal.step(raw)
    return clock() - start


def measure(quick: bool, threads: int, pairs: int, clock: Clock) -> None:
    """Print one row of the table; this process keeps to as many cores as threads."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    pin_malloc()
    torch.set_num_threads(threads)
    raws = list(raw_batches(quick, NUM_DIFFERENT))
    with filled(quick, threads) as ctx:
        ceiling, dense = Ideal(Ceiling(sizes(quick), threads).table), Ideal(None)
        samples = TIMED * BATCH / 1e3
        turns = {
            "persia": lambda: samples / persia_slice(ctx, raws, clock),
            "ceiling": lambda: samples / ideal_slice(ceiling, raws, clock),
            "alone": lambda: samples / ideal_slice(dense, raws, clock),
        }
        series = interleave(turns, pairs)
    rates = [f"{own.rate:.1f}" for own in series.values()]
    row(threads, *rates, ratio(series["persia"], series["ceiling"]))


def main() -> None:
    options = parser(__doc__, 20, cpu_time=True)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.clock is time.process_time and args.threads != [1]:
        options.error("--cpu-time adds the threads up: use it with --threads 1")
    if args.one:
        measure(args.quick, args.threads[0], args.pairs, args.clock)
        return
    columns = ("PERSIA", "ceiling", "dense net alone", "PERSIA of the ceiling [95 %]")
    table("DLRM, thousand samples/s", "threads", *columns)
    for threads in args.threads:
        # A process each, because threads keep the cores they were started with.
        words = [word for word in sys.argv[1:] if word in ("--quick", "--cpu-time")]
        words += ["--one", "--threads", str(threads), "--pairs", str(args.pairs)]
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.whole_step", *words], check=True
        )


if __name__ == "__main__":
    main()
