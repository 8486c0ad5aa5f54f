"""Embedding-workers of serving, and their servers, killed or halted while requests come."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._rpc import serving_pool
from persia._worker import server_pool
from persia.ctx import InferCtx
from persia.errors import NotReady, ServiceError
from tests.faults.batches import SLOTS, make_batch
from tests.faults.job import make_ctx, step
from tests.support.fixtures import Monkey
from tests.support.processes import Cluster
from tests.support.waiting import PATIENCE_S, until

SERVER, WORKER = "embedding-parameter-server", "embedding-worker"


def trained(folder: Path) -> dict[str, Any]:
    """Train a step and dump a checkpoint; return the settings of servers that load it."""
    with make_ctx() as ctx:
        step(ctx, ctx.get_embedding_from_data(make_batch(0)))
        ctx.dump_checkpoint(folder)
    infer = {"servers": ["unused:1"], "embedding_checkpoint": str(folder)}
    return {"common_config": {"job_type": "Infer", "infer_config": infer}}


@pytest.fixture
def cluster(no_job: None, tmp_path: Path) -> Iterator[Cluster]:
    """Two embedding-workers, the first of which is down, over a server with a checkpoint."""
    settings = trained(tmp_path)
    with Cluster(
        SLOTS, settings, num_workers=2, environment={"PERSIA_RPC_TIMEOUT": str(PATIENCE_S)}
    ) as made:
        made.start_replica(SERVER)
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
        if server.address == cluster.addresses[WORKER][1]:
            checks.append(timeout_s)
        check(pool, server, timeout_s)

    ask_one = serving_pool.ServingWorkers._ask

    def patient(pool: Any, server: Any, *call: Any) -> Any:
        # The one that lives may be slow on a busy machine: it is not to be taken for dead.
        if server.address == cluster.addresses[WORKER][0]:
            call = (*call[:-1], PATIENCE_S)
        return ask_one(pool, server, *call)

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
        monkeypatch.setattr(serving_pool, "HEALTH_TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr(serving_pool.ServingWorkers, "_ask", patient)
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


@pytest.fixture
def copies(no_job: None, tmp_path: Path) -> Iterator[list[Cluster]]:
    """Two embedding-workers, each with two servers of its own, that have one checkpoint."""
    with contextlib.ExitStack() as stack:
        settings = trained(tmp_path)
        made = [stack.enter_context(Cluster(SLOTS, settings, num_servers=2)) for _ in range(2)]
        for one in made:
            one.start_servers()
        for one in made:
            await_ready(one)
        yield made


def is_answered(ctx: InferCtx) -> bool:
    """Return whether a request is answered in its time."""
    try:
        ask(ctx)
    except ServiceError:
        return False
    return True


def await_ready(cluster: Cluster) -> None:
    with InferCtx(cluster.addresses[WORKER]) as ctx:
        ctx.wait_for_serving()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_server_is_dead_costs_one_request_and_is_found_again(
    copies: list[Cluster], monkeypatch: Monkey, how: signal.Signals
) -> None:
    avoided: list[str] = []
    slow: list[str] = []
    avoid = serving_pool.ServingWorkers._avoid

    def noted(pool: Any, server: Any, problem: str, *, lacks_servers: bool = False) -> None:
        # One that is only slow may be taken for dead on a busy machine, and is back at once.
        if lacks_servers and copies[0].addresses[SERVER][1] in problem:
            avoided.append(problem)
        if server.address == copies[1].addresses[WORKER][0]:
            slow.append(problem)
        avoid(pool, server, problem, lacks_servers=lacks_servers)

    monkeypatch.setattr(serving_pool.ServingWorkers, "_avoid", noted)
    # A silent server is found after these; a dead one when its connection breaks.
    assert 2 * server_pool.ATTEMPT_S < 0.2
    with InferCtx([one.addresses[WORKER][0] for one in copies]) as ctx:
        ctx.wait_for_serving()
        await_up(ctx, True, True)
        for _ in range(8):
            ask(ctx)
        await_up(ctx, True, True)
        avoided.clear()
        process = copies[0].processes[f"{SERVER}-1"]
        if how is signal.SIGKILL:
            copies[0].kill(f"{SERVER}-1")
        else:
            os.kill(process.pid, how)
        for _ in range(16):
            ask(ctx)
        assert len(avoided) <= 1 or slow

        def is_asked_alone() -> bool:
            # Again where the one that lives was slow, so that the other was tried once more.
            await_up(ctx, False, True)
            avoided.clear()
            slow.clear()
            for _ in range(16):
                ask(ctx)
            return not slow

        until(is_asked_alone, details=lambda: slow)
        assert len(avoided) <= 1
        if how is signal.SIGKILL:
            copies[0].start_replica(SERVER, 1)
        else:
            os.kill(process.pid, signal.SIGCONT)
        await_up(ctx, True, True)
        for _ in range(8):
            ask(ctx)


@pytest.mark.slow
def test_where_all_copies_lack_a_server_the_error_names_it_at_the_deadline(
    copies: list[Cluster],
) -> None:
    addresses = [one.addresses[WORKER][0] for one in copies]
    with InferCtx(addresses, timeout_s=2.0) as ctx:
        ctx.wait_for_serving()
        until(lambda: is_answered(ctx))
        for one in copies:
            one.kill(f"{SERVER}-0")
        with pytest.raises(NotReady, match=f"{SERVER} 0 at") as caught:
            ask(ctx)
        assert (caught.value.role, caught.value.replica) == (SERVER, 0)
        assert caught.value.address in [one.addresses[SERVER][0] for one in copies]
        copies[1].start_replica(SERVER, 0)
        await_ready(copies[1])
        until(lambda: is_answered(ctx))
    with InferCtx(addresses[:1], timeout_s=1.0) as alone, pytest.raises(NotReady):
        ask(alone)
