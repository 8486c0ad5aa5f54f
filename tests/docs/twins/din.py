"""DIN with a padded history and its mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.docs import twins


def train(page: Any) -> float:
    num_items = page.NUM_TOPICS * page.PER_TOPIC
    trained = np.concatenate(
        [page.candidates[: page.TRAIN.stop], page.history[: page.offsets[page.TRAIN.stop]]]
    )
    items = twins.table(page, "candidate", trained, num_items)
    padded = np.full((page.size, page.lengths.max()), num_items)
    padded[np.arange(padded.shape[1]) < page.lengths[:, None]] = page.history
    torch.manual_seed(0)
    net = page.DIN()

    def score(samples: NDArray[Any]) -> torch.Tensor:
        candidate = items(torch.from_numpy(page.candidates[samples]))
        ids = torch.from_numpy(padded[samples])
        seen, is_there = items(ids), (ids < num_items).unsqueeze(2)
        weights = net.weights(candidate.unsqueeze(1).expand_as(seen), seen) * is_there
        interest = (weights * seen).sum(1)
        logits: torch.Tensor = net.top(torch.cat([candidate, interest], dim=1))
        return logits

    rows = torch.optim.Adagrad(items.parameters(), lr=0.1)
    dense = torch.optim.Adam(net.parameters(), lr=0.001)
    for _ in range(page.EPOCHS):
        for samples in twins.parts(page.TRAIN, page.BATCH_SIZE):
            labels = torch.from_numpy(page.clicks[samples, None])
            loss = nn.functional.binary_cross_entropy_with_logits(score(samples), labels)
            twins.step(loss, rows, dense)
    return twins.auc_of(score, page.TEST, page.clicks)
