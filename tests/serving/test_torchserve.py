"""The port that clients of TorchServe call, by a stub made from the .proto."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, empty_pb2
from grpc_tools import protoc

import persia
from persia._serving.torchserve import PACKAGE, SERVICE, make_messages
from persia.errors import DataError
from tests.serving.oip.serving_models import (
    EchoModel,
    FakeRepository,
    Running,
    serving,
)
from tests.support.waiting import PATIENCE_S, until

MESSAGES = make_messages()


class BytesModel(EchoModel):
    """Scores the bytes of ``batch``."""

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.before(inputs)
        if "batch" not in inputs:
            raise DataError("expected the input 'batch'")
        (sent,) = inputs["batch"].tolist()
        if sent == b"fail":
            raise RuntimeError("secret")
        return {"score": np.frombuffer(sent, np.uint8).astype(np.float32).reshape(-1, 1) / 10}


@pytest.fixture
def repository() -> FakeRepository:
    return FakeRepository(adult_income=BytesModel())


@pytest.fixture
def running(repository: FakeRepository) -> Iterator[Running]:
    with serving(repository) as one:
        yield one


@pytest.fixture
def channel(running: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.torchserve) as one:
        yield one


def predict(
    channel: grpc.Channel,
    timeout_s: float = PATIENCE_S,
    metadata: Sequence[tuple[str, str]] = (),
    **fields: Any,
) -> list[float]:
    call = channel.unary_unary(
        f"/{SERVICE}/Predictions",
        request_serializer=MESSAGES["PredictionsRequest"].SerializeToString,
        response_deserializer=MESSAGES["PredictionResponse"].FromString,
    )
    asked = MESSAGES["PredictionsRequest"](**fields)
    reply = call(asked, timeout=timeout_s, metadata=metadata)
    # As the old client reads it: a number a line, between a first line and a last.
    first, *lines, last = reply.prediction.decode().splitlines()
    assert (first, last) == ("[", "]")
    return [float(line.strip().replace(",", "")) for line in lines]


def test_messages_are_those_of_the_proto(tmp_path: Path) -> None:
    folder = Path(persia.__file__).parent / "_serving"
    out = tmp_path / "set"
    arguments = ["protoc", f"-I{folder}", f"--descriptor_set_out={out}", "torchserve.proto"]
    include = Path(protoc.__file__).parent / "_proto"
    assert protoc.main([*arguments, f"-I{include}"]) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    assert file.package == PACKAGE
    assert [f"{PACKAGE}.{one.name}" for one in file.service] == [SERVICE]
    for message in file.message_type:
        made = descriptor_pb2.DescriptorProto()
        MESSAGES[message.name].DESCRIPTOR.CopyToProto(made)
        for one in [*message.field, *made.field, *made.nested_type, *message.nested_type]:
            for field in [one, *getattr(one, "field", ())]:
                if hasattr(field, "json_name"):
                    field.ClearField("json_name")
        assert made == message


@pytest.mark.parametrize("version", ["", "1", "1.0"])
def test_one_number_a_line(channel: grpc.Channel, version: str) -> None:
    sent = {"batch": bytes([1, 2, 30])}
    found = predict(channel, model_name="adult_income", model_version=version, input=sent)
    assert np.array_equal(np.array(found, np.float32), np.array([0.1, 0.2, 3.0], np.float32))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"model_name": "none"}, "NOT_FOUND"),
        ({"model_version": "7"}, "NOT_FOUND"),
        ({"model_version": "x"}, "INVALID_ARGUMENT"),
        ({"input": {}}, "INVALID_ARGUMENT"),
        ({"input": {"data": b"1"}}, "INVALID_ARGUMENT"),
        ({"input": {"batch": b"fail"}}, "INTERNAL"),
    ],
)
def test_refused(channel: grpc.Channel, changed: dict[str, Any], code: str) -> None:
    fields = {"model_name": "adult_income", "input": {"batch": b"1"}, **changed}
    with pytest.raises(grpc.RpcError) as refused:
        predict(channel, **fields)
    assert refused.value.code().name == code
    assert "Traceback" not in refused.value.details()


def test_ping(channel: grpc.Channel, running: Running) -> None:
    call = channel.unary_unary(
        f"/{SERVICE}/Ping",
        request_serializer=empty_pb2.Empty.SerializeToString,
        response_deserializer=MESSAGES["TorchServeHealthResponse"].FromString,
    )
    assert json.loads(call(empty_pb2.Empty(), timeout=PATIENCE_S).health) == {
        "status": "Healthy"
    }
    running.service.is_draining = True
    assert "Unhealthy" in call(empty_pb2.Empty(), timeout=PATIENCE_S).health


def test_requests_are_counted_and_have_deadlines(
    running: Running, channel: grpc.Channel, repository: FakeRepository
) -> None:
    fields: dict[str, Any] = {"model_name": "adult_income", "input": {"batch": b"12"}}
    predict(channel, **fields)

    def num_answered() -> int:
        (found,) = running.service.read_statistics("adult_income")
        return int(found["inference_stats"]["success"]["count"])

    until(lambda: num_answered() == 1)  # counted a moment after the answer
    go_on = threading.Event()
    repository.held["adult_income"].before = lambda inputs: go_on.wait(PATIENCE_S)
    with pytest.raises(grpc.RpcError) as late:
        predict(channel, timeout_s=0.05, **fields)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    go_on.set()


def test_a_token_is_asked_for(repository: FakeRepository, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("token-" * 4)
    fields: dict[str, Any] = {"model_name": "adult_income", "input": {"batch": b"1"}}
    with (
        serving(repository, token_file=token) as running,
        grpc.insecure_channel(running.torchserve) as channel,
    ):
        with pytest.raises(grpc.RpcError) as refused:
            predict(channel, **fields)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        shown = [("authorization", f"Bearer {'token-' * 4}")]
        assert predict(channel, metadata=shown, **fields)
