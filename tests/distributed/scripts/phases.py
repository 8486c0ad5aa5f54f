"""One rank of a few short jobs, one after the other; writes what it saw.

Usage: phases.py DIRECTORY OPTIONS PHASE..., with a phase as ``phases_loader.py`` has it, which
opens one stream for each, and OPTIONS a JSON object with arguments of ``run``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from persia import env
from persia.data import DataLoader, StreamingDataset
from persia.distributed import BaguaDistributedOption
from persia.errors import PersiaError
from tests.distributed.net import make_ctx, rows
from tests.support.processes import DEADLINE_S


def run(
    phase: str,
    *,
    url: str = "",
    load: bool = False,
    dump_at: int = 0,
    noise: float = 0.0,
    algorithm: str | None = None,
    resume_from: Sequence[str] = (),
) -> dict[str, object]:
    """Train one phase and return what is compared.

    Args:
        phase: How many batches there are, and what is done where they are not as many.
        url: Of a checkpoint.
        load: Whether to continue from it.
        dump_at: The step after which rank 0 dumps; 0 is none.
        noise: Of the outputs, which each rank draws.
        algorithm: Of ``BaguaDistributedOption``; none is the default option.
        resume_from: By rank, the folder that it is to go on from.
    """
    losses: list[float] = []
    option = None if algorithm is None else BaguaDistributedOption(algorithm)
    if resume_from:
        os.environ[env.resume_from.name] = resume_from[env.get_rank() or 0]
    with make_ctx(distributed_option=option) as ctx:
        if ctx.rank_id == 0:
            ctx.clear_embeddings()
        dist.barrier()
        torch.manual_seed(100 * load + ctx.rank_id)
        if load:
            ctx.load_checkpoint(url)
        loader = DataLoader(
            StreamingDataset(6),
            reproducible=phase != "joined",
            embedding_staleness=1,
            timeout_ms=int(1000 * DEADLINE_S),  # others may wait for a disk
            drop_last=phase != "joined",
        )
        failure = ""
        ids: list[int] = []
        order: list[tuple[str, ...]] = []
        try:
            loops = itertools.repeat(loader, 2 if phase == "epochs" else 1)
            for number, batch in enumerate(itertools.chain.from_iterable(loops), start=1):
                ids.append(batch.batch_id)
                order = [batch.feature_names, batch.non_id_type_tensors.names]
                output, labels = ctx.forward(batch)
                output = output + noise * torch.rand_like(output)
                loss = torch.nn.functional.mse_loss(output, (labels or [])[0])
                losses.append(ctx.backward(loss).item())
                if number == dump_at and ctx.rank_id == 0:
                    ctx.dump_checkpoint(url, blocking=bool(number % 2))
        except PersiaError as error:
            if phase != "failing":
                raise
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
        "ids": ids,
        "order": order,
        "losses": losses,
        "stats": stats,
        "rows": held,
        "parameters": parameters,
        "failure": failure,
    }


if __name__ == "__main__":
    found = [run(phase, **json.loads(sys.argv[2])) for phase in sys.argv[3:]]
    (Path(sys.argv[1]) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
