"""A worker over servers whose calls fail on demand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from persia._rpc.messages import OptimizerSettings
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.errors import ServiceUnavailable
from tests.support.services import SGD, make_servers, make_worker, value
from tests.support.waiting import PATIENCE_S

WIDE = 2**56  # the first id that does not fit 64 - 8 bits


class Faulty:
    """A server whose next calls fail, before or after they took effect."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        self.fail_before: list[str] = []
        self.fail_after: list[str] = []
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.server, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.fail_before:
                self.fail_before.remove(name)
                raise ServiceUnavailable(f"{name} was not heard")
            result = found(*arguments)
            if name in self.fail_after:
                self.fail_after.remove(name)
                raise ServiceUnavailable(f"the answer to {name} was lost")
            return result

        return call


class Slow(Faulty):
    """A server whose calls of one method wait, once they have begun, until they may end."""

    def __init__(self, method: str, only_batch: int | None = None) -> None:
        super().__init__(make_servers()[0])
        self.started, self.may_end = threading.Event(), threading.Event()
        self._method, self._only_batch = method, only_batch

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name != self._method:
            return found

        def call(request: Any) -> Any:
            if self._only_batch in (None, getattr(request, "batch_id", None)):
                self.started.set()
                assert self.may_end.wait(PATIENCE_S)
            return found(request)

        return call


@contextlib.contextmanager
def faulty_cluster(
    num_servers: int = 2, *, optimizer: OptimizerSettings = SGD, **more: Any
) -> Iterator[tuple[EmbeddingWorker, list[Faulty]]]:
    faulty = [Faulty(server) for server in make_servers(num_servers, optimizer=optimizer)]
    with contextlib.closing(make_worker(faulty, **more)) as worker:
        yield worker, faulty


def embeddings(servers: list[Faulty], name: str, ids: list[int]) -> list[Any]:
    plain = [server.server for server in servers]
    return [value(plain, name, x).tolist() for x in ids]
