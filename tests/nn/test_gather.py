"""One lookup and one update of all embeddings of a converted model."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia._modules import requests
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


def both(**options: Any) -> tuple[Any, Net, Any, Any]:
    torch.manual_seed(0)
    theirs = Net(**options)
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
    assert torch.isfinite(ours(ids, offsets))
    ours.eval()(ids, offsets)
    assert not any(requests._ahead.values())
    assert requests.missed is None
    tracker = home_of(ours.bags[0]._tables[0]).tracker
    assert tracker.stats()["staleness"] == 0


def test_a_wrong_guess_costs_its_lookup_only() -> None:
    ours, theirs, our_optimizer, torch_optimizer = both()
    pairs = (ours, our_optimizer), (theirs, torch_optimizer)
    for number in range(3):
        train(number, *pairs)
    ours.is_hidden = theirs.is_hidden = True
    for number in range(PATIENCE):
        losses = train(number, *pairs)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not any(requests._ahead.values())


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
