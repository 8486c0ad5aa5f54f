"""One rank that trains over real services, dumps or loads, and writes what it saw.

Usage: resume.py DIRECTORY OPTIONS, with OPTIONS a JSON object:
    url       of the checkpoint
    dump_at   step after which rank 0 dumps; 0 is none
    load      whether to continue from it
    algorithm of BaguaDistributedOption; none is the default option
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from persia.data import DataLoader, StreamingDataset
from persia.distributed import BaguaDistributedOption
from tests.distributed.net import make_ctx, rows
from tests.support.processes import DEADLINE_S


def main(directory: Path, options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    name = options.get("algorithm")
    option = None if name is None else BaguaDistributedOption(name)
    with make_ctx(seed=5, distributed_option=option) as ctx:
        torch.manual_seed(100 * options["load"] + ctx.rank_id)
        if options["load"]:
            ctx.load_checkpoint(options["url"])
        losses = []
        loader = DataLoader(
            StreamingDataset(6),
            timeout_ms=int(1000 * DEADLINE_S),  # others may wait for a disk
            reproducible=True,
            embedding_staleness=1,
        )
        for number, batch in enumerate(loader, start=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            noise = torch.rand_like(output)  # each rank draws its own
            loss = torch.nn.functional.mse_loss(output + noise, labels[0])
            losses.append(ctx.backward(loss).item())
            if number == options["dump_at"] and ctx.rank_id == 0:
                ctx.dump_checkpoint(options["url"], blocking=bool(number % 2))
        dense = [parameter.tolist() for parameter in ctx.model.parameters()]
        found = {"losses": losses, "rows": rows(ctx), "dense": dense}
        (directory / f"rank-{ctx.rank_id}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
