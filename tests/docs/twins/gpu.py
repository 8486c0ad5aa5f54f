"""The model of the page on GPUs, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from persia.embedding.data import PersiaBatch
from persia.metrics import AUC
from tests.docs import twins

NUM_USERS = 1000


def train(page: Any) -> float:
    config = SimpleNamespace(CONFIG={"slots_config": {"user": {"dim": 16}}})
    users = twins.table(config, "user", np.arange(NUM_USERS), NUM_USERS)
    torch.manual_seed(0)
    net = page.Net()
    rows = torch.optim.Adagrad(users.parameters(), lr=0.1)
    dense = torch.optim.Adam(net.parameters(), lr=0.003)

    def score(batch: PersiaBatch) -> tuple[torch.Tensor, torch.Tensor]:
        (ids,) = batch.features
        user = torch.from_numpy(ids.distinct[ids.inverse].astype(np.int64))
        logits: torch.Tensor = net([], {"user": users(user)})
        return logits, torch.from_numpy(batch.labels[0].data)

    for batch in page.batches(200, 1):
        loss = nn.functional.binary_cross_entropy_with_logits(*score(batch))
        for optimizer in (rows, dense):
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 10)
        rows.step()
        dense.step()
    auc = AUC()
    with torch.no_grad():
        for batch in page.batches(20, 2):
            auc.update(*score(batch))
    return float(auc.compute())
