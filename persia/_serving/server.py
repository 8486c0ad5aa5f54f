"""The process that serves models: its ports, its end, and several processes behind one port.

SIGTERM makes the server not ready; after ``drain_delay_s``, in which load balancers notice, it
takes no more connections, finishes what it has within ``drain_s``, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from persia._core.base.threads import prefer_thread
from persia._serving.access import AccessPolicy, check_listening
from persia._serving.oip.grpc_service import (
    EXTRA_BYTES,
    GrpcFrontend,
    MessageReader,
    UnaryCalls,
    start_grpc,
)
from persia._serving.oip.rest import RestFrontend
from persia._serving.oip.tensors import RequestLimits
from persia._serving.service import InferenceService
from persia._serving.torchserve import TorchServeFrontend
from persia.errors import ConfigError

_logger = logging.getLogger(__name__)

# Seconds: of an idle connection; before a process that died is started again.
_KEEP_ALIVE_S, _RESTART_S = 75, 1.0
# Seconds that a connection beyond the bound has to read that it is.
_BEYOND_S = 1.0
_TOO_MANY_BODY = b'{"error":"expected fewer connections, this server has all that it takes"}'
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_TOO_MANY_BODY), _TOO_MANY_BODY)
)
# gRPC messages that are read at the same time, at least.
_LEAST_READERS = 16
# Seconds that a process keeps away from a shared port at most; then it can say what is wrong.
_LOADED_S = 300.0


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where a server listens, who may ask, and how it ends."""

    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int | None = 9000  # None: no gRPC
    torchserve_port: int | None = None  # None: clients of TorchServe are not answered
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    control_token_file: Path | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    body_timeout_s: float = 30.0
    max_unfinished_bytes: int = 256 << 20
    max_connections: int = 1024  # of each port; HTTP answers 503 beyond, gRPC refuses
    drain_delay_s: float = 0.0
    drain_s: float = 30.0
    shares_ports: bool = False  # with other processes of the same server

    def check(self) -> None:
        """Raise ``ConfigError`` for what would let strangers in, or cannot be read."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("expected --tls-cert and --tls-key together, got one of them")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not path.is_file():
                raise ConfigError(f"{path}: expected a PEM file")
        check_listening(
            self.host,
            has_tls=self.tls_cert is not None,
            has_token=self.token_file is not None,
        )


class ListeningPorts(NamedTuple):
    """Where a server listens; None: not by this protocol."""

    http: int
    grpc: int | None
    torchserve: int | None


class _HttpConnection(HttpToolsProtocol):
    """Closes a connection whose request's head does not come: uvicorn waits for it forever.

    One beyond ``max_connections`` is answered 503, whatever it asks.
    """

    head_timeout_s = 30.0
    max_connections = 1024
    _timer: asyncio.TimerHandle | None = None
    _head_due: float | None = None  # seconds of the loop; None: no head is waited for
    _is_beyond = _is_answered = False
    # Requests that are not answered. uvicorn knows the last of those that came without waiting
    # for an answer, and would write those of the others to a connection that is gone.
    _open: tuple[Any, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_beyond = len(self.connections) > self.max_connections
        if self._is_beyond:
            # These are no more than a few: each ends soon.
            self.head_timeout_s = min(_BEYOND_S, self.head_timeout_s)
            if len(self.connections) > 2 * self.max_connections:
                transport.abort()
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Read on; of a connection that is beyond the bound nothing."""
        if not self._is_beyond:
            super().data_received(data)
        elif not self._is_answered:
            self._is_answered = True
            # Closed a little later: with bytes that are not read the answer would be lost.
            self.transport.write(_TOO_MANY)

    def on_message_begin(self) -> None:
        """Give the next request its time, which ends with ``on_headers_complete``."""
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._head_due = None
        super().on_headers_complete()
        if self.cycle is not None:
            left = (one for one in self._open if not one.response_complete)
            self._open = (*left, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open = ()

    def _await_head(self) -> None:
        # The timer goes on from request to request: one for each costs more than reading it.
        self._head_due = self.loop.time() + self.head_timeout_s
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._check_head)

    def _check_head(self) -> None:
        self._timer = None
        if self._head_due is None:
            return
        left = self._head_due - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_head)
        else:
            self.transport.close()


class _HttpServer(uvicorn.Server):
    """uvicorn without its handlers of signals, which belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def install_signal_handlers(self) -> None:
        """Install none, in releases before ``capture_signals``."""


class ModelServer:
    """Serves a service over HTTP and gRPC until ``stop``.

    Args:
        on_ready: Called with the ports once all are open.
    """

    def __init__(
        self,
        service: InferenceService,
        settings: ListenSettings,
        *,
        on_ready: Callable[[ListeningPorts], None] | None = None,
    ) -> None:
        settings.check()
        self._service, self._settings = service, settings
        self._on_ready = on_ready
        self._access = AccessPolicy(settings.token_file, settings.control_token_file)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._lock = threading.Lock()  # guards the next
        self._is_stopped = False

    def stop(self) -> None:
        """Begin to end; from any thread, or a handler of a signal."""
        with self._lock:
            self._is_stopped = True
            if self._loop is not None and self._end is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._end.set)

    def run(self, *, handles_signals: bool = False) -> bool:
        """Serve; returns whether everything in flight was answered."""
        prefer_thread()
        try:
            import uvloop
        except ImportError:  # there is none for Windows
            loop = asyncio.new_event_loop()
        else:
            loop = uvloop.new_event_loop()
        try:
            return loop.run_until_complete(self._serve(handles_signals))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _serve(self, handles_signals: bool) -> bool:
        loop = asyncio.get_running_loop()
        end = asyncio.Event()
        with self._lock:
            self._loop, self._end = loop, end
            if self._is_stopped:
                end.set()
        if handles_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, end.set)
        settings = self._settings
        listener = open_listener(
            settings.host, settings.http_port, shares=settings.shares_ports
        )
        calls = self._unary_calls()
        opened: list[tuple[Any, int]] = []
        try:
            http = self._http_server()
            if settings.shares_ports:
                await self._wait_until_loaded(end)
            for frontend, port in (
                (self._grpc_frontend(calls), settings.grpc_port),
                (TorchServeFrontend(self._service, calls), settings.torchserve_port),
            ):
                if port is not None:
                    opened.append(await self._start_grpc(frontend, port))
            is_whole = await self._serve_http(http, listener, opened, end)
        finally:
            for grpc, _ in opened:
                await grpc.stop(0)
            listener.close()
        return is_whole

    async def _wait_until_loaded(self, end: asyncio.Event) -> None:
        """Leave a shared port to the other processes until the models here were loaded.

        A model that cannot be loaded is waited for no longer than the others.
        """
        repository, latest = self._service.repository, time.monotonic() + _LOADED_S
        while not (end.is_set() or self._service.is_ready or time.monotonic() > latest):
            states = {line.state for line in repository.index()}
            if states and "LOADING" not in states:
                return
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(end.wait(), 0.05)

    def _unary_calls(self) -> UnaryCalls:
        settings = self._settings
        most = settings.max_unfinished_bytes // (settings.limits.body_bytes + EXTRA_BYTES)
        reader = MessageReader(settings.body_timeout_s, max(_LEAST_READERS, most))
        return UnaryCalls(self._access, reader)

    def _grpc_frontend(self, calls: UnaryCalls) -> GrpcFrontend:
        settings = self._settings
        may_control = not settings.shares_ports
        return GrpcFrontend(self._service, calls, settings.limits, may_control=may_control)

    async def _start_grpc(
        self, frontend: GrpcFrontend | TorchServeFrontend, port: int
    ) -> tuple[Any, int]:
        settings = self._settings
        return await start_grpc(
            frontend.handlers(),
            settings.limits,
            settings.host,
            port,
            tls=_read_tls(settings),
            shares_ports=settings.shares_ports,
            max_connections=settings.max_connections,
        )

    async def _serve_http(
        self,
        http: _HttpServer,
        listener: socket.socket,
        opened: Sequence[tuple[Any, int]],
        end: asyncio.Event,
    ) -> bool:
        task = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            while not (http.started or task.done()):
                await asyncio.sleep(0.001)
            if self._on_ready is not None and not task.done():
                self._on_ready(self._ports(listener, opened))
            waiting = asyncio.create_task(end.wait())
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        finally:
            is_whole = await self._drain(http, task, [grpc for grpc, _ in opened])
        return is_whole

    def _ports(
        self, listener: socket.socket, opened: Sequence[tuple[Any, int]]
    ) -> ListeningPorts:
        ports = iter([port for _, port in opened])
        settings = self._settings
        return ListeningPorts(
            listener.getsockname()[1],
            None if settings.grpc_port is None else next(ports),
            None if settings.torchserve_port is None else next(ports),
        )

    async def _drain(
        self, http: _HttpServer, task: asyncio.Task[None], grpcs: Sequence[Any]
    ) -> bool:
        settings, service = self._settings, self._service
        service.is_draining = True
        if settings.drain_delay_s and not task.done():
            await asyncio.sleep(settings.drain_delay_s)
        until = time.monotonic() + settings.drain_s
        http.should_exit = True
        endings: list[Any] = [task]
        endings += [asyncio.ensure_future(grpc.stop(settings.drain_s)) for grpc in grpcs]
        _, late = await asyncio.wait(endings, timeout=settings.drain_s + 1)
        if late:
            http.force_exit = True
        is_whole = not late and await asyncio.get_running_loop().run_in_executor(
            None, service.drain, max(0.0, until - time.monotonic())
        )
        for one in endings:
            if one.done() and not one.cancelled() and one.exception() is not None:
                _logger.error("a port ended with an error", exc_info=one.exception())
                is_whole = False
        return is_whole

    def _http_server(self) -> _HttpServer:
        settings = self._settings
        app = RestFrontend(
            self._service,
            self._access,
            settings.limits,
            body_timeout_s=settings.body_timeout_s,
            max_unfinished_bytes=settings.max_unfinished_bytes,
            may_control=not settings.shares_ports,
        )
        bounds = {
            "head_timeout_s": settings.body_timeout_s,
            "max_connections": settings.max_connections,
        }
        config = uvicorn.Config(
            app,
            http=type("_Http", (_HttpConnection,), bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=2048,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(settings.drain_s)),
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{settings.tls_cert}: cannot use the certificate: {error}"
            ) from error
        return _HttpServer(config)


def open_listener(host: str, port: int, *, shares: bool) -> socket.socket:
    """Return a bound socket; with ``shares``, other processes may bind the same port.

    Raises:
        ConfigError: The address cannot be had.
    """
    bare = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    try:
        if shares:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bare, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return listener


def _read_tls(settings: ListenSettings) -> tuple[bytes, bytes] | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return settings.tls_key.read_bytes(), settings.tls_cert.read_bytes()


class WorkerProcesses:
    """Processes that serve the same ports; one that dies is started again.

    Args:
        command: Of a process, without its number.
        count: How many.
        drain_s: After which a process that was asked to end is killed.
    """

    def __init__(self, command: Sequence[str], count: int, *, drain_s: float) -> None:
        self._command, self._count, self._drain_s = [*command], count, drain_s
        self._end = threading.Event()

    def stop(self) -> None:
        """Begin to end."""
        self._end.set()

    def run(self) -> int:
        """Keep the processes alive until ``stop``; returns the worst of their statuses."""
        running = {number: self._start(number) for number in range(self._count)}
        while not self._end.wait(0.2):
            for number, process in running.items():
                status = process.poll()
                if status is None:
                    continue
                if status == 2:  # a setting that no restart makes right
                    self._end.set()
                    break
                _logger.error(
                    "worker %d ended with status %d; starting it again", number, status
                )
                if self._end.wait(_RESTART_S):
                    break
                running[number] = self._start(number)
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until = time.monotonic() + self._drain_s + 5
        worst = 0
        for number, process in running.items():
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _logger.error("worker %d did not end in time and is killed", number)
                process.kill()
                status = process.wait(10)
            worst = max(worst, abs(status))
        return worst

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *self._command, "--worker", str(number)])
