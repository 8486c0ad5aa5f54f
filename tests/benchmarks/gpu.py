"""The whole step of a DLRM on a GPU, against the same net over nn.EmbeddingBag on that GPU.

    python -m tests.benchmarks.gpu [--out build/gpu] [--threads 1 2 4 8 16] [--pairs 7]

    persia           rows in the host's memory, any 64-bit id, updates in the background
    sparse           one nn.EmbeddingBag(sparse=True) of all rows on the GPU, torch's Adagrad
    dense            the same with dense gradients: Adagrad steps every row in every step
    net alone        embeddings given, their gradients dropped

Slices of the four alternate in one process, which is given a number of threads for the store;
another number is another process. A slice of PERSIA is an epoch, timed between its first and
its last batches. ``cores`` are seconds of processor time by all threads of the process per
second of a slice of PERSIA.

``--device cpu --quick`` runs the same on a machine without a GPU, to try it: not a measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import Adagrad
from tests.benchmarks.interleaved import Series, interleave, pin_malloc, ratio
from tests.benchmarks.local.dlrm import DLRM, SLOTS, TOP, Raw, loss_of, raw_batches
from tests.benchmarks.local.train import fill, step
from tests.benchmarks.workload import ACCUMULATOR, BATCH, DIM, LR, sizes

STALENESS = 10
WARM, TIMED, BEHIND = 4, 32, STALENESS + 4
NUM_DIFFERENT = 16
NETS = {"256-128": TOP, "1024-512-256": (1024, 512, 256)}
NAMES = ("persia", "sparse", "dense", "net alone")


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timer:
    """Times a stretch of steps on a device, and notes how many cores were busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.cores: list[float] = []

    def begin(self) -> None:
        wait_for(self._device)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> float:
        wait_for(self._device)
        wall = time.perf_counter() - self._wall
        self.cores.append((time.process_time() - self._cpu) / wall)
        return wall


def net(top: tuple[int, ...], device: torch.device) -> tuple[DLRM, torch.optim.Optimizer]:
    """Return the dense part; the same for everyone."""
    torch.manual_seed(0)
    model = DLRM(top).to(device)
    return model, torch.optim.Adagrad(model.parameters(), lr=LR)


def context(top: tuple[int, ...], device: torch.device, threads: int) -> TrainCtx:
    """Return PERSIA's, not yet entered."""
    model, optimizer = net(top, device)
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LR, initial_accumulator_value=ACCUMULATOR),
        dense_optimizer=optimizer,
        embedding_config={"slots_config": SLOTS},
        global_config={"embedded_config": {"num_threads": threads}},
        features=list(SLOTS),
        allow_missing=list(SLOTS),  # of the batches of ``fill``, each of one feature
        device_id=device.index if device.type == "cuda" else None,
        mixed_precision=False,
    )


def persia_slice(ctx: TrainCtx, raws: list[Raw], timer: Timer) -> float:
    """Return the seconds of TIMED steps."""
    seconds = 0.0
    epoch = (raw.batch() for raw in islice(cycle(raws), WARM + TIMED + BEHIND))
    for number, batch in enumerate(DataLoader(epoch, embedding_staleness=STALENESS)):
        if number == WARM:
            timer.begin()
        if number == WARM + TIMED:
            seconds = timer.end()
        step(ctx, batch)
    return seconds


class Bags:
    """The net over one EmbeddingBag of all rows, or over embeddings that are given.

    Batches are row numbers in the host's pinned memory, as a data pipeline would have them;
    their copy is part of the step.
    """

    def __init__(
        self,
        top: tuple[int, ...],
        device: torch.device,
        raws: list[Raw],
        quick: bool,
        sparse: bool | None,
    ) -> None:
        self._device = device
        self._model, self._optimizer = net(top, device)
        self._bag: torch.nn.EmbeddingBag | None = None
        num_features = len(SLOTS)
        if sparse is not None:
            self._bag = torch.nn.EmbeddingBag(
                sum(sizes(quick)), DIM, mode="sum", sparse=sparse, device=device
            )
            torch.nn.init.uniform_(self._bag.weight, -0.01, 0.01)
            self._rows = torch.optim.Adagrad(
                self._bag.parameters(), lr=LR, initial_accumulator_value=ACCUMULATOR
            )
        self._given = torch.randn(num_features, BATCH, DIM, device=device)
        self._offsets = torch.arange(num_features * BATCH, device=device)
        firsts = np.cumsum([0, *sizes(quick)[:-1]])
        self._batches = [self._pinned(raw, firsts) for raw in raws]

    def _pinned(self, raw: Raw, firsts: Any) -> tuple[torch.Tensor, ...]:
        rows = np.concatenate(
            [ids.rows + first for ids, first in zip(raw.features, firsts, strict=True)]
        )
        tensors = map(torch.from_numpy, (rows, raw.dense, raw.labels))
        is_cuda = self._device.type == "cuda"
        return tuple(each.pin_memory() if is_cuda else each for each in tensors)

    def slice(self, timer: Timer) -> float:
        """Return the seconds of TIMED steps."""
        for number, batch in enumerate(islice(cycle(self._batches), WARM + TIMED)):
            if number == WARM:
                timer.begin()
            self._step(*(each.to(self._device, non_blocking=True) for each in batch))
        return timer.end()

    def _step(self, rows: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> None:
        if self._bag is None:
            embeddings = self._given.detach().requires_grad_()
        else:
            embeddings = self._bag(rows, self._offsets).view(self._given.shape)
        loss = loss_of(self._model([dense], list(embeddings.unbind())), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._bag is not None:
            self._rows.step()
            self._rows.zero_grad()


def bags_rate(bags: Bags, timer: Timer) -> float:
    """Return thousand samples a second."""
    return TIMED * BATCH / 1e3 / bags.slice(timer)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one net with one number of threads; the rates and cores of each contender."""
    device = (
        torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    )
    pin_malloc()
    top = NETS[options.net]
    raws = list(raw_batches(options.quick, NUM_DIFFERENT))
    samples = TIMED * BATCH / 1e3
    with context(top, device, options.threads[0]) as ctx:
        fill(ctx, options.quick)
        timers = {name: Timer(device) for name in NAMES}
        turns: dict[str, Callable[[], float]] = {
            "persia": lambda: samples / persia_slice(ctx, raws, timers["persia"])
        }
        for name, sparse in (("sparse", True), ("dense", False), ("net alone", None)):
            bags = Bags(top, device, raws, options.quick, sparse)
            turns[name] = partial(bags_rate, bags, timers[name])
        series = interleave(turns, options.pairs)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "net": options.net,
        "threads": options.threads[0],
        "rates": {name: own.rates for name, own in series.items()},  # thousand samples/s
        "cores": {name: timers[name].cores[-options.pairs :] for name in NAMES},
        "device_bytes": peak,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return the Markdown tables, one for each net."""
    lines: list[str] = []
    for name in NETS:
        of_net = [one for one in found if one["net"] == name]
        if not of_net:
            continue
        columns = ("store threads", *NAMES, "of sparse [95 %]", "of dense [95 %]", "cores")
        lines += [
            f"DLRM, top 367-{name}-1, thousand samples/s\n",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
        ]
        for one in of_net:
            series = {name: Series(rates) for name, rates in one["rates"].items()}
            cells = [one["threads"], *(f"{series[name].rate:.1f}" for name in NAMES)]
            cells += [ratio(series["persia"], series[name]) for name in ("sparse", "dense")]
            cells.append(f"{np.median(one['cores']['persia']):.1f}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--quick", action="store_true", help="1 %% of the rows")
    add("--pairs", type=int, default=7, help="repetitions")
    add("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of the store")
    add("--net", choices=list(NETS), default=None, help="one of them; both if not given")
    add("--out", type=Path, default=Path("build/gpu"), help="folder of measured.json")
    add("--seconds", type=float, default=360.0, help="what is not done by then is left out")
    add("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"expected a CUDA device, torch {torch.__version__} finds none; --device cpu "
            "--quick tries the program"
        )
    return options


def measured(
    options: argparse.Namespace, net: str, threads: int, limit_s: float
) -> dict[str, Any] | None:
    """Measure in a process of its own; None if that took too long."""
    words = ["--one", "--device", options.device, "--net", net, "--threads", str(threads)]
    words += ["--pairs", str(options.pairs), *["--quick"] * options.quick]
    command = [sys.executable, "-m", "tests.benchmarks.gpu", *words]
    try:
        ran = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.one:
        print(json.dumps(measure(options)))
        return
    found: list[dict[str, Any]] = []
    begin = time.monotonic()
    longest_s = 0.0  # of one
    runs = [
        (name, threads)
        for threads in options.threads
        for name in ([options.net] if options.net else NETS)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, threads in runs:
        start_s = time.monotonic() - begin
        left_s = options.seconds - start_s
        one = measured(options, name, threads, left_s) if left_s > longest_s else None
        if one is None:
            print(f"left out for lack of time: {name} with {threads} threads", flush=True)
            continue
        longest_s = max(longest_s, time.monotonic() - begin - start_s)
        found.append(one)
        print(f"measured {name} with {threads} threads", flush=True)
        text = json.dumps(found, indent=1)
        (options.out / "measured.json").write_text(text, encoding="utf-8")
        (options.out / "measured.md").write_text(table(found), encoding="utf-8")
    if not found:
        sys.exit("nothing was measured")
    print(table(found))


if __name__ == "__main__":
    main()
