"""A scheduler, early stopping, and a copy of the best state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.docs import twins


def train(page: Any) -> float:
    trained = page.TRAIN.stop
    users = twins.table(page, "user", page.users[:trained], page.NUM_USERS)
    items = twins.table(page, "item", page.items[:trained], page.NUM_ITEMS)
    torch.manual_seed(0)
    net = page.Net()
    whole = nn.ModuleList([users, items, net])

    def score(samples: NDArray[Any]) -> torch.Tensor:
        user, item = (torch.from_numpy(ids[samples]) for ids in (page.users, page.items))
        logits: torch.Tensor = net.score(users(user), items(item))
        return logits

    rows = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=page.ROW_LR)
    dense = torch.optim.Adam(net.parameters(), lr=page.DENSE_LR)
    schedules = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(each, "max", factor=0.3, patience=0)
        for each in (rows, dense)
    ]
    aucs: list[float] = []
    best: dict[str, torch.Tensor] = {}
    while len(aucs) < 20 and max(aucs, default=0.0) in [0.0, *aucs[-page.PATIENCE :]]:
        order = np.random.default_rng(len(aucs) + 1).permutation(trained)
        for begin in range(0, trained, page.BATCH_SIZE):
            samples = order[begin : begin + page.BATCH_SIZE]
            labels = torch.from_numpy(page.clicks[samples, None])
            loss = nn.functional.binary_cross_entropy_with_logits(score(samples), labels)
            twins.step(loss, rows, dense)
        aucs.append(twins.auc_of(score, page.VALIDATION, page.clicks))
        if aucs[-1] == max(aucs):
            best = copy.deepcopy(whole.state_dict())
        for schedule in schedules:
            schedule.step(aucs[-1])
    whole.load_state_dict(best)
    return twins.auc_of(score, page.TEST, page.clicks)
