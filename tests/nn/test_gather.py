"""One lookup and one update of all embeddings of a converted model."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia._modules import joint, requests
from persia._modules.homes import home_of
from persia.nn.gather import Gather, gather
from persia.nn.recipes import PATIENCE

NUM, ROWS = 5, 30


class Net(nn.Module):
    """Bags over rows of a matrix, one of them, if asked for, over ids that are computed."""

    def __init__(self, is_hidden: bool = False) -> None:
        super().__init__()
        self.is_hidden = is_hidden
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, 4, mode="sum") for _ in range(NUM))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if ids.max() < 0:
            raise ValueError("negative ids")
        if self.is_hidden:
            ids = ids.square() % ROWS
        found = [bag(one, offsets) for bag, one in zip(self.bags, ids, strict=True)]
        return torch.cat(found, 1).square().sum()


def both(kind: type[Net] = Net, **options: Any) -> tuple[Any, Net, Any, Any]:
    torch.manual_seed(0)
    theirs = kind(**options)
    ours: Any = copy.deepcopy(theirs)
    persia.nn.convert(ours)
    optimizers = (
        persia.optim.Adagrad(ours.parameters(), lr=0.1),
        torch.optim.Adagrad(theirs.parameters(), lr=0.1),
    )
    return ours, theirs, *optimizers


def hook_of(model: nn.Module) -> Gather:
    (hook,) = model._forward_pre_hooks.values()
    own = hook.__self__  # type: ignore[attr-defined]
    assert isinstance(own, Gather)
    return own


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(ROWS, (NUM, 12), generator=generator), torch.arange(0, 12, 2)


def train(number: int, *pairs: tuple[Any, Any]) -> list[float]:
    losses = []
    for model, optimizer in pairs:
        loss = model(*batch(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_step_is_one_lookup_and_one_update_and_equals_torchs() -> None:
    ours, theirs, our_optimizer, torch_optimizer = both()
    pairs = (ours, our_optimizer), (theirs, torch_optimizer)
    for number in range(4):
        losses = train(number, *pairs)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    home = home_of(ours.bags[0]._tables[0])
    home.wait()
    worker = home.worker
    with (
        mock.patch.object(worker, "lookup_direct", wraps=worker.lookup_direct) as asked,
        mock.patch.object(worker, "update", wraps=worker.update) as updated,
    ):
        losses = train(9, *pairs)
        home.wait()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (asked.call_count, updated.call_count) == (1, 1)


def test_ids_that_the_model_computes_are_looked_up_as_before() -> None:
    ours, theirs, our_optimizer, torch_optimizer = both(is_hidden=True)
    for number in range(PATIENCE + 2):
        losses = train(number, (ours, our_optimizer), (theirs, torch_optimizer))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert hook_of(ours).is_closed


def test_a_forward_that_raises_or_has_no_backward_leaves_nothing_in_flight() -> None:
    ours, _, optimizer, _ = both()
    for number in range(3):
        train(number, (ours, optimizer))
    ids, offsets = batch(4)
    with pytest.raises(ValueError, match="negative"):
        ours(-ids - 1, offsets)
    assert not requests.is_in_forward()
    assert joint.current() is None
    assert torch.isfinite(ours(ids, offsets))
    ours.eval()(ids, offsets)
    assert not requests._ahead
    tracker = home_of(ours.bags[0]._tables[0]).tracker
    assert tracker.stats()["staleness"] == 0


def test_an_interrupt_is_over_with_the_next_forward() -> None:
    ours, _, optimizer, _ = both()
    for number in range(3):
        train(number, (ours, optimizer))
    ids, offsets = batch(4)
    with (
        mock.patch.object(Net, "forward", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ours(ids, offsets)
    assert requests.is_in_forward()
    train(5, (ours, optimizer))
    assert not requests.is_in_forward()
    home_of(ours.bags[0]._tables[0]).wait()
    assert home_of(ours.bags[0]._tables[0]).tracker.stats()["staleness"] == 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_threads_have_forwards_of_their_own(is_shared: bool) -> None:
    """Of two models, and of one in two threads: each is inside of its forward meanwhile."""
    offsets = torch.arange(12)
    models = [both(Graph) for _ in range(2)]
    for ours, *_ in models:
        for number in range(2):
            ours(batch(number)[0], offsets)
    if is_shared:
        models[1] = models[0]
    meets = threading.Barrier(2, timeout=60)
    nodes: list[set[str]] = []
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    failures: list[BaseException] = []

    def run(place: int) -> None:
        ours, theirs, _, _ = models[place]
        given = batch(10 + place)[0], offsets
        try:
            meets.wait()
            outputs.append((ours(*given), theirs(*given)))
        except BaseException as exc:
            failures.append(exc)

    def forward(model: Any, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        meets.wait()
        found = [bag(one, offsets) for bag, one in zip(model.bags, ids, strict=True)]
        nodes.append({type(one.grad_fn).__name__ for one in found})
        meets.wait()
        return torch.cat(found, 1).square().sum()

    for ours, *_ in models:
        ours.forward = forward.__get__(ours)
    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert nodes == [{"_JointLookupBackward"}] * 2
    for own, their in outputs:
        assert own.item() == pytest.approx(their.item(), rel=1e-5)
    assert not requests._ahead


class Graph(Net):
    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found = [bag(one, offsets) for bag, one in zip(self.bags, ids, strict=True)]
        return torch.cat(found, 1).square().sum()


def test_a_converted_model_is_one_graph() -> None:
    ours, theirs, our_optimizer, torch_optimizer = both(Graph)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for number in range(3):
        losses = train(number, (compiled, our_optimizer), (theirs, torch_optimizer))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_wrong_guess_costs_its_lookup_only() -> None:
    ours, theirs, our_optimizer, torch_optimizer = both()
    pairs = (ours, our_optimizer), (theirs, torch_optimizer)
    for number in range(3):
        train(number, *pairs)
    ours.is_hidden = theirs.is_hidden = True
    for number in range(PATIENCE):
        losses = train(number, *pairs)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not requests._ahead


def test_it_is_hooked_once_and_copies_begin_again() -> None:
    ours, _, optimizer, _ = both()
    gather(ours)
    for number in range(3):
        train(number, (ours, optimizer))
    assert len(hook_of(ours).recipes) == NUM
    memory = io.BytesIO()
    torch.save(ours, memory)
    memory.seek(0)
    for other in (copy.deepcopy(ours), torch.load(memory, weights_only=False)):
        own = hook_of(other)
        assert own is not hook_of(ours)
        assert len(own.recipes) == 0
        (end,) = list[Any](other._forward_hooks.values())
        assert end.__self__ is own
