"""gRPC of the Open Inference Protocol, by tritonclient and by calls that stay silent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from persia._serving.oip.proto import inference_pb2 as pb
from persia._serving.service import ServiceSettings
from tests.serving.oip.serving_models import (
    EchoModel,
    FakeRepository,
    rows,
    serving,
)
from tests.support.waiting import PATIENCE_S, until

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def repository() -> FakeRepository:
    return FakeRepository(echo=EchoModel())


@pytest.fixture
def address(repository: FakeRepository) -> Iterator[str]:
    with serving(repository) as running:
        yield running.grpc


def echo_input(values: Any = None) -> Any:
    return triton.InferInput("x", [3, 4], "FP32").set_data_from_numpy(
        rows() if values is None else values
    )


def test_tritonclient(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo", "1")
        about = client.get_model_metadata("echo")
        assert (about.inputs[0].name, list(about.inputs[0].shape)) == ("x", [-1, 4])
        assert "statistics" in client.get_server_metadata().extensions
        found = client.infer("echo", [echo_input()], request_id="9")
        assert np.array_equal(found.as_numpy("x"), rows())
        assert found.get_response().id == "9"

        def statistics() -> Any:
            (counts,) = client.get_inference_statistics("echo").model_stats
            return counts

        # An answer is counted a moment after it was given.
        until(lambda: statistics().inference_stats.success.count == 1)
        assert statistics().inference_count == 3


def ask(address: str, message: Any) -> Any:
    with grpc.insecure_channel(address) as channel:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return pb.ModelInferResponse.FromString(
            channel.unary_unary(INFER)(data, timeout=PATIENCE_S)
        )


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -1.0]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"", b"\xff"]),
    ],
)
def test_typed_contents(address: str, datatype: str, field: str, values: list[Any]) -> None:
    message = pb.ModelInferRequest(model_name="echo")
    one = message.inputs.add(name="x", datatype=datatype, shape=[2])
    getattr(one.contents, field).extend(values)
    found = ask(address, message)
    assert found.outputs[0].datatype == datatype
    assert [*found.outputs[0].shape] == [2]


def bad(**changes: Any) -> Any:
    one = {"name": "x", "datatype": "FP32", "shape": [1, 4], **changes}
    return pb.ModelInferRequest(model_name="echo", inputs=[one], raw_input_contents=[bytes(16)])


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT", "ModelInferRequest"),
        (pb.ModelInferRequest(model_name="echo"), "INVALID_ARGUMENT", "at least one"),
        (bad(shape=[2, 4]), "INVALID_ARGUMENT", "32 bytes"),
        (bad(shape=[-1]), "INVALID_ARGUMENT", "dimensions"),
        (bad(shape=[1 << 60, 0]), "INVALID_ARGUMENT", "elements"),
        (bad(datatype="X"), "INVALID_ARGUMENT", "datatype"),
        (bad(name="y"), "INVALID_ARGUMENT", "unexpected inference input"),
        (
            pb.ModelInferRequest(model_name="z", inputs=bad().inputs),
            "INVALID_ARGUMENT",
            "values",
        ),
    ],
)
def test_bad_messages(address: str, message: Any, code: str, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(address, message)
    assert caught.value.code() == grpc.StatusCode[code]
    assert text in caught.value.details()


def test_unknown_models_and_late_answers(repository: FakeRepository, address: str) -> None:
    go_on = threading.Event()
    with triton.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException, match="NOT_FOUND"):
            client.infer("other", [echo_input()])
        repository.held["echo"].before = lambda inputs: go_on.wait(PATIENCE_S)
        with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED|Deadline"):
            client.infer("echo", [echo_input()], client_timeout=0.05)
        go_on.set()


def test_silent_calls_hold_up_no_other(repository: FakeRepository) -> None:
    settings = ServiceSettings(num_threads=1, max_waiting=1)
    # More calls than are read at the same time.
    with (
        serving(repository, settings) as running,
        silent_calls(running.grpc, 64),
        triton.InferenceServerClient(running.grpc) as client,
    ):
        found = client.infer("echo", [echo_input()], client_timeout=PATIENCE_S)
        assert np.array_equal(found.as_numpy("x"), rows())


def test_silent_calls_are_given_up(repository: FakeRepository) -> None:
    with (
        serving(repository, body_timeout_s=2.0) as running,
        silent_calls(running.grpc, 64) as silent,
    ):
        codes = {one.exception(PATIENCE_S).code() for one in silent}
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}


@contextlib.contextmanager
def silent_calls(address: str, count: int) -> Iterator[list[Any]]:
    """Begin calls that send no message."""
    end = threading.Event()

    def silence() -> Iterator[bytes]:
        end.wait(2 * PATIENCE_S)
        yield from ()

    with grpc.insecure_channel(address) as channel:
        try:
            yield [channel.stream_unary(INFER).future(silence()) for _ in range(count)]
        finally:
            end.set()


def test_health_of_grpc_itself(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=PATIENCE_S) == b"\x08\x01"


def test_tokens_and_control(repository: FakeRepository, tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("token", "control")}
    for name, path in paths.items():
        path.write_text(f"{name}-0123456789abcdef")
    with serving(
        repository, token_file=paths["token"], control_token_file=paths["control"]
    ) as running:
        shown = {"authorization": "Bearer token-0123456789abcdef"}
        control = {"authorization": "Bearer control-0123456789abcdef"}
        with triton.InferenceServerClient(running.grpc) as client:
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
                client.infer("echo", [echo_input()])
            client.infer("echo", [echo_input()], headers=shown)
            with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
                client.unload_model("echo", headers=shown)
            client.unload_model("echo", headers=control)
            (line,) = client.get_model_repository_index(headers=control).models
            assert (line.name, line.state) == ("echo", "UNAVAILABLE")
            with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                client.infer("echo", [echo_input()], headers=shown)
            client.load_model("echo", headers=control)
            assert client.is_model_ready("echo", headers=shown)
