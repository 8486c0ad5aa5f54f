"""A DLRM in module form against the context form, and converted against torch's own bags.

    python -m tests.benchmarks.modules [calls] [forms] [converted] [--quick] [--pairs 20]
                                       [--threads 1 2] [--samples N] [--cpu-time]

    calls       Python calls, C calls and calls of the engine a step; the same on a busy machine
    forms       steps of 2048 samples: EmbeddingCollection against a TrainCtx at staleness 1,
                and with ``persia.nn.prefetch`` against one at "auto"
    converted   steps of 4096 samples: 26 nn.EmbeddingBag(sparse=True) with torch's Adagrad
                against the same model converted, the embeddings alone, with the dense net, and
                that with ``persia.nn.prefetch``

Slices of all contenders of a table alternate in one process, which keeps to as many cores as
threads; the first ones only warm, until "auto" has settled, and the last columns have what it
came to. Every row is there before the first slice. What a data pipeline would do, reading and
batching, is done before; what PERSIA does with ids is in the time, by whichever thread.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch

import persia.nn
import persia.optim
from persia._worker.service import EmbeddingWorker
from persia.ctx import TrainCtx
from persia.data import DataLoader
from tests.benchmarks.interleaved import (
    Clock,
    Series,
    interleave,
    parser,
    pin_malloc,
    ratio,
    row,
    table,
)
from tests.benchmarks.local.dlrm import NUM_FEATURES, Raw, loss_of, net, raw_batches
from tests.benchmarks.local.train import filled, step
from tests.benchmarks.workload import ACCUMULATOR, BATCH, DIM, LR, all_ids, sizes

FORMS_SAMPLES = 2048
NUM_DIFFERENT = 16
# Steps of a slice. Behind those that are timed are more than any contender reads ahead, so that
# all have as much ahead of them at the end of the time as at its beginning.
WARM, TIMED, BEHIND = 8, 64, 24
# Slices of each contender before the first that counts: what chooses a staleness by itself
# decides each 16 steps, for the first 192, and has rests behind that.
SETTLING = 4
COUNTED = 10  # steps
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids [B, 26], dense, labels
Staleness = int | Literal["auto"]


def timed(steps: Iterable[Any], clock: Clock) -> float:
    """Return the seconds of TIMED steps behind the first WARM."""
    start = seconds = 0.0
    for number, _ in enumerate(steps):
        if number == WARM - 1:
            start = clock()
        if number == WARM + TIMED - 1:
            seconds = clock() - start
    return seconds


def cut(raws: Iterable[Raw], samples: int) -> list[Raw]:
    """Return batches of their first samples."""
    return [
        Raw(
            [
                replace(one, values=one.values[:samples], rows=one.rows[:samples])
                for one in raw.features
            ],
            raw.dense[:samples],
            raw.labels[:samples],
        )
        for raw in raws
    ]


def tensors(raw: Raw, *, are_rows: bool) -> Batch:
    """Return a batch as a data pipeline gives it to a model."""
    ids = [one.rows if are_rows else one.values.view(np.int64) for one in raw.features]
    dense, labels = torch.from_numpy(raw.dense), torch.from_numpy(raw.labels)
    return torch.from_numpy(np.stack(ids, 1)), dense, labels


# --- contenders -------------------------------------------------------------------------------


def context_steps(ctx: TrainCtx, raws: list[Raw], staleness: Staleness) -> Iterator[None]:
    """Train an epoch in a context, yielding behind each step."""
    count = WARM + TIMED + BEHIND
    epoch = (raw.batch() for raw in islice(cycle(raws), count))
    for batch in DataLoader(epoch, embedding_staleness=staleness):
        step(ctx, batch)
        yield


class ModuleForm:
    """The same net over an EmbeddingCollection."""

    def __init__(self, raws: list[Raw], quick: bool) -> None:
        batches = cycle([tensors(raw, are_rows=False) for raw in raws])
        self._batches: list[Batch] = list(islice(batches, WARM + TIMED + BEHIND))
        names = [f"table_{number}" for number in range(NUM_FEATURES)]
        self._collection = persia.nn.EmbeddingCollection(dict.fromkeys(names, DIM))
        self._ahead = persia.nn.prefetch(self._batches, self._collection)
        self._net, self._dense = net()
        self._sparse = persia.optim.Adagrad(
            persia.nn.sparse_parameters(self._collection),
            lr=LR,
            initial_accumulator_value=ACCUMULATOR,
        )
        for number, ids in all_ids(sizes(quick)):
            with torch.no_grad():
                persia.nn.Embedding(names[number], DIM)(torch.from_numpy(ids.view(np.int64)))

    @property
    def depth(self) -> int:
        """What "auto" has come to."""
        return self._ahead.depth

    def steps(self, *, is_prefetched: bool) -> Iterator[None]:
        """Train an epoch, yielding behind each step."""
        for ids, dense, labels in self._ahead if is_prefetched else self._batches:
            logits = self._net([dense], self._collection(ids))
            loss_of(logits, labels).backward()
            self._dense.step()
            self._sparse.step()
            self._dense.zero_grad()
            self._sparse.zero_grad()
            yield


class Bags(torch.nn.Module):
    """Bags called as the DLRM of Meta calls them."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        made = []
        for size in sizes(quick):
            bag = torch.nn.EmbeddingBag(size, DIM, mode="sum", sparse=True)
            torch.nn.init.uniform_(bag.weight, -0.01, 0.01)
            made.append(bag)
        self.bags = torch.nn.ModuleList(made)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        """Return the vectors of ids [26, B]."""
        return [bag(one, offsets) for bag, one in zip(self.bags, ids, strict=True)]


class BagForm:
    """The net over 26 bags of torch, or over the same ones converted."""

    def __init__(self, raws: list[Raw], bags: Bags, *, converts: bool) -> None:
        found = [tensors(raw, are_rows=True) for raw in raws]
        different = [(ids.t().contiguous(), dense, labels) for ids, dense, labels in found]
        self._batches: list[Batch] = list(islice(cycle(different), WARM + TIMED + BEHIND))
        self._bags = bags
        self._offsets = torch.arange(len(raws[0].labels))
        make: Any = torch.optim.Adagrad
        if converts:
            persia.nn.convert(bags, prefix="converted.")
            make = persia.optim.Adagrad
        self._net, self._dense = net()
        self._sparse = make(bags.parameters(), lr=LR, initial_accumulator_value=ACCUMULATOR)
        self._given = torch.full((len(raws[0].labels), DIM), 1e-3)
        self._ahead: Iterable[Batch] | None = None

    def steps(self, *, is_whole: bool, is_prefetched: bool = False) -> Iterator[None]:
        """Train, yielding behind each step; the embeddings alone get a given gradient."""
        batches: Iterable[Batch] = self._batches
        if is_prefetched:
            self._ahead = self._ahead or persia.nn.prefetch(self._batches, self._bags)
            batches = self._ahead
        for ids, dense, labels in batches:
            vectors = self._bags(ids, self._offsets)
            if is_whole:
                loss_of(self._net([dense], vectors), labels).backward()
                self._dense.step()
                self._dense.zero_grad()
            else:
                torch.autograd.backward(vectors, [self._given] * len(vectors))
            self._sparse.step()
            self._sparse.zero_grad()
            yield


def bag_forms(raws: list[Raw], quick: bool) -> tuple[BagForm, BagForm]:
    """Return torch's, and the converted one with the same weights."""
    theirs = Bags(quick)
    ours = copy.deepcopy(theirs)
    return BagForm(raws, theirs, converts=False), BagForm(raws, ours, converts=True)


# --- tables -----------------------------------------------------------------------------------


def measure_forms(args: argparse.Namespace) -> None:
    """Print the module form's part of the context form's rate."""
    raws = cut(raw_batches(args.quick, NUM_DIFFERENT), args.samples or FORMS_SAMPLES)
    with filled(args.quick, args.threads[0]) as ctx:
        form = ModuleForm(raws, args.quick)
        slices: dict[str, Callable[[], Iterator[None]]] = {
            "staleness 1": lambda: context_steps(ctx, raws, 1),
            "module": lambda: form.steps(is_prefetched=False),
            "auto": lambda: context_steps(ctx, raws, "auto"),
            "prefetch": lambda: form.steps(is_prefetched=True),
        }
        series = _series(slices, args, len(raws[0].labels))
        session: Any = ctx._session
        found = session.lookups.controller.permits, form.depth
    _print(args, series, ("module", "staleness 1"), ("prefetch", "auto"), more=found)


def measure_converted(args: argparse.Namespace) -> None:
    """Print how many times the rate of torch's bags the converted ones have."""
    raws = cut(raw_batches(args.quick, NUM_DIFFERENT), args.samples or BATCH)
    theirs, ours = bag_forms(raws, args.quick)
    slices: dict[str, Callable[[], Iterator[None]]] = {
        "torch, sparse": lambda: theirs.steps(is_whole=False),
        "converted, sparse": lambda: ours.steps(is_whole=False),
        "torch, whole": lambda: theirs.steps(is_whole=True),
        "converted, whole": lambda: ours.steps(is_whole=True),
        "converted, prefetch": lambda: ours.steps(is_whole=True, is_prefetched=True),
    }
    series = _series(slices, args, len(raws[0].labels))
    pairs = [(f"converted, {part}", f"torch, {part}") for part in ("sparse", "whole")]
    _print(args, series, *pairs, ("converted, prefetch", "torch, whole"))


def _print(
    args: argparse.Namespace,
    series: dict[str, Series],
    *pairs: tuple[str, str],
    more: Sequence[object] = (),
) -> None:
    """Print a row: the rates of all, and how many times the second's each first one has."""
    rates = [f"{own.rate * 1e3:.1f}" for own in series.values()]
    ratios = [ratio(series[one], series[other]) for one, other in pairs]
    row(args.threads[0], *rates, *ratios, *more)


def _series(
    slices: dict[str, Callable[[], Iterator[None]]], args: argparse.Namespace, samples: int
) -> Any:
    def turn(name: str) -> Callable[[], float]:
        return lambda: TIMED * samples / 1e6 / timed(slices[name](), args.clock)

    return interleave({name: turn(name) for name in slices}, args.pairs, warm=SETTLING)


class Calls:
    """Counts calls by all threads that were started after it was made, and by its own."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_counting = False
        self._own = threading.get_ident()
        self._engine = {
            getattr(EmbeddingWorker, name).__code__: name
            for name in ("lookup", "lookup_direct", "update", "release")
        }
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_counting or event not in ("call", "c_call"):
            return
        own = "own" if threading.get_ident() == self._own else "other"
        self._counts[f"{own} {event}"] += 1
        if event == "call" and frame.f_code in self._engine:
            self._counts[self._engine[frame.f_code]] += 1

    def of(self, steps: Iterator[Any]) -> dict[str, float]:
        """Return calls a step."""
        for _ in range(WARM):
            next(steps)
        self._counts.clear()
        self._is_counting = True
        sys.setprofile(self._note)
        for _ in range(COUNTED):
            next(steps)
        sys.setprofile(None)
        self._is_counting = False
        for _ in steps:  # to its end, or what is ahead is not given back
            pass
        return {name: count / COUNTED for name, count in self._counts.items()}


def count_calls(args: argparse.Namespace) -> None:
    """Print calls a step of all contenders, on 1 % of the rows."""
    calls = Calls()
    raws = cut(raw_batches(True, NUM_DIFFERENT), args.samples or FORMS_SAMPLES)
    with filled(True, 1) as ctx:
        form = ModuleForm(raws, True)
        slices = {
            "context, staleness 1": context_steps(ctx, raws, 1),
            "context, auto": context_steps(ctx, raws, "auto"),
            "EmbeddingCollection": form.steps(is_prefetched=False),
            "EmbeddingCollection, prefetch": form.steps(is_prefetched=True),
        }
        found = {name: calls.of(steps) for name, steps in slices.items()}
    theirs, ours = bag_forms(raws, True)
    found["26 bags, converted"] = calls.of(ours.steps(is_whole=True))
    ahead = ours.steps(is_whole=True, is_prefetched=True)
    found["26 bags, converted, prefetch"] = calls.of(ahead)
    found["26 bags of torch"] = calls.of(theirs.steps(is_whole=True))
    engine = ("lookup_direct", "lookup", "update", "release")
    columns = ("own call", "own c_call", "other call", "other c_call", *engine)
    for name, counts in found.items():
        row(name, *(f"{counts.get(column, 0):.0f}" for column in columns))


HEADS: dict[str, tuple[Callable[[argparse.Namespace], None], str, tuple[str, ...]]] = {
    "calls": (
        count_calls,
        "Calls a step; C calls are those from Python",
        (
            "",
            *("Python, user's thread", "C, user's thread"),
            *("Python, others", "C, others"),
            *("lookups of the engine", "of registered ids", "updates", "releases"),
        ),
    ),
    "forms": (
        measure_forms,
        "DLRM, thousand samples/s",
        (
            "threads",
            *("context, staleness 1", "module", "context, auto", "module, prefetch"),
            *("module of staleness 1 [95 %]", "prefetch of auto [95 %]"),
            *("staleness of auto", "depth of prefetch"),
        ),
    ),
    "converted": (
        measure_converted,
        "26 bags, thousand samples/s",
        (
            "threads",
            *("torch, embeddings", "converted, embeddings"),
            *("torch, whole step", "converted, whole step", "the same with prefetch"),
            *("embeddings, times torch [95 %]", "whole step, times torch [95 %]"),
            "with prefetch, times torch [95 %]",
        ),
    ),
}


@contextmanager
def store_threads(count: int) -> Iterator[None]:
    """Have stores of modules use as many threads."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as config:
        config.write(f"embedded_config:\n  num_threads: {count}\n")
        config.flush()
        os.environ["PERSIA_GLOBAL_CONFIG"] = config.name
        yield


def main() -> None:
    options = parser(__doc__, 20, cpu_time=True)
    options.add_argument("tables", nargs="*", choices=[*HEADS, []], help="default: all")
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--samples", type=int, help="of a batch; default as above")
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.clock is time.process_time and args.threads != [1]:
        options.error("--cpu-time adds the threads up: use it with --threads 1")
    if args.one:
        threads = args.threads[0]
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
        pin_malloc()
        torch.set_num_threads(threads)
        with store_threads(threads):
            HEADS[args.tables[0]][0](args)
        return
    for name in args.tables or HEADS:
        _, title, columns = HEADS[name]
        table(title, *columns)
        for threads in [1] if name == "calls" else args.threads:
            # A process each, because threads keep the cores they were started with.
            words = [word for word in sys.argv[1:] if word in ("--quick", "--cpu-time")]
            words += ["--one", "--threads", str(threads), "--pairs", str(args.pairs)]
            words += [] if args.samples is None else ["--samples", str(args.samples)]
            command = [sys.executable, "-m", "tests.benchmarks.modules", name, *words]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
