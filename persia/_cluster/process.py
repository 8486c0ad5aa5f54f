"""The processes of the two server roles, from configuration to exit status.

    configure      YAML files, kernels, log
    listen         at once, so that the end of the job can be told
    connect        an embedding-worker, to all parameter servers; until they are there its
                   callers are told to come again, and why
    serve          until the job ends, a signal comes, or a thread fails
    stop           what is here is finished and the rest counted

The exit status is the job's, or 0 in its place where something starts anew what fails; 128 + n
after signal n; or 1.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

from persia import env
from persia._cluster.connect import connect_parameter_servers, listening_address
from persia._cluster.events import Event, Events, watched_process
from persia._cluster.job import GRACE_S, POLL_S, status_after_job
from persia._cluster.process_metrics import push_settings, soon
from persia._core.base import cpu
from persia._files.allowed_roots import ANYWHERE, AllowedRoots
from persia._metrics.endpoint import Endpoint
from persia._metrics.roles import of_clients, of_rpc_server, of_server, of_worker
from persia._rpc.job import JobState
from persia._rpc.methods import Role, embedding_worker, parameter_server
from persia._rpc.server import Server
from persia._rpc.zmq_transport import ZmqTransport, is_local
from persia._server.service import ParameterServer
from persia._server.supervised import open_state
from persia._worker.service import EmbeddingWorker
from persia.config import (
    EmbeddingSchema,
    GlobalConfig,
    ParameterServerConfig,
    schema_fingerprint,
)
from persia.errors import ConfigError, JobFinished, ServiceBusy

logger = logging.getLogger(__name__)

# Seconds that data-loaders get to hear that the job has ended.
_TELL_S = 10.0
# Seconds that calls get to end. Honcho kills 5 s after SIGTERM.
_STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says to a server."""

    embedding_config: str | os.PathLike[str] | None
    global_config: str | os.PathLike[str] | None
    replica_index: int = 0
    replica_size: int = 1
    port: int | None = None
    host: str | None = None


def set_up_logging(who: str) -> None:
    """Send PERSIA's log to stderr, each line with the role and number of this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}: %(message)s"))
    log = logging.getLogger("persia")
    log.addHandler(handler)
    log.setLevel(env.log_level())


def run_parameter_server(options: Options) -> int:
    """Serve an embedding-parameter-server until its end; returns the exit status.

    Raises:
        ConfigError: If a file, an option or the address cannot be used.
    """
    listed = env.parameter_server_addresses()
    schema, config = _load(options, env.PARAMETER_SERVERS_VARIABLE, listed)
    settings = config.embedding_parameter_server_config
    address = listening_address(
        parameter_server().name, options.replica_index, port=options.port, host=options.host
    )
    server = ParameterServer(
        schema,
        settings,
        replica_index=options.replica_index,
        replica_size=options.replica_size,
        state=open_state(settings, address, options.replica_index, options.replica_size),
        num_checkpoint_threads=config.common_config.checkpointing_config.num_workers,
        roots=_roots(settings, address),
    )
    with ExitStack() as stack:
        events = stack.enter_context(watched_process())
        stack.callback(server.close)
        transport = stack.enter_context(closing(ZmqTransport()))
        serving = _Serving(transport, parameter_server(), options, schema, server, events)
        stack.callback(serving.stop)
        serving.sources.append(of_server(server))
        serving.tell(stack, server.why_not_ready, config)
        infer = config.common_config.infer_config
        if config.common_config.job_type == "Infer" and infer and infer.embedding_checkpoint:
            logger.info("listens at %s, loads %s", serving.address, infer.embedding_checkpoint)
            server.load_checkpoint(infer.embedding_checkpoint)
        logger.info("serves at %s", serving.address)
        status = serving.wait()
        # It was asked to end: nobody will look for its rows. After a failure somebody may.
        serving.stop()
        if server.state is not None:
            server.state.remove()
        return status


def _roots(settings: ParameterServerConfig, address: str) -> AllowedRoots:
    """Return where clients may have checkpoints written: nowhere, if strangers may ask."""
    listed = env.checkpoint_roots()
    if listed is None:
        return ANYWHERE if is_local(address) else AllowedRoots([])
    roots = AllowedRoots(listed)
    if settings.enable_incremental_update:
        roots.check(settings.incremental_dir)
    return roots


def run_embedding_worker(options: Options) -> int:
    """Serve an embedding-worker until its end; returns the exit status.

    Raises:
        ConfigError: If a file, an option or an address cannot be used, or the parameter
            servers that answer are not one set.
        ServiceUnavailable: If parameter servers are missing at the deadline.
    """
    listed = env.embedding_worker_addresses()
    schema, config = _load(options, env.EMBEDDING_WORKERS_VARIABLE, listed)
    with ExitStack() as stack:
        events = stack.enter_context(watched_process())
        transport = stack.enter_context(closing(ZmqTransport()))
        late = _LateWorker()
        serving = _Serving(transport, embedding_worker(), options, schema, late, events)
        stack.callback(serving.stop)
        serving.tell(stack, late.why_not_ready, config)
        logger.info("listens at %s, connects to the parameter servers", serving.address)
        try:
            servers = connect_parameter_servers(
                transport,
                on_restart=late.server_restarted,
                should_stop=serving.has_ended,
                on_wait=late.wait_for,
            )
        except JobFinished:
            return serving.wait()
        worker = EmbeddingWorker(schema, config.embedding_worker_config, servers)
        late.worker = worker
        clients = [server.client for server in servers]
        role = embedding_worker().name
        serving.sources += (
            of_worker(options.replica_index, worker),
            of_clients(role, options.replica_index, worker, clients),
        )
        # In the opposite order: calls to servers must end before their threads can.
        stack.callback(worker.close)
        for server in servers:
            stack.callback(server.close)
        stack.callback(_say_what_is_in_flight, worker, serving)
        stack.callback(serving.stop)
        logger.info("serves at %s, with %d parameter server(s)", serving.address, len(servers))
        return serving.wait()


def _say_what_is_in_flight(worker: EmbeddingWorker, serving: _Serving) -> None:
    in_flight = worker.stats().get("in_flight", 0)
    if in_flight:
        logger.log(serving.level, "%d batches were between lookup and update", in_flight)


def _load(
    options: Options, variable: str, listed: Sequence[str]
) -> tuple[EmbeddingSchema, GlobalConfig]:
    if options.embedding_config is None:
        raise ConfigError(
            "expected an embedding config: give --embedding-config or set "
            "PERSIA_EMBEDDING_CONFIG"
        )
    if not 0 <= options.replica_index < options.replica_size:
        raise ConfigError(
            f"--replica-index must be in 0..{options.replica_size - 1} for --replica-size "
            f"{options.replica_size}, got {options.replica_index}"
        )
    if len(listed) > options.replica_size:
        # Each would serve as if it were alone.
        raise ConfigError(
            f"{variable} lists {len(listed)} addresses, but --replica-size is "
            f"{options.replica_size}"
        )
    if (kernels := env.isa()) is not None:
        cpu.select(kernels)
    return EmbeddingSchema.load(options.embedding_config), GlobalConfig.load(
        options.global_config
    )


class _LateWorker:
    """Stands for the embedding-worker while there is none: its callers shall come again."""

    def __init__(self) -> None:
        self.worker: EmbeddingWorker | None = None
        self._why = "connecting to the embedding-parameter-servers"

    def wait_for(self, why: str) -> None:
        """Say who is missing to those who call."""
        self._why = why

    def why_not_ready(self) -> str:
        """Say why batches cannot be looked up and trained; "" if they can."""
        if self.worker is None:
            return self._why
        with soon():
            if self.worker.ready_for_serving():
                return ""
        return "parameter servers have no settings and optimizer yet, or a load goes on"

    def server_restarted(self, number: int) -> None:
        """Pass on that a parameter server was started anew."""
        if self.worker is not None:
            self.worker.server_restarted(number)

    def __getattr__(self, name: str) -> Any:
        if self.worker is None:
            raise ServiceBusy(f"the embedding-worker waits: {self._why}")
        return getattr(self.worker, name)


# --- one server -------------------------------------------------------------------------------


class _LoudJob(JobState):
    """Says that the job has ended before whoever tells it has an answer.

    So the line stands before what the trainer's launcher prints last.
    """

    def _note(self, status: int) -> None:
        logger.info("the job has ended with status %d", status)


class _Serving:
    """A server in a process of its own."""

    def __init__(
        self,
        transport: ZmqTransport,
        role: Role,
        options: Options,
        schema: EmbeddingSchema,
        service: object,
        events: Events,
    ) -> None:
        self._events = events
        self._job = _LoudJob()
        address = listening_address(
            role.name, options.replica_index, port=options.port, host=options.host
        )
        self._server = Server(
            transport,
            address,
            role,
            service,
            replica_index=options.replica_index,
            replica_size=options.replica_size,
            schema_fingerprint=schema_fingerprint(schema),
            job=self._job,
        )
        self._server.start()
        self._role, self._number = role.name, options.replica_index
        self.sources = [of_rpc_server(self._role, self._number, self._server)]
        self._is_stopped = False
        threading.Thread(target=self._watch_job, name="persia-job", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._server.address

    @property
    def level(self) -> int:
        """The log level of what is said at the end: nothing is to follow a failed job."""
        return logging.DEBUG if self._job.status else logging.INFO

    def tell(self, stack: ExitStack, ready: Callable[[], str], config: GlobalConfig) -> None:
        """Serve metrics of this process, until the stack ends.

        Raises:
            ConfigError: If it cannot listen where the environment says.
        """
        endpoint = Endpoint(
            self._role,
            self._number,
            lambda: self.sources,
            ready,
            self._why_not_healthy,
            push=push_settings(config),
        )
        stack.callback(endpoint.close)

    def _why_not_healthy(self) -> str:
        return "" if self._server.is_alive else "it answers no calls any more"

    def _watch_job(self) -> None:
        status = self._job.wait()
        if status is not None:
            self._events.put(Event("job", status))

    def has_ended(self) -> bool:
        """Whether there is a reason to end."""
        return not self._events.empty()

    def wait(self) -> int:
        """Wait for the end and return the exit status.

        Raises:
            BaseException: What ended a thread.
        """
        event = self._events.get()
        if event.error is not None:
            raise event.error
        if event.kind == "signal":
            logger.log(self.level, "stops after %s", signal.Signals(event.number).name)
            status = self._job.status
            return 128 + event.number if status is None else status_after_job(status)
        deadline = time.monotonic() + _TELL_S
        while not (self._job.wait_until_told(POLL_S) or self.has_ended()):
            if time.monotonic() > deadline:
                logger.log(self.level, "not every data-loader heard that the job has ended")
                break
        with suppress(queue.Empty):
            self._events.get(timeout=GRACE_S)
        return status_after_job(event.number)

    def stop(self) -> None:
        """Finish what is here; what is not finished in time is counted."""
        if self._is_stopped:
            return
        self._is_stopped = True
        counts = self._server.stop(_STOP_S)
        logger.log(
            self.level,
            "stopped: %d calls served, %d unfinished",
            counts.get("calls", 0),
            counts.get("unfinished", 0),
        )
