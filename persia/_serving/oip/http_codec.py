"""Requests and answers of inference over HTTP: JSON, and binary data behind it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from persia._serving.oip.plans import DataSpan, PlanCache, RequestPlan
from persia._serving.oip.tensors import (
    Array,
    RequestLimits,
    add_pad,
    check_parameters,
    checked_name,
    checked_shape,
    datatype_of,
    from_json,
    from_raw,
    to_json,
    to_raw,
)
from persia._serving.request import DecodedRequest, InferOutcome, RequestedOutput
from persia.errors import DataError

HEADER_LENGTH = "Inference-Header-Content-Length"
_JSON = b"application/json"
_BINARY = b"application/octet-stream"
_SHARED = "shared_memory_region"


def decode(
    body: bytes,
    header_length: str | None,
    encoding: str | None,
    limits: RequestLimits,
    plans: PlanCache[RequestPlan] | None = None,
) -> DecodedRequest:
    """Return the request of a body; of ``header_length`` None, all of it is JSON.

    With ``plans``, which are for these limits, a header that came before is not read again.
    """
    body = _decompressed(body, encoding, limits)
    if header_length is None:
        length = len(body)
    else:
        if not (header_length.isascii() and header_length.isdigit()):
            raise DataError(f"{HEADER_LENGTH}: expected a number, got {header_length!r}")
        length = int(header_length[:20])
        if length > len(body):
            raise DataError(
                f"{HEADER_LENGTH}: expected at most the body's {len(body)} bytes, got {length}"
            )
        if length == 0:
            return DecodedRequest({}, read_raw=lambda about: raw_input(about, body, limits))
    text = body[:length]
    plan = None if plans is None or header_length is None else plans.find(text)
    if plan is not None and len(body) - length == plan.num_bytes:
        return plan.read(body, length)
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        has_none = b"NaN" in text or b"Infinity" in text
        what = "JSON, which has no NaN and no Infinity" if has_none else "JSON"
        raise DataError(f"expected a request in {what}: {error}") from None
    if not isinstance(header, dict):
        raise DataError(f"expected a JSON object, got {type(header).__name__}")
    given = header.get("inputs")
    if not isinstance(given, list) or not given:
        raise DataError("expected a list `inputs` of at least one tensor")
    if len(given) > limits.tensors:
        raise DataError(f"expected at most {limits.tensors} inputs, got {len(given)}")
    request = DecodedRequest({}, id=_text(header, "id"))
    request.parameters = _parameters(header, "request")
    data, spans, place = memoryview(body)[length:], [], 0
    for one in given:
        span = _read_input(request, one, data, place, limits)
        if span is not None:
            spans.append(span)
            place += span.size
    if place != len(data):
        raise DataError(f"expected {place} bytes of binary data, got {len(data)}")
    asked = request.parameters.get("binary_data_output", False)
    request.is_binary = _flag("binary_data_output", asked)
    request.outputs = _read_outputs(header.get("outputs"), request.is_binary, limits)
    if plans is None or not RequestPlan.fits(request, spans, len(given)):
        return request
    if plans.wants(text):
        plan = RequestPlan(request, spans)
        plans.put(text, plan, length + plan.num_held)
    return request


def raw_input(
    metadata: Mapping[str, Any], body: bytes, limits: RequestLimits
) -> dict[str, Array]:
    """Return the input of a raw body, for a model that has one."""
    inputs = metadata["inputs"]
    if len(inputs) != 1:
        raise DataError(f"expected a raw body for a model of one input, got {len(inputs)}")
    name, datatype = inputs[0]["name"], inputs[0]["datatype"]
    shape = [int(dim) for dim in inputs[0]["shape"]]
    if datatype == "BYTES":
        values = np.empty(1, object)
        values[0] = body
        return {name: values}
    known = 1
    for dim in shape:
        known *= dim if dim > 0 else 1
    size = 2 if datatype in ("FP16", "BF16") else np.dtype(_numpy_name(datatype)).itemsize
    if shape.count(-1) > 1 or (-1 in shape and len(body) % (known * size)):
        raise DataError(f"input {name!r}: {len(body)} bytes do not make a shape {shape}")
    if -1 in shape:
        shape[shape.index(-1)] = len(body) // (known * size)
    checked, _ = checked_shape(name, shape, limits)
    return {name: from_raw(name, datatype, checked, body)}


def encode(outcome: InferOutcome) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of an answer."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, values, is_binary in outcome.outputs:
        one: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(values),
            "shape": list(values.shape),
        }
        if is_binary:
            blobs.append(to_raw(values))
            one["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            one["data"] = to_json(name, values)
        outputs.append(one)
    header: dict[str, Any] = {
        "model_name": outcome.model,
        "model_version": outcome.version,
        "outputs": outputs,
    }
    if outcome.id:
        header["id"] = outcome.id
    text = orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)
    if not blobs:
        return [(b"content-type", _JSON), (b"content-length", b"%d" % len(text))], text
    body = b"".join([text, *blobs])
    return [
        (b"content-type", _BINARY),
        (b"content-length", b"%d" % len(body)),
        (HEADER_LENGTH.lower().encode(), b"%d" % len(text)),
    ], body


def _decompressed(body: bytes, encoding: str | None, limits: RequestLimits) -> bytes:
    if encoding in (None, "", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise DataError(f"Content-Encoding: expected gzip or deflate, got {encoding!r}")
    # Small bodies may hold gigabytes.
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16 if encoding == "gzip" else zlib.MAX_WBITS)
    try:
        found = reader.decompress(body, limits.body_bytes)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"expected a body in {encoding}: {error}") from None
    if reader.unconsumed_tail:
        raise DataError(f"expected a body of at most {limits.body_bytes} bytes, got more")
    if not reader.eof:
        raise DataError(f"expected a whole body in {encoding}, got a part of one")
    return found


def _read_input(
    request: DecodedRequest, one: object, data: memoryview, place: int, limits: RequestLimits
) -> DataSpan | None:
    """Add an input to the request; return what it has of the data from ``place`` on, if any."""
    if not isinstance(one, dict):
        raise DataError(f"expected an object for each input, got {type(one).__name__}")
    name = checked_name(request.inputs, one.get("name"))
    shape, _ = checked_shape(name, one.get("shape"), limits)
    datatype = one.get("datatype")
    parameters = _parameters(one, "input", name)
    size = parameters.pop("binary_data_size", None)
    if _SHARED in parameters:
        raise DataError(f"input {name!r}: shared memory is not supported")
    add_pad(request, name, parameters)
    if size is None:
        if "data" not in one:
            raise DataError(f"input {name!r}: expected `data` or `binary_data_size`")
        request.inputs[name] = from_json(name, datatype, shape, one["data"])
        return None
    if "data" in one:
        raise DataError(f"input {name!r}: expected `data` or `binary_data_size`, got both")
    if type(size) is not int or not 0 <= size <= len(data) - place:
        raise DataError(
            f"input {name!r}: expected binary_data_size of at most the remaining "
            f"{len(data) - place} bytes, got {size!r}"
        )
    request.inputs[name] = from_raw(name, datatype, shape, data[place : place + size])
    return DataSpan(name, str(datatype), place, size)


def _read_outputs(
    given: object, is_binary: bool, limits: RequestLimits
) -> Sequence[RequestedOutput]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > limits.tensors:
        raise DataError(f"expected a list of at most {limits.tensors} outputs")
    outputs = []
    for one in given:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str):
            raise DataError("expected an object with a name for each output")
        parameters = _parameters(one, "output", name)
        if _SHARED in parameters:
            raise DataError(f"output {name!r}: shared memory is not supported")
        if parameters.get("classification"):
            raise DataError(f"output {name!r}: classification is not supported")
        asked = _flag("binary_data", parameters.get("binary_data", is_binary))
        outputs.append(RequestedOutput(name, asked))
    return outputs


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise DataError(f"parameter {name}: expected true or false, got {value!r}")
    return value


def _text(header: Mapping[str, Any], name: str) -> str:
    value = header.get(name, "")
    if not isinstance(value, str):
        raise DataError(f"{name}: expected a string, got {type(value).__name__}")
    return value


def _parameters(header: Mapping[str, Any], place: str, name: str = "") -> dict[str, Any]:
    found = header.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        of = f"{place} {name!r}" if name else f"the {place}"
        raise DataError(f"parameters of {of}: expected an object")
    check_parameters(place, name, found)
    return found


def _numpy_name(datatype: str) -> str:
    return datatype.lower().replace("fp", "float")
