"""One rank of a few short jobs, one after the other; each prints a line of JSON.

    phases.py PHASE...   even | uneven | joined | failing

A data-loader beside it opens one stream for each phase.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from persia.data import DataLoader, StreamingDataset
from persia.errors import PersiaError
from tests.distributed.net import make_ctx, rows


def run(phase: str) -> dict[str, object]:
    """Train one phase and return what is compared."""
    losses: list[float] = []
    with make_ctx() as ctx:
        if ctx.rank_id == 0:
            ctx.clear_embeddings()
        dist.barrier()
        loader = DataLoader(
            StreamingDataset(4),
            reproducible=phase != "joined",
            embedding_staleness=1,
            timeout_ms=60_000,
            drop_last=phase != "joined",
        )
        loss_fn = torch.nn.BCEWithLogitsLoss()
        failure = ""
        ids = []
        try:
            for batch in loader:
                ids.append(batch.batch_id)
                output, labels = ctx.forward(batch)
                losses.append(ctx.backward(loss_fn(output, (labels or [])[0])).item())
        except PersiaError as error:
            failure = str(error)
        if not failure:
            ctx.get_embedding_size()  # waits for this rank's updates, which the other reads
        dist.barrier()
        held = rows(ctx) if not failure else []
        stats = ctx.stats()  # behind a read, which waits until each update is acknowledged
        dist.barrier()
        parameters = [value.detach().flatten().tolist() for value in ctx.model.parameters()]
    return {
        "phase": phase,
        "rank": ctx.rank_id,
        "ids": ids,
        "losses": losses,
        "stats": stats,
        "rows": held,
        "parameters": parameters,
        "failure": failure,
    }


if __name__ == "__main__":
    for phase in sys.argv[1:]:
        # In one write: both ranks append to one file, and a buffer's worth may be cut in two.
        os.write(1, f"RESULT {json.dumps(run(phase))}\n".encode())
