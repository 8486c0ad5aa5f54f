"""Which optimizers and rates a new project is best begun with.

    python -m tests.benchmarks.defaults [--rows NAME ...] [--dense NAME ...] [--results FILE]

Each optimizer of rows is tried with each optimizer of the dense net, in every cell: a data set
(UCI Adult, and logs generated after Avazu, Criteo and MovieLens), a batch size and a net. Every
run is in lockstep and of at least ``LEAST_STEPS`` steps: a generated log is as long as that
takes, and Adult is trained several times. Prints by pair of optimizers, in 1e-4 of AUC, what it
loses to the best pair of a cell: in the mean, at most, by data set and by batch size; and its
mean rank among the pairs. Results are kept in a file, so that what was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from persia.ctx import TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad
from tests.benchmarks.staleness import BATCH_SIZE, DIM, DLRM, Log, auc_of, log_of, train

LEAST_STEPS, LEAST_SAMPLES = 32, 48 * 1024
WIDTH = 64

# By name, with the accumulator's first value behind a slash.
ROWS: dict[str, Callable[[], Optimizer]] = {
    "Adagrad 0.03": partial(Adagrad, lr=0.03),
    "Adagrad 0.1": partial(Adagrad, lr=0.1),
    "Adagrad 0.3": partial(Adagrad, lr=0.3),
    "Adagrad 0.1 / 0.01": partial(Adagrad, lr=0.1, initial_accumulator_value=0.01),
    "RowwiseAdagrad 0.1": partial(RowwiseAdagrad, lr=0.1),
    "Adam 0.003": partial(Adam, lr=0.003),
    "Adam 0.01": partial(Adam, lr=0.01),
    "SGD 10": partial(SGD, lr=10.0),
}
DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam 0.001": partial(torch.optim.Adam, lr=0.001),
    "Adam 0.003": partial(torch.optim.Adam, lr=0.003),
    "Adam 0.01": partial(torch.optim.Adam, lr=0.01),
    "SGD 0.1": partial(torch.optim.SGD, lr=0.1),
}
DATA = ("adult", "avazu", "criteo", "movielens")
SIZES = (128, 1024, 8192)


class MLP(nn.Module):
    """One hidden layer over all that there is."""

    def __init__(self, num_features: int, num_dense: int, width: int) -> None:
        super().__init__()
        inputs = num_features * DIM + num_dense
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        output: torch.Tensor = self.layers(torch.cat([*dense, *embeddings], 1))
        return output


NETS: dict[str, type[nn.Module]] = {"mlp": MLP, "dlrm": DLRM}


class Cell(NamedTuple):
    """Where pairs are compared."""

    data: str
    size: int  # of a batch
    net: str

    def __str__(self) -> str:
        return f"{self.data} {self.size} {self.net}"


class Pair(NamedTuple):
    """Names of two optimizers."""

    rows: str
    dense: str

    def __str__(self) -> str:
        return f"{self.rows}, {self.dense}"


@lru_cache(maxsize=1)
def data_of(name: str, seed: int, size: int) -> tuple[Log, int]:
    """Return a log, and how often it is to be trained on in batches of this size."""
    if name == "adult":
        log = log_of(name, seed)
        return log, -(-LEAST_STEPS * size // log.num_train)
    num_samples = max(LEAST_SAMPLES, LEAST_STEPS * size)
    return log_of(name, seed, num_samples // BATCH_SIZE), 1


def auc(cell: Cell, seed: int, pair: Pair) -> float:
    """Train once and return the AUC on what comes after."""
    log, num_passes = data_of(cell.data, seed, cell.size)
    torch.manual_seed(seed)
    num_features = log.ids.shape[1]
    model = NETS[cell.net](num_features, log.dense.shape[1], WIDTH)
    slots = {f"f{i}": {"dim": DIM} for i in range(num_features)}
    with TrainCtx(
        model=model,
        embedding_optimizer=ROWS[pair.rows](),
        dense_optimizer=DENSE[pair.dense](model.parameters()),
        embedding_config=EmbeddingConfig(seed=seed, schema={"slots_config": slots}),
        mixed_precision=False,
    ) as ctx:
        for _ in range(num_passes):
            train(ctx, log, 1, cell.size, repeats=True)
        return auc_of(ctx, log)


class Results:
    """AUC by cell, pair and seed, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, float] = {}
        if path is not None and path.exists():
            lines = path.read_text("utf-8").splitlines()
            self._found = dict(json.loads(line) for line in lines)

    def fill(self, cells: Iterable[Cell], pairs: Iterable[Pair], seeds: int) -> None:
        """Run what is not there yet."""
        for cell, seed, pair in itertools.product(cells, range(seeds), pairs):
            key = self._key(cell, pair, seed)
            if key not in self._found:
                self._found[key] = auc(cell, seed, pair)
                print(f"{key}: {self._found[key]:.5f}", flush=True)
                if self._path is not None:
                    with self._path.open("a", encoding="utf-8") as file:
                        print(json.dumps([key, self._found[key]]), file=file)

    def mean(self, cell: Cell, pair: Pair, seeds: int) -> float:
        """Return the mean AUC over seeds."""
        keys = [self._key(cell, pair, seed) for seed in range(seeds)]
        return statistics.fmean(self._found[key] for key in keys)

    @staticmethod
    def _key(cell: Cell, pair: Pair, seed: int) -> str:
        return f"{cell}, {pair}, seed {seed}"


def regrets(
    results: Results, cells: list[Cell], pairs: list[Pair], seeds: int
) -> Iterator[tuple[Pair, dict[Cell, float], float]]:
    """Yield each pair, what it loses to the best of each cell, and its mean rank, from 1."""
    means = {cell: [results.mean(cell, pair, seeds) for pair in pairs] for cell in cells}
    for place, pair in enumerate(pairs):
        lost = {cell: 1e4 * (max(found) - found[place]) for cell, found in means.items()}
        ranks = [1 + sum(one > found[place] for one in found) for found in means.values()]
        yield pair, lost, statistics.fmean(ranks)


def report(results: Results, cells: list[Cell], pairs: list[Pair], seeds: int) -> None:
    """Print a table of Markdown, the smallest mean first."""
    sizes = sorted({cell.size for cell in cells})
    data = list(dict.fromkeys(cell.data for cell in cells))
    titles = ["rows, dense", "mean", "worst", "rank", *data, *map(str, sizes)]
    print("\n| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
    found = regrets(results, cells, pairs, seeds)
    for pair, lost, rank in sorted(found, key=lambda one: statistics.fmean(one[1].values())):
        worst = max(lost, key=lost.__getitem__)
        groups = [[lost[cell] for cell in lost if cell.data == name] for name in data]
        groups += [[lost[cell] for cell in lost if cell.size == size] for size in sizes]
        means = [statistics.fmean(lost.values()), *map(statistics.fmean, groups)]
        mean, *others = [f"{value:.0f}" for value in means]
        row = [str(pair), mean, f"{lost[worst]:.0f} ({worst})", f"{rank:.1f}", *others]
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--dense", nargs="+", choices=DENSE, default=["Adam 0.003"])
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--results", type=Path, help="file of results, which is added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = list(map(Cell._make, itertools.product(options.data, options.sizes, options.nets)))
    pairs = list(map(Pair._make, itertools.product(options.rows, options.dense)))
    results = Results(options.results)
    results.fill(cells, pairs, options.seeds)
    report(results, cells, pairs, options.seeds)


if __name__ == "__main__":
    main()
