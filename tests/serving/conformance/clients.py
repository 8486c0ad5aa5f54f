"""The clients of the suite behind one shape: whichever is used, the assertions are the same."""

from __future__ import annotations

import asyncio
import atexit
import base64
import functools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.serving.conformance.models import DTYPES
from tests.serving.conformance.triton_host import Host
from tests.support.processes import ROOT

Arrays = Mapping[str, NDArray[Any]]
TIMEOUT_S = 60.0
# Python of a virtual environment with KServe's SDK.
KSERVE = os.environ.get("KSERVE_PYTHON", str(ROOT / "build" / "kserve" / "bin" / "python"))
# gRPC's names of HTTP's statuses.
NAMES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    429: "RESOURCE_EXHAUSTED",
    504: "DEADLINE_EXCEEDED",
    501: "UNIMPLEMENTED",
}


class Refused(Exception):
    """What a server answered instead: gRPC's name of the status, and the text."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


@dataclass(frozen=True)
class Answer:
    model: str
    version: str
    id: str
    outputs: dict[str, NDArray[Any]]


class Client(Protocol):
    def live(self) -> bool: ...
    def ready(self) -> bool: ...
    def model_ready(self, model: str, version: str = "") -> bool: ...
    def server_metadata(self) -> dict[str, Any]: ...
    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]: ...
    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]: ...
    def index(self) -> list[dict[str, Any]]: ...
    def load(self, model: str) -> None: ...
    def unload(self, model: str) -> None: ...
    def close(self) -> None: ...
    def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: str = "",
        request_id: str = "",
        outputs: Sequence[str] | None = None,
        binary: bool = True,
        parameters: Mapping[str, Any] | None = None,
        datatype: str = "",
    ) -> Answer: ...


class TritonClient:
    """tritonclient of one transport; ``wait`` makes a result of what its methods return."""

    def __init__(
        self, module: Any, address: str, name: str, control: Mapping[str, str]
    ) -> None:
        self.module, self.name, self.control = module, name, dict(control)
        self._loop = asyncio.new_event_loop() if name == "aio" else None
        if self._loop is None:
            self._client = module.InferenceServerClient(address)
        else:
            self._client = self._loop.run_until_complete(self._connect(address))

    async def _connect(self, address: str) -> Any:
        return self.module.InferenceServerClient(address)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self.name == "grpc" and method != "infer":
            options["client_timeout"] = TIMEOUT_S
        if method in ("get_model_repository_index", "load_model", "unload_model"):
            options["headers"] = self.control
        try:
            found = getattr(self._client, method)(*arguments, **options)
            return found if self._loop is None else self._loop.run_until_complete(found)
        except InferenceServerException as error:
            status = str(error.status()).removeprefix("StatusCode.")
            raise Refused(
                NAMES[int(status)] if status.isdigit() else status, error.message()
            ) from error

    def _json(self, method: str, *arguments: Any) -> Any:
        options = {"as_json": True} if self.name == "grpc" else {}
        return self.call(method, *arguments, **options)

    def live(self) -> bool:
        return bool(self.call("is_server_live"))

    def ready(self) -> bool:
        return bool(self.call("is_server_ready"))

    def model_ready(self, model: str, version: str = "") -> bool:
        return bool(self.call("is_model_ready", model, version))

    def server_metadata(self) -> dict[str, Any]:
        return dict(self._json("get_server_metadata"))

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        found = dict(self._json("get_model_metadata", model, version))
        for tensor in [*found["inputs"], *found["outputs"]]:
            tensor["shape"] = [int(size) for size in tensor["shape"]]
        return found

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        return list(self._json("get_inference_statistics", model, version)["model_stats"])

    def index(self) -> list[dict[str, Any]]:
        found = self._json("get_model_repository_index")
        return list(found.get("models", []) if isinstance(found, dict) else found)

    def load(self, model: str) -> None:
        self.call("load_model", model)

    def unload(self, model: str) -> None:
        self.call("unload_model", model)

    def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: str = "",
        request_id: str = "",
        outputs: Sequence[str] | None = None,
        binary: bool = True,
        parameters: Mapping[str, Any] | None = None,
        datatype: str = "",
    ) -> Answer:
        is_http = self.name != "grpc"
        options = {"binary_data": binary} if is_http else {}
        asked = []
        for name, values in inputs.items():
            kind = datatype or np_to_triton_dtype(values.dtype)
            one = self.module.InferInput(
                name, [*values.shape], np_to_triton_dtype(values.dtype)
            )
            asked.append(one.set_data_from_numpy(values, **options))
            one.set_shape([*values.shape])
            if is_http:
                one._datatype = kind
            else:
                one._input.datatype = kind
        wanted = outputs and [self.module.InferRequestedOutput(n, **options) for n in outputs]
        found = self.call(
            *("infer", model, asked),
            model_version=version,
            request_id=request_id,
            outputs=wanted,
            parameters=dict(parameters) if parameters else None,
        )
        reply = found.get_response() if is_http else found.get_response(as_json=True)
        names = [tensor["name"] for tensor in reply.get("outputs", [])]
        return Answer(
            reply["model_name"],
            reply["model_version"],
            reply.get("id", ""),
            {name: found.as_numpy(name) for name in names},
        )

    def close(self) -> None:
        if self._loop is None:
            self._client.close()
            return
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


class PlainClient:
    """httpx and JSON, as a program without any library sends it."""

    name = "plain"

    def __init__(self, address: str, control: Mapping[str, str]) -> None:
        self._control = dict(control)
        self.http = httpx.Client(base_url=f"http://{address}", timeout=TIMEOUT_S)

    def ask(self, verb: str, path: str, body: object = None) -> Any:
        found = self.http.request(
            verb, path, json=body, headers=self._control if "/repository/" in path else {}
        )
        if not found.is_success:
            message = found.json().get("error", "") if found.content else ""
            raise Refused(NAMES.get(found.status_code, str(found.status_code)), message)
        return found.json() if found.content else None

    def _path(self, model: str, version: str, rest: str = "") -> str:
        return f"/v2/models/{model}{f'/versions/{version}' if version else ''}{rest}"

    def live(self) -> bool:
        return self.http.get("/v2/health/live").is_success

    def ready(self) -> bool:
        return self.http.get("/v2/health/ready").is_success

    def model_ready(self, model: str, version: str = "") -> bool:
        return self.http.get(self._path(model, version, "/ready")).is_success

    def server_metadata(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/v2"))

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        return dict(self.ask("GET", self._path(model, version)))

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        path = self._path(model, version, "/stats") if model else "/v2/models/stats"
        return list(self.ask("GET", path)["model_stats"])

    def index(self) -> list[dict[str, Any]]:
        return list(self.ask("POST", "/v2/repository/index"))

    def load(self, model: str) -> None:
        self.ask("POST", f"/v2/repository/models/{model}/load")

    def unload(self, model: str) -> None:
        self.ask("POST", f"/v2/repository/models/{model}/unload")

    def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: str = "",
        request_id: str = "",
        outputs: Sequence[str] | None = None,
        binary: bool = True,
        parameters: Mapping[str, Any] | None = None,
        datatype: str = "",
    ) -> Answer:
        asked: dict[str, Any] = {"inputs": []}
        for name, values in inputs.items():
            kind = datatype or np_to_triton_dtype(values.dtype)
            data = values.tolist()
            if values.dtype == object:
                data = [[one.decode() for one in row] for row in data]
            about = {"name": name, "datatype": kind, "shape": [*values.shape]}
            asked["inputs"].append({**about, "data": data})
        if request_id:
            asked["id"] = request_id
        if outputs:
            asked["outputs"] = [{"name": name} for name in outputs]
        if parameters:
            asked["parameters"] = dict(parameters)
        found = self.ask("POST", self._path(model, version, "/infer"), asked)
        arrays = {}
        for one in found["outputs"]:
            data = (
                [v.encode() for v in one["data"]] if one["datatype"] == "BYTES" else one["data"]
            )
            arrays[one["name"]] = np.array(data, DTYPES[one["datatype"]]).reshape(one["shape"])
        return Answer(found["model_name"], found["model_version"], found.get("id", ""), arrays)

    def close(self) -> None:
        self.http.close()


class KServeProcess:
    """A process with KServe's clients, one for each server and transport."""

    def __init__(self, kind: str, address: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [KSERVE, str(Path(__file__).with_name("kserve_child.py")), kind, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self._process.kill)

    def call(self, method: str, *arguments: Any) -> Any:
        """Make a call; Refused for what the server answers instead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps([method, arguments]) + "\n")
            stdin.flush()
            found = json.loads(stdout.readline())
        if "status" in found:
            status = NAMES[int(found["status"])] if found["status"].isdigit() else ""
            raise Refused(status or found["status"], found["message"])
        assert "answer" in found, found
        return found["answer"]


_kserve_process = functools.cache(KServeProcess)


class KServeClient:
    """KServe's ``InferenceRESTClient`` or ``InferenceGRPCClient``; it has few calls."""

    def __init__(self, kind: str, address: str) -> None:
        if why := why_no_kserve():
            pytest.skip(why)
        self.name = f"kserve-{kind}"
        self._process = _kserve_process(kind, address)

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"KServe's client has no call for {name}")

    def live(self) -> bool:
        return bool(self._process.call("live"))

    def ready(self) -> bool:
        return bool(self._process.call("ready"))

    def model_ready(self, model: str, version: str = "") -> bool:
        try:
            return bool(self._process.call("model_ready", model, version))
        except Refused as refused:
            if refused.status == "UNAVAILABLE" or self.name == "kserve-http":
                return False
            raise

    def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: str = "",
        request_id: str = "",
        outputs: Sequence[str] | None = None,
        binary: bool = True,
        parameters: Mapping[str, Any] | None = None,
        datatype: str = "",
    ) -> Answer:
        asked = {
            "model": model,
            "version": version,
            "id": request_id,
            "binary": binary,
            "outputs": list(outputs or ()),
            "parameters": dict(parameters or {}),
            "inputs": [
                (name, datatype or np_to_triton_dtype(values.dtype), kserve_child_array(values))
                for name, values in inputs.items()
            ],
        }
        found = self._process.call("infer", asked)
        arrays = {name: array_of(one) for name, one in found["outputs"].items()}
        # Over HTTP it invents an id where none is given.
        given = found["id"] if request_id else ""
        return Answer(found["model"], found["version"], given, arrays)

    def close(self) -> None:
        """Leave the process to the next one."""


def kserve_child_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as kserve_child.py reads it."""
    if array.dtype == object:
        data: Any = [base64.b64encode(one).decode() for one in array.ravel().tolist()]
    else:
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": [*array.shape], "data": data}


def array_of(one: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of what kserve_child.py wrote."""
    found: NDArray[Any]
    if one["dtype"] == "object":
        found = np.empty(len(one["data"]), object)
        found[:] = [base64.b64decode(text) for text in one["data"]]
    else:
        found = np.frombuffer(base64.b64decode(one["data"]), one["dtype"])
    shaped: NDArray[Any] = found.reshape(one["shape"])
    return shaped


def why_no_kserve() -> str:
    """Say what is missing; empty where KServe is there."""
    return "" if os.access(KSERVE, os.X_OK) else f"{KSERVE} is missing: make kserve"


CLIENTS: dict[str, Callable[[Host], Client]] = {
    "http": lambda host: TritonClient(tritonclient.http, host.http, "http", host.control),
    "aio": lambda host: TritonClient(tritonclient.http.aio, host.http, "aio", host.control),
    "grpc": lambda host: TritonClient(tritonclient.grpc, host.grpc, "grpc", host.control),
    "plain": lambda host: PlainClient(host.http, host.control),
    "kserve-http": lambda host: KServeClient("http", host.http),
    "kserve-grpc": lambda host: KServeClient("grpc", host.grpc),
}
