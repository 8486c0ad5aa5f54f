"""Requests read by a plan, against the same ones read as a whole."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia._serving.batcher import InferJob
from persia._serving.oip import grpc_codec, http_codec
from persia._serving.oip.grpc_codec import MessagePlan
from persia._serving.oip.plans import MOST_BYTES, DataSpan, PlanCache, RequestPlan
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.oip.tensors import DTYPES, RequestLimits
from persia._serving.request import DecodedRequest
from persia.errors import DataError

LIMITS = RequestLimits(elements=1000, tensors=6)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
USUAL = st.sampled_from(("INT64", "INT64", "FP32", "UINT8"))
RARE = st.sampled_from((*DTYPES, "BYTES", "BF16"))
# What else a header of HTTP has; the last is wrong.
MORE: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    (
        {"parameters": {"binary_data_output": True, "timeout": 5}},
        {"id": "9", "outputs": [{"name": "y"}]},
        {"outputs": 5},
    )
)


@st.composite
def forms(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw names, datatypes, shapes and pads of inputs, most of which can have a plan."""
    made = []
    count = draw(st.integers(1, 4))
    for name in draw(st.permutations(["a", "b", "c", "a.pad"]))[:count]:
        one: dict[str, Any] = {
            "name": name,
            "datatype": draw(RARE if draw(st.integers(0, 9)) == 0 else USUAL),
            "shape": draw(SHAPES),
        }
        if draw(st.integers(0, 4)) == 0:
            one["pad"] = draw(st.integers(-1, 1 << 63))
        made.append(one)
    return made


def size_of(form: dict[str, Any]) -> int:
    count = int(np.prod(form["shape"], dtype=np.int64))
    datatype = form["datatype"]
    if datatype in DTYPES:
        return count * DTYPES[datatype].itemsize
    return count * (4 if datatype == "BYTES" else 2)  # empty texts


def raw_of(data: st.DataObject, form: dict[str, Any]) -> bytes:
    size = size_of(form)
    if form["datatype"] == "BYTES":
        return bytes(size)
    return data.draw(st.binary(min_size=size, max_size=size))


def body_of(forms: list[dict[str, Any]], raw: list[bytes], more: dict[str, Any]) -> bytes:
    """Return the length of a header, as text, and the body behind it."""
    inputs = []
    for form, content in zip(forms, raw, strict=True):
        parameters = {"binary_data_size": len(content)}
        if "pad" in form:
            parameters["pad"] = form["pad"]
        tensor = {name: form[name] for name in ("name", "datatype", "shape")}
        inputs.append({**tensor, "parameters": parameters})
    header = orjson.dumps({"inputs": inputs, **more})
    return b"%d:" % len(header) + header + b"".join(raw)


def message_of(forms: list[dict[str, Any]], raw: list[bytes]) -> bytes:
    message = pb.ModelInferRequest(model_name="clicks", model_version="3", id="7")
    for form in forms:
        tensor = {name: form[name] for name in ("name", "datatype", "shape")}
        one = message.inputs.add(**tensor)
        if "pad" in form:
            kind = "int64_param" if form["pad"] < 1 << 63 else "uint64_param"
            setattr(one.parameters["pad"], kind, form["pad"])
    message.outputs.add(name="y")
    message.raw_input_contents.extend(raw)
    return bytes(message.SerializeToString())


class HTTP:
    """Bodies with the length of their header before them."""

    def __init__(self) -> None:
        self.plans: PlanCache[RequestPlan] = PlanCache()

    def read(self, data: bytes, plans: Any) -> DecodedRequest:
        length, _, body = data.partition(b":")
        return http_codec.decode(body, length.decode("latin-1"), None, LIMITS, plans)


class GRPC:
    def __init__(self) -> None:
        self.plans: PlanCache[MessagePlan] = PlanCache()

    def read(self, data: bytes, plans: Any) -> DecodedRequest:
        job = InferJob(lambda job: DecodedRequest({}), lambda one: one, lambda job: None, 0, 0)
        request = grpc_codec.decode(data, job, LIMITS, plans)
        request.parameters = {**request.parameters, "model": (job.model, job.version)}
        return request


Protocol = HTTP | GRPC


def outcome(protocol: Protocol, data: bytes, plans: Any) -> Any:
    """Return all that a request has, or its error."""
    try:
        request = protocol.read(data, plans)
    except DataError as error:
        return type(error), str(error)
    inputs = [
        (name, one.dtype.str, one.shape, one.tolist(), one.flags.writeable, one.flags.aligned)
        for name, one in request.inputs.items()
    ]
    outputs = [*request.outputs]
    parameters = dict(request.parameters)
    # As text: NaN is not equal to itself.
    return repr((inputs, request.id, parameters, outputs, request.is_binary))


def damage(data: st.DataObject, message: bytes) -> bytes:
    """Cut, extend or change a message."""
    place = data.draw(st.integers(0, len(message) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=3))
    return data.draw(
        st.sampled_from(
            (
                message[:place],
                message + noise,
                message[:place] + noise + message[place + len(noise) :],
                message[:place] + noise + message[place:],
            )
        )
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), forms(), st.booleans())
def test_a_plan_reads_what_is_read_without(
    data: st.DataObject, of: list[dict[str, Any]], is_http: bool
) -> None:
    protocol: Protocol = HTTP() if is_http else GRPC()
    more = data.draw(MORE)

    def make() -> bytes:
        raw = [raw_of(data, form) for form in of]
        return body_of(of, raw, more) if is_http else message_of(of, raw)

    for _ in range(4):
        message = make()
        expected = outcome(protocol, message, None)
        assert outcome(protocol, message, protocol.plans) == expected
        damaged = damage(data, message)
        expected = outcome(protocol, damaged, None)
        assert outcome(protocol, damaged, protocol.plans) == expected


@pytest.mark.parametrize("is_http", [True, False])
def test_only_what_comes_again_and_is_right_has_a_plan(is_http: bool) -> None:
    protocol: Protocol = HTTP() if is_http else GRPC()
    good = [{"name": "a", "datatype": "INT64", "shape": [2]}]
    texts = [{"name": "a", "datatype": "BYTES", "shape": [2]}]
    wrong = [{"name": "a", "datatype": "INT64", "shape": [3]}]

    def ask(of: list[dict[str, Any]], size: int) -> Any:
        raw = [bytes(size)]
        message = body_of(of, raw, {}) if is_http else message_of(of, raw)
        return outcome(protocol, message, protocol.plans)

    for of, size in ((texts, 8), (wrong, 16)):
        for _ in range(3):
            ask(of, size)
    ask(good, 16)
    assert len(protocol.plans) == 0
    ask(good, 16)
    assert len(protocol.plans) == 1


@pytest.mark.parametrize("name", ["a", "a" * 40, "a" * 70])
@pytest.mark.parametrize("count", [1, 20])
def test_messages_of_one_form_have_one_plan_whatever_their_data(name: str, count: int) -> None:
    protocol = GRPC()
    of = [{"name": name, "datatype": "INT64", "shape": [count]}]
    for number in range(5):
        values = np.arange(count) + number
        request = protocol.read(message_of(of, [values.tobytes()]), protocol.plans)
        assert request.inputs[name].tolist() == values.tolist()
        assert len(protocol.plans) == (number > 0)


def test_arrays_of_two_requests_are_apart() -> None:
    protocol = HTTP()
    of = [{"name": "a", "datatype": "INT64", "shape": [2], "pad": 5}]
    message = body_of(of, [bytes(16)], {})
    for _ in range(3):
        one = protocol.read(message, protocol.plans)
    assert len(protocol.plans) == 1
    one.inputs["a"][:] = one.inputs["a.pad"][:] = 9
    other = protocol.read(message, protocol.plans)
    assert (other.inputs["a"].tolist(), other.inputs["a.pad"].tolist()) == ([0, 0], [5])


def test_large_requests_have_none() -> None:
    half = DataSpan("a", "INT64", 0, MOST_BYTES // 2)
    request = DecodedRequest({})
    assert RequestPlan.fits(request, [half, half], 2)
    assert not RequestPlan.fits(request, [half, half, half], 3)


@pytest.mark.parametrize("is_http", [True, False])
@pytest.mark.parametrize("form", ["small", "wide", "nested"])
def test_memory_of_plans_is_bounded(form: str, is_http: bool) -> None:
    """By what they take, and not by their headers, of which some have a few bytes."""
    most_bytes = 1 << 19
    protocol: Protocol = HTTP() if is_http else GRPC()
    plans: Any = PlanCache(most_bytes)
    count = 6 if form == "wide" else 1
    of = [{"name": f"{name}", "datatype": "UINT8", "shape": [1]} for name in range(count)]
    more: dict[str, Any] = {"parameters": {"x": [[]] * 3000}} if form == "nested" else {}
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100 if form == "nested" else 1500):
            of[0]["name"] = f"f{number}"
            raw = [b"1"] * count
            data = body_of(of, raw, more) if is_http else message_of(of, raw)
            for _ in range(2):
                protocol.read(data, plans)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used - before < 2 * most_bytes
    assert (len(plans) > 20) is not (form == "nested" and is_http)


def test_plans_are_bounded() -> None:
    plans: PlanCache[int] = PlanCache(most_bytes=10)
    for number in range(5):
        plans.put(number, number, 4)
    assert [plans.find(number) for number in range(5)] == [None, None, None, 3, 4]
    plans.put(4, 7, 4)
    plans.put(9, 9, 11)
    assert [plans.find(number) for number in (3, 4, 9)] == [3, 7, None]
    # A key is wanted when it comes again.
    assert [plans.wants(key) for key in ("a", "b", "a", "a")] == [False, False, True, True]
    for number in range(10_000):
        plans.wants(number)
    assert len(plans) == 2
