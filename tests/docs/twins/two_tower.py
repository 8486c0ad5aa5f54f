"""Two towers, in-batch negatives, and log q of the page's own estimator."""

from __future__ import annotations

from typing import Any

import torch

from persia.sampling import FrequencyEstimator
from tests.docs import twins


def train(page: Any) -> float:
    users = twins.table(page, "user", page.users, page.NUM_USERS)
    items = twins.table(page, "item", page.items, page.NUM_ITEMS)
    torch.manual_seed(0)
    net = page.TwoTower()
    rows = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.2)
    dense = torch.optim.Adam(net.parameters(), lr=0.003)
    frequency = FrequencyEstimator()
    for samples in twins.parts(range(len(page.users)), page.BATCH_SIZE):
        log_q = torch.from_numpy(frequency.observe(page.items[samples]))
        user, item = (torch.from_numpy(ids[samples]) for ids in (page.users, page.items))
        scores = net([], {"user": users(user), "item": items(item)})
        twins.step(page.loss_of(scores, log_q), rows, dense)
    with torch.no_grad():
        embeddings = {
            "user": users.weight[: page.NUM_USERS],
            "item": items.weight[: page.NUM_ITEMS],
        }
        return float(page.recall(net([], embeddings)))
