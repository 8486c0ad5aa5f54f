"""The Open Inference Protocol over HTTP, as an ASGI application.

Requests for inference skip the router. A body that has not come whole holds no place in the
queue of requests: it has a deadline, and all unfinished bodies share a bound of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request  # noqa: TC002 (starlette reads annotations)
from starlette.responses import Response
from starlette.routing import Route

from persia._serving.access import AccessPolicy, Need
from persia._serving.batcher import InferJob
from persia._serving.oip import http_codec
from persia._serving.oip.plans import PlanCache, RequestPlan
from persia._serving.oip.status import EXTENSIONS, NAME, answer_of, ignore_answer, status_of
from persia._serving.oip.tensors import RequestLimits
from persia._serving.request import DecodedRequest
from persia._serving.service import InferenceService
from persia.errors import DataError, NotAllowed, PersiaError, ServiceBusy, ServiceTimeout
from persia.version import __version__

_logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Callers name the milliseconds that they wait; the second is Envoy's name.
_DEADLINES = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
_JSON_HEADER = (b"content-type", b"application/json")


class BodyTooLarge(DataError):
    """A body has more bytes than the server takes."""


class BodyReader:
    """Reads whole bodies of requests.

    Args:
        timeout_s: Until a body must be whole.
        max_unfinished_bytes: Of all bodies that are not whole, together.
    """

    def __init__(self, max_bytes: int, *, timeout_s: float, max_unfinished_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_unfinished = max_unfinished_bytes
        self._unfinished = 0

    async def read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body; None if the caller has gone.

        Raises:
            BodyTooLarge: It is larger, or says so; it is not read then.
            ServiceTimeout: It did not come in time.
            ServiceBusy: Too much of other bodies has come and is not whole.
        """
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_bytes:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        is_late = False

        def expire() -> None:
            nonlocal is_late
            is_late = True
            if task is not None:
                task.cancel()

        timer = loop.call_later(self._timeout_s, expire)  # cheaper than a task of its own
        try:
            return await self._read(receive)
        except asyncio.CancelledError:
            if not is_late:
                raise
            if task is not None and hasattr(task, "uncancel"):  # from Python 3.11
                task.uncancel()
            raise ServiceTimeout(
                f"expected a whole body within {self._timeout_s:g} s, got a part"
            ) from None
        finally:
            timer.cancel()

    async def _read(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                if size + len(part) > self.max_bytes:
                    raise self._too_large()
                if not message.get("more_body"):
                    return b"".join([*parts, part]) if parts else part
                parts.append(part)
                size += len(part)
                self._unfinished += len(part)
                if self._unfinished > self._max_unfinished:
                    raise ServiceBusy(
                        f"expected at most {self._max_unfinished} bytes of unfinished bodies"
                    )
        finally:
            self._unfinished -= size

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"expected a body of at most {self.max_bytes} bytes, got more")


class RestFrontend:
    """ASGI application over a service.

    Args:
        body_timeout_s: Until the body of a request must be whole.
        may_control: Whether models are loaded and unloaded by requests; with several processes
            behind one port a request would reach only one of them.
    """

    def __init__(
        self,
        service: InferenceService,
        access: AccessPolicy,
        limits: RequestLimits,
        *,
        body_timeout_s: float = 30.0,
        max_unfinished_bytes: int = 256 << 20,
        may_control: bool = True,
    ) -> None:
        self._service, self._access, self._limits = service, access, limits
        self._may_control = may_control
        self._plans: PlanCache[RequestPlan] = PlanCache()
        self._bodies = BodyReader(
            limits.body_bytes,
            timeout_s=body_timeout_s,
            max_unfinished_bytes=max_unfinished_bytes,
        )
        self._others = Starlette(
            routes=self._routes(),
            exception_handlers=dict.fromkeys(
                (HTTPException, PersiaError, Exception), _answer_error
            ),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return
        path: str = scope["path"]
        is_infer = path.endswith("/infer") and path.startswith("/v2/models/")
        if scope["type"] != "http" or not is_infer or scope["method"] != "POST":
            await self._others(scope, receive, send)
            return
        try:
            found = await self._infer(scope, receive)
        except Exception as error:
            await _send_error(send, error)
            return
        if found is not None:
            headers, body = found
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _infer(
        self, scope: Scope, receive: Receive
    ) -> tuple[list[tuple[bytes, bytes]], bytes] | None:
        headers = dict(scope["headers"])
        self._access.check(Need.TOKEN, _text(headers, b"authorization"))
        deadline = time.monotonic() + self._timeout_s(headers)
        model, version = _model_of(scope)
        body = await self._bodies.read(headers, receive)
        if body is None:
            return None
        job = InferJob(
            partial(self._decode, headers, body),
            http_codec.encode,
            ignore_answer,
            deadline,
            len(body),
            model,
            version,
            _text(headers, b"traceparent"),
        )
        found: tuple[list[tuple[bytes, bytes]], bytes] = await answer_of(self._service, job)
        return found

    def _decode(
        self, headers: dict[bytes, bytes], body: bytes, job: InferJob
    ) -> DecodedRequest:
        length = headers.get(http_codec.HEADER_LENGTH.lower().encode())
        return http_codec.decode(
            body,
            None if length is None else length.decode("latin-1"),
            _text(headers, b"content-encoding"),
            self._limits,
            self._plans,
        )

    def _timeout_s(self, headers: dict[bytes, bytes]) -> float:
        for name in _DEADLINES:
            if name in headers:
                text = headers[name]
                if not text.isdigit() or len(text) > 9:
                    raise DataError(f"{name.decode()}: expected milliseconds, got {text!r}")
                return min(int(text) / 1e3, self._service.settings.timeout_s)
        return self._service.settings.timeout_s

    def _routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        version = model + "/versions/{version}"
        repository = "/v2/repository/models/{model}"
        found = [
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2", self._server),
            Route("/v2/", self._server),
            Route("/v2/models/stats", self._statistics),
        ]
        for place in (model, version):
            found += [
                Route(place, self._metadata),
                Route(f"{place}/ready", self._model_ready),
                Route(f"{place}/stats", self._statistics),
                # POST does not come here; the router refuses other methods.
                Route(f"{place}/infer", self, methods=["POST"]),
            ]
        found += [
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route(f"{repository}/load", partial(self._change, "load"), methods=["POST"]),
            Route(f"{repository}/unload", partial(self._change, "unload"), methods=["POST"]),
        ]
        return found

    def _check(self, need: Need, request: Request) -> None:
        self._access.check(need, request.headers.get("authorization", ""))

    async def _live(self, request: Request) -> Response:
        return _json({"live": True, "ready": self._service.is_ready})

    async def _ready(self, request: Request) -> Response:
        is_ready = self._service.is_ready
        return _json({"live": True, "ready": is_ready}, 200 if is_ready else 503)

    async def _server(self, request: Request) -> Response:
        self._check(Need.TOKEN, request)
        return _json({"name": NAME, "version": __version__, "extensions": EXTENSIONS})

    async def _metadata(self, request: Request) -> Response:
        self._check(Need.TOKEN, request)
        model, version = _of_path(request)
        return _json(dict(self._service.repository.metadata(model, version or None)))

    async def _model_ready(self, request: Request) -> Response:
        self._check(Need.TOKEN, request)
        model, version = _of_path(request)
        is_ready = self._service.repository.is_ready(model, version or None)
        is_ready = is_ready and not self._service.is_draining
        if not is_ready:
            self._service.repository.metadata(model, version or None)  # 404 if there is none
        return _json({"name": model, "ready": is_ready}, 200 if is_ready else 503)

    async def _statistics(self, request: Request) -> Response:
        self._check(Need.TOKEN, request)
        model, version = _of_path(request)
        return _json({"model_stats": self._service.read_statistics(model, version)})

    async def _index(self, request: Request) -> Response:
        self._check(Need.CONTROL, request)
        asked = await self._json_body(request)
        lines = self._service.repository.index(ready=bool(asked.get("ready", False)))
        return _json([index_line(line) for line in lines])

    async def _change(self, what: str, request: Request) -> Response:
        self._check(Need.CONTROL, request)
        check_control(self._may_control)
        asked = await self._json_body(request)
        if what == "load" and asked.get("parameters"):  # such as other files or settings
            raise DataError(f"{what}: expected no parameters, got {list(asked['parameters'])}")
        # It may take minutes, of which the loop must know nothing.
        change = getattr(self._service.repository, what)
        await asyncio.get_running_loop().run_in_executor(
            None, change, request.path_params["model"]
        )
        return Response(status_code=200)

    async def _json_body(self, request: Request) -> dict[str, Any]:
        body = await self._bodies.read(dict(request.scope["headers"]), request.receive)
        if not body:
            return {}
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise DataError(f"expected a request in JSON: {error}") from None
        if not isinstance(found, dict):
            raise DataError(f"expected a JSON object, got {type(found).__name__}")
        return found


def check_control(may_control: bool) -> None:
    """Refuse to load or unload where a request reaches one process of several."""
    if not may_control:
        raise NotAllowed(
            "models are loaded by the repository's files: several processes serve this port"
        )


def index_line(line: Any) -> dict[str, str]:
    """Return a line of the index in the protocol's form."""
    version = "" if line.version is None else str(line.version)
    state = str(line.state)
    return {"name": line.model, "version": version, "state": state, "reason": line.reason}


def _of_path(request: Request) -> tuple[str, str]:
    parameters = request.path_params
    return parameters.get("model", ""), parameters.get("version", "")


def _model_of(scope: Scope) -> tuple[str, str]:
    raw = scope.get("raw_path") or scope["path"].encode()
    parts = [unquote(part) for part in raw.decode("latin-1").split("/")]
    if len(parts) == 5:  # "", v2, models, name, infer
        return parts[3], ""
    if len(parts) == 7 and parts[4] == "versions":
        return parts[3], parts[5]
    raise HTTPException(404)


def _text(headers: dict[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error_of(error: BaseException) -> tuple[int, str]:
    if isinstance(error, BodyTooLarge):
        return 413, str(error)
    if isinstance(error, HTTPException):
        return error.status_code, "not found" if error.status_code == 404 else error.detail
    status = status_of(error)
    if status.http == 403 and "Bearer" in status.message:
        return 401, status.message
    return status.http, status.message


async def _send_error(send: Send, error: BaseException) -> None:
    status, message = _error_of(error)
    if status == 500:
        _logger.error("a request was answered with an error", exc_info=error)
    body = orjson.dumps({"error": message})
    headers = [_JSON_HEADER, (b"content-length", b"%d" % len(body))]
    if status in (408, 413, 504):
        # What is left of the body is not read: the connection cannot be used again.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_error(request: Request, error: Exception) -> Response:
    status, message = _error_of(error)
    headers = getattr(error, "headers", None)
    return Response(
        orjson.dumps({"error": message}), status, headers=headers, media_type="application/json"
    )
