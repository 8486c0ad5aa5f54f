"""Trains all batches within SPREAD_S, so that there is time for faults, and compares the rows.

progress 25
books {"batches": 500, ..., "wrong_ids": 0, "lost": 0, "trained_again": 0}
"""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import torch
from counting import (  # type: ignore[import-not-found]  # beside this script
    NUM_BATCHES,
    NUM_IDS,
    make_batch,
    occurrences,
)

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import Constant, EmbeddingConfig
from persia.embedding.optim import SGD


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        return torch.stack(embeddings).sum() + 0 * self.bias.sum()


def main() -> None:
    end = time.monotonic() + float(os.environ.get("SPREAD_S", "0"))
    model = Sum()
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(emb_initialization=Constant(0.0), weight_bound=0.0),
        mixed_precision=False,
    )
    pause = threading.Event()
    with ctx:
        for number, batch in enumerate(DataLoader(StreamingDataset(10), embedding_staleness=8)):
            loss, _ = ctx.forward(batch)
            ctx.backward(loss)
            if number % 25 == 0:
                print("progress", number, flush=True)
            left_s = end - time.monotonic()
            pause.wait(max(0.0, left_s / (NUM_BATCHES - number)))
        sizes = ctx.get_embedding_size()
        everyone = make_batch(np.arange(NUM_IDS, dtype=np.uint64), requires_grad=False)
        (rows,) = ctx.get_embedding_from_data(everyone).embedding_tensors
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"expected pooled rows, got {type(rows).__name__}")
        counts = -rows.detach().numpy()
        wrong = int((counts != occurrences()[:, None]).any(axis=1).sum())
        # Of occurrences of ids: how many their rows do not know of, and know of twice.
        missing = occurrences() - counts[:, 0].astype(np.int64)
        lost, again = int(missing.clip(0).sum()), int((-missing).clip(0).sum())
        repeated = sum(one.get("repeated_updates", 0) for one in ctx.server_stats())
        books = {"wrong_ids": wrong, "lost": lost, "trained_again": again}
        of_job = {"rows": sum(sizes), "repeated": repeated, **ctx.stats()}
    print("books", json.dumps({**books, **of_job}), flush=True)


if __name__ == "__main__":
    main()
