"""A trainer in a container, which says how far it is, and at its end what it has.

    progress 10
    end {"steps": 4000, "rows": [...], "parameters": [...]}

NUM_BATCHES is that of its data-loaders, PACE_S the pause after each step in seconds.
"""

from __future__ import annotations

import json
import os
import threading

import torch

from persia.data import DataLoader, StreamingDataset
from tests.distributed.net import make_ctx, rows

EVERY = 10


def main() -> None:
    pause, pace_s = threading.Event(), float(os.environ["PACE_S"])  # never set
    with make_ctx(checkpoint_every=EVERY) as ctx:
        if not ctx.update_times:
            torch.manual_seed(1)
        for batch in DataLoader(StreamingDataset(6), reproducible=True, embedding_staleness=1):
            output, labels = ctx.forward(batch)
            output = output + torch.rand_like(output)  # the generator's state goes on, too
            ctx.backward(torch.nn.functional.mse_loss(output, (labels or [])[0]))
            if ctx.update_times % EVERY == 0:
                print("progress", ctx.update_times, flush=True)
            pause.wait(pace_s)
        parameters = [value.detach().flatten().tolist() for value in ctx.model.parameters()]
        found = {"steps": ctx.update_times, "rows": rows(ctx), "parameters": parameters}
    print("end", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
