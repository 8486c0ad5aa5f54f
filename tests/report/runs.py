"""A small run that is recorded, and a reader of its report."""

from __future__ import annotations

import html
import math
import re

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from tests.training.conftest import Net, loss_of

SLOTS = {"slots_config": {"user": {"dim": 4}, "tags": {"dim": 8}}}
STEPS, SIZE = 40, 32


class Clicks(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        rng = np.random.default_rng(1)
        for _ in range(STEPS):
            tags = [rng.integers(0, 50, n).astype(np.uint64) for n in rng.integers(0, 3, SIZE)]
            users = rng.integers(0, 300, SIZE).astype(np.uint64)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID("user", users), IDTypeFeature("tags", tags)],
                non_id_type_features=[NonIDTypeFeature(rng.random((SIZE, 2), np.float32))],
                labels=[Label((users % 2).astype(np.float32).reshape(-1, 1))],
                requires_grad=True,
            )


def build(**options: object) -> TrainCtx:
    model = Net(num_features=3)  # of 4 columns; the tags have twice as many
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(schema=SLOTS),
        mixed_precision=False,
        **options,  # type: ignore[arg-type]
    )


def train(ctx: TrainCtx, spoiled: int = -1) -> None:
    for step, batch in enumerate(DataLoader(Clicks(), reproducible=True)):
        if step == 3:
            continue  # no backward: abandoned
        loss = loss_of(*ctx.forward(batch))
        ctx.backward(loss * math.nan if step == spoiled else loss)
        if step % 10 == 0:
            ctx.report(auc=0.5 + step / 100)


class Reader:
    """What a page shows, and what it would fetch."""

    def __init__(self, page: str) -> None:
        self.fetched = re.findall(r"<[^>]*\b(?:src|href)\s*=[^>]*>", page)
        shown = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
        self.num_charts = len(re.findall(r"<svg\b", shown))
        headings = re.findall(r"<(?:h1|h2|figcaption)\b[^>]*>([^<]*)", shown)
        self.headings = [html.unescape(one).strip() for one in headings]
        self.text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", shown)))
