"""Sequences padded in front by hand, over one embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.docs import twins


def padded(page: Any, sequences: list[Any]) -> torch.Tensor:
    """Return the last ids of each sequence: i64 [sequences, places]."""
    ids = np.full((len(sequences), page.PLACES), page.NUM_ITEMS)
    for row, items in zip(ids, sequences, strict=True):
        last = items[-page.PLACES :]
        row[page.PLACES - len(last) :] = last
    return torch.from_numpy(ids)


def train(page: Any) -> float:
    training = [page.sequences[number] for number in page.TRAIN]
    items = twins.table(page, "sampled", np.arange(page.NUM_ITEMS), page.NUM_ITEMS)
    torch.manual_seed(0)
    net = page.SASRec()
    rows = torch.optim.Adagrad(items.parameters(), lr=0.1)
    dense = torch.optim.Adam(net.parameters(), lr=0.003)
    seen = padded(page, [each[:-1] for each in training])
    following = padded(page, [each[1:] for each in training])
    for epoch in range(page.EPOCHS):
        draw = np.random.default_rng(epoch)
        for samples in twins.parts(page.TRAIN, page.BATCH_SIZE):
            sampled = torch.from_numpy(draw.integers(0, page.NUM_ITEMS, len(samples)))
            ids = seen[samples]
            expected = net.encode(items(ids), ids < page.NUM_ITEMS)
            right = (expected * items(following[samples])).sum(2, keepdim=True)
            scores = torch.cat([right, expected @ items(sampled).T], dim=2)
            loss = -scores.log_softmax(2)[..., 0][ids < page.NUM_ITEMS].mean()
            twins.step(loss, rows, dense)
    tested = [page.sequences[number] for number in page.TEST]
    ids = padded(page, [each[:-1] for each in tested])
    with torch.no_grad():
        expected = net.encode(items(ids), ids < page.NUM_ITEMS)[:, -1]
        best = (expected @ items.weight[: page.NUM_ITEMS].T).topk(10).indices
    right = torch.tensor([[each[-1]] for each in tested])
    return float((best == right).any(1).double().mean())
