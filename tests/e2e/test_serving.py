"""Inference by servers that load a checkpoint when they start, and by no trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import InferCtx, TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD
from tests.e2e.support import new_job

SLOTS = {"slots_config": {"user": {"dim": 4}, "item": {"dim": 4}}}


class Difference(torch.nn.Module):
    """Another one if its two features are swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, dense: Any, embeddings: list[torch.Tensor]) -> torch.Tensor:
        return (embeddings[0] - embeddings[1]).sum(1, keepdim=True) * self.scale


def batch_of(*names: str) -> PersiaBatch:
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID(
                name, np.arange(8, dtype=np.uint64) + np.uint64(len(name))
            )
            for name in names
        ],
        labels=[Label(np.ones((8, 1), np.float32))],
    )


def trained(folder: Path) -> torch.Tensor:
    """Train a step by the order user, item; return what the model answers."""
    model = Difference()
    config = EmbeddingConfig(emb_initialization=(-0.5, 0.5), schema=SLOTS)
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        embedding_config=config,
    ) as ctx:
        ctx.backward(
            ctx.forward(ctx.get_embedding_from_data(batch_of("user", "item")))[0].sum()
        )
        ctx.dump_checkpoint(folder)
        with torch.no_grad():
            answer: torch.Tensor = ctx.forward(
                ctx.get_embedding_from_data(batch_of("user", "item"))
            )[0]
        return answer


def test_servers_that_load_a_checkpoint_know_the_order_of_its_model(
    tmp_path: Path, no_job: None
) -> None:
    want = trained(tmp_path)
    infer = {"servers": ["unused:1"], "embedding_checkpoint": str(tmp_path)}
    settings = {"common_config": {"job_type": "Infer", "infer_config": infer}}
    with new_job(settings, SLOTS) as job:
        job.start_servers()
        addresses = job.addresses["embedding-worker"]
        with InferCtx(addresses, model=Difference()) as ctx:
            ctx.wait_for_serving()
            batch = ctx.get_embedding_from_data(batch_of("item", "user"))
            assert batch.feature_names == ("user", "item")
            assert torch.equal(ctx.forward(batch)[0], want)
