"""Two tasks over rows of users and items."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from tests.docs import twins


def train(page: Any) -> dict[str, float]:
    trained = page.TRAIN.stop
    users = twins.table(page, "user", page.users[:trained], page.NUM_USERS)
    items = twins.table(page, "item", page.items[:trained], page.NUM_ITEMS)
    torch.manual_seed(0)
    net = page.MMoE()
    rows = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.1)
    dense = torch.optim.Adam(net.parameters(), lr=0.001)

    def score(samples: NDArray[Any]) -> dict[str, torch.Tensor]:
        user, item = (torch.from_numpy(ids[samples]) for ids in (page.users, page.items))
        return dict(net.score(users(user), items(item)))

    for _ in range(page.EPOCHS):
        for samples in twins.parts(page.TRAIN, page.BATCH_SIZE):
            labels = {
                task: torch.from_numpy(found[samples, None])
                for task, found in page.happened.items()
            }
            twins.step(page.loss_of(score(samples), labels), rows, dense)
    return {
        task: twins.auc_of(lambda samples, task=task: score(samples)[task], page.TEST, labels)  # type: ignore[misc]
        for task, labels in page.happened.items()
    }
