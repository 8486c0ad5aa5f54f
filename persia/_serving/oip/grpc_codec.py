"""Requests and answers of inference over gRPC: raw contents, and contents by type."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from persia._serving.batcher import InferJob
from persia._serving.oip.plans import DataSpan, PlanCache, RequestPlan
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.oip.tensors import (
    BYTES,
    DTYPES,
    Array,
    RequestLimits,
    add_pad,
    check_parameters,
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
# Raw contents of an input: field 7, of a length that follows.
_RAW_TAG = 7 << 3 | 2
# Bytes by which a plan is found: a message begins with the names of model and version.
_KEY_BYTES = 64


class MessagePlan(NamedTuple):
    """How messages are read that differ from one that came in their raw contents only."""

    head: bytes  # whole fields, none of them raw contents
    frames: tuple[tuple[bytes, int], ...]  # before each of these: tag and length, and where
    model: str
    version: str
    request: RequestPlan

    def takes(self, data: bytes) -> bool:
        """Whether a message of the same length as the first one is like it."""
        starts = data.startswith
        return starts(self.head) and all(starts(frame, at) for frame, at in self.frames)


def parse(message: Any, data: bytes) -> Any:
    """Return a message; DataError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise DataError(f"expected a message {message.DESCRIPTOR.name}: {error}") from None


def decode(
    data: bytes,
    job: InferJob,
    limits: RequestLimits,
    plans: PlanCache[MessagePlan] | None = None,
) -> DecodedRequest:
    """Return the request of a message, and note in the job which model it names.

    With ``plans``, which are for these limits, only the data is read of messages like others.
    """
    key = len(data), _begin_of(data)
    plan = None if plans is None else plans.find(key)
    if plan is not None and plan.takes(data):
        job.model, job.version = plan.model, plan.version
        return plan.request.read(data, len(plan.head))
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
        request.parameters = _parameters("request", message)
    for number, one in enumerate(given):
        name = checked_name(request.inputs, one.name)
        shape, count = checked_shape(name, [*one.shape], limits)
        if one.parameters:
            parameters = _parameters("input", one)
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
            parameters = _parameters("output", asked)
            if parameters.keys() & {"shared_memory_region", "classification"}:
                raise DataError(
                    f"output {asked.name!r}: shared memory and classification are not supported"
                )
        outputs.append(RequestedOutput(asked.name, True))
    request.outputs = outputs
    if plans is not None and raw and plans.wants(key):
        plan = _plan_of(data, message, request)
        if plan is not None:
            plans.put(key, plan, len(plan.head) + plan.request.num_held)
    return request


def _plan_of(data: bytes, message: Any, request: DecodedRequest) -> MessagePlan | None:
    """Return the plan of a message that was read, None if its raw contents are not its end."""
    spans, frames, place = [], [], 0
    for one, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        frame = _frame_of(len(raw))
        frames.append((frame, place))
        place += len(frame)
        spans.append(DataSpan(one.name, one.datatype, place, len(raw)))
        place += len(raw)
    if not RequestPlan.fits(request, spans, len(spans)):
        return None
    head = data[: len(data) - place]
    try:
        # Whole fields alone can be read: the head of a message means the same in any other.
        if pb.ModelInferRequest.FromString(head).raw_input_contents:
            return None
    except DecodeError:
        return None
    plan = MessagePlan(
        head,
        tuple((frame, len(head) + at) for frame, at in frames),
        message.model_name,
        message.model_version,
        RequestPlan(request, spans),
    )
    return plan if plan.takes(data) else None


def _begin_of(data: bytes) -> bytes:
    """Return the first bytes of a message, of those before its raw contents."""
    place, end = 0, min(_KEY_BYTES, len(data) - 1)
    while place < end and data[place] != _RAW_TAG:
        if data[place] & 7 != 2:  # no field of the protocol: all of them say their length
            return b""
        size = data[place + 1]
        place += 2 + size if size < 128 else _KEY_BYTES  # longer than the key
    return data[: min(place, _KEY_BYTES)]


def _frame_of(size: int) -> bytes:
    frame = bytearray((_RAW_TAG,))
    while size > 127:
        frame.append(size & 127 | 128)
        size >>= 7
    frame.append(size)
    return bytes(frame)


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


def _parameters(place: str, owner: Any) -> dict[str, Any]:
    parameters = {}
    for name, one in owner.parameters.items():
        which = one.WhichOneof("parameter_choice")
        parameters[name] = getattr(one, which) if which else None
    check_parameters(place, getattr(owner, "name", ""), parameters)
    return parameters
