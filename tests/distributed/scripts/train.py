"""One rank that trains over real services, and writes what it saw.

Usage: train.py DIRECTORY OPTIONS, with OPTIONS a JSON object:
    loader       arguments of DataLoader
    algorithm    of BaguaDistributedOption; none is the default option
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.distributed import BaguaDistributedOption
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from tests.faults.batches import DIM, SLOTS


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = torch.nn.Sequential(
            torch.nn.Linear(2 * DIM, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        output: torch.Tensor = self.dense(torch.cat(embeddings, dim=1))
        return output


def main(directory: Path, options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    model = Net()
    name = options.get("algorithm")
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.5),
        dense_optimizer=torch.optim.SGD(model.parameters(), 0.1),
        embedding_config=EmbeddingConfig(emb_initialization=(-0.5, 0.5), schema=SLOTS),
        distributed_option=None if name is None else BaguaDistributedOption(name),
    ) as ctx:
        seen, losses = [], []
        loader = DataLoader(StreamingDataset(6), timeout_ms=60_000, **options["loader"])
        for batch in loader:
            output, labels = ctx.forward(batch)
            assert labels is not None
            loss = torch.nn.functional.mse_loss(output, labels[0])
            ctx.backward(loss)
            seen.append(int(batch.meta or b"-1"))
            losses.append(loss.item())
        stats = dict(ctx.stats())
        net = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        found = {"seen": seen, "losses": losses, "stats": stats, "net": net.tolist()}
        (directory / f"rank-{ctx.rank_id}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
