"""The REST server of jobs: the original's five routes, and the same with HTTP's codes.

    POST /apply       {"job_identifier": {"job_name", "namespace"}, "spec"}
    POST /delete      {"job_name", "namespace"}
    GET  /listpods    job_name, namespace      /podstatus    pod_name, namespace
    GET  /listjobs    namespace

Arguments are in a body of JSON or in the query. The original's routes always answer 200, with
``success`` and ``err_msg``; under /v1 a status of HTTP says so, and a failure is
``{"error": ...}``.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from persia._k8s.api import JOB_KIND, Api, ApiError, KubernetesApi
from persia._k8s.plan import JOB_LABEL, plan_job
from persia._k8s.spec import API_VERSION, KIND, read_job
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

# Bytes of a body: a job's document is a few kilobytes.
_MAX_BODY = 1 << 20
_BAD_GATEWAY = HTTPStatus.BAD_GATEWAY

Arguments = dict[str, Any]


async def apply(api: Api, given: Arguments) -> None:
    """Create a job, or replace the spec of the one that is there."""
    identifier = given.get("job_identifier")
    identifier = identifier if isinstance(identifier, dict) else {}
    name, namespace = _text(identifier, "job_name"), _namespace(identifier)
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": given.get("spec"),
    }
    plan_job(read_job(document))
    try:
        await api.create(document)
    except ApiError as exc:
        if exc.status != HTTPStatus.CONFLICT:
            raise
        found = await api.get(*JOB_KIND, namespace, name)
        await api.replace({**document, **found, "kind": KIND, "spec": document["spec"]})


async def delete(api: Api, given: Arguments) -> None:
    """Delete a job, with all that it owns."""
    meta = {"name": _text(given, "job_name"), "namespace": _namespace(given)}
    await api.delete({"apiVersion": API_VERSION, "kind": KIND, "metadata": meta})


async def list_pods(api: Api, given: Arguments) -> list[str]:
    """Return the names of a job's pods."""
    selector = f"{JOB_LABEL}={_text(given, 'job_name')}"
    return _names(await api.list("v1", "Pod", _namespace(given), labelSelector=selector))


async def pod_status(api: Api, given: Arguments) -> Any:
    """Return the status of a pod, or None."""
    pod = await api.get("v1", "Pod", _namespace(given), _text(given, "pod_name"))
    return pod.get("status")


async def list_jobs(api: Api, given: Arguments) -> list[str]:
    """Return the names of jobs."""
    return _names(await api.list(*JOB_KIND, _namespace(given)))


def _names(objects: list[Any]) -> list[str]:
    return sorted(one["metadata"]["name"] for one in objects)


def _text(given: Arguments, key: str) -> str:
    value = given.get(key)
    # Also a part of the call's path, and of a selector.
    plain = isinstance(value, str) and value.replace("-", "").replace(".", "")
    if not plain or not (plain.isascii() and plain.isalnum()) or len(str(value)) > 253:
        raise ConfigError(f"{key}: expected a name, got {value!r:.80}")
    return str(value)


def _namespace(given: Arguments) -> str:
    return _text({"namespace": "default", **given}, "namespace")


# --- HTTP -------------------------------------------------------------------------------------


def _done(_: object) -> Arguments:
    return {"success": True, "err_msg": ""}


def _listed(found: object) -> Arguments:
    return {"execution_results": _done(None), "resources": found}


def _pod_body(found: object) -> Arguments:
    body = "None" if found is None else json.dumps(found)
    return {"execution_results": _done(None), "body": body}


_NOTHING: dict[str, Arguments] = {
    "/listpods": {"resources": []},
    "/listjobs": {"resources": []},
}
_NOTHING["/podstatus"] = {"body": "None"}

Action = Callable[[Api, Arguments], Awaitable[Any]]
ROUTES: tuple[tuple[str, str, Action, Callable[[object], Arguments]], ...] = (
    ("POST", "/apply", apply, _done),
    ("POST", "/delete", delete, _done),
    ("GET", "/listpods", list_pods, _listed),
    ("GET", "/podstatus", pod_status, _pod_body),
    ("GET", "/listjobs", list_jobs, _listed),
)


def make_app(connect: Callable[[], Any], token: str, *, is_local: bool = False) -> Starlette:
    """Return the application.

    Args:
        connect: Returns the API as an asynchronous context manager.
        token: What callers must show as ``Authorization: Bearer``.
        is_local: Whether it listens on loopback, and so is called by no name of another host.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.api = await stack.enter_async_context(connect())
            yield

    def refusal(request: Request) -> Response | None:
        if is_local and not _is_loopback(_host_of(request)):
            body = {"error": "expected localhost or an address of loopback as Host"}
            return JSONResponse(body, HTTPStatus.MISDIRECTED_REQUEST)
        shown = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(shown, f"Bearer {token}".encode()):
            body = {"error": "expected Authorization: Bearer and the server's token"}
            return JSONResponse(body, HTTPStatus.UNAUTHORIZED)
        return None

    routes = []
    for method, path, action, old_body in ROUTES:
        old = _endpoint(action, refusal, path, old_body)
        routes.append(Route(path, old, methods=[method]))
        routes.append(Route(f"/v1{path}", _endpoint(action, refusal), methods=[method]))
    return Starlette(routes=routes, lifespan=lifespan)


def _endpoint(
    action: Action,
    refusal: Callable[[Request], Response | None],
    old_path: str | None = None,
    old_body: Callable[[object], Arguments] | None = None,
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        # Both kinds of routes refuse by a status: the original asked for no token.
        refused = refusal(request)
        if refused is not None:
            return refused
        try:
            found = await action(request.app.state.api, await _arguments(request))
        except (ConfigError, ApiError) as exc:
            if old_path is None:
                return JSONResponse({"error": str(exc)}, _status_of(exc))
            failed = {"success": False, "err_msg": str(exc)}
            nothing = _NOTHING.get(old_path)
            return JSONResponse(
                failed if nothing is None else {"execution_results": failed, **nothing}
            )
        return JSONResponse({"result": found} if old_body is None else old_body(found))

    return answer


def _status_of(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    status = getattr(error, "status", 0)
    # 401 would be of the caller's token; this is of the server's own.
    is_passed_on = status in (403, 404, 409, 422, 429)
    return status if is_passed_on else _BAD_GATEWAY


def _host_of(request: Request) -> str:
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


async def _arguments(request: Request) -> Arguments:
    found: Arguments = dict(request.query_params)
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY:
            raise ConfigError(f"expected a body of at most {_MAX_BODY} bytes")
    if content:
        # Of the kinds that a page of another site can send, this is none.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ConfigError(f"expected Content-Type: application/json, got {kind!r:.80}")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"expected a body of JSON: {exc}") from exc
        if not isinstance(body, dict):
            raise ConfigError("expected an object of JSON")
        found |= body
    return found


def find_token(host: str, token_file: Path | None) -> str:
    """Return the token of a file, or a new one where only this host can ask.

    Raises:
        ConfigError: If the file has none, or others can ask and there is no file.
    """
    if token_file is None:
        if not _is_loopback(host):
            raise ConfigError(
                f"--host {host}: expected --token-file where others than this host can ask"
            )
        return secrets.token_urlsafe(24)
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"--token-file: cannot read {token_file}: {exc}") from exc
    if not token or not token.isascii():
        raise ConfigError(f"--token-file: expected a token of ASCII in {token_file}")
    return token


def run_server(host: str, port: int, token: str) -> None:
    """Serve until a signal comes."""
    app = make_app(KubernetesApi, token, is_local=_is_loopback(host))
    uvicorn.run(app, host=host, port=port, log_level="warning")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
