"""Train a factorization machine whose rows are stepped by an optimizer in C.

    python examples/own_optimizer/train.py

The first run compiles sophia.c, which takes a second; later ones find it compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import Native
from persia.metrics import AUC
from persia.utils import ArgumentParser, at_least

FOLDER = Path(__file__).parent
COUNTS = {"user": 300, "item": 200, "hour": 24}
BATCH_SIZE = 256


class Clicks(IterableDataset):
    """Clicks that pairs of user, item and hour explain."""

    def __init__(self, samples: int, seed: int, requires_grad: bool) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.ids = {
            name: rng.integers(0, n, samples, dtype=np.uint64) for name, n in COUNTS.items()
        }
        tastes = np.random.default_rng(0)  # the same for all seeds
        vectors = [
            tastes.normal(size=(n, 4))[self.ids[name].astype(np.int64)]
            for name, n in COUNTS.items()
        ]
        scores = ((sum(vectors) ** 2 - sum(v**2 for v in vectors)) / 2).sum(axis=1)
        chance = 1 / (1 + np.exp(-scores))
        self.clicks = (rng.random(samples) < chance).astype(np.float32)[:, None]
        self.requires_grad = requires_grad

    def __len__(self) -> int:
        return -(-len(self.clicks) // BATCH_SIZE)

    def __iter__(self) -> Iterator[PersiaBatch]:
        for start in range(0, len(self.clicks), BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID(name, ids[rows]) for name, ids in self.ids.items()],
                labels=[Label(self.clicks[rows])],
                requires_grad=self.requires_grad,
            )


class FactorizationMachine(nn.Module):
    """Logits [B, 1] from the pairs of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(8, 1)
        nn.init.ones_(self.weights.weight)

    def forward(
        self, dense: Sequence[torch.Tensor], embeddings: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        vectors = torch.stack(list(embeddings), dim=1)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)) / 2
        return self.weights(pairs)


def build_ctx(seed: int) -> TrainCtx:
    torch.manual_seed(seed)
    model = FactorizationMachine()
    return TrainCtx(
        model=model,
        embedding_optimizer=Native(
            FOLDER / "sophia.c", state=lambda dim: 2 * dim, params={"beta1": 0.9}, lr=0.02
        ),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        embedding_config=EmbeddingConfig(
            emb_initialization=(-0.3, 0.3),
            seed=seed,
            schema=FOLDER / "config" / "embedding_config.yml",
        ),
    )


def run(ctx: TrainCtx, samples: int, seed: int) -> float:
    """Train one pass and return the AUC of another log."""
    loss_fn = nn.BCEWithLogitsLoss()
    for batch in DataLoader(Clicks(samples, seed, requires_grad=True), reproducible=True):
        logits, labels = ctx.forward(batch)
        ctx.backward(loss_fn(logits, labels[0]))
    auc = AUC()
    with eval_ctx(model=ctx.model) as evaluation, torch.no_grad():
        for batch in DataLoader(Clicks(samples // 4, seed + 1, requires_grad=False)):
            logits, labels = evaluation.forward(batch)
            auc.update(logits, labels[0])
    return float(auc.compute())


def main(argv: list[str] | None = None) -> float:
    parser = ArgumentParser(__doc__, "python train.py --samples 100000")
    parser.add_argument("--samples", type=at_least(1000), default=60_000, help="to train on")
    parser.add_argument("--seed", type=int, default=1, help="of the log and the model")
    args = parser.parse_args(argv)
    with build_ctx(args.seed) as ctx:
        auc = run(ctx, args.samples, args.seed)
    print(f"test AUC {auc:.4f}")
    return auc


if __name__ == "__main__":
    main()
