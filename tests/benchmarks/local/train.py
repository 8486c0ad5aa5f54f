"""Trains the benchmark's DLRM, in whatever mode it is started in.

Prints ``begin`` and ``end`` around the batches that count, and then their seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from persia import env
from persia.ctx import TrainCtx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from tests.benchmarks.local.dlrm import DLRM, NUM_FEATURES, parse, raw_batches
from tests.benchmarks.workload import DIM, LR


class Here(IterableDataset):
    """The batches of this process."""

    def __init__(self, quick: bool, count: int) -> None:
        super().__init__()
        self.raws = raw_batches(quick, count)

    def __iter__(self) -> Iterator[PersiaBatch]:
        for raw in self.raws:
            yield raw.batch()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    count = options.warm + options.timed
    model = DLRM()
    embedded = env.get_mode() == "embedded"
    slots = {f"feature_{number}": {"dim": DIM} for number in range(NUM_FEATURES)}
    loss_fn = torch.nn.BCEWithLogitsLoss()
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=LR),
        dense_optimizer=torch.optim.Adagrad(model.parameters(), lr=LR),
        embedding_config={"slots_config": slots},
        global_config={"embedded_config": {"num_threads": options.threads}},
    ) as ctx:
        dataset = Here(options.quick, count) if embedded else StreamingDataset(10)
        start = 0.0
        for number, batch in enumerate(DataLoader(dataset, embedding_staleness=10)):
            if number == options.warm:
                print("begin", flush=True)
                start = time.perf_counter()
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, (labels or [])[0]))
        seconds = time.perf_counter() - start
        print("end", flush=True)
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    main()
