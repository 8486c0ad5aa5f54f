"""Modules of persia.nn on a device: what torch's own give there, with rows in the host."""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import persia.nn
import persia.optim
from persia import env
from tests.gpu.devices import ON_EACH, wait_for
from tests.support.processes import Cluster
from tests.support.twins import DIM, Twins, batches, twins


@pytest.fixture(autouse=True)
def _alone(no_job: None) -> None:
    """No test sees the servers of its surroundings."""


def moved(batch: tuple[torch.Tensor, ...], device: str) -> tuple[torch.Tensor, ...]:
    return tuple(one.to(device, non_blocking=True) for one in batch)


def train(both: Twins, device: str, count: int, ours: Any = None) -> None:
    """Step both side by side; ``ours`` is called in place of the twin, if it is given."""
    for batch in batches(count):
        users, items, labels = moved(batch, device)
        losses = []
        for model, optimizer in (
            (both.ours if ours is None else ours, both.our_optimizer),
            (both.torchs, both.torch_optimizer),
        ):
            optimizer.zero_grad()
            loss = ((model(users, items) - labels) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    both.assert_equal(1e-4)


@ON_EACH
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_model_trains_as_torchs(device: str, mode: str) -> None:
    train(twins("adagrad", device=device, mode=mode), device, 10)
    train(twins("sgd", device=device, mode=mode, padding_idx=3), device, 10)


@ON_EACH
def test_a_compiled_model_trains_as_torchs(device: str) -> None:
    # Inductor compiles with Triton, for which a C compiler has to be there.
    can_compile = device == "cuda" and shutil.which("cc") is not None
    both = twins("adagrad", device=device)
    backend = "inductor" if can_compile else "aot_eager"
    train(both, device, 5, torch.compile(both.ours, backend=backend, fullgraph=True))


@ON_EACH
def test_weights_of_ids_have_gradients(device: str) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(9, DIM, mode="sum", device=device)
    ours: Any = persia.nn.EmbeddingBag(9, DIM, mode="sum").to(device)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.tensor([8, 1, 1, 5], device=device)
    offsets = torch.tensor([0, 3, 3], device=device)
    found = []
    for module in (ours, theirs):
        weights = torch.arange(4.0, device=device, requires_grad=True)
        vectors = module(ids, offsets, weights)
        torch.autograd.backward(vectors.square().sum())
        found.append((vectors.detach(), weights.grad))
    for own, their in zip(*found, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-6)


@ON_EACH
def test_gradients_are_collected_over_backwards(device: str) -> None:
    both = twins("sgd", device=device)
    for _ in range(2):
        both.our_optimizer.zero_grad()
        both.torch_optimizer.zero_grad()
        for batch in batches(3):
            torch.autograd.backward(both.losses(moved(batch, device)))
        for model in (both.ours, both.torchs):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        both.our_optimizer.step()
        both.torch_optimizer.step()
    both.assert_equal()


@ON_EACH
def test_a_grad_scaler_skips_rows_too(device: str) -> None:
    both = twins("sgd", device=device)
    optimizers = both.our_optimizer, both.torch_optimizer
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**10) for _ in optimizers]

    def step(batch: tuple[torch.Tensor, ...]) -> None:
        losses = both.losses(moved(batch, device))
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()

    for batch in batches(3):
        step(batch)
    both.assert_equal()
    rows = both.ours.user.weight.detach() + 0
    users, items, labels = next(batches(1))
    step((users, items, torch.full_like(labels, torch.inf)))
    assert [scaler.get_scale() for scaler in scalers] == [2.0**9] * 2
    assert torch.equal(both.ours.user.weight.detach() + 0, rows)
    for batch in batches(3):
        step(batch)
    both.assert_equal()


@ON_EACH
def test_under_autocast_vectors_are_float32_and_learn(device: str) -> None:
    both = twins("adagrad", device=device)
    losses = []
    for batch in batches(15):
        users, items, labels = moved(batch, device)
        with torch.autocast(device, torch.bfloat16):
            assert both.ours.user(users).dtype is torch.float32
            loss = ((both.ours(users, items).float() - labels) ** 2).mean()
        both.our_optimizer.zero_grad()
        torch.autograd.backward(loss)
        both.our_optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@ON_EACH
def test_batches_of_the_host_are_looked_up_ahead(device: str) -> None:
    both = twins("adagrad", device=device)
    ahead = persia.nn.prefetch([*batches(12)], both.ours, 1)
    for batch in ahead:
        for loss, optimizer in zip(
            both.losses(moved(batch, device)),
            (both.our_optimizer, both.torch_optimizer),
            strict=True,
        ):
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    both.assert_equal()
    assert ahead.num_hits >= 2 * 8


class TwoPlaces(torch.nn.Module):
    """One embedding in the host, one on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (torch.nn.Embedding(9, DIM) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        device = next(self.far.parameters()).device
        found: torch.Tensor = self.near(ids).to(device) * self.far(ids.to(device))
        return found.sum()


@ON_EACH
def test_gradients_of_the_host_and_of_a_device_are_sent_together(device: str) -> None:
    torch.manual_seed(0)
    theirs = TwoPlaces()
    ours = copy.deepcopy(theirs)
    persia.nn.convert(ours)
    pairs = []
    for model, make in ((ours, persia.optim.SGD), (theirs, torch.optim.SGD)):
        model.far.to(device)
        pairs.append((model, make(model.parameters(), lr=0.1)))
    for number in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(torch.tensor([1, 5, 1 + number])).backward()
            optimizer.step()
    for name in ("near", "far"):
        own, their = getattr(ours, name).weight, getattr(theirs, name).weight
        torch.testing.assert_close(own.detach() + 0, their.detach())


@pytest.mark.slow
@ON_EACH
def test_memory_of_a_device_is_flat(device: str) -> None:
    num_steps = 1000 if device == "cuda" else 60
    both = twins("adagrad", device=device)
    allocated = []
    for count in (20, num_steps):
        train(both, device, count)
        wait_for(device)
        allocated.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert allocated[1] <= allocated[0]


@pytest.fixture
def servers() -> Iterator[None]:
    """Two parameter servers and an embedding-worker with the tables of the twins."""
    gc.collect()  # or tables of twins have these names, and others get a number behind them
    slots = {name: {"dim": DIM, "pooling": "jagged"} for name in ("user", "item")}
    with Cluster({"slots_config": slots}, num_servers=2) as cluster:
        cluster.start_servers()
        with env.changed(**cluster.variables):
            yield


@pytest.mark.slow
@ON_EACH
def test_rows_may_be_at_servers(device: str, servers: None) -> None:
    train(twins("adagrad", device=device), device, 10)
