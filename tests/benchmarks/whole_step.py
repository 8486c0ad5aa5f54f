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
from collections.abc import Callable, Iterator

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from tests.benchmarks.ceiling import Ceiling, Table, described_ids
from tests.benchmarks.interleaved import Clock, Series, pin_malloc, ratio
from tests.benchmarks.local.dlrm import DLRM, NUM_DIFFERENT, NUM_FEATURES, Raw, raw_batches
from tests.benchmarks.local.train import fill
from tests.benchmarks.workload import ACCUMULATOR, BATCH, DIM, LR, sizes

STALENESS = 10
WARM, TIMED, BEHIND = 4, 16, STALENESS + 4


class Epoch(IterableDataset):
    """The batches of one slice, built when they are asked for."""

    def __init__(self, raws: list[Raw]) -> None:
        super().__init__()
        self._raws = raws

    def __iter__(self) -> Iterator[PersiaBatch]:
        for number in range(WARM + TIMED + BEHIND):
            yield self._raws[number % len(self._raws)].batch()


def net() -> tuple[DLRM, torch.optim.Optimizer]:
    """Return the dense part; the same for both."""
    torch.manual_seed(0)
    model = DLRM()
    return model, torch.optim.Adagrad(model.parameters(), lr=LR)


loss_of = torch.nn.BCEWithLogitsLoss()


def persia_slice(ctx: TrainCtx, raws: list[Raw], clock: Clock) -> float:
    """Return the seconds of TIMED steps."""
    start = seconds = 0.0
    for number, batch in enumerate(DataLoader(Epoch(raws), embedding_staleness=STALENESS)):
        if number == WARM:
            start = clock()
        if number == WARM + TIMED:
            seconds = clock() - start
        output, labels = ctx.forward(batch)
        ctx.backward(loss_of(output, (labels or [])[0]))
    return seconds


class Ideal:
    """The ceiling and a dense net; without a table the dense net alone."""

    def __init__(self, table: Table | None) -> None:
        self._table = table
        self._model, self._optimizer = net()
        self._out = torch.zeros(NUM_FEATURES, BATCH, DIM)

    def step(self, raw: Raw) -> None:
        embeddings = self._out.detach()
        if self._table is not None:
            self._table.lookup(described_ids(raw.ids), BATCH, True, embeddings.numpy())
        embeddings.requires_grad = True
        logits = self._model([torch.from_numpy(raw.dense)], list(embeddings.unbind()))
        loss_of(logits, torch.from_numpy(raw.labels)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        gradient = embeddings.grad
        if self._table is not None and gradient is not None:
            self._table.update(gradient.numpy())

    def slice(self, raws: list[Raw], clock: Clock) -> float:
        """Return the seconds of TIMED steps."""
        start = 0.0
        for number in range(WARM + TIMED):
            if number == WARM:
                start = clock()
            self.step(raws[number % len(raws)])
        return clock() - start


def measure(quick: bool, threads: int, pairs: int, clock: Clock) -> None:
    """Print one row of the table; this process keeps to as many cores as threads."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    pin_malloc()
    torch.set_num_threads(threads)
    raws = list(raw_batches(quick, NUM_DIFFERENT))
    model, optimizer = net()
    persia, ideal, alone = Series([], []), Series([], []), Series([], [])
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LR, initial_accumulator_value=ACCUMULATOR),
        dense_optimizer=optimizer,
        embedding_config={
            "slots_config": {f"feature_{n}": {"dim": DIM} for n in range(NUM_FEATURES)}
        },
        global_config={"embedded_config": {"num_threads": threads}},
    ) as ctx:
        fill(ctx, quick)
        ceiling, dense = Ideal(Ceiling(sizes(quick), threads).table), Ideal(None)
        turns: list[tuple[Series, Callable[[], float]]] = [
            (persia, lambda: persia_slice(ctx, raws, clock)),
            (ideal, lambda: ceiling.slice(raws, clock)),
            (alone, lambda: dense.slice(raws, clock)),
        ]
        for number in range(pairs + 1):
            first = number % len(turns)
            for series, turn in turns[first:] + turns[:first]:
                seconds = turn()
                if number > 0:  # the first of all only warms
                    series.rates.append(TIMED * BATCH / seconds / 1e3)
    rates = " | ".join(f"{series.rate:.1f}" for series in (persia, ideal, alone))
    print(f"| {threads} | {rates} | {ratio(persia, ideal)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 %% of the rows")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine, 1 thread: not the clock"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_time and args.threads != [1]:
        parser.error("--cpu-time adds the threads up: use it with --threads 1")
    if args.one:
        measure(
            args.quick,
            args.threads[0],
            args.pairs,
            time.process_time if args.cpu_time else time.perf_counter,
        )
        return
    print("DLRM, thousand samples/s\n")
    print("| threads | PERSIA | ceiling | dense net alone | PERSIA of the ceiling [95 %] |")
    print("|---|---|---|---|---|", flush=True)
    for threads in args.threads:
        # A process each, because threads keep the cores they were started with.
        command = [sys.executable, "-m", "tests.benchmarks.whole_step", "--one"]
        command += ["--threads", str(threads), "--pairs", str(args.pairs)]
        command += ["--quick"] if args.quick else []
        command += ["--cpu-time"] if args.cpu_time else []
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
