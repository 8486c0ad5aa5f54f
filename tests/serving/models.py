"""A small model with every kind of feature, its config, its batches, and a trained context."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from tests.support.waiting import PATIENCE_S

SCHEMA: dict[str, Any] = {
    "feature_index_prefix_bit": 8,
    "slots_config": {
        "user": {"dim": 8},
        "tags": {"dim": 8, "pooling": "mean"},
        "hist": {"dim": 4, "pooling": "raw", "sample_fixed_size": 5},
        "jag": {"dim": 8, "pooling": "jagged"},
        "w": {"dim": 16, "pooling": "sum"},
        "hs": {"dim": 8, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 100}},
    },
    "group_settings": {"tags": {"dtype": "float16"}, "w": {"dtype": "bfloat16"}},
}
NUM_IDS = 50
# ``RowServers`` that a busy machine may keep waiting.
PATIENT: dict[str, Any] = {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3 + 8 + 8 + 4 + 8 + 16 + 8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(16, 1),
        )

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        hist, jag = embeddings["hist"], embeddings["jag"]
        size = dense[0].shape[0]
        samples = torch.repeat_interleave(
            torch.arange(size), jag.offsets.diff(), output_size=jag.values.shape[0]
        )
        parts = [
            dense["dense"],
            embeddings["user"],
            embeddings["tags"],
            (hist[..., :-1] * hist[..., -1:]).sum(1),
            torch.zeros(size, 8).index_add(0, samples, jag.values),
            embeddings["w"],
            embeddings["hs"],
        ]
        out: torch.Tensor = torch.sigmoid(self.layers(torch.cat(parts, 1)))
        return out


def make_net() -> Net:
    return Net()


def arrays(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """The inputs of a request, by name."""
    edges = np.concatenate([[0], np.cumsum(rng.integers(0, 6, size))]).astype(np.int64)
    count = int(edges[-1])
    found: dict[str, Any] = {
        "user": rng.integers(0, NUM_IDS, size),
        "hs": rng.integers(0, NUM_IDS, size),
        "w.weights": rng.random(count).astype(np.float32),
        "dense": rng.random((size, 3)).astype(np.float32),
    }
    for name in ("tags", "hist", "jag", "w"):
        found[f"{name}.values"] = rng.integers(0, NUM_IDS, count)
        found[f"{name}.offsets"] = edges
    return found


def batch_of(given: dict[str, Any], trains: bool = False) -> PersiaBatch:
    def ids(name: str) -> Any:
        return given[name].astype(np.uint64)

    size = len(given["user"])
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID("user", ids("user")),
            *(
                IDTypeFeature.from_csr(name, ids(f"{name}.values"), given[f"{name}.offsets"])
                for name in ("tags", "hist", "jag")
            ),
            IDTypeFeature.from_csr(
                "w", ids("w.values"), given["w.offsets"], given["w.weights"]
            ),
            IDTypeFeatureWithSingleID("hs", ids("hs")),
        ],
        [NonIDTypeFeature(given["dense"], "dense")],
        [Label(np.ones((size, 1), np.float32))] if trains else None,
        requires_grad=trains,
    )


def make_ctx(**options: Any) -> TrainCtx:
    torch.manual_seed(7)
    net = Net()
    return TrainCtx(
        Adagrad(lr=0.1),
        torch.optim.Adam(net.parameters()),
        model=net,
        embedding_config=SCHEMA,
        mixed_precision=False,
        **options,
    )


def train(ctx: TrainCtx, rng: np.random.Generator, steps: int = 4) -> None:
    for _ in range(steps):
        batch = ctx.get_embedding_from_data(batch_of(arrays(rng, 16), trains=True))
        output, _ = ctx.forward(batch)
        ctx.backward(output.sum())
