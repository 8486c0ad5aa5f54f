"""Copies, pickles and state dicts of modules."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import persia.nn
import persia.optim


def test_a_copy_reads_the_same_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(persia.nn.EmbeddingBag("copied module", 3, mode="sum"))
    with caplog.at_level(logging.WARNING):
        twin = copy.deepcopy(model)
        copy.deepcopy(model)
    assert len(caplog.records) == 1
    ids = torch.tensor([[1, 2]])
    assert torch.equal(twin(ids), model(ids))
    assert twin[0].anchor is model[0].anchor
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(twin), lr=1.0)
    twin(ids).sum().backward()
    optimizer.step()
    assert torch.equal(twin(ids), model(ids))
    assert twin[0].version == model[0].version == 1


@pytest.mark.parametrize("make", ["bag", "collection"])
def test_pickles_and_state_dicts_have_a_reference(make: str) -> None:
    module: nn.Module = persia.nn.EmbeddingBag("pickled", 3, mode="max")
    if make == "collection":
        module = persia.nn.EmbeddingCollection({"a": ("pickled", 3), "b": ("pickled too", 4)})
    found = pickle.loads(pickle.dumps(module))
    ids = torch.tensor([[1, 2]])
    for one, two in zip(found.parameters(), module.parameters(), strict=True):
        assert one is two
    if make == "bag":
        assert torch.equal(found(ids), module(ids))
    state = module.state_dict()
    assert list(state) == ["_extra_state"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found.load_state_dict(torch.load(file, weights_only=True))
    other = persia.nn.EmbeddingBag("another", 3)
    with pytest.raises(RuntimeError, match="looks up in"):
        other.load_state_dict(state)


def test_a_state_dict_of_torchs_module_is_taken_as_rows() -> None:
    theirs = nn.Embedding(6, 3)
    ours = persia.nn.Embedding("from torch", 3)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(torch.arange(6)), theirs.weight)
    with pytest.raises(RuntimeError, match=r"expected \[n, 3\], got \[6, 4\]"):
        ours.load_state_dict(nn.Embedding(6, 4).state_dict())


def test_a_state_dict_has_tensors_only_and_goes_through_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(persia.nn.EmbeddingBag("in safetensors", 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    other = nn.Sequential(persia.nn.EmbeddingBag("another", 3), nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="in safetensors"):
        other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
