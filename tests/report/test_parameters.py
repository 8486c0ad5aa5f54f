"""What a report says that a run was run with."""

from __future__ import annotations

from typing import Any

import torch

from persia._report.parameters import parameters
from persia.config import EmbeddingSchema
from persia.embedding import EmbeddingConfig, Normal
from persia.embedding.optim import Adagrad


def test_optimizers_have_all_options_and_slots_their_settings() -> None:
    model = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "lr": 0.5},
    ]
    schema = EmbeddingSchema.load(
        {
            "slots_config": {
                "user": {"dim": 4},
                "tags": {"dim": 8, "pooling": "raw", "sample_fixed_size": 3},
                "url": {
                    "dim": 2,
                    "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 99},
                },
            },
            "feature_groups": {"all": ["user"]},
            "group_settings": {
                "tags": {"dtype": "float16", "eviction": {"policy": "lfu"}},
                "url": {"optimizer": {"name": "sgd", "lr": 0.75}},
            },
        }
    )
    found = parameters(
        model,
        Adagrad(lr=0.25, eps=0.125),
        torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        EmbeddingConfig(
            emb_initialization=Normal(), seed=7, weight_bound=3, admit_probability=0.5
        ).settings(),
        schema,
        {"ranks": 2},
    )
    assert {
        "model": "Linear",
        "model parameters": "8",
        "embedding optimizer": "Adagrad",
        "embedding optimizer: lr": "0.25",
        "embedding optimizer: eps": "0.125",
        "dense optimizer": "SGD",
        "dense optimizer, group 0: lr": "0.1",
        "dense optimizer, group 0: momentum": "0.9",
        "dense optimizer, group 1: lr": "0.5",
        "ranks": "2",
        "initial values": "normal(mean=0, standard_deviation=0.01)",
        "seed of rows": "7",
        "weight_bound": "3",
        "admit_probability": "0.5",
        "slot user": "dim 4, sum, float32, group all",
        "slot tags": "dim 8, raw, float16, sample_fixed_size 3, padding back",
        "eviction of group tags": "policy lfu",
        "optimizer of group url": "name sgd, lr 0.75, momentum 0, weight_decay 0",
        "slot url": "dim 2, sum, float32, 2 rounds of 99 rows",
    }.items() <= found.items()
    assert not any("params" in name or "foreach" in name for name in found)
