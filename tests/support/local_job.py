"""A whole job in one process: each server at an ipc socket, served by threads of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from persia import env
from persia._cluster.connect import connect_parameter_servers
from persia._rpc.methods import embedding_worker, parameter_server
from persia._rpc.server import serve
from persia._rpc.zmq_transport import ZmqTransport
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, schema_fingerprint
from tests.faults.batches import SLOTS
from tests.support.processes import LISTS
from tests.support.services import make_servers
from tests.support.waiting import PATIENCE_S


@contextmanager
def local_job(
    directory: Path,
    name: str = "job",
    *,
    settings: EmbeddingWorkerConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[EmbeddingWorker]:
    """Serve a parameter server and an embedding-worker, which the environment then names."""
    settings = settings or EmbeddingWorkerConfig()
    addresses = {role: f"ipc://{directory}/{name}-{role}" for role in LISTS}
    schema = EmbeddingSchema.load(SLOTS)
    with ExitStack() as stack:
        variables = {LISTS[role]: address for role, address in addresses.items()}
        stack.enter_context(env.changed(**variables))
        transport = stack.enter_context(closing(ZmqTransport()))
        (store,) = make_servers(1, schema, hyper=None, optimizer=None, capacity=10_000)
        of_server, of_worker, _ = addresses.values()
        server = serve(transport, of_server, parameter_server(), store)
        stack.callback(server.stop, PATIENCE_S)
        (remote,) = connect_parameter_servers(transport, timeout_s=PATIENCE_S)
        stack.callback(remote.close)
        worker = stack.enter_context(
            closing(EmbeddingWorker(schema, settings, [remote], clock=clock))
        )
        server = serve(
            transport,
            of_worker,
            embedding_worker(),
            worker,
            replica_index=0,
            replica_size=1,
            schema_fingerprint=schema_fingerprint(schema),
        )
        stack.callback(server.stop, PATIENCE_S)
        yield worker
