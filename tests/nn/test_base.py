"""Copies, pickles and state dicts of modules."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

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


def test_a_pickle_of_a_model_that_is_gone_gets_the_rows_of_no_other() -> None:
    gone: Any = persia.nn.convert(nn.Embedding(9, 3), prefix="gone ")
    data, table = pickle.dumps(gone), weakref.ref(gone._tables[0])
    del gone
    gc.collect()
    assert table() is None
    other: Any = persia.nn.convert(nn.Embedding(9, 3), prefix="gone ")
    assert pickle.loads(data)._tables[0] is not other._tables[0]


OF_ANOTHER = """
import pickle, sys, torch, persia.nn
persia.nn.Embedding("of a user", 3)
model = torch.nn.Sequential(persia.nn.convert(torch.nn.Embedding(9, 3)), torch.nn.Linear(3, 1))
torch.save(model.state_dict(), sys.argv[1] + "/state.pt")
shared = persia.nn.convert(torch.nn.Embedding(9, 3))
with open(sys.argv[1] + "/model.pickle", "wb") as file:
    pickle.dump([model, shared, shared], file)
"""


def test_rows_that_do_not_come_with_a_state_dict_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run([sys.executable, "-c", OF_ANOTHER, str(tmp_path)], check=True, timeout=300)
    embedding: Any = persia.nn.convert(nn.Embedding(9, 3))
    model = nn.Sequential(embedding, nn.Linear(3, 1))
    optimizer = persia.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        pickle.loads(pickle.dumps(model)).load_state_dict(model.state_dict())
        assert not caplog.records
        best = copy.deepcopy(model.state_dict())
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        model.load_state_dict(best)
        assert "they have changed since it was made" in caplog.messages.pop()
        model.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert "it is of another process; write persia.nn.save(" in caplog.messages[-1]
        caplog.clear()
        persia.nn.save(model, tmp_path)
        persia.nn.load(model, tmp_path)
        model.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert not [one for one in caplog.records if one.name == "persia.nn"]
        found, one, two = pickle.loads((tmp_path / "model.pickle").read_bytes())
        assert "it is of another process" in caplog.messages.pop()
        assert not [one for one in caplog.records[:-1] if one.name == "persia.nn"]
    assert one._tables[0] is two._tables[0] is not found[0]._tables[0]
    assert found[0]._tables[0] is not embedding._tables[0]
