"""``persia-launcher serve``: the models of a repository over HTTP and gRPC."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from persia._metrics.definitions import SERVING
from persia._metrics.endpoint import Endpoint
from persia._metrics.registry import MetricSource
from persia.errors import ConfigError

if TYPE_CHECKING:
    from persia._serving.servable import Servable
    from persia._serving.server import ListeningPorts, ListenSettings
    from persia._serving.service import ServiceSettings

_logger = logging.getLogger(__name__)
_MB = 1 << 20
# Seconds: for models to be closed after the last request.
_CLOSE_S = 10.0
_SWITCH_INTERVAL_S = 1e-4

_PATH = click.Path(path_type=Path)
_PORT = click.IntRange(0, 65535)
_SECONDS = click.FloatRange(0)
_ROW_DTYPES = ("float32", "float16", "bfloat16", "int8")
# Name, type, default and help of each option.
_OPTIONS: tuple[tuple[str, Any, Any, str], ...] = (
    (
        "--host",
        str,
        "127.0.0.1",
        "Where to listen. Beyond this host it needs TLS or a token.",
    ),
    ("--http-port", _PORT, 8080, "Port of HTTP; 0: one that is free."),
    ("--grpc-port", _PORT, 9000, "Port of gRPC; 0: one that is free."),
    (
        "--torchserve-port",
        _PORT,
        None,
        "Answer gRPC clients of TorchServe there; 0: a port that is free.",
    ),
    ("--tls-cert", _PATH, None, "Certificate, PEM, of HTTP and gRPC."),
    ("--tls-key", _PATH, None, "Its private key, PEM."),
    ("--token-file", _PATH, None, "Token that callers show as `Authorization: Bearer`."),
    ("--control-token-file", _PATH, None, "Token for index, load and unload; without it, off."),
    ("--threads", click.IntRange(1), None, "Threads that score; processors / workers."),
    (
        "--workers",
        click.IntRange(1, 256),
        1,
        "Processes behind the same ports.",
    ),
    (
        "--max-batch-size",
        click.IntRange(1),
        1024,
        "Rows to which waiting requests are joined.",
    ),
    ("--max-queue", click.IntRange(0), 1024, "Requests that may wait; beyond it 429."),
    (
        "--max-connections",
        click.IntRange(1),
        1024,
        "Connections of each port; beyond them 503.",
    ),
    ("--max-body-mb", click.IntRange(1), 64, "Megabytes of one request."),
    ("--timeout", _SECONDS, 30.0, "Seconds until a request must be answered."),
    ("--body-timeout", _SECONDS, 30.0, "Seconds until the whole of a request must have come."),
    ("--slow-ms", _SECONDS, 1000.0, "Milliseconds from which a request is logged as slow."),
    ("--drain-delay", _SECONDS, 0.0, "Seconds between `not ready` and closing the ports."),
    ("--drain", _SECONDS, 30.0, "Seconds that requests in flight have when the server ends."),
    ("--poll", click.FloatRange(0.05), 1.0, "Seconds between looks for new versions."),
    (
        "--record-every",
        click.IntRange(0),
        100,
        "Record 1 request of this many, to warm up; 0: none.",
    ),
    ("--row-dtype", click.Choice(_ROW_DTYPES), "float32", "How rows are held in memory."),
    (
        "--follow-interval",
        click.FloatRange(0.01),
        0.25,
        "Seconds between looks for changed rows.",
    ),
    (
        "--rows",
        click.Choice(("local", "servers")),
        "local",
        "Hold rows here, or ask the servers of PERSIA_SERVING_REPLICAS.",
    ),
    ("--cache-ttl-ms", _SECONDS, 0.0, "Milliseconds that rows of servers are kept; 0: none."),
    ("--cache-rows", click.IntRange(2), 100_000, "Rows kept, of each server."),
    (
        "--rows-within",
        str,
        None,
        "Folders or URLs, with commas, below which versions may have rows elsewhere.",
    ),
    (
        "--loader",
        str,
        None,
        "MODULE:FUNCTION that makes a model of a version's folder, instead of PERSIA's.",
    ),
)


def add_options(command: Any) -> Any:
    """Add the options of ``serve``."""
    for name, kind, default, text in reversed(_OPTIONS):
        shown = default is not None
        command = click.option(name, type=kind, default=default, help=text, show_default=shown)(
            command
        )
    for name, values, text in (
        (
            "--model",
            "models",
            "Serve this one only; may be given again. Without it, all.",
        ),
        (
            "--policy",
            "policies",
            "MODEL=latest, MODEL=all or MODEL=3,5: its versions.",
        ),
    ):
        command = click.option(name, values, multiple=True, help=text)(command)
    text = "Serve a new version whose inputs or outputs differ from the last one's."
    command = click.option("--allow-schema-change", is_flag=True, help=text)(command)
    text = "Load dense nets of machine code (format aot): it may do anything."
    command = click.option("--allow-native", is_flag=True, help=text)(command)
    command = click.option("--no-grpc", is_flag=True, help="Serve HTTP only.")(command)
    return click.option("--worker", type=click.IntRange(0), hidden=True)(command)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line says."""

    repository: Path
    worker: int | None
    workers: int
    values: Mapping[str, Any]

    @property
    def threads(self) -> int:
        """Threads of one process."""
        given: int | None = self.values["threads"]
        return given or max(1, (os.cpu_count() or 1) // self.workers)

    def server(self) -> ListenSettings:
        """Return where and how the server listens; ConfigError if it may not."""
        from persia._serving.oip.tensors import RequestLimits
        from persia._serving.server import ListenSettings

        values = self.values
        settings = ListenSettings(
            host=values["host"],
            http_port=values["http_port"],
            grpc_port=None if values["no_grpc"] else values["grpc_port"],
            torchserve_port=values["torchserve_port"],
            tls_cert=values["tls_cert"],
            tls_key=values["tls_key"],
            token_file=values["token_file"],
            control_token_file=values["control_token_file"],
            limits=RequestLimits(body_bytes=values["max_body_mb"] * _MB),
            body_timeout_s=values["body_timeout"],
            max_unfinished_bytes=4 * values["max_body_mb"] * _MB,
            max_connections=values["max_connections"],
            drain_delay_s=values["drain_delay"],
            drain_s=values["drain"],
            shares_ports=self.workers > 1,
        )
        settings.check()
        return settings

    def service(self) -> ServiceSettings:
        """Return how requests are queued."""
        from persia._serving.service import ServiceSettings

        values = self.values
        return ServiceSettings(
            num_threads=self.threads,
            max_batch_size=values["max_batch_size"],
            max_waiting=values["max_queue"],
            max_waiting_bytes=4 * values["max_body_mb"] * _MB,
            timeout_s=values["timeout"],
            slow_s=values["slow_ms"] / 1e3,
        )


def run_serve(repository: Path, **values: Any) -> int:
    """Serve until SIGTERM or SIGINT; returns the status to exit with."""
    worker, workers = values.pop("worker"), values.pop("workers")
    options = ServeOptions(repository, worker, workers, values)
    if not repository.is_dir():
        raise ConfigError(f"{repository}: expected the folder of a model repository")
    try:
        server = options.server()
    except ImportError as error:
        raise ConfigError(
            f"serving needs packages that are not installed ({error.name}): "
            'pip install "persia[serve]"'
        ) from error
    _refuse_one_model(repository)
    if workers > 1 and worker is None:
        return _run_workers(options, server)
    return _run_one(options, server)


def _refuse_one_model(repository: Path) -> None:
    """Refuse the folder of one model, whose versions would look like models without any."""
    from persia._serving.bundle import MANIFEST

    if any(repository.glob(f"[0-9]*/{MANIFEST}")):
        model = repository.resolve()
        raise ConfigError(
            f"{repository}: expected the folder of a model repository, got that of one model: "
            f"serve {model.parent} with --model {model.name}"
        )


def _run_workers(options: ServeOptions, settings: ListenSettings) -> int:
    """Start the processes, each with this process's command line and ports."""
    from persia._serving.server import WorkerProcesses, open_listener

    held, words = [], []
    # Bound and never listening: it keeps ports asked for as 0, without connections.
    for name, port in (
        ("--http-port", settings.http_port),
        ("--grpc-port", settings.grpc_port),
        ("--torchserve-port", settings.torchserve_port),
    ):
        if port is not None:
            held.append(open_listener(settings.host, port, shares=True))
            words += [name, str(held[-1].getsockname()[1])]
    command = ["-m", "persia.launcher", *sys.argv[1:], *words]
    processes = WorkerProcesses(command, options.workers, drain_s=settings.drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: processes.stop())
    _logger.info("serving with %d workers: %s", options.workers, " ".join(words))
    try:
        return processes.run()
    finally:
        for one in held:
            one.close()


def _run_one(options: ServeOptions, settings: ListenSettings) -> int:
    from persia._serving.server import ModelServer
    from persia._serving.service import InferenceService
    from persia._serving.versions import ModelRepository, VersionPolicy
    from persia._serving.warmup import WarmupRecorder

    # A thread that waits for the interpreter's lock gets it after this time. Beside a version
    # that is loading, 5 ms (the default) is what a request would wait at each of its hops.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    values = options.values
    policies = {}
    for text in values["policies"]:
        model, _, policy = text.partition("=")
        policies[model] = VersionPolicy.parse(policy)
    every = values["record_every"]
    recorder = WarmupRecorder(options.repository, every=every) if every else None
    models = ModelRepository(
        options.repository,
        load=_loader(values),
        policies=policies,
        models=values["models"] or None,
        poll_s=values["poll"],
        allow_schema_change=values["allow_schema_change"],
        recorder=recorder,
    )
    _check_ports(settings)
    with models:
        record = recorder.record if recorder else None
        service = InferenceService(models, options.service(), record=record)
        endpoint = _serve_metrics(service, options.worker or 0)
        server = ModelServer(service, settings, on_ready=_announce(settings))
        try:
            is_whole = server.run(handles_signals=True)
        finally:
            service.close(_CLOSE_S)
            endpoint.close()
    return 0 if is_whole else 1


def _check_ports(settings: ListenSettings) -> None:
    """Refuse a port that is taken before rows are read, which may take minutes."""
    from persia._serving.server import open_listener

    for name in ("http_port", "grpc_port", "torchserve_port"):
        port = getattr(settings, name)
        if not port:
            continue
        try:
            open_listener(settings.host, port, shares=settings.shares_ports).close()
        except ConfigError as error:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{error}; {option} takes another port, 0 a free one") from error


def _loader(values: Mapping[str, Any]) -> Callable[[Path], Servable]:
    """Return what makes a model of a version's folder."""
    name = values["loader"]
    if name is None:
        from persia._serving.predictor import Predictor
        from persia._serving.remote_rows import RowServers

        servers = None
        if values["rows"] == "servers":
            servers = RowServers.listed(
                cache_ttl_ms=values["cache_ttl_ms"], cache_rows=values["cache_rows"]
            )
        row_dtype, interval_s = values["row_dtype"], values["follow_interval"]
        within, native = values["rows_within"], values["allow_native"]
        places = (
            None
            if within is None
            else [one.strip() for one in within.split(",") if one.strip()]
        )
        return lambda folder: Predictor(
            folder,
            row_dtype=row_dtype,
            follow_interval_s=interval_s,
            row_servers=servers,
            rows_within=places,
            allow_native=native,
        )
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--loader {name}: expected MODULE:FUNCTION: {error}") from error
    if not callable(found):
        raise ConfigError(f"--loader {name}: expected a function, got {type(found).__name__}")
    return cast("Callable[[Path], Servable]", found)


def _announce(settings: ListenSettings) -> Any:
    scheme = "https" if settings.tls_cert else "http"

    def announce(ports: ListeningPorts) -> None:
        # What is there now, torch above all, stays: a collection need not look at it while
        # every thread waits.
        gc.collect()
        gc.freeze()
        # Scripts that asked for port 0 read this line.
        line = f"serving at {scheme}://{settings.host}:{ports.http}"
        line += f", gRPC at {settings.host}:{ports.grpc}" if ports.grpc else ""
        if ports.torchserve:
            line += f", TorchServe's at {settings.host}:{ports.torchserve}"
        click.echo(line)

    return announce


def _serve_metrics(service: Any, worker: int) -> Endpoint:
    source = MetricSource(SERVING, worker, "service", service, service.samples)

    def readiness() -> str:
        return "" if service.is_ready else "no version of a model is ready, or it is ending"

    return Endpoint(SERVING, worker, lambda: [source], readiness, lambda: "")
