"""A trainer in a pod, which says how far it is, and at its end what it has.

progress 10
end {"steps": 3000, "rows": [...], "parameters": [...]}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from persia.data import DataLoader, IterableDataset
from persia.embedding.data import PersiaBatch

# The folder that tests/ is in: the image has none, and a PYTHONPATH of its own.
sys.path.append(str(Path(__file__).parents[3]))

from tests.distributed.batches import make_batch
from tests.distributed.net import make_ctx, rows

STEPS, PAUSE_S = int(os.environ["STEPS"]), float(os.environ["PAUSE_S"])
EVERY = 10


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[PersiaBatch]:
        return map(make_batch, range(STEPS))


def main() -> None:
    pause = threading.Event()  # never set
    with make_ctx(checkpoint_every=EVERY) as ctx:
        if not ctx.update_times:
            torch.manual_seed(1)
        for batch in DataLoader(Batches(), reproducible=True, embedding_staleness=1):
            output, labels = ctx.forward(batch)
            output = output + torch.rand_like(output)  # the generator's state goes on, too
            ctx.backward(torch.nn.functional.mse_loss(output, (labels or [])[0]))
            if ctx.update_times % EVERY == 0:
                print("progress", ctx.update_times, flush=True)
            pause.wait(PAUSE_S)
        parameters = [value.detach().flatten().tolist() for value in ctx.model.parameters()]
        found = {"steps": ctx.update_times, "rows": rows(ctx), "parameters": parameters}
    print("end", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
