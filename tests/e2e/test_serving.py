"""Inference by servers that load a checkpoint when they start, and by no trainer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import InferCtx, TrainCtx
from persia.embedding import EmbeddingConfig
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import ServiceError
from tests.e2e.support import Job, new_job
from tests.support.waiting import PATIENCE_S, until

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


def trained(folder: Path, lr: float = 0.1) -> torch.Tensor:
    """Train a step by the order user, item; return what the model answers."""
    model = Difference()
    config = EmbeddingConfig(emb_initialization=(-0.5, 0.5), schema=SLOTS)
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=lr),
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


@contextmanager
def serving(folder: Path, **infer: Any) -> Iterator[Job]:
    """Servers for inference of a folder's checkpoint."""
    infer = {"embedding_checkpoint": str(folder), "follow_interval_sec": 0.05} | infer
    settings = {"common_config": {"job_type": "Infer", "infer_config": infer}}
    with new_job(settings, SLOTS) as job:
        job.start_servers()
        yield job


def answer(ctx: InferCtx) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = ctx.forward(
            ctx.get_embedding_from_data(batch_of("user", "item"))
        )[0]
    return found


def test_servers_that_load_a_checkpoint_know_the_order_of_its_model(
    tmp_path: Path, no_job: None
) -> None:
    want = trained(tmp_path)
    with serving(tmp_path, servers=["unused:1"]) as job:
        addresses = job.addresses["embedding-worker"]
        with InferCtx(addresses, model=Difference()) as ctx:
            ctx.wait_for_serving()
            batch = ctx.get_embedding_from_data(batch_of("item", "user"))
            assert batch.feature_names == ("user", "item")
            assert torch.equal(ctx.forward(batch)[0], want)


def test_a_newer_checkpoint_is_served_without_a_zero_before(
    tmp_path: Path, no_job: None
) -> None:
    wanted = [trained(tmp_path)]
    with (
        serving(tmp_path) as job,
        InferCtx(job.addresses["embedding-worker"], model=Difference()) as ctx,
    ):
        ctx.wait_for_serving()
        assert torch.equal(answer(ctx), wanted[0])
        wanted.append(trained(tmp_path, lr=7.0))
        assert not torch.equal(*wanted)
        seen: list[torch.Tensor] = []

        def has_switched() -> bool:
            seen.append(answer(ctx))
            return torch.equal(seen[-1], wanted[1])

        until(has_switched)
        assert all(torch.equal(one, wanted[0]) for one in seen[:-1])


def test_a_server_that_was_killed_is_not_ready_and_never_answers_zeros(
    tmp_path: Path, no_job: None
) -> None:
    folder, aside = tmp_path / "checkpoints", tmp_path / "aside"
    want = trained(folder)
    server = "embedding-parameter-server"
    with (
        serving(folder) as job,
        InferCtx(job.addresses["embedding-worker"], model=Difference()) as ctx,
    ):
        ctx.wait_for_serving()
        assert torch.equal(answer(ctx), want)
        seen: list[torch.Tensor] = []
        failures: list[ServiceError] = []
        is_done = threading.Event()

        def ask() -> None:
            while not is_done.is_set():
                try:
                    seen.append(answer(ctx))
                except ServiceError as exc:
                    failures.append(exc)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            shutil.move(folder, aside)
            job.kill(f"{server}-0")
            job.start_replica(server)
            until(lambda: "no rows yet" in job.log(f"{server}-0"))
            count = len(seen)
            shutil.move(aside, folder)
            until(lambda: len(seen) > count + 1)
        finally:
            is_done.set()
            thread.join(PATIENCE_S)
        assert all(torch.equal(one, want) for one in seen)
