"""Train a click model from one command: no servers, no ports, no data to fetch.

    python examples/quickstart/train.py

The embeddings live in this process (embedded mode): nothing else is started.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from click_log import ClickLog, auc, generate
from click_model import POOLED_DIMS, ClickModel
from tqdm import tqdm

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from persia.metrics import AUC
from persia.utils import ArgumentParser, at_least

EMBEDDING_CONFIG = Path(__file__).parent / "config" / "embedding_config.yml"
FEATURES = (*POOLED_DIMS, "recent_categories")
TEST_BATCH_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line sets."""

    samples: int = 600_000
    batch_size: int = 512
    seed: int = 1
    staleness: int = 10
    reproducible: bool = False
    threads: int = 1
    servers: int = 1
    embeddings: bool = True
    report: str | None = None  # file
    tensorboard: str | None = None  # folder
    quiet: bool = False
    json: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured."""

    auc: float
    best_auc: float
    loss: float  # mean over the last tenth of the training batches
    samples_per_s: float
    rows: int
    bytes_per_row: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"test AUC        {self.auc:.4f}",
                f"best possible   {self.best_auc:.4f} (AUC of the true probability)",
                f"training        {self.samples_per_s:,.0f} samples/s",
                f"rows held       {self.rows:,}",
                f"bytes per row   {self.bytes_per_row:.0f}",
            ]
        )


class ClickDataset(IterableDataset):
    """A stretch of the log, cut into batches, in the order of time."""

    def __init__(
        self, log: ClickLog, samples: range, batch_size: int, requires_grad: bool
    ) -> None:
        super().__init__()
        self.log = log
        self.samples = samples
        self.batch_size = batch_size
        self.requires_grad = requires_grad

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[PersiaBatch]:
        for start in self.samples[:: self.batch_size]:
            stop = min(start + self.batch_size, self.samples.stop)
            yield PersiaBatch(
                [self._feature(name, start, stop) for name in FEATURES],
                non_id_type_features=[NonIDTypeFeature(self.log.dense[start:stop])],
                labels=[Label(self.log.clicks[start:stop])],
                requires_grad=self.requires_grad,
            )

    def _feature(
        self, name: str, start: int, stop: int
    ) -> IDTypeFeature | IDTypeFeatureWithSingleID:
        if name in self.log.single:
            return IDTypeFeatureWithSingleID(name, self.log.single[name][start:stop])
        ragged = self.log.ragged[name].rows(start, stop)
        return IDTypeFeature.from_csr(name, ragged.values, ragged.offsets)


def build_ctx(options: Options) -> TrainCtx:
    """Return the context of a fresh model; equal seeds give equal beginnings."""
    torch.manual_seed(options.seed)
    model = ClickModel(use_embeddings=options.embeddings)
    return TrainCtx(
        model=model,
        # The recorded numbers are of this, nearly torch's 0. The original's 0.01 costs AUC:
        # while gradients are small beside it, Adagrad steps no further than SGD would.
        embedding_optimizer=Adagrad(lr=0.05, initial_accumulator_value=1e-8),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=5e-4),
        embedding_config=EmbeddingConfig(
            emb_initialization=(-0.05, 0.05), seed=options.seed, schema=EMBEDDING_CONFIG
        ),
        global_config={
            "embedded_config": {
                "num_servers": options.servers,
                "num_threads": options.threads,
            }
        },
        report=options.report,
        tensorboard=options.tensorboard,
    )


def train(ctx: TrainCtx, log: ClickLog, options: Options) -> tuple[float, float]:
    """Train one pass; return the loss near the end and the seconds it took."""
    dataset = ClickDataset(log, range(log.num_train), options.batch_size, requires_grad=True)
    loader = DataLoader(
        dataset,
        reproducible=options.reproducible,
        embedding_staleness=options.staleness,
        allow_untrained=not options.embeddings,  # their gradients are zero then
    )
    loss_fn = torch.nn.BCEWithLogitsLoss()
    losses = []
    lately = AUC()  # of batches before they are trained on
    start = time.perf_counter()
    with tqdm(
        total=log.num_train, unit=" samples", unit_scale=True, disable=options.quiet or None
    ) as bar:
        for batch in loader:
            logits, labels = ctx.forward(batch)
            loss = ctx.backward(loss_fn(logits, labels[0]))
            losses.append(loss.item())
            lately.update(logits, labels[0])
            bar.update(batch.batch_size)
            if len(losses) % 50 == 0:
                bar.set_postfix(loss=f"{np.mean(losses[-50:]):.4f}")
                ctx.report(train_auc=lately.compute())
                lately.reset()
    tail = losses[-max(1, len(losses) // 10) :]
    return float(np.mean(tail)), time.perf_counter() - start


def test(ctx: TrainCtx, log: ClickLog) -> float:
    """Return the AUC on the held-out part. Inserts and changes nothing."""
    samples = range(log.num_train, len(log))
    dataset = ClickDataset(log, samples, TEST_BATCH_SIZE, requires_grad=False)
    scores = []
    ctx.model.eval()
    with eval_ctx(model=ctx.model) as evaluation, torch.no_grad():
        for batch in DataLoader(dataset, reproducible=True):
            logits, _ = evaluation.forward(batch)
            scores.append(logits[:, 0].numpy())
    ctx.model.train()
    value = auc(log.clicks[samples.start :, 0], np.concatenate(scores))
    ctx.report(auc=value)
    return value


def run(ctx: TrainCtx, log: ClickLog, options: Options) -> Report:
    """Train and test inside ``ctx``, which must be entered."""
    loss, seconds = train(ctx, log, options)
    test_auc = test(ctx, log)
    held = ctx.server_stats()
    rows = sum(stats["rows"] for stats in held)
    return Report(
        auc=test_auc,
        best_auc=log.best_auc(),
        loss=loss,
        samples_per_s=log.num_train / seconds,
        rows=rows,
        bytes_per_row=sum(stats["bytes"] for stats in held) / max(rows, 1),
    )


def parse_args(argv: list[str] | None = None) -> Options:
    parser = ArgumentParser(__doc__, "python train.py --samples 100000 --report report.html")
    add = parser.add_argument
    default = Options()
    add("--samples", type=at_least(1000), default=default.samples, help="length of the log")
    add("--batch-size", type=at_least(1), default=default.batch_size)
    add("--seed", type=int, default=default.seed, help="of the log, the rows and the model")
    add(
        "--staleness",
        type=at_least(1),
        default=None,
        help=f"most batches between lookup and update (default {default.staleness}, or 1 with "
        "--reproducible)",
    )
    add("--reproducible", action="store_true", help="the same bits in every run")
    add("--threads", type=at_least(1), default=default.threads, help="of each server")
    add(
        "--servers",
        type=at_least(1),
        default=default.servers,
        help="parameter servers in the process",
    )
    add(
        "--no-embeddings",
        dest="embeddings",
        action="store_false",
        help="feed the model zeros instead, to see what embeddings are worth",
    )
    add("--report", help="HTML file to write a report of the run to")
    add("--tensorboard", help="folder to write TensorBoard's event files to")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="print the report as one line of JSON")
    args = parser.parse_args(argv)
    if args.staleness is None:
        args.staleness = 1 if args.reproducible else default.staleness
    return Options(**vars(args))


def main(argv: list[str] | None = None) -> None:
    options = parse_args(argv)
    if not options.quiet and not options.json:
        print(f"drawing a click log of {options.samples:,} samples", flush=True)
    log = generate(options.samples, options.seed)
    with build_ctx(options) as ctx:
        report = run(ctx, log, options)
    print(json.dumps(dataclasses.asdict(report)) if options.json else report)


if __name__ == "__main__":
    main()
