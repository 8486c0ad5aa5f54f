"""Adagrad's rows at the rate that the page's table has as the best."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from persia.embedding import EmbeddingConfig, Normal
from tests.docs import twins

SLOTS = {"slots_config": {"user": {"dim": 16}, "item": {"dim": 16}}}


def train(page: Any) -> float:
    config = SimpleNamespace(CONFIG=EmbeddingConfig(Normal(0, 0.1), seed=0, schema=SLOTS))
    trained = slice(page.TRAIN.start, page.TRAIN.stop)
    users = twins.table(config, "user", page.users[trained], page.NUM_USERS)
    items = twins.table(config, "item", page.items[trained], page.NUM_ITEMS)
    torch.manual_seed(0)
    net = page.Net()
    rows = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.3)
    dense = torch.optim.Adam(net.parameters(), lr=0.003)

    def score(samples: NDArray[Any]) -> torch.Tensor:
        user, item = (torch.from_numpy(ids[samples]) for ids in (page.users, page.items))
        logits: torch.Tensor = net([], {"user": users(user), "item": items(item)})
        return logits

    for samples in twins.parts(page.TRAIN, page.BATCH_SIZE):
        labels = torch.from_numpy(page.clicks[samples, None])
        loss = nn.functional.binary_cross_entropy_with_logits(score(samples), labels)
        twins.step(loss, rows, dense)
    return twins.auc_of(score, page.TEST, page.clicks)
