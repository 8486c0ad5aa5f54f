"""The quickstart (shared groups, a hash stack, a raw sequence) moves between server counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.loading import load
from tests.golden.test_examples import rows_of

COUNTS = (1, 2, 3, 5)
SAMPLES = 6_000
STOP, STEPS = 20, 50
BATCH = 64


def _train(servers: int, folder: Path, *, dumps: bool, loads: bool) -> tuple[Any, ...]:
    """Train ``STOP + STEPS`` batches, or the last ``STEPS``; return rows and losses."""
    train = load("quickstart")
    options = train.Options(
        samples=SAMPLES, batch_size=BATCH, reproducible=True, staleness=1, servers=servers
    )
    log = train.generate(options.samples, options.seed)
    losses, at_stop = [], {}
    with train.build_ctx(options) as ctx:
        if loads:
            ctx.load_checkpoint(folder)
            at_stop = rows_of(ctx)
        dataset = train.ClickDataset(log, range((STOP + STEPS) * BATCH), BATCH, True)
        loader = train.DataLoader(dataset, reproducible=True, embedding_staleness=1)
        loss_fn = torch.nn.BCEWithLogitsLoss()
        for number, batch in enumerate(loader, start=1):
            logits, labels = ctx.forward(batch)
            losses.append(ctx.backward(loss_fn(logits, labels[0])).item())
            if number == STOP and dumps:
                ctx.dump_checkpoint(folder, blocking=False)
                ctx.wait_for_dump_embedding()
                at_stop = rows_of(ctx)
        dense = torch.cat([p.detach().reshape(-1) for p in ctx.model.parameters()]).tolist()
        return at_stop, losses[-STEPS:], dense, rows_of(ctx)


@pytest.mark.slow
def test_any_number_of_servers_to_any_other(tmp_path: Path) -> None:
    found = {
        count: _train(count, tmp_path / str(count), dumps=True, loads=False) for count in COUNTS
    }
    # Whatever the number of servers, the same rows and steps; so one of them stands for all.
    assert all(one == found[1] for one in found.values())
    for source, target in itertools.product(COUNTS, COUNTS):
        moved = _train(target, tmp_path / str(source), dumps=False, loads=True)
        assert moved == found[1], (source, target)


def test_two_servers_become_three(tmp_path: Path) -> None:
    whole = _train(2, tmp_path, dumps=True, loads=False)
    assert _train(3, tmp_path, dumps=False, loads=True) == whole
