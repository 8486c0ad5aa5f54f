"""Vectors of several modules from one node of autograd: who takes them, and their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import persia.nn
import persia.optim
from persia._modules import joint, requests
from persia._modules.homes import home_of
from tests.support.waiting import until

ROWS, SAMPLES = 20, 6
IDS = torch.randint(ROWS, (3, SAMPLES), generator=torch.Generator().manual_seed(0))


class Towers(nn.Module):
    """Three embeddings of each kind, called as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, 4, mode=mode) for mode in MODES)
        self.one = nn.Embedding(ROWS, 4)
        self.call: Any = None

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
        found = [bag(row, offsets) for bag, row in zip(self.bags, ids, strict=True)]
        found.append(self.one(ids[0]))
        return found if self.call is None else self.call(found)


MODES = ("sum", "mean", "max")
EDGES = torch.arange(SAMPLES)


def twins() -> tuple[Any, Any, Any, Any]:
    """Return a converted model that has learnt where its ids are, torch's, and optimizers."""
    torch.manual_seed(0)
    theirs: Any = Towers()
    ours: Any = copy.deepcopy(theirs)
    persia.nn.convert(ours)
    our_optimizer = persia.optim.Adagrad(ours.parameters(), lr=0.1)
    torch_optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    both = ours, theirs, our_optimizer, torch_optimizer
    for _ in range(2):
        step(*both)
    return both


def total(found: list[torch.Tensor]) -> Any:
    return torch.stack([one.square().sum() for one in found]).sum()


def step(
    ours: Any, theirs: Any, *optimizers: Any, ids: Any = IDS, offsets: Any = EDGES
) -> None:
    losses = []
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        found = model(ids, offsets)
        loss = total(found) if isinstance(found, list) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def nodes_of(found: list[torch.Tensor]) -> list[str]:
    """Return the kind of the first node behind each vector's views."""
    names = []
    for one in found:
        node: Any = one.grad_fn
        while "View" in type(node).__name__:
            node = node.next_functions[0][0]
        names.append(type(node).__name__)
    return names


def assert_nothing_in_flight(model: Any) -> None:
    tracker = home_of(model.one._tables[0]).tracker
    home_of(model.one._tables[0]).wait()
    until(lambda: tracker.stats()["staleness"] == 0)
    assert joint.current() is None
    assert not requests._ahead


def test_all_modules_have_one_node_and_train_as_torchs() -> None:
    ours, theirs, *optimizers = twins()
    found = ours(IDS, EDGES)
    assert set(nodes_of(found)) == {"_JointLookupBackward"}
    assert len({id(one.grad_fn) for one in found[:3]}) == 1
    expected = theirs(IDS, EDGES)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
    del found, one
    for _ in range(3):
        step(ours, theirs, *optimizers)
    ours.eval()(IDS, EDGES)
    assert_nothing_in_flight(ours)


@pytest.mark.parametrize("form", ["backward", "grad", "before"])
def test_a_backward_of_some_inputs_trains_only_these(form: str) -> None:
    """The node is one for all tables, and runs for all of them."""
    ours, theirs, *optimizers = twins()
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        optimizer.zero_grad()
        some = list(model.one.parameters())

        def part(model: nn.Module = model, some: list[Any] = some) -> None:
            loss = total(model(IDS, EDGES)) * 3
            if form == "grad":
                torch.autograd.grad(loss, some)
            else:
                loss.backward(inputs=some)

        if form == "before":
            part()
        total(model(IDS, EDGES)).backward()
        if form != "before":
            part()
        optimizer.step()
    step(ours, theirs, *optimizers)
    assert_nothing_in_flight(ours)


@pytest.mark.parametrize("is_added_to", [False, True])
def test_an_anchors_gradient_that_is_set_by_hand_steps_its_rows(is_added_to: bool) -> None:
    ours, theirs, *optimizers = twins()
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        optimizer.zero_grad()
        parameters = list(model.parameters())
        found = torch.autograd.grad(total(model(IDS, EDGES)), parameters)
        for one, gradient in zip(parameters, found, strict=True):
            one.grad = gradient * 0.5
        if is_added_to:
            (total(model(IDS, EDGES)) * 3).backward()
        optimizer.step()
    step(ours, theirs, *optimizers)


def test_ids_of_other_dtypes_and_layouts_are_taken() -> None:
    ours, theirs, *optimizers = twins()
    seen: list[torch.Tensor] = []

    def call(found: list[torch.Tensor]) -> Any:
        seen.extend(found)
        return total(found)

    ours.call = call
    for ids in (IDS.int(), IDS.t().contiguous().t()):
        step(ours, theirs, *optimizers, ids=ids)
        assert set(nodes_of(seen[-4:])) == {"_JointLookupBackward"}


def test_other_samples_take_the_rows_and_are_not_pooled_again() -> None:
    ours, theirs, *optimizers = twins()
    halves = torch.arange(0, SAMPLES, 2)
    for offsets in (halves, halves, EDGES, halves):
        step(ours, theirs, *optimizers, offsets=offsets)
    assert_nothing_in_flight(ours)
    assert nodes_of(ours(IDS, halves)) == ["_LookupBackward"] * 3 + ["_JointLookupBackward"]


def test_offsets_that_change_during_a_forward_are_seen() -> None:
    ours, theirs, *optimizers = twins()

    def forward(model: Any, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
        found = []
        for place, (bag, row) in enumerate(zip(model.bags, ids, strict=True)):
            offsets[1:] = EDGES[1:] if place == 0 else 2
            # Torch's bags save theirs for the backward.
            found.append(bag(row, offsets if model is ours else offsets.clone()))
        return total(found)

    for model in (ours, theirs):
        model.forward = forward.__get__(model)
    for _ in range(2):
        step(ours, theirs, *optimizers, offsets=EDGES.clone())


def step_by_two_backwards(ours: Any, theirs: Any, *optimizers: Any) -> None:
    """Step both models by a backward for each half of their features, then by one for all."""
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        optimizer.zero_grad()
        found = model(IDS, EDGES)
        total(found[:2]).backward()
        total(found[2:]).backward()
        optimizer.step()
    step(ours, theirs, *optimizers)


def test_losses_of_different_features_have_backwards_of_their_own() -> None:
    ours, theirs, our_optimizer, torch_optimizer = twins()
    step_by_two_backwards(ours, theirs, our_optimizer, torch_optimizer)
    assert_nothing_in_flight(ours)


@pytest.mark.parametrize("retains", [False, True])
def test_a_second_backward_needs_a_graph_that_is_retained(retains: bool) -> None:
    ours, _, optimizer, _ = twins()
    optimizer.zero_grad()
    loss: Any = torch.stack([one.sum() for one in ours(IDS, EDGES)]).sum()
    loss.backward(retain_graph=retains)
    before = ours.one.anchor.grad[0].item()
    if retains:
        loss.backward()
        assert ours.one.anchor.grad[0].item() == pytest.approx(2 * before)
    else:
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    optimizer.step()
    del loss
    ours.eval()(IDS, EDGES)
    assert_nothing_in_flight(ours)


def test_vectors_may_be_changed_in_place() -> None:
    ours, theirs, *optimizers = twins()
    ours.call = theirs.call = lambda found: total([one.mul_(2.0).relu_() for one in found])
    step(ours, theirs, *optimizers)
    step(ours, theirs, *optimizers)


def test_vectors_that_no_module_takes_are_given_up() -> None:
    ours, theirs, *optimizers = twins()
    for model in (ours, theirs):
        model.forward = lambda ids, _, bags=model.bags: total([bags[0](ids[0], EDGES)])
    for _ in range(2):
        step(ours, theirs, *optimizers)
    assert_nothing_in_flight(ours)


def test_inside_of_a_checkpoint_modules_look_up_themselves() -> None:
    ours, theirs, *optimizers = twins()
    for model in (ours, theirs):
        own = model.forward

        def forward(ids: torch.Tensor, offsets: torch.Tensor, own: Any = own) -> Any:
            return checkpoint(lambda: total(own(ids, offsets)), use_reentrant=False)

        model.forward = forward
    for _ in range(2):
        step(ours, theirs, *optimizers)
    assert_nothing_in_flight(ours)


def test_rows_that_have_changed_since_are_looked_up_again() -> None:
    ours, _, _, _ = twins()

    def forward(ids: torch.Tensor, offsets: torch.Tensor) -> Any:
        with torch.no_grad():
            ours.one.weight.zero_()
        return ours.one(ids[0])

    ours.forward = forward
    assert not ours(IDS, EDGES).any()


def test_a_part_that_is_frozen_or_evaluates_trains_as_torchs() -> None:
    ours, theirs, *optimizers = twins()
    for model in (ours, theirs):
        model.bags[0].requires_grad_(False)
        model.bags[1].eval()
    frozen = ours.bags[0].weight.detach() + 0
    for _ in range(3):
        step(ours, theirs, *optimizers)
    assert torch.equal(ours.bags[0].weight.detach() + 0, frozen)


@pytest.mark.parametrize(
    ("name", "stand_in", "node"),
    [
        ("_saving_hooks", None, "_LookupBackward"),
        ("_keeps_graph", lambda: True, "_JointLookupBackward"),
    ],
)
def test_a_torch_without_its_private_functions_trains_as_well(
    monkeypatch: pytest.MonkeyPatch, name: str, stand_in: Any, node: str
) -> None:
    """With what stands in for a function that torch no longer has under that name."""
    monkeypatch.setattr(joint, name, stand_in)
    ours, theirs, our_optimizer, torch_optimizer = twins()
    assert set(nodes_of(ours(IDS, EDGES))) == {node}
    for _ in range(3):
        step(ours, theirs, our_optimizer, torch_optimizer)
    step_by_two_backwards(ours, theirs, our_optimizer, torch_optimizer)
    ours.eval()(IDS, EDGES)
    assert_nothing_in_flight(ours)
