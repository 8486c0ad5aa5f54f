"""The processes of the two server roles, from configuration to exit status.

    listen         at once, so that the end of the job can be announced
    connect        an embedding-worker, to all parameter servers; until they are there calls
                   are answered with ServiceBusy, which says what is missing
    serve          until the job ends, a signal comes, or a thread fails
    stop           calls that are here are finished; those left after seconds are counted

The exit status is the job's, or 0 in its place where a supervisor restarts what fails; 128 + n
after signal n; or 1.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

from persia import env
from persia._cluster.addresses import TCP, is_name
from persia._cluster.connect import connect_parameter_servers, listening_address
from persia._cluster.job import (
    GRACE_S,
    LAST_ASK_S,
    POLL_S,
    Event,
    status_after_job,
    watched_process,
)
from persia._cluster.process_metrics import (
    PROBE_S,
    of_clients,
    of_rpc_server,
    of_server,
    of_worker,
    push_settings,
)
from persia._core.base import cpu
from persia._files.catalog import chains
from persia._files.manifest import feature_order
from persia._files.open import ANYWHERE, AllowedRoots
from persia._metrics.endpoint import Endpoint
from persia._metrics.registry import MetricSource
from persia._rpc.deadlines import within
from persia._rpc.job import JobState
from persia._rpc.messages import WireDtypes
from persia._rpc.methods import Role, embedding_worker, parameter_server
from persia._rpc.server import Server
from persia._rpc.zmq_transport import ZmqTransport, is_local
from persia._server.read_only import ReadOnlyParameterServer
from persia._server.service import ParameterServer
from persia._server.state_file import open_state
from persia._worker.service import EmbeddingWorker
from persia.config import (
    EmbeddingSchema,
    GlobalConfig,
    InferConfig,
    ParameterServerConfig,
    schema_fingerprint,
)
from persia.errors import ConfigError, JobFinished, PersiaError

logger = logging.getLogger(__name__)

# Seconds that data-loaders get to ask whether the job has ended.
_ANNOUNCE_S = 10.0
# Seconds that calls get to end. Honcho kills 5 s after SIGTERM.
_STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class Options:
    embedding_config: str | os.PathLike[str] | None
    global_config: str | os.PathLike[str] | None
    replica_index: int = 0
    replica_size: int = 1
    port: int | None = None
    host: str | None = None


def run_parameter_server(options: Options) -> int:
    """Serve an embedding-parameter-server until its end; returns the exit status."""
    schema, config = _load(options, env.parameter_server_addresses)
    settings = config.embedding_parameter_server_config
    process = ServerProcess(parameter_server(), options)
    address, index, size = process.address, options.replica_index, options.replica_size
    # Before signals become events: one that comes while rows are recovered ends this process at
    # once, as if it were killed, and the next one finds the state file.
    if config.common_config.served_checkpoint:
        return _run_read_only(process, options, schema, config)
    service = ParameterServer(
        schema,
        settings,
        replica_index=index,
        replica_size=size,
        state_file=open_state(settings, address, index, size),
        num_checkpoint_threads=config.common_config.checkpointing_config.num_workers,
        roots=_roots(settings, address),
    )
    process.stack.callback(service.close)
    service.recover()
    with process:
        process.listen(schema, config, lambda: service.readiness() or "", service)
        process.sources.append(of_server(service))
        logger.info("serves at %s", process.server.address)
        status = process.wait()
        # After an ordered end its rows are not recovered; after a failure they may be.
        process.stop()
        if service.state_file is not None:
            service.state_file.remove()
        return status


def _run_read_only(
    process: ServerProcess, options: Options, schema: EmbeddingSchema, config: GlobalConfig
) -> int:
    """Serve rows for inference until the end; returns the exit status."""
    infer = config.common_config.infer_config or InferConfig(
        config.common_config.served_checkpoint
    )
    service = ReadOnlyParameterServer(
        schema,
        infer,
        replica_index=options.replica_index,
        replica_size=options.replica_size,
        roots=_roots(config.embedding_parameter_server_config, process.address),
    )
    process.stack.callback(service.close)
    with process:
        process.listen(schema, config, lambda: service.readiness() or "", service)
        process.sources.append(of_server(service))
        source = infer.incremental_dir or infer.embedding_checkpoint
        logger.info("listens at %s, loads %s", process.server.address, source)
        service.start(process.has_ended)
        logger.info("serves at %s", process.server.address)
        status = process.wait()
        process.stop()
        return status


def _roots(settings: ParameterServerConfig, address: str) -> AllowedRoots:
    """Return where clients may have checkpoints written: nowhere, if any host may ask."""
    listed = env.checkpoint_roots()
    if listed is None:
        return ANYWHERE if is_local(address) else AllowedRoots([])
    roots = AllowedRoots(listed)
    if settings.enable_incremental_update:
        roots.check(settings.incremental_dir)
    return roots


def run_embedding_worker(options: Options) -> int:
    """Serve an embedding-worker until its end; returns the exit status."""
    role = embedding_worker()
    schema, config = _load(options, env.embedding_worker_addresses)
    worker: EmbeddingWorker | None = None
    missing = "connecting to the embedding-parameter-servers"

    def ready() -> str:
        if worker is None:
            return missing
        with within(PROBE_S):
            if worker.ready_for_serving():
                return ""
        return "parameter servers have no settings and optimizer yet, or a load goes on"

    def on_restart(number: int) -> None:
        if worker is not None:
            worker.reconfigure_server(number)

    def on_wait(line: str) -> None:
        nonlocal missing
        missing = line

    with ServerProcess(role, options) as process:
        process.listen(schema, config, ready, None, waits_for=lambda: missing)
        logger.info("listens at %s, connects to the parameter servers", process.server.address)
        try:
            servers = connect_parameter_servers(
                process.transport,
                on_restart=on_restart,
                should_stop=process.has_ended,
                on_wait=on_wait,
            )
        except JobFinished:
            return process.wait()
        for server in servers:
            server.check_wire(_wire_dtypes(config))
        served = config.common_config.served_checkpoint
        worker = EmbeddingWorker(
            schema, config.embedding_worker_config, servers, fails_over=bool(served)
        )
        _take_order(worker, served)
        process.server.service = worker
        clients = [server.client for server in servers]
        process.sources += (
            of_worker(options.replica_index, worker),
            of_clients(role.name, options.replica_index, worker, clients),
        )
        # In the opposite order: calls to servers must end before their threads can.
        process.stack.callback(worker.close)
        for server in servers:
            process.stack.callback(server.close)
        process.stack.callback(_log_in_flight, worker, process)
        process.stack.callback(process.stop)
        address = process.server.address
        logger.info("serves at %s, with %d parameter server(s)", address, len(servers))
        return process.wait()


def _wire_dtypes(config: GlobalConfig) -> WireDtypes:
    wire = config.common_config.wire_config
    return WireDtypes(wire.row_dtype, wire.gradient_dtype)


def _take_order(worker: EmbeddingWorker, checkpoint: str) -> None:
    """Have a worker keep the order of features of the checkpoint that servers load, if any."""
    if not checkpoint:
        return
    why = "which an earlier version, or servers by themselves, wrote"
    order = None
    try:
        order = feature_order(chains(checkpoint)[0].manifests[-1], checkpoint)
    except PersiaError as exc:
        why = f"which cannot be read here: {exc}"
    if order is None:
        logger.warning(
            "the order in which the model receives features is not known from %s, %s: batches "
            "keep their own order. Give InferCtx features=[...], in the model's order",
            checkpoint,
            why,
        )
    else:
        worker.fix_feature_order(order, None)


def _log_in_flight(worker: EmbeddingWorker, process: ServerProcess) -> None:
    num_in_flight = worker.stats().get("in_flight", 0)
    if num_in_flight:
        logger.log(process.level, "%d batches were between lookup and update", num_in_flight)


def _load(
    options: Options, addresses: env.Variable[list[str]]
) -> tuple[EmbeddingSchema, GlobalConfig]:
    index, size, listed = options.replica_index, options.replica_size, addresses()
    num_listed = len(listed)
    if options.embedding_config is None:
        raise ConfigError(
            "expected an embedding config: give --embedding-config or set "
            "PERSIA_EMBEDDING_CONFIG"
        )
    if not 0 <= index < size:
        expected = f"must be in 0..{size - 1} for --replica-size {size}, got {index}"
        raise ConfigError(f"--replica-index {expected}")
    if num_listed > size:
        # Each would serve as the only one of its set.
        text = f"{addresses.name} lists {num_listed} addresses, but --replica-size is {size}"
        raise ConfigError(text)
    if addresses.is_set() and num_listed < size and not any(map(_may_be_several, listed)):
        logger.warning(
            "%s lists %d address(es), but --replica-size is %d: processes with this list find "
            "no more servers than that",
            addresses.name,
            num_listed,
            size,
        )
    if (kernels := env.isa()) is not None:
        cpu.select(kernels)
    schema = EmbeddingSchema.load(options.embedding_config)
    return schema, GlobalConfig.load(options.global_config)


def _may_be_several(address: str) -> bool:
    """Whether an address as it is listed has a name, or is no host's."""
    return is_name(TCP + address.removeprefix(TCP))


class ServerProcess:
    """A server that is a process: its calls, its metrics, and what ends it."""

    def __init__(self, role: Role, options: Options) -> None:
        self._role, self._options = role, options
        self.address = listening_address(
            role.name, options.replica_index, port=options.port, host=options.host
        )
        self._job = JobState()
        self._is_stopped = False
        self.sources: list[MetricSource] = []  # of metrics; read at each request
        self.stack = ExitStack()  # what is closed at the end

    def __enter__(self) -> ServerProcess:
        try:
            self._events = self.stack.enter_context(watched_process())
            self.transport = self.stack.enter_context(closing(ZmqTransport()))
        except BaseException:
            self.stack.close()  # __exit__ does not run
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def listen(
        self,
        schema: EmbeddingSchema,
        config: GlobalConfig,
        ready: Callable[[], str],
        service: object | None,
        waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        """Answer calls, and serve metrics.

        Without ``service``, ``server.service`` is set later. ``ready`` says what is missing
        until it can be used, "" if nothing is; ``waits_for`` what it waits for as long as there
        is none. That is called for each call that is refused: it must ask no other process.
        """
        name, number = self._role.name, self._options.replica_index
        self.server = Server(
            self.transport,
            self.address,
            self._role,
            service,
            replica_index=number,
            replica_size=self._options.replica_size,
            schema_fingerprint=schema_fingerprint(schema),
            wire=_wire_dtypes(config),
            ready=waits_for,
            job=self._job,
        )
        self.server.start()
        self.stack.callback(self.stop)
        watch = threading.Thread(target=self._watch_job, name="persia-job", daemon=True)
        watch.start()
        self.stack.callback(watch.join, _ANNOUNCE_S)
        self.stack.callback(self._job.close)
        self.sources.append(of_rpc_server(name, number, self.server))
        endpoint = Endpoint(
            name,
            number,
            lambda: self.sources,
            ready,
            lambda: "" if self.server.is_alive else "it answers no calls any more",
            push=push_settings(config),
        )
        self.stack.callback(endpoint.close)

    @property
    def level(self) -> int:
        """The log level of last lines: after a failed job its traceback stays the last."""
        return logging.DEBUG if self._job.status else logging.INFO

    def _watch_job(self) -> None:
        status = self._job.wait()
        if status is not None:
            self._events.put(Event("job", status))

    def has_ended(self) -> bool:
        return not self._events.empty()

    def wait(self) -> int:
        """Wait for the end and return the exit status.

        Raises:
            BaseException: What ended a thread.
        """
        event = self._events.get()
        if event.error is not None:
            raise event.error
        patience_s = _ANNOUNCE_S
        if event.kind == "signal":
            logger.log(self.level, "stops after %s", signal.Signals(event.number).name)
            status = self._job.status
            if status is None:
                return 128 + event.number
            # The job has ended just now, and others may not have heard of it.
            event, patience_s = Event("job", status), LAST_ASK_S
        deadline = time.monotonic() + patience_s
        while not self._job.wait_until_notified(POLL_S):
            if self.has_ended():
                # A signal, which data-loaders may have got as well: each asks once more.
                deadline = min(deadline, time.monotonic() + LAST_ASK_S)
            if time.monotonic() > deadline:
                logger.log(self.level, "not every data-loader heard that the job has ended")
                break
        # Signalled or not: a data-loader that has not asked yet is not known here.
        leave_at = time.monotonic() + GRACE_S
        with suppress(queue.Empty):
            while (left_s := leave_at - time.monotonic()) > 0.0:
                error = self._events.get(timeout=left_s).error
                if error is not None:
                    raise error
        return status_after_job(event.number)

    def stop(self) -> None:
        """Finish the calls that are here; those not finished in time are counted."""
        if self._is_stopped:
            return
        self._is_stopped = True
        counts = self.server.stop(_STOP_S)
        numbers = counts.get("calls", 0), counts.get("unfinished", 0)
        logger.log(self.level, "stopped: %d calls served, %d unfinished", *numbers)
