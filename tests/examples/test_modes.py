"""The examples in every mode: the same script, the same bits.

Reproducible, at staleness 1: over ipc or tcp, with one or more of each role, the AUC and the
final rows are those of embedded mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia._cluster.connect import connect_parameter_servers
from persia._core.base.hashing import owners, route
from persia._rpc.messages import TableSigns
from persia._rpc.zmq_transport import ZmqTransport
from persia.config import EmbeddingSchema
from persia.data import DataLoader, StreamingDataset
from tests.distributed import net
from tests.distributed.batches import SLOTS
from tests.distributed.batches import make_batch as net_batch
from tests.examples.loading import digest_of, load, parts_of, run_quickstart
from tests.support.processes import ROOT, Cluster
from tests.training.conftest import LOCKSTEP, train

SCRIPTS = Path(__file__).parent / "scripts"
SMALL_LOADER = ROOT / "tests" / "distributed" / "scripts" / "phases_loader.py"
Rows = dict[int, Any]  # signs by dim


# Of the processes of a job: transport, servers, embedding-workers and data-loaders.
Layout = tuple[str, int, int, int]


@contextmanager
def services(
    layout: Layout, config: Path | Mapping[str, Any], loader: Path, *arguments: str
) -> Iterator[None]:
    """Start a job of which this process is the nn-worker."""
    transport, servers, workers, loaders = layout
    with (
        Cluster(
            config, transport=transport, num_servers=servers, num_workers=workers
        ) as cluster,
        env.changed(**cluster.variables),
    ):
        cluster.start_servers()
        cluster.start_loaders(loader, loaders, *arguments)
        assert env.get_mode() == "services"
        yield


def signs_of(parts: dict[int, list[Any]]) -> Rows:
    return {dim: np.concatenate([part[0] for part in found]) for dim, found in parts.items()}


def remote_rows(signs: Rows, config: Path | Mapping[str, Any]) -> str:
    """Return a digest over the rows that the servers hold for these signs."""
    tables = EmbeddingSchema.load(config).tables
    numbers = {table.dim: number for number, table in enumerate(tables)}
    parts: dict[int, list[Any]] = {}
    with closing(ZmqTransport()) as transport:
        servers = connect_parameter_servers(transport)
        held = sum(server.get_embedding_size() for server in servers)
        assert held == sum(len(some) for some in signs.values())
        for dim, wanted in signs.items():
            order, starts = route(wanted, owners(len(servers)), len(servers))
            for number, server in enumerate(servers):
                own = wanted[order[starts[number] : starts[number + 1]]]
                (found,) = server.read_embedding([TableSigns(numbers[dim], own)])
                parts.setdefault(dim, []).append((found.signs, found.values, found.states))
        for server in servers:
            server.close()
    return digest_of(parts)


SMALL = 40  # batches


def test_a_small_job_is_bit_equal_in_services_mode() -> None:
    """What the fast tier has of this module."""
    with net.make_ctx() as ctx:
        losses = train(ctx, [net_batch(number) for number in range(SMALL)], **LOCKSTEP)
        parts = parts_of(ctx)
        signs, digest = signs_of(parts), digest_of(parts)
    with services(("tcp", 3, 2, 2), SLOTS, SMALL_LOADER, str(SMALL // 2)):
        with net.make_ctx() as ctx:
            assert train(ctx, StreamingDataset(4), **LOCKSTEP) == losses
        assert remote_rows(signs, SLOTS) == digest


SAMPLES, BATCH_SIZE, SEED = 12_000, 256, 1


@pytest.fixture(scope="module")
def embedded_quickstart() -> tuple[float, Rows, str]:
    own = {"samples": SAMPLES, "batch_size": BATCH_SIZE, "seed": SEED}
    options = {"staleness": 1, "reproducible": True} | own
    report, parts = run_quickstart(load("quickstart"), parts_of, **options)
    return report.auc, signs_of(parts), digest_of(parts)


# The four pairs of transport and servers, and of workers and loaders.
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("tcp", 3, 2, 2), ("ipc", 1, 1, 1), ("ipc", 3, 1, 2), ("tcp", 1, 2, 1)], ids=str
)
def test_quickstart_is_bit_equal_in_services_mode(
    embedded_quickstart: tuple[float, Rows, str], layout: Layout
) -> None:
    auc, signs, digest = embedded_quickstart
    quickstart = load("quickstart")
    config = Path(quickstart.EMBEDDING_CONFIG)
    sizes = (SAMPLES, BATCH_SIZE, SEED)
    with services(layout, config, SCRIPTS / "click_loader.py", *map(str, sizes)):
        log = quickstart.generate(SAMPLES, SEED)
        options = quickstart.Options(samples=SAMPLES, batch_size=BATCH_SIZE, seed=SEED)
        with quickstart.build_ctx(options) as ctx:
            loss_fn = torch.nn.BCEWithLogitsLoss()
            loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
            for batch in loader:
                logits, labels = ctx.forward(batch)
                ctx.backward(loss_fn(logits, labels[0]))
            assert quickstart.test(ctx, log) == auc
            assert ctx.stats()["batches"] == -(-log.num_train // BATCH_SIZE)
        assert remote_rows(signs, config) == digest
