"""A job whose rows say how often each id was trained.

The loss is the sum of all embeddings and SGD's rate is 1, so each occurrence of an id lowers
every value of its row by 1, whatever the order: a batch that is lost or applied twice shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import Constant, EmbeddingConfig, InitialValues
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch
from persia.embedding.optim import SGD, Optimizer
from tests.faults.batches import NUM_IDS, SLOTS, occurrences

LOADER = Path(__file__).parent / "scripts" / "loader.py"


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        return torch.stack(embeddings).sum() + 0 * self.bias.sum()


def make_ctx(
    slots: Mapping[str, Any] = SLOTS,
    optimizer: Optimizer | None = None,
    initial: InitialValues | None = None,
    **options: Any,
) -> TrainCtx:
    model = Sum()
    return TrainCtx(
        model=model,
        embedding_optimizer=optimizer or SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(
            emb_initialization=initial or Constant(0.0), weight_bound=0.0, schema=slots
        ),
        **options,
    )


def trained(ctx: TrainCtx) -> dict[str, np.ndarray]:
    """Return how often each id was trained, by feature, as the rows say."""
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID(name, ids) for name in ("user", "item")], requires_grad=False
    )
    tensors = ctx.get_embedding_from_data(batch).embedding_tensors
    counts = {}
    for name, tensor in zip(("user", "item"), tensors, strict=True):
        assert isinstance(tensor, torch.Tensor)
        values = -tensor.detach().numpy()
        assert (values == values[:, :1]).all()
        counts[name] = values[:, 0]
    return counts


def step(ctx: TrainCtx, batch: Any) -> int:
    """Train a batch; returns its number."""
    loss, _ = ctx.forward(batch)
    ctx.backward(loss)
    return int(batch.meta or b"-1")


def train(
    ctx: TrainCtx,
    at: int = -1,
    disturb: Callable[[], None] = lambda: None,
    *,
    in_order: bool = False,
    timeout_ms: int = 60_000,
) -> list[int]:
    """Train to the end, disturbed before batch ``at``; returns the numbers of the batches."""
    loader = DataLoader(
        StreamingDataset(6), reproducible=in_order, embedding_staleness=3, timeout_ms=timeout_ms
    )
    seen = []
    for place, batch in enumerate(loader):
        if place == at:
            disturb()
        seen.append(step(ctx, batch))
    return seen


def assert_each_once(ctx: TrainCtx, seen: list[int], count: int) -> None:
    """Check that the first ``count`` batches were trained, and once."""
    assert sorted(seen) == list(range(count))
    assert_trained(ctx, occurrences(count))
    assert ctx.stats()["failed"] == 0


def train_each_once(
    count: int, at: int = -1, disturb: Callable[[], None] = lambda: None, in_order: bool = False
) -> None:
    """Train to the end as the trainer of a job, and check that."""
    with make_ctx() as ctx:
        seen = train(ctx, at, disturb, in_order=in_order)
        assert not in_order or seen == list(range(count))
        assert_each_once(ctx, seen, count)


def assert_trained(ctx: TrainCtx, expected: dict[str, np.ndarray]) -> None:
    got = trained(ctx)
    for name, counts in expected.items():
        np.testing.assert_array_equal(got[name], counts)
