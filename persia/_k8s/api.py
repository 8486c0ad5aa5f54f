"""The calls to the Kubernetes API that an operator and a server of jobs make.

kopf finds the credentials, and its HTTP library carries the calls: no client of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import aiohttp
import kopf

from persia._k8s.spec import API_VERSION, KIND, PLURAL
from persia.errors import ConfigError, PersiaError

logger = logging.getLogger(__name__)

Object = Mapping[str, Any]
Page = tuple[list[Object], str]  # a part of a list, and the version of the whole

# Seconds that a call may take, and after which the API ends a watch.
_TIMEOUT_S, _WATCH_S = 30.0, 120
_UNAUTHORIZED, _NOT_FOUND = 401, 404
# Of each kind: what its resources are called. Which versions there are is in the objects.
_PLURALS = {
    KIND: PLURAL,
    "Event": "events",
    "Job": "jobs",
    "JobSet": "jobsets",
    "NetworkPolicy": "networkpolicies",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Secret": "secrets",
    "Service": "services",
}


class ApiError(PersiaError):
    """The API refused a call; says what it was of, with the status of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Api(Protocol):
    """What is called; objects are as JSON has them."""

    async def create(self, found: Object) -> Object:
        """Create an object; returns it as it is."""
        ...

    async def replace(self, found: Object, subresource: str = "") -> Object:
        """Replace an object, of the version that it names."""
        ...

    async def delete(self, found: Object) -> None:
        """Delete an object, and before it what it owns."""
        ...

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        """Return an object."""
        ...

    async def list(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> list[Object]:
        """Return the objects of a namespace, or of all."""
        ...

    def pages(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> AsyncIterator[Page]:
        """Yield the same in parts of at most ``limit``, with the version of the whole list."""
        ...


def path_of(api_version: str, kind: str, namespace: str | None, name: str = "") -> str:
    """Return the path of a resource, or of one object."""
    root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    place = "" if namespace is None else f"/namespaces/{namespace}"
    return f"{root}{place}/{_PLURALS[kind]}" + (f"/{name}" if name else "")


def _path_of(found: Object, *, with_name: bool = True) -> str:
    meta = found["metadata"]
    name = meta["name"] if with_name else ""
    return path_of(found["apiVersion"], found["kind"], meta.get("namespace", "default"), name)


def log_in() -> kopf.ConnectionInfo:
    """Return the credentials of the pod's service account, or of kubectl's configuration.

    Raises:
        ConfigError: If there are none.
    """
    settings = kopf.OperatorSettings()
    for source in (kopf.login_with_service_account, kopf.login_with_kubeconfig):
        found = source(settings=settings)
        if found is not None:
            return found
    raise ConfigError("expected a service account, or KUBECONFIG or ~/.kube/config, found none")


class _Login:
    """A session with some credentials, which is closed when its last call has ended."""

    def __init__(self, info: kopf.ConnectionInfo) -> None:
        self._server = info.server.rstrip("/")
        self._num_calls = 0
        self._is_over = False
        context: ssl.SSLContext | bool = True
        if info.server.startswith("https:"):
            context = info.as_ssl_context()
        self._session = aiohttp.ClientSession(
            headers=info.as_http_headers(),
            # Each watch holds a connection, and there is one for each namespace and kind.
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        self._num_calls += 1
        try:
            async with self._session.request(method, self._server + path, **options) as answer:
                yield answer
        finally:
            self._num_calls -= 1
            await self._close_if_over()

    async def end(self) -> None:
        """Close the session, now or when its last call has ended."""
        self._is_over = True
        await self._close_if_over()

    async def _close_if_over(self) -> None:
        if self._is_over and not self._num_calls:
            await self._session.close()


class KubernetesApi:
    """The API of a cluster over HTTP.

    Tokens of service accounts are replaced every hour: one that is refused is read again.
    Calls that are under way with the old one end by it.
    """

    def __init__(self) -> None:
        self._login: _Login | None = None

    async def __aenter__(self) -> KubernetesApi:
        self._login = _Login(log_in())
        return self

    async def __aexit__(self, *_: object) -> None:
        login, self._login = self._login, None
        if login is not None:
            await login.end()

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield an answer with a good status; ApiError otherwise, or if it cannot be read."""
        for is_last in (False, True):
            login = self._login
            if login is None:
                raise ApiError(f"{method} {path}: the connection is closed", 0)
            try:
                async with login.request(method, path, **options) as answer:
                    if answer.status != _UNAUTHORIZED or is_last:
                        if not answer.ok:
                            text = _message(await answer.read()) or answer.reason
                            text = f"{method} {path}: {answer.status}: {text}"
                            raise ApiError(text, answer.status)
                        yield answer
                        return
            except (aiohttp.ClientError, asyncio.TimeoutError) as exc:
                why = str(exc) or type(exc).__name__
                raise ApiError(f"{method} {path}: {why}", 0) from exc
            await self._log_in_again(login)

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        async with self._answer(method, path, json=body, params=query or {}) as answer:
            content = await answer.read()
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            found = json.loads(content)
        return found

    async def _log_in_again(self, refused: _Login) -> None:
        if self._login is not refused:
            return  # another call, refused as well, has
        self._login = _Login(log_in())
        await refused.end()

    async def version(self) -> tuple[int, int]:
        """Return the cluster's version."""
        found = await self._call("GET", "/version")
        return int(found["major"]), int(found["minor"].rstrip("+"))

    async def has(self, path: str) -> bool:
        """Return whether there is anything at a path."""
        try:
            await self._call("GET", path)
        except ApiError as exc:
            if exc.status == _NOT_FOUND:
                return False
            raise
        return True

    async def create(self, found: Object) -> Object:
        return await self._call("POST", _path_of(found, with_name=False), found)

    async def replace(self, found: Object, subresource: str = "") -> Object:
        path = _path_of(found) + (f"/{subresource}" if subresource else "")
        return await self._call("PUT", path, found)

    async def delete(self, found: Object) -> None:
        options: dict[str, Any] = {"propagationPolicy": "Foreground"}
        if found["metadata"].get("uid"):
            options["preconditions"] = {"uid": found["metadata"]["uid"]}
        await self._call("DELETE", _path_of(found), options)

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        return await self._call("GET", path_of(api_version, kind, namespace, name))

    async def list(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> list[Object]:
        pages = self.pages(api_version, kind, namespace, **query)
        return [one async for page, _ in pages for one in page]

    async def pages(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> AsyncIterator[Page]:
        path = path_of(api_version, kind, namespace)
        while True:
            found = await self._call("GET", path, query=query)
            meta = found.get("metadata") or {}
            # Of a list, items name neither version nor kind.
            shared = {"apiVersion": api_version, "kind": kind}
            yield [{**one, **shared} for one in found["items"]], meta.get("resourceVersion", "")
            if not meta.get("continue"):
                return
            query = {**query, "continue": meta["continue"]}

    async def watch(
        self, api_version: str, kind: str, namespace: str | None, version: str, **query: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield what changes after a version of a list, until the API ends it after minutes.

        Yields:
            How, ADDED, MODIFIED or DELETED, and the object as it is then; or BOOKMARK, and an
            object with nothing but a version, from which another watch may go on.

        Raises:
            ApiError: With status 410 if the API does not know any more what came after that
                version: list again.
        """
        path = path_of(api_version, kind, namespace)
        query |= {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query["timeoutSeconds"] = str(_WATCH_S)
        # A connection that is cut where neither end sees it is given up after that time.
        timeout = aiohttp.ClientTimeout(total=_WATCH_S + _TIMEOUT_S, sock_connect=_TIMEOUT_S)
        async with self._answer("GET", path, params=query, timeout=timeout) as answer:
            async for line in _lines(answer.content):
                event = json.loads(line)
                how, found = event["type"], event["object"]
                if how == "ERROR":
                    text = f"watch of {path}: {found.get('message')}"
                    raise ApiError(text, found.get("code", 0))
                yield how, found


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: the reader's own may be shorter than an object."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(None, lines):
            yield line


def _message(content: bytes) -> str:
    """Return what the API says of a refusal; the empty text where that is not its JSON."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, TypeError, KeyError):
        return ""


JOB_KIND = (API_VERSION, KIND)
