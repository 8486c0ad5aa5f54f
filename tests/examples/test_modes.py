"""The examples in every mode: the same script, the same bits.

Reproducible, at staleness 1: over ipc or tcp, with one or more of each role, the AUC and the
final rows are those of embedded mode.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia._core.hashing import owners, route
from persia._rpc.messages import TableSigns
from persia._rpc.zmq_transport import ZmqTransport
from persia._services.addresses import connect_parameter_servers
from persia.config import EmbeddingSchema
from persia.data import DataLoader, StreamingDataset
from tests.cluster import Cluster
from tests.examples.loading import load

SCRIPTS = Path(__file__).parent / "scripts"
# Servers, embedding-workers, data-loaders.
LAYOUTS = [("ipc", 1, 1, 1), ("tcp", 3, 2, 2), ("ipc", 3, 1, 2), ("tcp", 1, 2, 1)]

Rows = dict[int, Any]  # signs by dim


def embedded_rows(ctx: Any) -> tuple[Rows, str]:
    """Return the signs that are held, by dim, and a digest over their rows."""
    parts: dict[int, list[Any]] = {}
    for server in ctx.embedding_worker.servers:
        for signs, values, states in server._configured.store.iterate():
            parts.setdefault(values.shape[1], []).append((signs, values, states))
    return {
        dim: np.concatenate([p[0] for p in found]) for dim, found in parts.items()
    }, _digest(parts)


def remote_rows(signs: Rows, schema: EmbeddingSchema) -> str:
    """Return a digest over the rows that the servers hold for these signs."""
    numbers = {table.dim: number for number, table in enumerate(schema.tables)}
    transport = ZmqTransport()
    parts: dict[int, list[Any]] = {}
    try:
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
    finally:
        transport.close()
    return _digest(parts)


def _digest(parts: dict[int, list[Any]]) -> str:
    total = hashlib.sha256()
    for dim in sorted(parts):
        signs, values, states = (
            np.concatenate(arrays) for arrays in zip(*parts[dim], strict=True)
        )
        order = np.argsort(signs)
        for array in (signs, values, states):
            total.update(np.ascontiguousarray(array[order]).tobytes())
    return total.hexdigest()


def train_streamed(ctx: Any) -> None:
    loss_fn = torch.nn.BCEWithLogitsLoss()
    loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
    for batch in loader:
        logits, labels = ctx.forward(batch)
        ctx.backward(loss_fn(logits, labels[0]))


SAMPLES, BATCH_SIZE, SEED = 12_000, 256, 1


@pytest.fixture(scope="module")
def embedded_quickstart() -> tuple[float, Rows, str]:
    quickstart = load("quickstart")
    options = quickstart.Options(
        samples=SAMPLES,
        batch_size=BATCH_SIZE,
        seed=SEED,
        staleness=1,
        reproducible=True,
        quiet=True,
    )
    log = quickstart.generate(SAMPLES, SEED)
    with quickstart.build_ctx(options) as ctx:
        report = quickstart.run(ctx, log, options)
        signs, digest = embedded_rows(ctx)
    return report.auc, signs, digest


@pytest.mark.parametrize(("transport", "servers", "workers", "loaders"), LAYOUTS)
def test_quickstart_is_bit_equal_in_services_mode(
    embedded_quickstart: tuple[float, Rows, str],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    servers: int,
    workers: int,
    loaders: int,
) -> None:
    auc, signs, digest = embedded_quickstart
    quickstart = load("quickstart")
    options = quickstart.Options(samples=SAMPLES, batch_size=BATCH_SIZE, seed=SEED)
    with Cluster(
        quickstart.EMBEDDING_CONFIG,
        transport=transport,
        num_servers=servers,
        num_workers=workers,
    ) as cluster:
        cluster.start_servers()
        cluster.start_loaders(
            SCRIPTS / "click_loader.py", loaders, str(SAMPLES), str(BATCH_SIZE), str(SEED)
        )
        for name, value in cluster.variables.items():
            monkeypatch.setenv(name, value)
        assert env.get_mode() == "services"
        log = quickstart.generate(SAMPLES, SEED)
        with quickstart.build_ctx(options) as ctx:
            train_streamed(ctx)
            assert quickstart.test(ctx, log) == auc
            assert ctx.stats()["batches"] == -(-log.num_train // BATCH_SIZE)
        schema = EmbeddingSchema.load(quickstart.EMBEDDING_CONFIG)
        assert remote_rows(signs, schema) == digest
