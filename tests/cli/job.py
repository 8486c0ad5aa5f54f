"""A small job of real processes that trains until it is stopped, for screens to look at.

It listens at an address of this machine that no other test uses, so that its default ports are
its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes import ROOT, Cluster

SLOTS = {
    "feature_index_prefix_bit": 8,
    "slots_config": {"user": {"dim": 16}, "item": {"dim": 16}},
}

LOADER = """
import numpy as np
from persia import env
from persia.ctx import DataCtx
from persia.embedding.data import (
    IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch,
)

rng = np.random.default_rng(env.get_replica_index())
with DataCtx() as ctx:
    while True:
        ids = [rng.zipf(1.2, 256).astype(np.uint64) % 10**6 for _ in range(2)]
        ctx.send_data(PersiaBatch(
            [IDTypeFeatureWithSingleID(name, x) for name, x in zip(("user", "item"), ids)],
            non_id_type_features=[NonIDTypeFeature(rng.random((256, 1), np.float32))],
            labels=[Label((ids[0] % 2).astype(np.float32).reshape(-1, 1))],
        ))
"""

TRAINER = """
import torch
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.embedding.optim import Adagrad

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.top = torch.nn.Linear(33, 1)

    def forward(self, dense, embeddings):
        return self.top(torch.cat([*dense, *embeddings], dim=1))

torch.manual_seed(0)
model = Net()
with TrainCtx(
    model=model, embedding_optimizer=Adagrad(lr=0.1),
    dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.01), mixed_precision=False,
) as ctx:
    right = seen = 0
    for batch in DataLoader(StreamingDataset(buffer_size=10), embedding_staleness=4):
        output, labels = ctx.forward(batch)
        ctx.backward(torch.nn.functional.binary_cross_entropy_with_logits(output, labels[0]))
        right += int(((output > 0) == (labels[0] > 0.5)).sum())
        seen += len(output)
        ctx.report(accuracy=right / seen)
"""


@contextmanager
def training_job(
    num_servers: int = 2, num_workers: int = 1, num_loaders: int = 2
) -> Iterator[Cluster]:
    """Start the job; it is stopped at the end."""
    with Cluster(
        SLOTS,
        transport="tcp",
        num_servers=num_servers,
        num_workers=num_workers,
        environment={"PERSIA_METRICS_PORT": "", "PERSIA_RUN_ID": "clicks"},
    ) as cluster:
        cluster.variables["PERSIA_METRICS_HOST"] = cluster.host
        (cluster.place / "loader.py").write_text(LOADER)
        (cluster.place / "train.py").write_text(TRAINER)
        cluster.start_servers()
        cluster.start_loaders(cluster.place / "loader.py", num_loaders)
        cluster.start("nn-worker", "nn-worker", str(cluster.place / "train.py"))
        yield cluster


def ask(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``persia-launcher`` beside a job, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "persia.launcher", *arguments],
        cwd=ROOT,
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
