"""TorchRec's own KeyedJaggedTensor in, and its KeyedTensor out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import persia.nn
import persia.optim
from tests.zoo.alike import num_distinct, package

# TorchRec and what it imports use what torch has deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROWS, DIM, KEYS = 30, 4, ["user", "item"]


def jagged(torchrec: Any, seed: int, first: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (2 * 16,), generator=generator)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator) + first
    return torchrec.KeyedJaggedTensor.from_lengths_sync(KEYS, values, lengths)


def test_a_collection_trains_as_torchrecs_bags() -> None:
    torchrec = package("torchrec")
    torch.manual_seed(0)
    theirs = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=key, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key]
            )
            for key in KEYS
        ]
    )
    ours = persia.nn.EmbeddingCollection({key: (f"torchrec {key}", DIM) for key in KEYS})
    for key in KEYS:
        weight = theirs.embedding_bags[key].weight.detach()
        ours.tables[key].write(range(ROWS), weight)
    optimizers = [
        torch.optim.Adagrad(theirs.parameters(), lr=0.1),
        persia.optim.Adagrad(ours.parameters(), lr=0.1),
    ]
    for seed in range(50):
        given = jagged(torchrec, seed)
        outputs = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            output = model(given)
            assert isinstance(output, torchrec.KeyedTensor)
            assert output.keys() == KEYS
            optimizer.zero_grad()
            (output["user"] * output["item"] - 1).square().mean().backward()
            optimizer.step()
            outputs.append(output.values())
        assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
    before = len(ours.tables["item"])
    given = jagged(torchrec, 1, 1 << 40)
    ours(given)
    assert len(ours.tables["item"]) == before + num_distinct([given["item"].values()])
    swapped = given.permute([1, 0])
    assert torch.equal(ours(swapped).values(), ours(given).values())
