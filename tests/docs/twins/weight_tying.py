"""One embedding for what comes in and what is scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.docs import twins


def train(page: Any) -> float:
    items = twins.table(page, "sampled", np.arange(page.NUM_ITEMS), page.NUM_ITEMS)
    torch.manual_seed(0)
    net = page.Tied()
    rows = torch.optim.Adagrad(items.parameters(), lr=0.1)
    dense = torch.optim.Adam(net.parameters(), lr=0.002)
    seen, target = torch.from_numpy(page.seen), torch.from_numpy(page.target)
    for epoch in range(page.EPOCHS):
        draw = np.random.default_rng(epoch)
        for samples in twins.parts(page.TRAIN, page.BATCH_SIZE):
            sampled = torch.from_numpy(draw.integers(0, page.NUM_ITEMS, len(samples)))
            basket, right = items(seen[samples]).mean(1), items(target[samples])
            expected = net.expect(basket[:, :-1])
            of_right = (expected * right[:, :-1]).sum(1) + right[:, -1]
            of_sampled = net.scores(basket, items(sampled))
            scores = torch.cat([of_right.unsqueeze(1), of_sampled], dim=1)
            loss = (scores.logsumexp(1) - scores[:, 0]).mean()
            twins.step(loss, rows, dense)
    with torch.no_grad():
        tested = slice(page.TEST.start, page.TEST.stop)
        scores = net.scores(items(seen[tested]).mean(1), items.weight[: page.NUM_ITEMS])
        return nn.functional.cross_entropy(scores, target[tested]).item()
