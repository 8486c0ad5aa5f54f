"""Train an income model on UCI Adult for one epoch and test it.

    python examples/adult_income/train.py             # embedded mode: no servers, no ports
    python examples/adult_income/train.py --seeds 5   # seeds 1 to 5, and their mean
    honcho start                                      # four roles, each a process of its own
    python examples/adult_income/train.py --checkpoint DIR            # stop it when you like,
    python examples/adult_income/train.py --checkpoint DIR --resume   # and go on
    PERSIA_RESUME_FROM=DIR python examples/adult_income/train.py      # the same by itself

The training batches come from data_loader.py; in embedded mode this script starts it.

Environment: REPRODUCIBLE=1 for the same bits in every run, EMBEDDING_STALENESS for the most
batches between lookup and update (10; 1 if reproducible).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from batches import batches, num_batches
from income_model import IncomeModel
from prepare_data import Income, load
from tqdm import tqdm

from persia import env
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import PersiaBatch
from persia.embedding.optim import Adagrad
from persia.metrics import AUC
from persia.utils import ArgumentParser, at_least, load_yaml

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIG = Path(__file__).parent / "config"
EMBEDDING_LR = 1e-2
DENSE_LR = 0.1
CHECKPOINT_INTERVAL = 50  # batches between two checkpoints


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the environment set."""

    seed: int = 3
    seeds: int = 0  # above 0: run seeds 1 to this one instead
    staleness: int | Literal["auto"] = "auto"
    reproducible: bool = False
    threads: int = 1
    servers: int = 1
    checkpoint: str | None = None  # folder or URL
    resume: bool = False
    report: str | None = None  # file
    tensorboard: str | None = None  # folder
    quiet: bool = False
    json: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured."""

    seed: int
    auc: float
    loss: float  # mean over the last tenth of the training batches
    samples_per_s: float
    rows: int

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: test AUC {self.auc:.6f}, {self.samples_per_s:,.0f} samples/s, "
            f"{self.rows} rows held"
        )


class TestDataset(IterableDataset):
    """The test file in its own order, read in this process."""

    def __init__(self, income: Income) -> None:
        super().__init__()
        self.income = income

    def __iter__(self) -> Iterator[PersiaBatch]:
        return batches(self.income, requires_grad=False)


def build_ctx(options: Options) -> TrainCtx:
    """Return the context of a fresh model; equal seeds give equal beginnings."""
    torch.manual_seed(options.seed)
    model = IncomeModel()
    servers = load_yaml(CONFIG / "global_config.yml")
    servers["embedded_config"] = {
        "num_servers": options.servers,
        "num_threads": options.threads,
    }
    return TrainCtx(
        model=model,
        # As the original's example, whose sum of squares began with 0.01.
        embedding_optimizer=Adagrad(lr=EMBEDDING_LR, initial_accumulator_value=0.01),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=DENSE_LR),
        embedding_config=EmbeddingConfig(
            seed=options.seed, schema=CONFIG / "embedding_config.yml"
        ),
        global_config=servers,
        report=options.report,
        tensorboard=options.tensorboard,
        checkpoint_every=CHECKPOINT_INTERVAL if env.resume_from() else None,
    )


def train(ctx: TrainCtx, income: Income, options: Options) -> tuple[list[float], float]:
    """Train one epoch; return the loss of each batch, and samples per second and rank."""
    loader = DataLoader(
        StreamingDataset(buffer_size=10),
        reproducible=options.reproducible,
        embedding_staleness=options.staleness,
    )
    loss_fn = torch.nn.BCELoss()
    losses = []
    num_samples, start = 0, 0.0
    with tqdm(
        total=num_batches(income) // ctx.world_size,
        unit=" batches",
        disable=options.quiet or ctx.rank_id > 0 or None,
    ) as bar:
        for batch in loader:
            start = start or time.perf_counter()  # once the data-loader is there
            output, labels = ctx.forward(batch)
            loss = ctx.backward(loss_fn(output, labels[0]))
            losses.append(loss.item())
            num_samples += batch.batch_size
            bar.update()
            if options.checkpoint and ctx.update_times % CHECKPOINT_INTERVAL == 0:
                ctx.dump_checkpoint(options.checkpoint, blocking=False)
    return losses, num_samples / (time.perf_counter() - start)


def test(ctx: TrainCtx, income: Income) -> float:
    """Return the AUC on the test file. Inserts and changes nothing."""
    # Of this rank alone: each has all of the test file.
    metric = AUC(bins=None, sync_on_compute=False)
    ctx.model.eval()
    with eval_ctx(model=ctx.model) as evaluation, torch.no_grad():
        for batch in DataLoader(TestDataset(income), reproducible=True):
            output, labels = evaluation.forward(batch)
            metric.update(output, labels[0])
    ctx.model.train()
    value = float(metric.compute())
    ctx.report(auc=value)
    return value


def run(ctx: TrainCtx, data: tuple[Income, Income], options: Options) -> Report:
    """Train and test inside ``ctx``, which must be entered."""
    train_data, test_data = data
    if options.checkpoint and options.resume:
        ctx.load_checkpoint(options.checkpoint)
    losses, samples_per_s = train(ctx, train_data, options)
    test_auc = test(ctx, test_data)
    return Report(
        seed=options.seed,
        auc=test_auc,
        loss=float(np.mean(losses[-max(1, len(losses) // 10) :])),
        samples_per_s=samples_per_s,
        rows=sum(ctx.get_embedding_size()),
    )


def auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """Return the area under the ROC curve, every score kept."""
    metric = AUC(bins=None, sync_on_compute=False)
    metric.update(scores, labels)
    return float(metric.compute())


def parse_args(argv: list[str] | None = None) -> Options:
    parser = ArgumentParser(__doc__, "python train.py --seeds 5 --report report.html")
    add = parser.add_argument
    default = Options()
    add("--seed", type=int, default=default.seed, help="of the rows and the model")
    add("--seeds", type=at_least(0), default=default.seeds, help="run seeds 1 to SEEDS instead")
    add("--threads", type=at_least(1), default=default.threads, help="of each server")
    add(
        "--servers",
        type=at_least(1),
        default=default.servers,
        help="parameter servers in the process",
    )
    add("--checkpoint", help="folder or URL in which to save training as it goes on")
    add("--resume", action="store_true", help="continue from what --checkpoint has saved")
    add("--report", help="HTML file to write a report of the run to")
    add("--tensorboard", help="folder to write TensorBoard's event files to")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="print a line of JSON for each run")
    args = parser.parse_args(argv)
    if args.seeds and env.get_mode() == "services":
        parser.error("--seeds: data-loaders send one epoch, which is one seed's; use --seed")
    if args.resume and not args.checkpoint:
        parser.error("--resume: expected --checkpoint, to say from what")
    reproducible = os.environ.get("REPRODUCIBLE", "0") == "1"
    staleness = os.environ.get("EMBEDDING_STALENESS") or (
        1 if reproducible else default.staleness
    )
    bound: int | Literal["auto"] = "auto" if staleness == "auto" else int(staleness)
    return Options(**vars(args), reproducible=reproducible, staleness=bound)


def main(argv: list[str] | None = None) -> None:
    options = parse_args(argv)
    data = load()
    seeds = range(1, options.seeds + 1) if options.seeds > 0 else [options.seed]
    aucs = []
    for seed in seeds:
        of_seed = dataclasses.replace(options, seed=seed)
        with build_ctx(of_seed) as ctx:
            report = run(ctx, data, of_seed)
        aucs.append(report.auc)
        if ctx.rank_id == 0:
            text = json.dumps(dataclasses.asdict(report)) if options.json else str(report)
            print(text, flush=True)
    if len(aucs) > 1 and not options.json:
        print(f"mean test AUC {np.mean(aucs):.6f} over seeds 1 to {len(aucs)}")


if __name__ == "__main__":
    main()
