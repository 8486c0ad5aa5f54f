"""``weight`` of a table: read, initialized and changed as a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import persia.nn
import persia.optim
from persia.errors import ConfigError


def test_initialization_over_weight_writes_rows() -> None:
    module = persia.nn.Embedding(50, 8)
    for change in (nn.init.xavier_uniform_, nn.init.normal_, nn.init.trunc_normal_):
        change(module.weight)
        assert torch.equal(module(torch.arange(50)), module.weight + 0)
    module.weight.data.normal_(0.0, 0.02)
    assert module.weight.std().item() == pytest.approx(0.02, rel=0.2)
    with torch.no_grad():
        module.weight[3].fill_(2.0)
        module.weight.data[4:6].zero_()
        module.weight.mul_(2.0)
    assert module(torch.tensor(3)).tolist() == [4.0] * 8
    assert module(torch.tensor([4, 5])).abs().sum() == 0


def test_shape_dtype_and_device_look_nothing_up() -> None:
    module = persia.nn.Embedding(1 << 40, 8)
    weight = module.weight
    assert weight.shape == weight.size() == (1 << 40, 8)
    assert (weight.dtype, weight.device.type, weight.dim()) == (torch.float32, "cpu", 2)
    assert weight.requires_grad
    assert "1099511627776" in repr(weight)


def test_vectors_by_torchs_function_are_those_of_any_id() -> None:
    module = persia.nn.Embedding(3, 2)
    module.weight.data.fill_(1.0)
    optimizer = persia.optim.SGD(module.parameters(), lr=0.5)
    ids = torch.tensor([[0, 1 << 40], [2, 2]])
    out = nn.functional.embedding(ids, module.weight, padding_idx=-1)
    assert out.shape == (2, 2, 2)
    assert torch.equal(out, module(ids))
    out.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert module(torch.arange(3)).tolist() == [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0]]
    assert not nn.functional.embedding(ids, module.weight.detach()).requires_grad
    with pytest.raises(IndexError):  # rows 1 and 2 only, which torch looks up
        nn.functional.embedding(torch.tensor([2]), module.weight[1:])


def test_a_weight_cannot_be_replaced() -> None:
    module: Any = persia.nn.Embedding(3, 2)
    with pytest.raises(ConfigError, match=r"write module\.weight\.data\.copy_\(values\)"):
        module.weight = nn.Parameter(torch.ones(3, 2))


def test_weight_in_a_loss_has_gradients() -> None:
    module = persia.nn.Embedding(3, 2)
    module.weight.data.fill_(1.0)
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=0.5)
    scores = nn.functional.linear(torch.ones(4, 2), module.weight)
    assert scores.shape == (4, 3)
    (scores.sum() / 4 + module.weight.pow(2).sum() / 2).backward()
    optimizer.step()
    assert module(torch.arange(3)).tolist() == [[0.0, 0.0]] * 3
    module.weight.requires_grad_(False)
    assert not module.anchor.requires_grad
