"""Answers TorchServe's gRPC calls ``Ping`` and ``Predictions``, for old clients of PERSIA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from persia._serving.access import Need
from persia._serving.batcher import InferJob
from persia._serving.oip import grpc_codec
from persia._serving.oip.grpc_service import UnaryCalls, answer_call
from persia._serving.request import DecodedRequest, InferOutcome
from persia._serving.service import InferenceService
from persia.errors import DataError

PACKAGE = "org.pytorch.serve.grpc.inference"
SERVICE = f"{PACKAGE}.InferenceAPIsService"


def make_messages() -> dict[str, Any]:
    """Return the classes of torchserve.proto by name."""
    fields = descriptor_pb2.FieldDescriptorProto
    text, raw = fields.TYPE_STRING, fields.TYPE_BYTES
    file = descriptor_pb2.FileDescriptorProto(
        name="persia/torchserve.proto", package=PACKAGE, syntax="proto3"
    )

    def add(message: Any, name: str, number: int, kind: Any, **more: Any) -> None:
        label = more.pop("label", fields.LABEL_OPTIONAL)
        message.field.add(name=name, number=number, type=kind, label=label, **more)

    asked = file.message_type.add(name="PredictionsRequest")
    add(asked, "model_name", 1, text)
    add(asked, "model_version", 2, text)
    entry = asked.nested_type.add(name="InputEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, text)
    add(entry, "value", 2, raw)
    place = f".{PACKAGE}.PredictionsRequest.InputEntry"
    repeated = fields.LABEL_REPEATED
    add(asked, "input", 3, fields.TYPE_MESSAGE, type_name=place, label=repeated)
    add(file.message_type.add(name="PredictionResponse"), "prediction", 1, raw)
    add(file.message_type.add(name="TorchServeHealthResponse"), "health", 1, text)
    # A pool of its own: a client's generated module of these names may be loaded, too.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        one.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{PACKAGE}.{one.name}")
        )
        for one in file.message_type
    }


_MESSAGES = make_messages()


def format_scores(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the first output's values as text, one number a line.

    The lines of ``[`` and ``]`` around them are TorchServe's; the old client drops the first
    and the last line unseen.
    """
    values = next(iter(outputs.values())).ravel()
    return json.dumps(values.tolist(), indent=2).encode()


class TorchServeFrontend:
    """Methods of TorchServe's service, for ``start_grpc``; requests queue with all others."""

    def __init__(self, service: InferenceService, calls: UnaryCalls) -> None:
        self._service, self._calls = service, calls

    def handlers(self) -> tuple[Any, ...]:
        """Return what a gRPC server is given."""
        methods = {
            "Ping": self._calls.method("Ping", Need.NOTHING, None, self._ping),
            "Predictions": self._calls.method("Predictions", Need.TOKEN, None, self._predict),
        }
        return (grpc.method_handlers_generic_handler(SERVICE, methods),)

    async def _ping(self, data: bytes, context: Any) -> bytes:
        status = "Healthy" if self._service.is_ready else "Unhealthy"
        reply = _MESSAGES["TorchServeHealthResponse"](health=json.dumps({"status": status}))
        return bytes(reply.SerializeToString())

    async def _predict(self, data: bytes, context: Any) -> bytes:
        return bytes(
            await answer_call(self._service, partial(_decode, data), _encode, data, context)
        )


def _decode(data: bytes, job: InferJob) -> DecodedRequest:
    asked = grpc_codec.parse(_MESSAGES["PredictionsRequest"], data)
    # TorchServe's archiver calls the first version 1.0.
    version = asked.model_version.removesuffix(".0")
    if version and not version.isdigit():
        raise DataError(f"model_version: expected a number, got {asked.model_version!r:.80}")
    if not asked.input:
        raise DataError("input: expected the key 'batch', got none")
    job.model, job.version = asked.model_name, version
    inputs = {name: np.array([value], np.object_) for name, value in asked.input.items()}
    return DecodedRequest(inputs)


def _encode(outcome: InferOutcome) -> bytes:
    outputs = {name: values for name, values, _ in outcome.outputs}
    reply = _MESSAGES["PredictionResponse"](prediction=format_scores(outputs))
    return bytes(reply.SerializeToString())
