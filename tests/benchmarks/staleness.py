"""What ``embedding_staleness="auto"`` costs and saves, beside 10 and 1.

    python -m tests.benchmarks.staleness auc [--seeds 5] [--log avazu|criteo|adult]
    python -m tests.benchmarks.staleness compensation [--seeds 5] [--log avazu|criteo|adult]
    python -m tests.benchmarks.staleness speed [--pairs 10] [--net dlrm|light] [--mode compose]

``auc`` trains each log once per seed and bound. It prints the AUC on data that comes after,
what 10 costs against 1, and what "auto" costs as a share of that. ``compensation`` does so of
strengths of ``delay_compensation`` where each lookup misses exactly 9 updates, so that its
numbers repeat. ``speed`` trains in turn
under each bound, in one context, and prints samples a second as ratios to 10. Both print how
many updates a lookup missed in the mean. Speed is for an idle machine; AUC depends on it as far
as lateness does. ``--mode compose`` needs the images of ``make compose-test``; it runs this
file in the nn-worker's container, with ``--mode cluster``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from persia.metrics import AUC

BOUNDS: tuple[Any, ...] = (1, "auto", 10)
BATCH_SIZE, DIM = 256, 16
LOGS = ("adult", "avazu", "criteo")
MODES = ("embedded", "local", "compose", "cluster")
STRENGTHS = (0.0, 0.5, 1.0, 2.0)  # of the delay compensation


@dataclass
class Log:
    """Clicks: ids of each feature, dense columns, and whether each was a click."""

    ids: NDArray[np.uint64]  # [samples, features]
    dense: NDArray[np.float32]
    clicks: NDArray[np.float32]
    num_train: int

    def batches(self, is_test: bool, size: int = BATCH_SIZE) -> Iterator[PersiaBatch]:
        """Yield batches of the first part, or of the rest."""
        first, end = (self.num_train, len(self.ids)) if is_test else (0, self.num_train)
        for begin in range(first, end, size):
            part = slice(begin, min(begin + size, end))
            columns = enumerate(self.ids[part].T)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID(f"f{i}", column) for i, column in columns],
                [NonIDTypeFeature(self.dense[part])],
                [Label(self.clicks[part, None])],
                requires_grad=not is_test,
            )


def generated(sizes: list[int], num_dense: int, steps: int, exponent: float, seed: int) -> Log:
    """Draw a log: ids by a power law, clicks by a weight of each id and of pairs of them."""
    rng = np.random.default_rng(seed)
    num = steps * BATCH_SIZE + 20_000
    ids = np.stack([(n * rng.random(num) ** exponent).astype(np.uint64) for n in sizes], 1)
    dense = rng.normal(size=(num, num_dense)).astype(np.float32)
    logits = dense @ rng.normal(0, 0.15, num_dense) - 1.6
    factors = []
    for column, size in zip(ids.T, sizes, strict=True):
        logits += rng.normal(0, 1.5 / len(sizes) ** 0.5, size)[column]
        factors.append(rng.normal(0, 0.5, (size, 2))[column])
    for one, other in itertools.pairwise(factors):
        logits += (one * other).sum(1)
    clicks = (rng.random(num) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return Log(ids, dense, clicks, steps * BATCH_SIZE)


def adult() -> Log:
    """Return UCI Adult, in the order of its two files."""
    from tests.examples.loading import load

    first, second = load("adult_income").load()
    dense = np.concatenate([first.continuous, second.continuous])
    dense = (dense - first.continuous.mean(0)) / first.continuous.std(0)
    return Log(
        np.concatenate([first.categorical, second.categorical]),
        dense.astype(np.float32),
        np.concatenate([first.target, second.target])[:, 0],
        len(first),
    )


def log_of(name: str, seed: int, steps: int | None = None) -> Log:
    """Return a log by name, of as many steps; Adult is what it is.

    Sizes, and steps if none are given, are those of the public data it is named after.
    """
    if name == "adult":
        return adult()
    if name == "movielens":  # users, films, and what is known of them
        return generated([6040, 3700, 7, 21, 18, 2], 1, steps or 313, 2.0, seed)
    if name == "avazu":
        sizes = [7, 7, 24, 1000, 800, 20, 700, 300, 25, 5000, 20000, 2000, 5, 4, 900, 8, 9, 300]
        return generated([*sizes, 4, 60, 150, 50], 1, steps or 80, 3.0, seed)
    sizes = [1000, 500, 40000, 20000, 200, 15, 8000, 400, 3, 9000, 4000, 40000, 3000]
    sizes += [26, 6000, 30000, 10, 3000, 1500, 4]
    return generated(sizes, 13, steps or 430, 3.0, seed)


class DLRM(nn.Module):
    """Dot products of embeddings and dense features, then layers; ``width`` 0 is one layer."""

    def __init__(self, num_features: int, num_dense: int, width: int) -> None:
        super().__init__()
        num = num_features + 1
        self.bottom = nn.Sequential(nn.Linear(num_dense, max(width, 16)), nn.ReLU())
        self.to_dim = nn.Linear(max(width, 16), DIM)
        self.pairs = torch.tril_indices(num, num, -1)
        inputs = self.pairs.shape[1] + DIM
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.top = nn.Sequential(*(hidden if width else []), nn.Linear(width or inputs, 1))

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        bottom = self.to_dim(self.bottom(dense[0]))
        rows = torch.stack([bottom, *embeddings], 1)
        products = rows @ rows.transpose(1, 2)
        flat = products[:, self.pairs[0], self.pairs[1]]
        output: torch.Tensor = self.top(torch.cat([flat, bottom], 1))
        return output


def schema_of(log: Log) -> dict[str, Any]:
    return {"slots_config": {f"f{i}": {"dim": DIM} for i in range(log.ids.shape[1])}}


def context(
    log: Log, seed: int, width: int, worker: Any = None, compensation: float = 0.0
) -> TrainCtx:
    """Return a context, not entered, over new rows or those of a worker, and a new net."""
    torch.manual_seed(seed)
    model = DLRM(log.ids.shape[1], log.dense.shape[1], width)
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.05, initial_accumulator_value=1e-8),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.001),
        embedding_config=EmbeddingConfig(seed=seed, schema=schema_of(log)),
        mixed_precision=False,
        global_config={"embedding_worker_config": {"delay_compensation": compensation}},
        embedding_worker=worker,
    )


def train(
    ctx: TrainCtx, log: Log, bound: Any, size: int = BATCH_SIZE, *, repeats: bool = False
) -> tuple[float, float]:
    """Train one pass; return samples a second, and the mean of updates missed."""
    metrics = ctx.metrics()
    names = ("persia_missed_updates_sum", "persia_missed_updates_count")
    before = [metrics.value(name) for name in names]
    begin = time.perf_counter()
    data = log.batches(False, size)
    for batch in DataLoader(data, embedding_staleness=bound, reproducible=repeats):
        logits, labels = ctx.forward(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, (labels or [])[0])
        ctx.backward(loss)
    ctx.get_embedding_size()  # waits for the updates
    seconds = time.perf_counter() - begin
    missed, num = (metrics.value(name) - was for name, was in zip(names, before, strict=True))
    return log.num_train / seconds, missed / num


def auc_of(ctx: TrainCtx, log: Log) -> float:
    """Return the AUC on the samples after the training's."""
    auc = AUC(bins=None)
    ctx.model.eval()
    with eval_ctx(model=ctx.model) as evaluation, torch.no_grad():
        for batch in DataLoader(log.batches(True, 5000)):
            logits, labels = evaluation.forward(batch)
            auc.update(logits, (labels or [])[0])
    return float(auc.compute())


def compare_auc(name: str, num_seeds: int) -> None:
    """Print AUC and lateness of each bound."""
    found: dict[Any, list[float]] = {bound: [] for bound in BOUNDS}
    late: dict[Any, list[float]] = {bound: [] for bound in BOUNDS}
    for seed in range(num_seeds):
        log = log_of(name, seed)
        for bound in BOUNDS:
            with context(log, seed, 64) as ctx:
                late[bound].append(train(ctx, log, bound)[1])
                found[bound].append(auc_of(ctx, log))
    mean = {bound: statistics.fmean(values) for bound, values in found.items()}
    for bound in BOUNDS:
        each = " ".join(f"{value:.4f}" for value in found[bound])
        missed = statistics.fmean(late[bound])
        print(f"{name} {bound!s:>4}: AUC {mean[bound]:.5f}  missed {missed:.2f}  ({each})")
    cost, of_auto = mean[1] - mean[10], mean[1] - mean["auto"]
    print(f"{name}: 10 costs {cost:.5f}, auto {of_auto:.5f}, a share of {of_auto / cost:.2f}")


def compare_strengths(name: str, num_seeds: int) -> None:
    """Print AUC by strength, and what it costs beside 1 as a share of what 10 costs without."""
    found: dict[tuple[int, float], list[float]] = {(1, 0.0): []}
    found |= {(10, strength): [] for strength in STRENGTHS}
    for seed in range(num_seeds):
        log = log_of(name, seed)
        for (bound, strength), values in found.items():
            with context(log, seed, 64, compensation=strength) as ctx:
                train(ctx, log, bound, repeats=True)
                values.append(auc_of(ctx, log))
    mean = {kind: statistics.fmean(values) for kind, values in found.items()}
    cost = mean[1, 0.0] - mean[10, 0.0]
    for (bound, strength), values in found.items():
        each = " ".join(f"{value:.4f}" for value in values)
        share = (mean[1, 0.0] - mean[bound, strength]) / cost
        auc = mean[bound, strength]
        print(f"{name} {bound}, strength {strength:g}: {auc:.5f}, share {share:.2f} ({each})")


def compare_speed(net: str, mode: str, num_pairs: int) -> None:
    """Print samples a second under each bound, by those of 10, in turn."""
    from persia.helper import PersiaServiceCtx

    log = log_of("criteo", 0)
    services: Any = contextlib.nullcontext()
    if mode == "local":
        services = PersiaServiceCtx(embedding_config=schema_of(log))
    ratios: dict[Any, list[float]] = {bound: [] for bound in BOUNDS}
    late: dict[Any, list[float]] = {bound: [] for bound in BOUNDS}
    with services, context(log, 0, 512 if net == "dlrm" else 0) as ctx:
        train(ctx, log, "auto")  # the ramp, and new rows
        for _ in range(num_pairs):
            speeds = {}
            for bound in BOUNDS:
                speeds[bound], missed = train(ctx, log, bound)
                late[bound].append(missed)
            for bound in BOUNDS:
                ratios[bound].append(speeds[bound] / speeds[10])
    for bound in BOUNDS:
        ratio, missed = statistics.median(ratios[bound]), statistics.fmean(late[bound])
        print(f"{mode} {net} {bound!s:>4}: {ratio:.3f} of 10, missed {missed:.2f}")


def compare_in_containers(net: str, num_pairs: int) -> None:
    """Run this file as the script of the stack's nn-worker, and print what it prints."""
    from tests.compose.__main__ import compose, down, run

    words = ["speed", "--mode", "cluster", "--net", net, "--pairs", str(num_pairs)]
    command = ["persia-launcher", "nn-worker", "/workspace/train.py", *words]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy(__file__, folder / "train.py")
        (folder / "config").mkdir()
        # YAML has JSON in it.
        schema = json.dumps(schema_of(log_of("criteo", 0)))
        (folder / "config" / "embedding_config.yml").write_text(schema)
        (folder / "config" / "global_config.yml").write_text("{}")
        overlay = folder / "overlay.yml"
        overlay.write_text(json.dumps({"services": {"nn_worker": {"command": command}}}))
        up = compose("up", "--no-build", "--exit-code-from", "nn_worker", overlay=True)
        up[up.index("up") : up.index("up")] = ["-f", os.fspath(overlay)]
        try:
            done = run(up, 1800, WORKSPACE=name, DATA_LOADER_REPLICAS="0")
        finally:
            down()
    for line in done.stdout.splitlines():
        _, found, result = line.partition("cluster ")
        if found and " of 10, missed " in result:
            print(f"compose {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["auc", "compensation", "speed"])
    parser.add_argument("--log", default="avazu", choices=LOGS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--net", default="dlrm", choices=["dlrm", "light"])
    parser.add_argument("--mode", default="embedded", choices=MODES)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "auc":
        compare_auc(options.log, options.seeds)
    elif options.what == "compensation":
        compare_strengths(options.log, options.seeds)
    elif options.mode == "compose":
        compare_in_containers(options.net, options.pairs)
    else:
        compare_speed(options.net, options.mode, options.pairs)


if __name__ == "__main__":
    main()
