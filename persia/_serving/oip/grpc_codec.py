"""Requests and answers of inference over gRPC: raw contents, and contents by type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from persia._serving.batcher import InferJob
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.oip.tensors import (
    BYTES,
    DTYPES,
    Array,
    RequestLimits,
    add_pad,
    checked_name,
    checked_shape,
    datatype_of,
    from_raw,
    strings,
    to_raw,
)
from persia._serving.request import DecodedRequest, InferOutcome, RequestedOutput
from persia.errors import DataError

# Field of typed contents by datatype. FP16 and BF16 have none.
_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def parse(message: Any, data: bytes) -> Any:
    """Return a message; DataError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise DataError(f"expected a message {message.DESCRIPTOR.name}: {error}") from None


def decode(data: bytes, job: InferJob, limits: RequestLimits) -> DecodedRequest:
    """Return the request of a message, and note in the job which model it names."""
    message = parse(pb.ModelInferRequest, data)
    job.model, job.version = message.model_name, message.model_version
    given, raw = message.inputs, message.raw_input_contents
    if not given:
        raise DataError("expected at least one input")
    if len(given) > limits.tensors or len(message.outputs) > limits.tensors:
        raise DataError(f"expected at most {limits.tensors} inputs and outputs")
    if raw and len(raw) != len(given):
        raise DataError(f"expected raw contents of {len(given)} inputs, got {len(raw)}")
    request = DecodedRequest({}, id=message.id, is_binary=True)
    if message.parameters:
        request.parameters = _parameters(message.parameters)
    for number, one in enumerate(given):
        name = checked_name(request.inputs, one.name)
        shape, count = checked_shape(name, [*one.shape], limits)
        if one.parameters:
            parameters = _parameters(one.parameters)
            if "shared_memory_region" in parameters:
                raise DataError(f"input {name!r}: shared memory is not supported")
            add_pad(request, name, parameters)
        if raw:
            if one.HasField("contents"):
                raise DataError(f"input {name!r}: expected contents or raw contents, got both")
            request.inputs[name] = from_raw(name, one.datatype, shape, raw[number])
        else:
            request.inputs[name] = _from_contents(name, one, shape, count)
    outputs = []
    for asked in message.outputs:
        if asked.parameters:
            parameters = _parameters(asked.parameters)
            if parameters.keys() & {"shared_memory_region", "classification"}:
                raise DataError(
                    f"output {asked.name!r}: shared memory and classification are not supported"
                )
        outputs.append(RequestedOutput(asked.name, True))
    request.outputs = outputs
    return request


def encode(outcome: InferOutcome) -> bytes:
    """Return the message of an answer, with raw contents."""
    message = pb.ModelInferResponse(
        model_name=outcome.model, model_version=outcome.version, id=outcome.id
    )
    for name, values, _ in outcome.outputs:
        message.outputs.add(name=name, datatype=datatype_of(values), shape=values.shape)
        message.raw_output_contents.append(to_raw(values))
    return bytes(message.SerializeToString())


def _from_contents(name: str, one: Any, shape: tuple[int, ...], count: int) -> Array:
    field = _FIELDS.get(one.datatype)
    if field is None:
        known = ", ".join(_FIELDS)
        raise DataError(
            f"input {name!r}: expected a datatype of {known} for contents, got {one.datatype!r}"
        )
    contents = getattr(one.contents, field)
    if len(contents) != count:
        raise DataError(
            f"input {name!r}: expected {count} values in {field} for shape {[*shape]}, got "
            f"{len(contents)}"
        )
    if one.datatype == BYTES:
        return strings(contents).reshape(shape)
    dtype = DTYPES[one.datatype]
    try:
        values = np.array(contents, dtype)
    except OverflowError:
        raise DataError(
            f"input {name!r}: expected values of {one.datatype}, got larger"
        ) from None
    return values.reshape(shape)


def _parameters(found: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {}
    for name, one in found.items():
        which = one.WhichOneof("parameter_choice")
        parameters[name] = getattr(one, which) if which else None
    return parameters
