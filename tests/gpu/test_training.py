"""Training on a device: what a CPU gives, in every precision, without a wait or a leak.

Each test runs on the CPU too, with few steps, so that no line is untried where there is no GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import Adagrad
from tests.examples.loading import load
from tests.gpu.devices import (
    ON_EACH,
    number_of,
    read_trace,
    resident_bytes,
    wait_for,
    without_waiting,
)
from tests.gpu.job import NAMES, Net, batches, embeddings, new_ctx, step, train
from tests.support.fixtures import Record
from tests.support.processes import Cluster, run
from tests.training.fakes import SLOTS, make_batch

LOCKSTEP: dict[str, Any] = {"reproducible": True, "embedding_staleness": 1}


@pytest.fixture(autouse=True)
def _alone(no_job: None) -> None:
    """No test sees the servers of its surroundings."""


@pytest.fixture
def servers() -> Iterator[Cluster]:
    """Two parameter servers and an embedding-worker, processes that the context connects to."""
    with Cluster({"slots_config": SLOTS}, num_servers=2) as cluster:
        cluster.start_servers()
        with env.changed(**cluster.variables):
            yield cluster


@pytest.mark.slow
@ON_EACH
def test_training_over_servers_gives_what_one_process_on_the_cpu_gives(
    device: str, servers: Cluster
) -> None:
    with new_ctx(device, Net(), embedding_config=None) as ctx:
        losses, rows = train(ctx, batches(30), **LOCKSTEP), embeddings(ctx)
    with env.changed(**dict.fromkeys(servers.variables)), new_ctx("cpu", Net()) as ctx:
        wanted, their_rows = train(ctx, batches(30), **LOCKSTEP), embeddings(ctx)
    # The devices sum in different orders.
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for own, other in zip(rows, their_rows, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@ON_EACH
def test_bf16_autocast_learns_and_leaves_rows_in_float32(device: str) -> None:
    with new_ctx(device, Net(dtype=torch.bfloat16)) as ctx:
        losses = train(ctx, batches(40), **LOCKSTEP)
        for batch in DataLoader(batches(1)):
            user = batch.embedding_tensors["user"]
            output, _ = ctx.forward(batch)
            ctx.backward(output.square().mean())
            assert isinstance(user, torch.Tensor)
            assert user.dtype == torch.float32
        assert ctx.stats()["nan_rows"] == {}
    with new_ctx(device, Net()) as ctx:
        exact = train(ctx, batches(40), **LOCKSTEP)
    np.testing.assert_allclose(losses, exact, rtol=0.05)


@ON_EACH
def test_a_grad_scaler_skips_dense_and_sparse_alike(device: str) -> None:
    with new_ctx(device, Net(), mixed_precision=True) as ctx:
        losses = train(ctx, batches(20), **LOCKSTEP)
        assert np.isfinite(losses).all()
        scale, rows = ctx.grad_scaler.get_scale(), embeddings(ctx)  # type: ignore[union-attr]
        parameters = [one.detach().clone() for one in ctx.model.parameters()]
        good = make_batch(0, 64, NAMES)
        bad = PersiaBatch(
            good.features,  # type: ignore[arg-type]
            [NonIDTypeFeature(np.full((64, 2), np.inf, np.float32))],
            good.labels,
        )
        train(ctx, [bad], allow_untrained=True, **LOCKSTEP)
        assert ctx.stats()["skipped"] == 1
        assert ctx.grad_scaler.get_scale() == scale / 4  # type: ignore[union-attr]
        assert all(map(torch.equal, embeddings(ctx), rows))
        assert all(map(torch.equal, ctx.model.parameters(), parameters))


@pytest.mark.slow
@ON_EACH
def test_memory_is_flat(device: str, record_property: Record) -> None:
    num_steps = 1000 if device == "cuda" else 60
    with new_ctx(device, Net()) as ctx:
        train(ctx, batches(50))  # rows, buffers and threads are there
        before, resident = _allocated(device), resident_bytes()
        train(ctx, (make_batch(number % 50, 64, NAMES) for number in range(num_steps)))
        after, grown = _allocated(device), resident_bytes() - resident
    record_property(
        "measured",
        f"memory after {num_steps} steps on {device}: {after - before:+d} bytes allocated on "
        f"the device, {grown / 2**20:+.1f} MiB resident in the host",
    )
    assert after <= before
    assert grown < 32 << 20


def _allocated(device: str) -> int:
    wait_for(device)
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@ON_EACH
def test_no_call_of_a_step_waits_for_the_device(device: str) -> None:
    with new_ctx(device, Net()) as ctx:
        train(ctx, batches(5))  # the first steps look for gradients that are all zero
        losses = []
        for batch in DataLoader(batches(20)):
            with without_waiting(device):
                losses.append(step(ctx, batch))
        assert torch.stack(losses).isfinite().all()


@ON_EACH
def test_copies_run_on_streams_of_their_own_beside_the_dense_net(
    device: str, tmp_path: Path, record_property: Record
) -> None:
    width, size = (4096, 4096) if device == "cuda" else (16, 64)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with new_ctx(device, Net(width)) as ctx:
        train(ctx, batches(12, size))
        loader = iter(DataLoader(list(batches(24, size))))
        for batch in islice(loader, 4):
            step(ctx, batch)
        with torch.profiler.profile(activities=activities) as profile:
            for batch in islice(loader, 16):
                with torch.profiler.record_function("step"):
                    step(ctx, batch)
            wait_for(device)
        for batch in loader:
            step(ctx, batch)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    assert len([mark for mark in trace.marks if mark.name == "step"]) >= 16
    assert trace.waits("step") == []
    if device == "cpu":
        assert trace.copies == []
        return
    dense = trace.streams(trace.kernels)
    ups = [copy for copy in trace.copies if "HtoD" in copy.name]
    downs = [copy for copy in trace.copies if "DtoH" in copy.name]
    assert ups
    assert downs
    assert not any("Pageable" in copy.name for copy in trace.copies)
    assert trace.streams(ups).isdisjoint(dense | trace.streams(downs))
    assert trace.streams(downs).isdisjoint(dense)
    up, down = trace.hidden(ups), trace.hidden(downs)
    record_property(
        "measured",
        f"of the time of copies a kernel ran beside {up:.0%} of those to the device and "
        f"{down:.0%} of those to the host; calls that waited in 16 steps: 0",
    )
    assert up > 0.2
    assert down > 0.2


@ON_EACH
def test_the_quickstart_learns(device: str, record_property: Record) -> None:
    quickstart = load("quickstart")
    samples = 600_000 if device == "cuda" else 3_000
    options = quickstart.Options(samples=samples, quiet=True, threads=4)
    log = quickstart.generate(options.samples, options.seed)
    torch.manual_seed(options.seed)
    context = new_ctx(
        device,
        quickstart.ClickModel(),
        embedding_optimizer=Adagrad(lr=0.05, initial_accumulator_value=1e-8),
        embedding_config=EmbeddingConfig(
            emb_initialization=(-0.05, 0.05),
            seed=options.seed,
            schema=quickstart.EMBEDDING_CONFIG,
        ),
    )
    context.dense_optimizer = torch.optim.Adam(context.model.parameters(), lr=5e-4)
    with context as ctx:
        loss, seconds = quickstart.train(ctx, log, options)
        auc = _test_auc(quickstart, ctx, log)
    line = f"quickstart on {device}: AUC {auc:.4f} of {log.best_auc():.4f}, loss {loss:.4f}, "
    record_property("measured", line + f"{log.num_train / seconds:,.0f} samples/s")
    assert np.isfinite(loss)
    if device == "cuda":
        assert log.best_auc() - auc < 0.01


def _test_auc(quickstart: Any, ctx: Any, log: Any) -> float:
    samples = range(log.num_train, len(log))
    dataset = quickstart.ClickDataset(log, samples, 4096, requires_grad=False)
    scores = []
    with quickstart.eval_ctx(model=ctx.model) as evaluation, torch.no_grad():
        for batch in DataLoader(dataset, reproducible=True):
            scores.append(evaluation.forward(batch)[0][:, 0])
    found: float = quickstart.auc(
        log.clicks[samples.start :, 0], torch.cat(scores).cpu().numpy()
    )
    return found


@pytest.mark.slow
@ON_EACH
def test_one_rank_under_torchrun(device: str) -> None:
    words = ("--nproc-per-node", "1", "--standalone", "-m", "tests.gpu.rank", device)
    ran = run(
        *(sys.executable, "-m", "torch.distributed.run", *words),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout_s=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert ("nccl" if device == "cuda" else "gloo") + ": 20 steps" in ran.stdout


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_other_than_0_takes_no_memory_on_0() -> None:
    program = (
        "import torch\n"
        "from tests.gpu.job import Net, batches, new_ctx, train\n"
        "with new_ctx('cuda:1', Net(), device_id=1) as ctx:\n"
        "    train(ctx, batches(20))\n"
        "assert torch.cuda.memory_allocated(1) > 0\n"
        "assert torch.cuda.memory_reserved(0) == 0\n"
    )
    ran = run("-c", program, timeout_s=200)
    assert ran.returncode == 0, ran.stderr


def test_a_device_is_named_by_its_number() -> None:
    assert [number_of(name) for name in ("cpu", "cuda")] == [None, 0]
