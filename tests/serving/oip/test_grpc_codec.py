"""Messages of gRPC, read and written without a server."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia._serving.batcher import InferJob
from persia._serving.oip.grpc_codec import decode, encode
from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.oip.tensors import RequestLimits
from persia._serving.request import DecodedRequest, InferOutcome
from persia.errors import DataError

LIMITS = RequestLimits(tensors=2)


def job() -> InferJob:
    return InferJob(lambda job: DecodedRequest({}), lambda one: one, lambda job: None, 0.0, 0)


def message() -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="m", model_version="3", id="7")
    one = made.inputs.add(name="x", datatype="INT64", shape=[2])
    one.parameters["pad"].int64_param = 0
    made.parameters["timeout"].int64_param = 5
    made.raw_input_contents.append(np.arange(2).tobytes())
    return made


def test_parameters_pad_and_model() -> None:
    asked = job()
    found = decode(message().SerializeToString(), asked, LIMITS)
    assert (asked.model, asked.version, found.id) == ("m", "3", "7")
    assert {name: one.tolist() for name, one in found.inputs.items()} == {
        "x": [0, 1],
        "x.pad": [0],
    }
    assert found.parameters == {"timeout": 5}


def test_parameters_in_a_wrong_place_are_refused() -> None:
    theirs, misspelt, elsewhere = message(), message(), message()
    theirs.inputs[0].parameters["content_type"].string_param = "np"
    theirs.parameters["priority"].int64_param = 1
    assert decode(theirs.SerializeToString(), job(), LIMITS).inputs["x"].tolist() == [0, 1]
    misspelt.inputs[0].parameters["padding"].int64_param = 0
    elsewhere.parameters["pad"].int64_param = 0
    for one, expected in (
        (misspelt, "parameter 'padding' of input 'x': expected 'pad', the id"),
        (elsewhere, "parameter 'pad' of the request: expected it of an input"),
    ):
        with pytest.raises(DataError) as refused:
            decode(one.SerializeToString(), job(), LIMITS)
        assert expected in str(refused.value)


def test_refused_messages() -> None:
    many = message()
    for name in "ab":
        many.inputs.add(name=name, datatype="INT64", shape=[0])
    both = message()
    both.inputs[0].contents.int64_contents.append(1)
    more = message()
    more.raw_input_contents.append(b"")
    shared = message()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    ranked = message()
    ranked.outputs.add(name="y").parameters["classification"].int64_param = 3
    small = pb.ModelInferRequest()
    small.inputs.add(name="x", datatype="INT8", shape=[1]).contents.int_contents.append(200)
    half = pb.ModelInferRequest()
    half.inputs.add(name="x", datatype="FP16", shape=[1]).contents.fp32_contents.append(1)
    for wrong in (many, both, more, shared, ranked, small, half):
        with pytest.raises(DataError):
            decode(wrong.SerializeToString(), job(), LIMITS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 80))
def test_any_bytes_are_read_or_refused(noise: bytes, place: int) -> None:
    data = message().SerializeToString()
    for one in (noise, data[:place] + noise + data[place:], data[:place]):
        with contextlib.suppress(DataError):
            decode(one, job(), LIMITS)


def test_an_answer() -> None:
    values = np.array([[1], [2]], np.uint8)
    data = encode(InferOutcome("m", "1", "", [("y", values, True)]))
    found = pb.ModelInferResponse.FromString(data)
    assert [*found.outputs[0].shape] == [2, 1]
    assert found.outputs[0].datatype == "UINT8"
    assert found.raw_output_contents[0] == b"\x01\x02"
