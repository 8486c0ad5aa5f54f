"""A server of HTTP in the API server's place, which answers as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import yaml
from aiohttp import web

from persia._k8s.api import KubernetesApi

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def write_config(path: Path, port: int, token: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}/"}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


def run(
    config: Path, handler: Handler, calls: Callable[[KubernetesApi], Awaitable[None]]
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    async def play() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        write_config(config, runner.addresses[0][1], "old")
        try:
            async with KubernetesApi() as api:
                await calls(api)
        finally:
            await runner.cleanup()

    asyncio.run(play())
