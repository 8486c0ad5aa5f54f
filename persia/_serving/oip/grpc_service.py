"""The Open Inference Protocol over gRPC.

Messages come as bytes. Those of inference are parsed in a model thread, whatever their size; a
call whose message does not come ends after a deadline and holds no place in any queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from persia._serving.access import AccessPolicy, Need
from persia._serving.batcher import InferJob
from persia._serving.oip import grpc_codec
from persia._serving.oip.plans import PlanCache
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.oip.rest import check_control, index_line
from persia._serving.oip.status import EXTENSIONS, NAME, answer_of, ignore_answer, status_of
from persia._serving.oip.tensors import RequestLimits
from persia._serving.request import DecodedRequest, InferOutcome
from persia._serving.service import InferenceService
from persia.errors import ConfigError, DataError, ProtocolError, ServiceTimeout
from persia.version import __version__

_logger = logging.getLogger(__name__)

# Beyond this many calls of one connection at a time, further ones wait in its client.
_MAX_STREAMS = 1024
# Milliseconds: until a connection must be one of HTTP/2; of one without a call.
_HANDSHAKE_MS, _IDLE_MS = 20_000, 300_000
# Of a message beyond its data: tensors' names and shapes.
EXTRA_BYTES = 1 << 20

Handler = Callable[[Any, Any], Awaitable[Any]]


class MessageReader:
    """Reads the messages of calls, few at a time: a part of one takes memory, too.

    Calls that have no turn hold a window of 64 KiB each. While some wait for a turn, one that
    has been at it for ``patience_s`` ends, the longest first; the one that came last is next,
    as the others may be silent.

    Args:
        timeout_s: Until the message of a call must be whole.
        most: Calls that read at the same time.
    """

    def __init__(self, timeout_s: float, most: int, *, patience_s: float = 0.25) -> None:
        self.timeout_s, self._most, self._patience_s = timeout_s, most, patience_s
        # The first is the oldest.
        self._reading: dict[_Reading, None] = {}
        self._waiting: list[asyncio.Future[None]] = []

    async def read(self, name: str, context: Any) -> bytes:
        """Return the only message of a call.

        Raises:
            ServiceTimeout: It did not come in time, or too slowly while others waited.
            ProtocolError: The caller sent none.
        """
        end = time.monotonic() + self.timeout_s
        while len(self._reading) >= self._most:
            await self._wait_for_turn(name, end)
        reading = _Reading()
        self._reading[reading] = None
        # Cheaper than a task of its own.
        timer = asyncio.get_running_loop().call_later(end - reading.began, reading.expire)
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if not reading.is_late:
                raise
            reading.go_on()
            took = time.monotonic() - reading.began
            raise ServiceTimeout(f"{name}: expected a message within {took:.2g} s") from None
        finally:
            timer.cancel()
            del self._reading[reading]
            self._wake_one()
        if data is grpc.aio.EOF:
            raise ProtocolError(f"{name}: expected a message, got none")
        return bytes(data)

    async def _wait_for_turn(self, name: str, end: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            while not turn.done() and self._reading:
                now = time.monotonic()
                if now >= end:
                    raise ServiceTimeout(f"{name}: expected a turn within {self.timeout_s:g} s")
                oldest = next(iter(self._reading))
                until = oldest.began + self._patience_s
                if now >= until:
                    oldest.expire()  # its own task, which runs next, gives its place away
                    until = now + self._patience_s
                await asyncio.wait({turn}, timeout=min(until, end) - now)
        except BaseException:
            if turn.done():
                self._wake_one()
            raise
        finally:
            if not turn.done():
                self._waiting.remove(turn)

    def _wake_one(self) -> None:
        if self._waiting:
            self._waiting.pop().set_result(None)


class _Reading:
    """A task that waits for its message since ``began``."""

    def __init__(self) -> None:
        self.began, self.is_late = time.monotonic(), False
        self._task = asyncio.current_task()

    def expire(self) -> None:
        """Cancel the wait, if it goes on."""
        if not self.is_late and self._task is not None:
            self.is_late = True
            self._task.cancel()

    def go_on(self) -> None:
        """Have the task run on after ``expire``."""
        if self._task is not None and hasattr(self._task, "uncancel"):  # from Python 3.11
            self._task.uncancel()


class UnaryCalls:
    """Makes methods of one message each: who may call, until when it comes, errors."""

    def __init__(self, access: AccessPolicy, reader: MessageReader) -> None:
        self._access, self._reader = access, reader

    def method(self, name: str, need: Need, message: Any, handler: Handler) -> Any:
        """Return what a server calls; without ``message``, the handler gets and gives bytes."""

        # A unary call as a stream of one: only so may the wait for its message have a deadline.
        async def answer(_: Any, context: Any) -> bytes:
            try:
                metadata = dict(context.invocation_metadata() or ())
                self._access.check(need, str(metadata.get("authorization", "")))
                data = await self._reader.read(name, context)
                if message is None:
                    reply = await handler(data, context)
                    return bytes(reply)
                reply = await handler(grpc_codec.parse(message, data), context)
                return bytes(reply.SerializeToString())
            except Exception as error:
                status = status_of(error)
                if status.http == 500:
                    _logger.error("%s was answered with an error", name, exc_info=error)
                grpc_name = status.grpc
                if status.http == 403 and "Bearer" in status.message:
                    grpc_name = "UNAUTHENTICATED"
                return await _abort(context, grpc_name, status.message)

        return grpc.stream_unary_rpc_method_handler(answer)


class GrpcFrontend:
    """Methods of ``inference.GRPCInferenceService`` over a service.

    Args:
        may_control: See ``RestFrontend``.
    """

    def __init__(
        self,
        service: InferenceService,
        calls: UnaryCalls,
        limits: RequestLimits,
        *,
        may_control: bool = True,
    ) -> None:
        self._service, self._calls, self._limits = service, calls, limits
        self._may_control = may_control
        self._plans: PlanCache[grpc_codec.MessagePlan] = PlanCache()

    def handlers(self) -> tuple[Any, ...]:
        """Return what a gRPC server is given."""
        methods: dict[str, tuple[Need, Any, Handler]] = {
            "ServerLive": (Need.NOTHING, pb.ServerLiveRequest, self._server_live),
            "ServerReady": (Need.NOTHING, pb.ServerReadyRequest, self._server_ready),
            "ModelReady": (Need.TOKEN, pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (Need.TOKEN, pb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": (Need.TOKEN, pb.ModelMetadataRequest, self._model_metadata),
            "ModelStatistics": (Need.TOKEN, pb.ModelStatisticsRequest, self._statistics),
            "ModelInfer": (Need.TOKEN, None, self._infer),
            "RepositoryIndex": (Need.CONTROL, pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": (Need.CONTROL, pb.RepositoryModelLoadRequest, self._load),
            "RepositoryModelUnload": (
                *(Need.CONTROL, pb.RepositoryModelUnloadRequest, self._unload),
            ),
        }
        make = self._calls.method
        found = {name: make(name, *what) for name, what in methods.items()}
        health = {"Check": make("Check", Need.NOTHING, None, self._health)}
        return (
            grpc.method_handlers_generic_handler("inference.GRPCInferenceService", found),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        )

    async def _infer(self, data: bytes, context: Any) -> bytes:
        decode = partial(grpc_codec.decode, data, limits=self._limits, plans=self._plans)
        return bytes(await answer_call(self._service, decode, grpc_codec.encode, data, context))

    async def _health(self, data: bytes, context: Any) -> bytes:
        # HealthCheckResponse: field 1 is SERVING (1) or NOT_SERVING (2).
        return b"\x08\x01" if self._service.is_ready else b"\x08\x02"

    async def _server_live(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._service.is_ready)

    async def _model_ready(self, request: Any, context: Any) -> Any:
        repository = self._service.repository
        is_ready = repository.is_ready(request.name, request.version or None)
        if not is_ready:
            repository.versions(request.name)  # NOT_FOUND if there is no such model
        return pb.ModelReadyResponse(ready=is_ready and not self._service.is_draining)

    async def _server_metadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name=NAME, version=__version__, extensions=EXTENSIONS)

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        about = self._service.repository.metadata(request.name, request.version or None)
        reply = pb.ModelMetadataResponse(
            name=about["name"], versions=about["versions"], platform=about["platform"]
        )
        for side in ("inputs", "outputs"):
            for one in about[side]:
                tensor = {key: one[key] for key in ("name", "datatype", "shape")}
                getattr(reply, side).add(**tensor)
        return reply

    async def _statistics(self, request: Any, context: Any) -> Any:
        found = self._service.read_statistics(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=found)

    async def _index(self, request: Any, context: Any) -> Any:
        lines = self._service.repository.index(ready=request.ready)
        return pb.RepositoryIndexResponse(models=[index_line(line) for line in lines])

    async def _load(self, request: Any, context: Any) -> Any:
        check_control(self._may_control)
        if request.parameters:
            raise DataError(f"load: expected no parameters, got {[*request.parameters]}")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._service.repository.load, request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: Any, context: Any) -> Any:
        check_control(self._may_control)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._service.repository.unload, request.model_name)
        return pb.RepositoryModelUnloadResponse()


async def answer_call(
    service: InferenceService,
    decode: Callable[[InferJob], DecodedRequest],
    encode: Callable[[InferOutcome], Any],
    data: bytes,
    context: Any,
) -> Any:
    """Score the request of a call, within its deadline."""
    remaining = context.time_remaining()
    timeout_s = service.settings.timeout_s
    timeout_s = timeout_s if remaining is None else min(remaining, timeout_s)
    metadata = dict(context.invocation_metadata() or ())
    job = InferJob(
        decode,
        encode,
        ignore_answer,
        time.monotonic() + timeout_s,
        len(data),
        traceparent=str(metadata.get("traceparent", "")),
    )
    return await answer_of(service, job)


async def _abort(context: Any, name: str, text: str) -> bytes:
    await context.abort(grpc.StatusCode[name], text)
    return b""  # abort has raised


async def start_grpc(
    handlers: Sequence[Any],
    limits: RequestLimits,
    host: str,
    port: int,
    *,
    tls: tuple[bytes, bytes] | None,
    shares_ports: bool,
    max_connections: int = 1024,
) -> tuple[Any, int]:
    """Start a server in the running loop; returns it and its port.

    Raises:
        ConfigError: The address cannot be had, or the key does not fit.
    """
    size = limits.body_bytes + EXTRA_BYTES
    server = grpc.aio.server(
        handlers=handlers,
        options=[
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.so_reuseport", int(shares_ports)),
            # Clients of Triton ping while they wait.
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    bare = host.strip("[]")
    address = f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials([tls])
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen at {address} for gRPC: {error}") from error
    await server.start()
    return server, bound
