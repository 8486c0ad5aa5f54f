"""The workload of the whole step: DLRM over 26 features, and its batches."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from tests.benchmarks.ceiling import Table, described
from tests.benchmarks.workload import BATCH, DIM, LR, Ids, batches, sizes

NUM_DENSE = 13
NUM_FEATURES = len(sizes(True))
SLOTS = {f"feature_{number}": {"dim": DIM} for number in range(NUM_FEATURES)}
# Different batches, taken in turn: enough that none is still in a cache when it comes again.
NUM_DIFFERENT = 16
# Batches behind those that are timed, so that all roles have as much ahead of them at the end
# of the time as at its beginning.
NUM_BEHIND = 40
WARM, TIMED = 20, 100
COUNT = WARM + TIMED + NUM_BEHIND


TOP = (256, 128)  # widths of the top net's inner layers


class DLRM(torch.nn.Module):
    """Bottom 13-64-32-16, dot products of 27 vectors, top 367-256-128-1 or as given."""

    def __init__(self, top: Sequence[int] = TOP) -> None:
        super().__init__()
        self.bottom = _mlp(NUM_DENSE, 64, 32, DIM)
        num_pairs = (NUM_FEATURES + 1) * NUM_FEATURES // 2
        self.top = _mlp(num_pairs + DIM, *top, 1)
        rows, columns = torch.tril_indices(NUM_FEATURES + 1, NUM_FEATURES + 1, offset=-1)
        self.register_buffer("pairs", rows * (NUM_FEATURES + 1) + columns)

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return logits [B, 1]."""
        bottom = self.bottom(dense[0])
        vectors = torch.stack([bottom, *embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        chosen = products.index_select(1, self.pairs)  # type: ignore[arg-type]
        logits: torch.Tensor = self.top(torch.cat([bottom, chosen], dim=1))
        return logits


def net() -> tuple[DLRM, torch.optim.Optimizer]:
    """Return the dense part; the same everywhere."""
    torch.manual_seed(0)
    model = DLRM()
    return model, torch.optim.Adagrad(model.parameters(), lr=LR)


loss_of = torch.nn.BCEWithLogitsLoss()


def _mlp(*widths: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


@dataclasses.dataclass(frozen=True)
class Raw:
    """One batch as a data pipeline would hold it."""

    features: list[Ids]  # with one id a sample
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]

    def batch(self) -> PersiaBatch:
        """Build what is sent; finding the distinct ids is part of it."""
        return PersiaBatch(
            [
                IDTypeFeatureWithSingleID(f"feature_{number}", ids.values)
                for number, ids in enumerate(self.features)
            ],
            non_id_type_features=[NonIDTypeFeature(self.dense)],
            labels=[Label(self.labels)],
        )


class Ideal:
    """The ceiling and a dense net; without a table the dense net alone."""

    def __init__(self, table: Table | None) -> None:
        self._table = table
        self._model, self._optimizer = net()
        self._out = torch.randn(NUM_FEATURES, BATCH, DIM)

    def step(self, raw: Raw) -> None:
        embeddings = self._out.detach()
        if self._table is not None:
            self._table.lookup(described(raw.features), BATCH, True, embeddings.numpy())
        embeddings.requires_grad = True
        logits = self._model([torch.from_numpy(raw.dense)], list(embeddings.unbind()))
        loss_of(logits, torch.from_numpy(raw.labels)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        gradient = embeddings.grad
        if self._table is not None and gradient is not None:
            self._table.update(gradient.numpy())


def raw_batches(quick: bool, count: int = COUNT) -> Iterator[Raw]:
    """Yield ``count`` batches; the same in every process."""
    rng = np.random.default_rng(1)
    different = [
        Raw(
            batch.features,
            rng.normal(size=(BATCH, NUM_DENSE)).astype(np.float32),
            rng.integers(0, 2, (BATCH, 1)).astype(np.float32),
        )
        for batch in batches("single", quick, NUM_DIFFERENT)
    ]
    for number in range(count):
        yield different[number % NUM_DIFFERENT]


def parse() -> argparse.Namespace:
    """Read the command line of both scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dense", action="store_true", help="the dense net alone")
    return parser.parse_args()
