"""Calls of the API over HTTP, to a server that answers as a cluster's does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kopf")

from aiohttp import web

from persia._k8s.api import JOB_KIND, ApiError, KubernetesApi, log_in, path_of
from persia.errors import ConfigError
from tests.k8s.http_api import run, write_config
from tests.k8s.specs import original
from tests.support.fixtures import Monkey


@pytest.fixture
def config(tmp_path: Path, monkeypatch: Monkey) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


def test_paths_are_those_of_the_api() -> None:
    assert path_of("v1", "Pod", None) == "/api/v1/pods"
    assert path_of("batch/v1", "Job", "n", "j") == "/apis/batch/v1/namespaces/n/jobs/j"
    assert path_of(*JOB_KIND, "n") == "/apis/persia.com/v1/namespaces/n/persiajobs"


def test_each_call_is_the_request_that_it_says(config: Path) -> None:
    seen: list[tuple[str, str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer old"
        body = await request.json() if request.can_read_body else None
        seen.append((request.method, request.path_qs, body))
        if request.path == "/version":
            return web.json_response({"major": "1", "minor": "20+"})
        if request.path == "/apis/none":
            return web.json_response({"message": "no such thing"}, status=404)
        return web.json_response({"items": [{"metadata": {"name": "x"}}]})

    async def calls(api: KubernetesApi) -> None:
        job = original()
        job["metadata"]["uid"] = "u"
        await api.create(job)
        await api.replace(job, "status")
        await api.delete(job)
        (pod,) = await api.list("v1", "Pod", labelSelector="persia_job=a,b")
        assert pod == {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        assert await api.version() == (1, 20)
        assert await api.has("/apis/batch/v1")
        assert not await api.has("/apis/none")

    run(config, handler, calls)
    jobs = "/apis/persia.com/v1/namespaces/default/persiajobs"
    assert [(method, path) for method, path, _ in seen[:4]] == [
        ("POST", jobs),
        ("PUT", f"{jobs}/adult-income/status"),
        ("DELETE", f"{jobs}/adult-income"),
        ("GET", "/api/v1/pods?labelSelector=persia_job%3Da,b"),
    ]
    # The name is free again only when all that it owned is gone.
    assert seen[2][2] == {"propagationPolicy": "Foreground", "preconditions": {"uid": "u"}}


def test_a_list_with_a_limit_comes_in_parts(config: Path) -> None:
    names = [str(number) for number in range(7)]
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path_qs.partition("?")[2])
        begin, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        part = [{"metadata": {"name": name}} for name in names[begin : begin + limit]]
        rest = str(begin + limit) if begin + limit < len(names) else ""
        meta = {"continue": rest, "resourceVersion": "7"}
        return web.json_response({"items": part, "metadata": meta})

    async def calls(api: KubernetesApi) -> None:
        pages = [of async for of in api.pages("v1", "Pod", labelSelector="a", limit="3")]
        found = [one for page, _ in pages for one in page]
        assert [one["metadata"]["name"] for one in found] == names
        assert {one["kind"] for one in found} == {"Pod"}
        assert {version for _, version in pages} == {"7"}

    run(config, handler, calls)
    first = "labelSelector=a&limit=3"
    assert asked == [first, f"{first}&continue=3", f"{first}&continue=6"]


def test_a_watch_yields_events_of_any_length_until_one_is_an_error(config: Path) -> None:
    pod = {"metadata": {"name": "x" * 400_000, "resourceVersion": "8"}}
    events = [{"type": "ADDED", "object": pod}, {"type": "BOOKMARK", "object": pod}]
    events.append({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
    queries: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in events:
            line = json.dumps(event).encode() + b"\n"
            for begin in range(0, len(line), 100_000):
                await answer.write(line[begin : begin + 100_000])
        return answer

    async def calls(api: KubernetesApi) -> None:
        found = []

        async def watch() -> None:
            async for event in api.watch("v1", "Pod", None, "7", labelSelector="a"):
                found.append(event)

        with pytest.raises(ApiError, match=r"watch of /api/v1/pods: too old") as at:
            await watch()
        assert at.value.status == 410
        assert found == [("ADDED", pod), ("BOOKMARK", pod)]

    run(config, handler, calls)
    (query,) = queries
    assert query.pop("timeoutSeconds").isdecimal()
    assert query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "7",
        "labelSelector": "a",
    }


def test_a_token_that_is_refused_is_read_again(config: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.headers["Authorization"] == "Bearer new":
            return web.json_response({"items": []})
        write_config(config, request.url.port or 0, "new")
        return web.json_response({"message": "Unauthorized"}, status=401)

    async def calls(api: KubernetesApi) -> None:
        assert await api.list("v1", "Pod") == []

    run(config, handler, calls)


def test_calls_under_way_with_a_token_that_is_replaced_end_by_it(config: Path) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        is_old = request.headers["Authorization"] == "Bearer old"
        if request.path == "/version":
            begun.set()
            await go.wait()
            return web.json_response({"major": "1", "minor": "30" if is_old else "0"})
        if not is_old:
            return web.json_response({"items": []})
        write_config(config, request.url.port or 0, "new")
        return web.json_response({"message": "Unauthorized"}, status=401)

    async def calls(api: KubernetesApi) -> None:
        version = asyncio.create_task(api.version())
        await begun.wait()
        old = api._login
        # Two at once are refused: one reads the token again for both.
        for found in await asyncio.gather(api.list("v1", "Pod"), api.list("v1", "Pod")):
            assert found == []
        assert old is not None
        assert old is not api._login
        assert not old._session.closed
        go.set()
        assert await version == (1, 30)
        assert old._session.closed

    run(config, handler, calls)


def test_what_is_refused_says_why(config: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path.endswith("pods"):
            return web.Response(text="<html>", status=503)
        return web.json_response({"message": "exceeded quota"}, status=403)

    async def calls(api: KubernetesApi) -> None:
        with pytest.raises(
            ApiError, match=r"POST /apis/persia.com.*: 403: exceeded quota"
        ) as at:
            await api.create(original())
        assert at.value.status == 403
        with pytest.raises(ApiError, match="GET /api/v1/pods: 503: Service Unavailable"):
            await api.list("v1", "Pod")

    run(config, handler, calls)


def test_an_api_that_is_away_and_credentials_that_are_none(
    config: Path, monkeypatch: Monkey
) -> None:
    async def calls() -> None:
        async with KubernetesApi() as api:
            with pytest.raises(ApiError, match=r"GET /version: .*127\.0\.0\.1:1") as at:
                await api.version()
            assert at.value.status == 0

    write_config(config, 1, "t")
    asyncio.run(calls())
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(config.parent))
    with pytest.raises(ConfigError, match="expected a service account, or KUBECONFIG"):
        log_in()
