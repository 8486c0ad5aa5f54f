"""Train DLRM on a log in Criteo's layout for one epoch and test it.

    python examples/criteo/train.py           # embedded mode: no servers, no ports
    make -C examples/criteo run               # four roles, each a process of its own
    python examples/criteo/train.py --checkpoint DIR            # stop it when you like,
    python examples/criteo/train.py --checkpoint DIR --resume   # and go on

The training batches come from data_loader.py; in embedded mode this script starts it.

Environment: CRITEO_DATA names the folder of the log (see README.md); without, a small one is
generated. REPRODUCIBLE=1 for the same bits in every run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from criteo_log import BATCH_SIZE, folder
from dlrm import DLRM
from tqdm import tqdm

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import Adagrad
from persia.metrics import AUC
from persia.readers import Columns, CriteoReader
from persia.utils import ArgumentParser

CONFIG = Path(__file__).parent / "config"
EMBEDDING_LR = 0.1
DENSE_LR = 3e-3
CHECKPOINT_INTERVAL = 1000  # batches between two checkpoints
COLUMNS = Columns(
    [f"C{number}" for number in range(1, 27)],
    [f"I{number}" for number in range(1, 14)],
    ["label"],
    strings="hex",
    requires_grad=False,
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the environment set."""

    seed: int = 1
    reproducible: bool = False
    checkpoint: str | None = None  # folder or URL
    resume: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured."""

    auc: float
    losses: list[float]
    samples_per_s: float
    rows: int

    def __str__(self) -> str:
        return (
            f"test AUC {self.auc:.4f}, {self.samples_per_s:,.0f} samples/s, "
            f"{self.rows:,} rows held"
        )


def build_ctx(options: Options) -> TrainCtx:
    """Return the context of a fresh model; equal seeds give equal beginnings."""
    torch.manual_seed(options.seed)
    model = DLRM()
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=EMBEDDING_LR),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=DENSE_LR),
        embedding_config=EmbeddingConfig(
            seed=options.seed, schema=CONFIG / "embedding_config.yml"
        ),
        global_config=CONFIG / "global_config.yml",
    )


def train(ctx: TrainCtx, options: Options) -> tuple[list[float], float]:
    """Train one epoch; return the loss of each batch, and samples per second and rank."""
    loader = DataLoader(
        StreamingDataset(buffer_size=10),
        reproducible=options.reproducible,
    )
    loss_fn = torch.nn.BCEWithLogitsLoss()
    losses = []
    num_samples, start = 0, 0.0
    with tqdm(unit=" batches", disable=options.quiet or ctx.rank_id > 0 or None) as bar:
        for batch in loader:
            start = start or time.perf_counter()  # once the data-loader is there
            output, labels = ctx.forward(batch)
            losses.append(ctx.backward(loss_fn(output, labels[0])).item())
            num_samples += batch.batch_size
            bar.update()
            if options.checkpoint and ctx.update_times % CHECKPOINT_INTERVAL == 0:
                ctx.dump_checkpoint(options.checkpoint, blocking=False)
    seconds = time.perf_counter() - start if start else 1.0
    return losses, num_samples / seconds


def test(ctx: TrainCtx) -> float:
    """Return the AUC on the test files. Inserts and changes nothing."""
    # Of this rank alone: each has all of the test files.
    metric = AUC(bins=None, sync_on_compute=False)
    reader = CriteoReader(folder() / "test", BATCH_SIZE, COLUMNS, shard=(0, 1))
    ctx.model.eval()
    with eval_ctx(model=ctx.model) as evaluation, torch.no_grad():
        for batch in DataLoader(reader):
            output, labels = evaluation.forward(batch)
            metric.update(output, labels[0])
    ctx.model.train()
    return float(metric.compute())


def run(ctx: TrainCtx, options: Options) -> Report:
    """Train and test inside ``ctx``, which must be entered."""
    if options.checkpoint and options.resume:
        ctx.load_checkpoint(options.checkpoint)
    losses, samples_per_s = train(ctx, options)
    return Report(test(ctx), losses, samples_per_s, sum(ctx.get_embedding_size()))


def parse_args(argv: list[str] | None = None) -> Options:
    parser = ArgumentParser(__doc__, "python train.py --checkpoint saved")
    add = parser.add_argument
    add("--seed", type=int, default=Options().seed, help="of the rows and the model")
    add("--checkpoint", help="folder or URL in which to save training as it goes on")
    add("--resume", action="store_true", help="continue from what --checkpoint has saved")
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint:
        parser.error("--resume: expected --checkpoint, to say from what")
    return Options(**vars(args), reproducible=os.environ.get("REPRODUCIBLE", "0") == "1")


def main(argv: list[str] | None = None) -> None:
    options = parse_args(argv)
    folder()  # generated before a data-loader looks for it
    with build_ctx(options) as ctx:
        report = run(ctx, options)
    if ctx.rank_id == 0:
        print(report, flush=True)


if __name__ == "__main__":
    main()
