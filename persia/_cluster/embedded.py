"""The servers of embedded mode: the same objects, in this process, without sockets."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from persia import env
from persia._core.base import cpu
from persia._rpc.deadlines import Retry, caller_deadline
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.errors import ServiceBusy

if TYPE_CHECKING:
    from persia._rpc.messages import SlotOutput
    from persia._worker.packing import PackedBatch
    from persia.config import EmbeddingSchema, GlobalConfig

logger = logging.getLogger(__name__)

# Seconds: a century. Expiry is for trainers that died; here they are this process, which
# releases what it drops, and a notebook may rest for a day between two cells.
NEVER = 100 * 366 * 24 * 3600


# Seconds between two attempts of a lookup, while a load replaces rows.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2


class EmbeddedWorker(EmbeddingWorker):
    """An embedding-worker that is called directly, so it tries again what a client would."""

    def _lookup(self, batch: PackedBatch, is_training: bool) -> tuple[SlotOutput, ...]:
        """Wait for rows while a load replaces them, for ``PERSIA_RPC_TIMEOUT`` at most.

        By the caller's thread: those of the servers are needed to end the load.
        """
        try:
            return super()._lookup(batch, is_training)
        except ServiceBusy as error:
            busy = error
        timeout_s = min(env.rpc_timeout_s(), caller_deadline.get() - time.monotonic())
        for _ in Retry(timeout_s, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S):
            try:
                return super()._lookup(batch, is_training)
            except ServiceBusy as error:
                busy = error
        raise busy


def build_embedding_worker(schema: EmbeddingSchema, config: GlobalConfig) -> EmbeddingWorker:
    """Build the servers of ``embedded_config``, and a worker over them; rows live as it does.

    Raises:
        ConfigError: ``PERSIA_ISA`` names kernels that this machine cannot run.
    """
    if (name := env.isa()) is not None:
        cpu.select(name)
    num_servers = config.embedded_config.num_servers
    num_threads = config.embedded_config.num_threads
    servers = [
        ParameterServer(
            schema,
            config.embedding_parameter_server_config,
            replica_index=number,
            replica_size=num_servers,
            num_threads=num_threads,
            num_checkpoint_threads=config.common_config.checkpointing_config.num_workers,
        )
        for number in range(num_servers)
    ]
    logger.info(
        "embedded mode: %d parameter server(s) with %d thread(s) each in this process, "
        "%d slots in %d groups",
        *(num_servers, num_threads, len(schema.slots), len(schema.groups)),
    )
    settings = dataclasses.replace(
        config.embedding_worker_config, buffered_data_expired_sec=NEVER
    )
    return EmbeddedWorker(schema, settings, servers, num_pooling_threads=num_threads)
