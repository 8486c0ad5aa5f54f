"""Calls of KServe's own clients: ``kserve_child.py http|grpc ADDRESS``, in a Python with them.

Each line of the input is a call in JSON, and each line of the output its answer. It imports
nothing of PERSIA: KServe pins packages of which this project has others.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from typing import Any

import grpc
import httpx
import kserve  # type: ignore[import-not-found]
import numpy as np
from kserve.protocol import infer_type  # type: ignore[import-not-found]

TIMEOUT_S = 60.0


def to_array(one: dict[str, Any]) -> Any:
    """Return the array that ``from_array`` wrote."""
    if one["dtype"] == "object":
        found = np.empty(len(one["data"]), object)
        found[:] = [base64.b64decode(text) for text in one["data"]]
    else:
        found = np.frombuffer(base64.b64decode(one["data"]), one["dtype"])
    return found.reshape(one["shape"])


def from_array(array: Any) -> dict[str, Any]:
    """Return an array as JSON can have it."""
    if array.dtype == object:
        each = [one.encode() if isinstance(one, str) else one for one in array.ravel().tolist()]
        data: Any = [base64.b64encode(one).decode() for one in each]
    else:
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def request_of(asked: dict[str, Any], is_http: bool) -> Any:
    """Return the request that KServe's clients take."""
    inputs = []
    for name, kind, array in asked["inputs"]:
        values = to_array(array)
        one = infer_type.InferInput(name, list(values.shape), kind)
        one.set_data_from_numpy(values, binary_data=asked["binary"])
        one._datatype = kind  # it has set that of the array, and the suite sends wrong ones
        inputs.append(one)
    binary = {"binary_data": asked["binary"]} if is_http else None
    wanted = [infer_type.RequestedOutput(name, binary) for name in asked["outputs"]]
    parameters = dict(asked["parameters"])
    if is_http and asked["binary"] and not wanted:
        parameters["binary_data_output"] = True
    return infer_type.InferRequest(
        asked["model"],
        inputs,
        request_id=asked["id"] or None,
        parameters=parameters or None,
        request_outputs=wanted or None,
        model_version=asked["version"] or None,
    )


def answer_of(found: Any) -> dict[str, Any]:
    """Return an answer as JSON can have it."""
    outputs = {one.name: from_array(one.as_numpy()) for one in found.outputs}
    about = {"model": found.model_name, "version": found.model_version, "id": found.id}
    return {**about, "outputs": outputs}


class Http:
    """``InferenceRESTClient``; a version is named in the path, where it puts the model."""

    def __init__(self, address: str) -> None:
        config = kserve.RESTConfig(protocol="v2", timeout=TIMEOUT_S)
        self._client, self._url = kserve.InferenceRESTClient(config), f"http://{address}"
        # Its answers have no version, though the server's have; and of health it wants JSON,
        # where Triton sends nothing.
        self._version, self._is_success = "", False
        self._client._client.event_hooks = {"response": [self._note_version]}

    async def _note_version(self, response: Any) -> None:
        body = await response.aread()
        self._is_success = response.is_success
        if response.is_success and body.startswith(b"{"):
            length = int(response.headers.get("inference-header-content-length", len(body)))
            self._version = json.loads(body[:length]).get("model_version", "")

    async def live(self) -> bool:
        return await self._health(self._client.is_server_live)

    async def ready(self) -> bool:
        return await self._health(self._client.is_server_ready)

    async def _health(self, ask: Any) -> bool:
        try:
            return bool(await ask(self._url))
        except json.JSONDecodeError:
            return self._is_success

    async def model_ready(self, model: str, version: str) -> bool:
        return bool(await self._client.is_model_ready(self._url, _path(model, version)))

    async def infer(self, asked: dict[str, Any]) -> dict[str, Any]:
        request, path = request_of(asked, True), _path(asked["model"], asked["version"])
        found = answer_of(await self._client.infer(self._url, request, path))
        return found | {"version": self._version}


class Grpc:
    """``InferenceGRPCClient``."""

    def __init__(self, address: str) -> None:
        self._client = kserve.InferenceGRPCClient(address, timeout=TIMEOUT_S, retries=0)

    async def live(self) -> bool:
        return bool(await self._client.is_server_live())

    async def ready(self) -> bool:
        return bool(await self._client.is_server_ready())

    async def model_ready(self, model: str, version: str) -> bool:
        # It has no argument for a version.
        if version:
            request = kserve.protocol.grpc.grpc_predict_v2_pb2.ModelReadyRequest(
                name=model, version=version
            )
            return bool((await self._client._client_stub.ModelReady(request)).ready)
        return bool(await self._client.is_model_ready(model))

    async def infer(self, asked: dict[str, Any]) -> dict[str, Any]:
        return answer_of(await self._client.infer(request_of(asked, False)))


def _path(model: str, version: str) -> str:
    return f"{model}/versions/{version}" if version else model


async def answer(client: Any, line: str) -> dict[str, Any]:
    """Make a call, and return its answer or what was answered instead."""
    method, arguments = json.loads(line)
    try:
        return {"answer": await getattr(client, method)(*arguments)}
    except httpx.HTTPStatusError as error:
        # It reads what is wrong only if the server says that it is JSON.
        message = f"{error} {error.response.text}"
        return {"status": str(error.response.status_code), "message": message}
    except grpc.aio.AioRpcError as error:
        return {"status": error.code().name, "message": error.details()}
    except Exception as error:
        return {"problem": repr(error)}


async def serve(kind: str, address: str) -> None:
    """Answer until the input ends."""
    client = Http(address) if kind == "http" else Grpc(address)
    loop = asyncio.get_running_loop()
    # KServe writes lines of its own to the standard output.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        replies.write(json.dumps(await answer(client, line)) + "\n")


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
