"""What dumps and loads cost a TrainCtx: one line for each number.

    python -m tests.benchmarks.state [--quick] [--cuts N] [--pairs N] [--ids KIND]
        [--only LINE ...]

A job in embedded mode holds 10 million rows of dim 16 with Adagrad's state, about 160 bytes
each in a file. A step is 4096 samples of 8 ids, a small dense net, forward and backward by a
DataLoader. Ids are drawn for every step: ``uniform`` over all rows, so that most rows change
before a dump has read them, or by popularity (``zipf``). The lines:

    pauses   over CUTS dumps with ``blocking=False`` in training: the longest step (the call is
             part of its step) and the median one
    beside   the rate of training while a dump is written, of the rate before and after it
    disk     dumps and loads without training, against dd in the same folder, pair by pair
    tmpfs    the same on a tmpfs
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from persia._rpc.messages import LookupRequest, TableSigns
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeature, Label, PersiaBatch
from persia.embedding.optim import Adagrad
from tests.benchmarks.checkpoints import against_dd
from tests.benchmarks.interleaved import parser, pin_malloc

DIM = 16
SAMPLES, IDS = 4096, 8
FILL = 34_000
GROUP = np.uint64(1 << 56)
# Steps before anything is timed, and between two dumps.
WARM, BETWEEN = 20, 12
# Steps before and after a dump, to compare with: some seconds.
ALONE = 400


def clicks(rows: int, kind: str) -> Iterator[PersiaBatch]:
    """Yield batches without end."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, (SAMPLES, 1)).astype(np.float32)
    # Popular ids lie anywhere in memory.
    places = rng.permutation(rows) if kind == "zipf" else None
    while True:
        if places is None:
            drawn = rng.integers(0, rows, (SAMPLES, IDS))
        else:
            popular = np.minimum(rng.pareto(0.25, (SAMPLES, IDS)) * 50, rows - 1)
            drawn = places[popular.astype(np.int64)]
        ids = IDTypeFeature("id", list(drawn.astype(np.uint64)))
        yield PersiaBatch([ids], labels=[Label(labels)])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, dense: object, embeddings: list[torch.Tensor]) -> Any:
        return self.layers(embeddings[0])


def job(rows: int) -> TrainCtx:
    torch.manual_seed(0)
    # As docs/operations.md says of few cores: a second thread of PyTorch's would spin.
    torch.set_num_threads(1)
    model = Net()
    server = {"capacity": rows + rows // 8, "memory_limit": 0}
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.Adam(model.parameters()),
        embedding_config={"slots_config": {"id": {"dim": DIM}}},
        global_config={"embedding_parameter_server_config": server},
    )


def fill(ctx: TrainCtx, rows: int) -> None:
    """Enter all rows, in the order of their ids."""
    worker: Any = ctx.embedding_worker
    server = worker._servers.servers[0]
    for number, first in enumerate(range(0, rows, FILL)):
        signs = np.arange(first, min(first + FILL, rows), dtype=np.uint64) | GROUP
        server.lookup(LookupRequest(1 << 40 | number, True, (TableSigns(0, signs),)))


class Training:
    """Steps of one pass that does not end; ``steps`` has the seconds of each."""

    def __init__(self, ctx: TrainCtx, rows: int, kind: str) -> None:
        self._ctx = ctx
        self._batches = iter(DataLoader(clicks(rows, kind)))
        self._loss = torch.nn.BCEWithLogitsLoss()
        self.run(WARM)
        # The interpreter's own collection stops all of the process for 160 ms where torch is
        # loaded, whichever object triggers it: it is no part of a dump, nor of a step.
        gc.freeze()

    def step(self, then: Callable[[], object] | None = None) -> float:
        """Return the seconds of a step, and of what comes right after it."""
        start = time.perf_counter()
        output, labels = self._ctx.forward(next(self._batches))
        self._ctx.backward(self._loss(output, (labels or [])[0]))
        if then is not None:
            then()
        return time.perf_counter() - start

    def run(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def while_dumping(self, folder: str) -> list[float]:
        """Return the steps from the call to the end of its files."""
        steps = [self.step(lambda: self._ctx.dump_checkpoint(folder, blocking=False))]
        writer = self._ctx._connected().checkpoints.writer
        while writer._thread is not None and writer._thread.is_alive():
            steps.append(self.step())
        self._ctx.wait_for_dump_embedding()
        return steps


def pauses(training: Training, folder: str, cuts: int) -> None:
    def say(what: str, steps: list[float], more: str = "") -> None:
        middle, longest = 1e3 * median(steps), 1e3 * max(steps)
        print(f"{what}: median {middle:.1f} ms, longest {longest - middle:.1f} ms more{more}")

    say("without a dump", training.run(200))
    steps, called = [], []
    for _ in range(cuts):
        steps += training.run(BETWEEN)
        during = training.while_dumping(folder)
        called.append(f"{1e3 * during[0]:.0f}")
        steps += during
    asked = f" (asked: at most 50); steps with the call: {', '.join(called)}"
    say(f"pauses: {cuts} cuts, {len(steps)} steps", steps, asked)


def beside(training: Training, folder: str, pairs: int) -> None:
    ratios, rates = [], []
    alone = training.run(ALONE)
    for _ in range(pairs):
        during = training.while_dumping(folder)
        before, alone = alone, training.run(ALONE)
        rates.append(len(during) / sum(during))
        ratios.append(rates[-1] * (sum(before) + sum(alone)) / (2 * ALONE))
    num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    print(
        f"beside: {median(rates):.1f} steps/s while {num_bytes / 1e9:.2f} GB are dumped in "
        f"{sum(during):.1f} s: {median(ratios):.2f} of the rate without (asked: at least 0.8); "
        f"each: {', '.join(f'{each:.2f}' for each in ratios)}"
    )


def main() -> None:
    options = parser(__doc__, 5)
    options.add_argument("--cuts", type=int, default=10)
    options.add_argument("--ids", choices=["uniform", "zipf"], default="uniform")
    options.add_argument("--only", nargs="*", default=["pauses", "beside", "disk", "tmpfs"])
    arguments = options.parse_args()
    rows = 100_000 if arguments.quick else 10_000_000
    pin_malloc()
    with job(rows) as ctx:
        fill(ctx, rows)
        print(f"{rows} rows", file=sys.stderr)
        if "pauses" in arguments.only or "beside" in arguments.only:
            training = Training(ctx, rows, arguments.ids)
            with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as folder:
                if "pauses" in arguments.only:
                    pauses(training, folder, arguments.cuts)
                if "beside" in arguments.only:
                    beside(training, folder, arguments.pairs)
            return  # a load comes between two passes
        for line, parent, least in (("disk", ".", 0.7), ("tmpfs", "/dev/shm", 0.35)):
            if line in arguments.only:
                asked = f" (asked: at least {least})"
                dump, load = ctx.dump_embedding, ctx.load_embedding
                against_dd(parent, arguments.pairs, dump, load, asked)


if __name__ == "__main__":
    main()
