"""A small job of real processes that trains until it is stopped, for screens to look at.

It listens at an address of this machine that no other test uses, so that its default ports are
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes import Cluster
from tests.support.scripts import NET, SEND, slots

LOADER = f"""
{SEND}
from persia import env

rng = np.random.default_rng(env.get_replica_index())
with DataCtx() as ctx:
    while True:
        send(ctx, rng, [rng.zipf(1.2, 256).astype(np.uint64) % 10**6 for _ in range(2)])
"""

TRAINER = f"""
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
def training_job(
    num_servers: int = 2, num_workers: int = 1, num_loaders: int = 2
) -> Iterator[Cluster]:
    """Start the job; it is stopped at the end."""
    with Cluster(
        slots(16),
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
