"""A training whose rows and weights count its steps, so that every number served is known.

    python -m tests.serving.proofs.trainer FOLDER [--rows N] [--flush S] [--from CHECKPOINT]

Rows begin at zero and each step adds one to every value of every row and to the one parameter
of the model. What a version answers for a sample is that parameter, then the sum of a row of
each feature: DIM times the steps that those rows have. It obeys lines on its input: ``rate R``
steps a second, ``step``, ``publish``, ``end``; and prints a line of JSON for all that it did.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia.ctx import TrainCtx
from persia.embedding import Constant, EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD

DIM = 16
FEATURES = tuple(f"feature{number}" for number in range(8))
SCHEMA: dict[str, Any] = {
    "feature_index_prefix_bit": 8,
    "slots_config": {name: {"dim": DIM} for name in FEATURES},
}
MODEL = "counted"


class Counted(torch.nn.Module):
    """Answers [B, 1 + features]: its parameter, and the sum of each feature's row."""

    def __init__(self, steps: float = 0.0) -> None:
        super().__init__()
        self.steps = torch.nn.Parameter(torch.full((1, 1), float(steps)))

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        """Add up."""
        sums = torch.cat([embeddings[name].sum(1, keepdim=True) for name in FEATURES], 1)
        return torch.cat([self.steps + 0 * dense[0][:, :1], sums], 1)


def batch_of(ids: Any) -> PersiaBatch:
    """Train these ids of every feature."""
    size = len(ids)
    return PersiaBatch(
        [IDTypeFeatureWithSingleID(name, ids) for name in FEATURES],
        [NonIDTypeFeature(np.zeros((size, 1), np.float32), "dense")],
        [Label(np.ones((size, 1), np.float32))],
    )


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Training:
    """One context, and the steps that it has made."""

    def __init__(self, ctx: TrainCtx, folder: Path, num_rows: int) -> None:
        self._ctx, self._models = ctx, folder / "models" / MODEL
        self._batch = batch_of(np.arange(num_rows // len(FEATURES), dtype=np.uint64))

    def step(self) -> None:
        """Add one to every row, and to the parameter."""
        ctx, began = self._ctx, time.monotonic()
        output, _ = ctx.forward(ctx.get_embedding_from_data(self._batch))
        # The parameter's gradient is of one sample: a mean's would round.
        ctx.backward(-output[:, 1:].sum() - output[0, 0])
        say(did="step", steps=int(ctx.model.steps.item()), began=began)

    def publish(self) -> None:
        """Begin another version, beside the steps."""
        publisher: Any = self._ctx._publisher
        if publisher is None:
            self._ctx.publish(self._models, every_s=1e6, rows="log", keep_last=100)
            publisher = self._ctx._publisher
        say(did="publish", steps=int(self._ctx.model.steps.item()))
        publisher.publish()


def obey(training: Training) -> None:
    """Do what the lines say, until they end."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("end")

    threading.Thread(target=read, daemon=True).start()
    pause_s, due = None, 0.0
    while True:
        left = None if pause_s is None else max(0.0, due - time.monotonic())
        try:
            words = lines.get(timeout=left).split()
        except queue.Empty:
            due = max(due + (pause_s or 0.0), time.monotonic())
            training.step()
            continue
        if words[0] == "end":
            return
        if words[0] == "rate":
            pause_s = 1 / float(words[1]) if float(words[1]) else None
            due = time.monotonic()
        else:
            getattr(training, words[0])()


def main() -> None:
    """Train until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--flush", type=float, default=0.5)
    parser.add_argument("--from", dest="checkpoint", default="")
    parser.add_argument("--steps", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    net = Counted(given.steps)
    with TrainCtx(
        SGD(lr=1.0),
        torch.optim.SGD(net.parameters(), lr=1.0),
        model=net,
        embedding_config=EmbeddingConfig(Constant(0.0), weight_bound=0, schema=SCHEMA),
        global_config={
            "embedding_parameter_server_config": {
                "enable_incremental_update": True,
                "incremental_flush_sec": given.flush,
                "incremental_dir": str(given.folder / "log"),
            }
        },
        mixed_precision=False,
    ) as ctx:
        if given.checkpoint:
            ctx.load_embedding(given.checkpoint)
        training = Training(ctx, given.folder, given.rows)
        say(did="begin", steps=given.steps)
        obey(training)


if __name__ == "__main__":
    main()
