"""Embedding-workers of serving that are killed or stand still while requests come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._rpc import serving_pool
from persia.ctx import InferCtx
from tests.faults.batches import SLOTS, make_batch
from tests.faults.job import make_ctx, step
from tests.support.fixtures import Monkey
from tests.support.processes import Cluster
from tests.support.waiting import PATIENCE_S, until

WORKER = "embedding-worker"


@pytest.fixture
def cluster(no_job: None, tmp_path: Path) -> Iterator[Cluster]:
    """Two embedding-workers, the first of which is down, over a server with a checkpoint."""
    with make_ctx() as ctx:
        step(ctx, ctx.get_embedding_from_data(make_batch(0)))
        ctx.dump_checkpoint(tmp_path)
    infer = {"servers": ["unused:1"], "embedding_checkpoint": str(tmp_path)}
    settings = {"common_config": {"job_type": "Infer", "infer_config": infer}}
    with Cluster(
        SLOTS, settings, num_workers=2, environment={"PERSIA_RPC_TIMEOUT": str(PATIENCE_S)}
    ) as made:
        made.start_replica("embedding-parameter-server")
        made.start_replica(WORKER, 1)
        yield made


def ask(ctx: InferCtx) -> None:
    """Make a request, whose answer is right: each id was trained once for each occurrence."""
    batch = make_batch(0)
    tensors: Any = ctx.get_embedding_from_data(batch).embedding_tensors
    for feature, tensor in zip(batch.features, tensors, strict=True):
        place = np.asarray(feature.inverse)
        np.testing.assert_array_equal(-tensor.numpy()[:, 0], np.bincount(place)[place])


def await_up(ctx: InferCtx, *up: bool) -> None:
    pool: Any = ctx.embedding_worker
    until(lambda: tuple(one.is_up for one in pool._servers.values()) == up)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_worker_costs_no_request_and_is_found_again(
    cluster: Cluster, monkeypatch: Monkey, how: signal.Signals
) -> None:
    checks: list[float] = []
    check = serving_pool.ServingWorkers._check

    def counted(pool: Any, server: Any, timeout_s: float) -> None:
        checks.append(timeout_s)
        check(pool, server, timeout_s)

    with InferCtx(cluster.addresses[WORKER]) as ctx:  # one of them is down
        ctx.wait_for_serving()
        ask(ctx)
        await_up(ctx, False, True)
        cluster.start_replica(WORKER, 0)
        await_up(ctx, True, True)
        ctx.wait_for_serving()
        until(lambda: "serves at" in cluster.log(f"{WORKER}-0"))
        # Only requests are to find it.
        monkeypatch.setattr(serving_pool, "HEALTH_S", PATIENCE_S)
        for _ in range(8):
            ask(ctx)
        monkeypatch.setattr(serving_pool.ServingWorkers, "_check", counted)
        process = cluster.processes[f"{WORKER}-1"]
        os.kill(process.pid, how)
        if how is signal.SIGKILL:
            process.wait()
        for _ in range(16):
            ask(ctx)
        # One attempt, and one question for its health; no more once it is avoided.
        assert len(checks) <= 1
        assert all(seconds <= 0.1 for seconds in checks)
        await_up(ctx, True, False)
        monkeypatch.undo()
        if how is signal.SIGKILL:
            cluster.start_replica(WORKER, 1)
        else:
            os.kill(process.pid, signal.SIGCONT)
