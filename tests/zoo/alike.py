"""A model that others wrote, trained as it is and converted, step by step."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import persia.nn
import persia.optim

STEPS = 100
TOLERANCE = 1e-5  # of a loss, which is of the order of 1
NEW = 1 << 40  # ids from here on are in no model's vocabulary

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (torch.optim.SGD, persia.optim.SGD),
    "adagrad": (torch.optim.Adagrad, persia.optim.Adagrad),
}

Loss = Callable[[Any, Any], torch.Tensor]


def package(module: str) -> Any:
    """Return a module of a package that only ``make zoo`` installs, or skip."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        pytest.skip(f"{exc}; `make zoo` installs it")


def num_distinct(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many distinct ids tensors have."""
    return len(np.unique(torch.cat([each.flatten() for each in tensors]).numpy()))


def tables_of(model: nn.Module) -> dict[str, Any]:
    """Return by place the rows of each converted module."""
    return {
        place: module.table
        for place, module in model.named_modules()
        if isinstance(module, persia.nn.Embedding | persia.nn.EmbeddingBag)
    }


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss, batches: Iterable[Any]
) -> Iterator[float]:
    """Yield the loss of each batch; dropout draws the same in each of two models."""
    model.train()
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


def assert_converted_alike(
    model: nn.Module, loss_of: Loss, batches: list[Any], optimizer: str, lr: float
) -> nn.Module:
    """Train a model as it is and, converted by one call, again; return the converted one."""
    for_torch, for_rows = OPTIMIZERS[optimizer]
    converted = persia.nn.convert(copy.deepcopy(model))
    names = {type(module) for module in converted.modules()}
    assert not names & {nn.Embedding, nn.EmbeddingBag}
    theirs = list(train(model, for_torch(model.parameters(), lr=lr), loss_of, batches))
    own = for_rows(converted.parameters(), lr=lr)
    ours = list(train(converted, own, loss_of, batches))
    assert len(ours) == len(theirs) == STEPS
    assert theirs[-1] != theirs[0]
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True)]
    assert max(differences) < TOLERANCE, differences
    return converted


def assert_learns_new(
    model: nn.Module, loss_of: Loss, batches: list[Any], new_ids: int, lr: float = 0.1
) -> None:
    """Train batches of ids that the model has never seen: they get rows, and the loss falls.

    Args:
        model: A converted model.
        loss_of: The loss of a model and a batch.
        batches: Repeated, so that what is learned shows.
        new_ids: How many rows the batches add, over all tables.
        lr: Rate of Adagrad.
    """
    before = sum(map(len, tables_of(model).values()))
    optimizer = persia.optim.Adagrad(model.parameters(), lr=lr)
    losses = list(train(model, optimizer, loss_of, batches * 10))
    assert sum(map(len, tables_of(model).values())) == before + new_ids
    assert math.fsum(losses[-len(batches) :]) < 0.9 * math.fsum(losses[: len(batches)])
