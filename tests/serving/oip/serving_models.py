"""Models without rows and a repository without files, and a server over them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._serving.server import ListeningPorts, ListenSettings, ModelServer
from persia._serving.service import InferenceService, ServiceSettings
from persia.errors import DataError, ServiceError, ServiceUnavailable
from tests.support.waiting import PATIENCE_S

Arrays = Mapping[str, NDArray[Any]]


class NoSuchModel(ServiceError, LookupError):
    pass


@dataclass
class EchoModel:
    """Returns each input as an output."""

    version: int = 1
    is_batch_independent: bool = True
    inputs: tuple[tuple[str, str, list[int]], ...] = (("x", "FP32", [-1, 4]),)
    before: Callable[[Arrays], object] = lambda inputs: None
    calls: list[int] = field(default_factory=list)

    def __call__(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        self.before(inputs)
        known = {name for name, _, _ in self.inputs}
        for name in inputs:
            if name.partition(".")[0] not in known:
                raise DataError(f"unexpected inference input {name!r} for model 'echo'")
        self.calls.append(len(next(iter(inputs.values()))))
        return {name: values.copy() for name, values in inputs.items()}

    def metadata(self) -> Mapping[str, Any]:
        tensors = [{"name": n, "datatype": d, "shape": s} for n, d, s in self.inputs]
        return {
            "name": "echo",
            "versions": [str(self.version)],
            "platform": "persia_bundle",
            "inputs": tensors,
            "outputs": tensors,
        }

    def close(self) -> None:
        pass


@dataclass
class Line:
    model: str
    version: int | None
    state: str = "READY"
    reason: str = ""


class FakeRepository:
    def __init__(self, **models: EchoModel) -> None:
        self.held = models
        self.unloaded: set[str] = set()

    def _find(self, model: str, version: object = None) -> EchoModel:
        found = self.held.get(model)
        if found is None or (version is not None and str(version) != str(found.version)):
            raise NoSuchModel(f"no model {model!r}, or no version {version} of it")
        if model in self.unloaded:
            raise ServiceUnavailable(f"model {model!r} is not loaded")
        return found

    @contextlib.contextmanager
    def use(self, model: str, version: int | str | None = None) -> Iterator[EchoModel]:
        yield self._find(model, version)

    def models(self) -> list[str]:
        return sorted(self.held.keys() - self.unloaded)

    def versions(self, model: str) -> list[int]:
        return [self._find(model).version]

    def metadata(self, model: str, version: int | str | None = None) -> Mapping[str, Any]:
        return self._find(model, version).metadata()

    def is_ready(self, model: str | None = None, version: int | str | None = None) -> bool:
        try:
            return model is None or bool(self._find(model, version))
        except ServiceError:
            return False

    def index(self, *, ready: bool = False) -> list[Line]:
        lines = [Line(name, one.version) for name, one in self.held.items()]
        for line in lines:
            if line.model in self.unloaded:
                line.state, line.reason = "UNAVAILABLE", "unloaded"
        return [line for line in lines if line.state == "READY" or not ready]

    def load(self, model: str, timeout_s: float = 600.0) -> None:
        if model not in self.held:
            raise NoSuchModel(f"no model {model!r}")
        self.unloaded.discard(model)

    def unload(self, model: str, timeout_s: float = 30.0) -> None:
        self.load(model)
        self.unloaded.add(model)


@dataclass
class Running:
    server: ModelServer
    service: InferenceService
    http: str
    grpc: str
    torchserve: str
    thread: threading.Thread
    result: list[bool]

    def stop(self) -> bool:
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.result[0]


@contextlib.contextmanager
def serving(
    repository: FakeRepository,
    service_settings: ServiceSettings | None = None,
    **settings: Any,
) -> Iterator[Running]:
    service = InferenceService(repository, service_settings or ServiceSettings(num_threads=2))
    ready = threading.Event()
    ports: list[ListeningPorts] = []
    result: list[bool] = []
    failed: list[BaseException] = []

    def note(opened: ListeningPorts) -> None:
        ports.append(opened)
        ready.set()

    server = ModelServer(
        service,
        ListenSettings(
            **{
                "http_port": 0,
                "grpc_port": 0,
                "torchserve_port": 0,
                "drain_s": 30.0,
                **settings,
            }
        ),
        on_ready=note,
    )

    def run() -> None:
        try:
            result.append(server.run())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        if failed:
            raise failed[0]
        http, grpc, torchserve = (f"127.0.0.1:{port}" for port in ports[0])
        yield Running(server, service, http, grpc, torchserve, thread, result)
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        service.close(PATIENCE_S)
        assert not thread.is_alive()


def rows(count: int = 3, dim: int = 4) -> NDArray[Any]:
    return np.arange(count * dim, dtype=np.float32).reshape(count, dim)
