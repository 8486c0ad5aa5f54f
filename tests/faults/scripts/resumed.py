"""A training that is killed by itself, at given steps, and goes on when it is started again.

Usage: resumed.py FOLDER STEPS KILLS, with KILLS a JSON list of [step, signal, seconds after].
Each kill happens once, to one rank in turn; its mark in FOLDER is made before. Losses are added
to FOLDER/losses-RANK as they are computed, and FOLDER/end-RANK.json is written at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from persia import env
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import PersiaBatch
from tests.distributed.batches import make_batch
from tests.distributed.net import make_ctx, rows
from tests.support.processes import DEADLINE_S

EVERY = 3


class Batches(IterableDataset):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __iter__(self) -> Iterator[PersiaBatch]:
        return map(make_batch, range(self.count))


coming: list[threading.Timer] = []  # the kill of this process


def kill_if_due(folder: Path, step: int, kills: list[tuple[int, str, float]]) -> None:
    if coming:
        return
    rank, size = env.get_rank() or 0, env.get_world_size() or 1
    for number, (at, name, delay_s) in enumerate(kills):
        mark = folder / f"kill-{number}"
        if mark.exists():
            continue
        if step >= at and number % size == rank:
            mark.touch()
            which = getattr(signal, name)
            # From a thread, so that it comes anywhere in the step.
            coming.append(threading.Timer(delay_s, os.kill, (os.getpid(), which)))
            coming[0].start()
        return


def main() -> None:
    folder, steps, kills = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    is_alone = env.get_mode() == "embedded"
    with make_ctx(checkpoint_every=EVERY) as ctx:
        if not ctx.update_times:
            torch.manual_seed(ctx.rank_id)
        loader = DataLoader(
            Batches(steps) if is_alone else StreamingDataset(6),
            reproducible=True,
            embedding_staleness=1,
            timeout_ms=int(1000 * DEADLINE_S),
        )
        with (folder / f"losses-{ctx.rank_id}").open("a") as file:
            for batch in loader:
                kill_if_due(folder, ctx.update_times + 1, kills)
                output, labels = ctx.forward(batch)
                output = output + torch.rand_like(output)
                loss = torch.nn.functional.mse_loss(output, (labels or [])[0])
                value = loss.item()
                file.write(f"{ctx.update_times + 1} {value!r}\n")
                file.flush()
                ctx.backward(loss)
        for one in coming:
            one.join()
        found = {
            "steps": ctx.update_times,
            "rows": rows(ctx),
            "parameters": [
                value.detach().flatten().tolist() for value in ctx.model.parameters()
            ],
        }
    (folder / f"end-{ctx.rank_id}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
