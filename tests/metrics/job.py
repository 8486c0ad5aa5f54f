"""Small jobs of real processes: one that stands still while a test asks, one that trains on.

with standing_job() as job:
    job.urls["embedding-worker-0"]      address of its metrics
    job.get("nn-worker", "/metrics")
    job.go_on()                         they end; the exit statuses
"""

from __future__ import annotations

import os
import re
import select
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import DEADLINE_S, Cluster
from tests.support.scripts import NET, SEND, slots
from tests.support.waiting import PATIENCE_S

NUM_BATCHES, BATCH_SIZE = 6, 32

LOADER = f"""
import sys
from persia._cluster import process_metrics
{SEND}
place = sys.argv[1]
with DataCtx() as ctx:
    with open(f"{{place}}/loader-says", "w") as pipe:
        pipe.write(process_metrics.url())
    for number in range(2 * {NUM_BATCHES}):
        rng = np.random.default_rng(number)
        send(ctx, rng, [rng.integers(0, 1000, {BATCH_SIZE}, dtype=np.uint64) for _ in range(2)])
    open(f"{{place}}/loader-waits").read()
"""

TRAINER = f"""
import sys
import numpy as np
from persia._cluster import process_metrics
from persia.ctx import eval_ctx
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch

DIM = 8
{NET}
place = sys.argv[1]
with TrainCtx(
    model=model, embedding_optimizer=Adagrad(lr=0.1),
    dense_optimizer=torch.optim.Adam(model.parameters()), mixed_precision=False,
) as ctx:
    # So that each stage has something left to do after the first half.
    loader = iter(DataLoader(StreamingDataset(buffer_size=1), embedding_staleness=1))

    def train():
        for _ in range({NUM_BATCHES}):
            output, labels = ctx.forward(next(loader))
            ctx.backward(loss_of(output, labels[0]))
        ctx.dump_checkpoint(f"{{place}}/checkpoint")

    def stand():
        with open(f"{{place}}/trainer-says", "w") as pipe:
            pipe.write(process_metrics.url())
        open(f"{{place}}/trainer-waits").read()

    train()
    unseen = np.full(1, 10**6, np.uint64)
    with eval_ctx(allow_missing=["item"]) as reader:
        reader.get_embedding_from_data(
            PersiaBatch([IDTypeFeatureWithSingleID("user", unseen)], requires_grad=False)
        )
    ctx.report(auc=0.5)
    stand()
    train()
    stand()
    for _ in loader:
        raise SystemExit("expected no more batches")
"""


def fetch(url: str, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
    """Return status and text of what is at a URL."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read Prometheus' text; names and labels must come once each."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def text_of(role: str, replica: int, run: str = "", **values: float) -> str:
    """Return Prometheus' text of one process."""
    labels = f'role="{role}",replica="{replica}"'
    info = f'version="1.2.3",run="{run}"'
    lines = [f"persia_info{{{labels},{info}}} 1.0", f"persia_ready{{{labels}}} 1.0"]
    lines += [f"{name}{{{labels}}} {value!r}" for name, value in values.items()]
    return "\n".join([*lines, "process_resident_memory_bytes 1e+08", ""])


class StandingJob:
    """The processes, and the addresses of their metrics."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.urls: dict[str, str] = {}

    def get(self, name: str, path: str) -> tuple[int, str]:
        return fetch(f"{self.urls[name]}{path}")

    def value(self, name: str, metric: str, **labels: str) -> float:
        """Return the sum of a process's series of a name that have these labels."""
        status, text = self.get(name, "/metrics")
        assert status == 200, self.cluster.log(name)
        found = [
            value
            for (series_name, of), value in series(text).items()
            if series_name == metric and labels.items() <= dict(of).items()
        ]
        assert found, f"{name} has no {metric} {labels}"
        return sum(found)

    def train_more(self) -> None:
        """Train as many batches again, and dump another checkpoint."""
        place = self.cluster.place
        (place / "trainer-waits").write_text("go")
        assert _read(place / "trainer-says", self.cluster) == self.urls["nn-worker"]

    def go_on(self) -> dict[str, int]:
        """Let all of them end; returns their exit statuses."""
        for who in ("loader", "trainer"):
            (self.cluster.place / f"{who}-waits").write_text("go")
        return self.cluster.wait()


@contextmanager
def standing_job(
    environment: Mapping[str, str] | None = None, **options: int
) -> Iterator[StandingJob]:
    """Train some batches, and let every process stand still."""
    variables = {"PERSIA_METRICS_PORT": "0", **(environment or {})}
    with Cluster(slots(8), environment=variables, **options) as cluster:  # type: ignore[arg-type]
        place = cluster.place
        for name in ("loader-says", "loader-waits", "trainer-says", "trainer-waits"):
            os.mkfifo(place / name)
        (place / "loader.py").write_text(LOADER)
        (place / "trainer.py").write_text(TRAINER)
        cluster.start_servers()
        cluster.start_loaders(place / "loader.py", 1, str(place))
        cluster.start_trainer(str(place / "trainer.py"), str(place))
        job = StandingJob(cluster)
        for name, who in (("data-loader-0", "loader"), ("nn-worker", "trainer")):
            job.urls[name] = _read(place / f"{who}-says", cluster)
        for name in cluster.processes:
            if name not in job.urls:
                (job.urls[name],) = re.findall(r"at (http://\S+)/metrics", cluster.log(name))
        yield job


def _read(pipe: Path, cluster: Cluster) -> str:
    """Read what a script writes, unless a process ends or the deadline passes before."""
    number = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ready, _, _ = select.select([number], [], [], DEADLINE_S)
        assert ready, cluster.logs()
        text = os.read(number, 4096).decode()
        assert text, cluster.logs()
        return text
    finally:
        os.close(number)


# --- a job for screens to look at ------------------------------------------------------------

ENDLESS_LOADER = f"""
{SEND}
from persia import env

rng = np.random.default_rng(env.get_replica_index())
with DataCtx() as ctx:
    while True:
        send(ctx, rng, [rng.zipf(1.2, 256).astype(np.uint64) % 10**6 for _ in range(2)])
"""

ENDLESS_TRAINER = f"""
DIM = 16
{NET}
with TrainCtx(
    model=model, embedding_optimizer=Adagrad(lr=0.1),
    dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.01), mixed_precision=False,
) as ctx:
    right = seen = 0
    for batch in DataLoader(StreamingDataset(buffer_size=10), embedding_staleness=4):
        output, labels = ctx.forward(batch)
        ctx.backward(loss_of(output, labels[0]))
        right += int(((output > 0) == (labels[0] > 0.5)).sum())
        seen += len(output)
        ctx.report(accuracy=right / seen)
"""


@contextmanager
def training_job() -> Iterator[Cluster]:
    """Train until the end, at default ports of an address that no other test uses."""
    variables = {"PERSIA_METRICS_PORT": "", "PERSIA_RUN_ID": "clicks"}
    with Cluster(slots(16), transport="tcp", num_servers=2, environment=variables) as cluster:
        cluster.variables["PERSIA_METRICS_HOST"] = cluster.host
        (cluster.place / "loader.py").write_text(ENDLESS_LOADER)
        (cluster.place / "train.py").write_text(ENDLESS_TRAINER)
        cluster.start_servers()
        cluster.start_loaders(cluster.place / "loader.py", 2)
        cluster.start_trainer(str(cluster.place / "train.py"))
        yield cluster
