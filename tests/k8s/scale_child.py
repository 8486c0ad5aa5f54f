"""The operator, which notes its requests and reconciliations, a line of JSON for each."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from persia._cli.log import set_up_logging
from persia._k8s.cache import Key
from persia._k8s.operator import Operator, run_operator


def measure(log: TextIO) -> None:
    """Have requests of this process, and jobs from queue to reconciliation, noted."""
    queued: dict[Key, float] = {}
    request, queue, step = aiohttp.ClientSession._request, Operator.queue, Operator.step

    def note(kind: str, value: float) -> None:
        log.write(json.dumps([kind, time.monotonic(), value]) + "\n")

    async def counted(self: aiohttp.ClientSession, *given: Any, **named: Any) -> Any:
        begin = time.monotonic()
        try:
            return await request(self, *given, **named)
        finally:
            note("request", time.monotonic() - begin)

    def timed_queue(self: Operator, key: Key) -> None:
        if self.cache.job(key) is not None:
            queued.setdefault(key, time.monotonic())
        queue(self, key)

    async def timed_step(self: Operator, key: Key) -> bool:
        begin, job = time.monotonic(), self.cache.job(key)
        since = queued.pop(key, begin)
        try:
            return await step(self, key)
        finally:
            if job is not None and not job.get("status"):
                note("create", time.monotonic() - begin)
            note("reconcile", time.monotonic() - begin)
            note("latency", time.monotonic() - since)

    aiohttp.ClientSession._request = counted  # type: ignore[method-assign]
    Operator.queue = timed_queue  # type: ignore[method-assign]
    Operator.step = timed_step  # type: ignore[method-assign]


if __name__ == "__main__":
    path, *namespaces = sys.argv[1:]
    set_up_logging("persia-operator")
    with Path(path).open("w", encoding="utf-8", buffering=1) as file:
        measure(file)
        run_operator(namespaces, {})
