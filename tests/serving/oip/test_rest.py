"""HTTP of the Open Inference Protocol, by tritonclient and by plain requests."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http as triton

from persia._serving.batcher import InferJob
from persia._serving.oip.tensors import RequestLimits
from persia._serving.service import ServiceSettings
from tests.serving.oip.serving_models import (
    EchoModel,
    FakeRepository,
    rows,
    serving,
)
from tests.support.fixtures import Monkey
from tests.support.waiting import PATIENCE_S, until
from tests.support.web import ask

if TYPE_CHECKING:
    import httpx

JSON = {
    "inputs": [
        {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[0.5, 1, 2, 3]]},
    ]
}


@pytest.fixture
def repository() -> FakeRepository:
    many = EchoModel(
        version=3, inputs=tuple((name, "FP32", [-1]) for name in ("a", "b", "s", "user"))
    )
    return FakeRepository(echo=EchoModel(), many=many)


@pytest.fixture
def url(repository: FakeRepository) -> Iterator[str]:
    with serving(repository, grpc_port=None) as running:
        yield f"http://{running.http}"


def test_health_metadata_and_statistics(url: str) -> None:
    with triton.InferenceServerClient(url.partition("//")[2]) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.is_model_ready("echo", "1")
        assert not client.is_model_ready("other")
        assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
        about = client.get_model_metadata("echo")
        assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        asked = triton.InferInput("x", [3, 4], "FP32").set_data_from_numpy(rows())
        client.infer("echo", [asked])

        def statistics() -> Any:
            (found,) = client.get_inference_statistics("echo")["model_stats"]
            return found

        # An answer is counted a moment after it was given.
        until(lambda: statistics()["inference_stats"]["success"]["count"] == 1)
        assert statistics()["inference_count"] == 3


def test_json_and_binary_give_the_same(url: str) -> None:
    assert ask("POST", f"{url}/v2/models/echo/infer", json=JSON).json() == {
        "model_name": "echo",
        "model_version": "1",
        "outputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.5, 1.0, 2.0, 3.0]}
        ],
    }
    with triton.InferenceServerClient(url.partition("//")[2]) as client:
        for sends_binary in (False, True):
            for gets_binary in (False, True):
                asked = triton.InferInput("x", [3, 4], "FP32")
                asked.set_data_from_numpy(rows(), binary_data=sends_binary)
                wanted = [triton.InferRequestedOutput("x", binary_data=gets_binary)]
                found = client.infer("echo", [asked], outputs=wanted, request_id="7")
                assert np.array_equal(found.as_numpy("x"), rows())
                assert found.get_response()["id"] == "7"
        found = client.infer("echo", [asked], request_compression_algorithm="gzip")
        assert np.array_equal(found.as_numpy("x"), rows())


def test_several_inputs_of_any_datatype(url: str) -> None:
    values: dict[str, Any] = {
        "a": np.array([2**63, 2**64 - 1], np.uint64),
        "b": np.array([True, False]),
        "s": np.array([b"\x00\xff", b""], object),
        "user": np.array([-(2**63)], np.int64),
    }
    names = {"a": "UINT64", "b": "BOOL", "s": "BYTES", "user": "INT64"}
    inputs = [
        triton.InferInput(name, [*one.shape], names[name]).set_data_from_numpy(one)
        for name, one in values.items()
    ]
    with triton.InferenceServerClient(url.partition("//")[2]) as client:
        found = client.infer("many", inputs, model_version="3")
        for name, one in values.items():
            assert found.as_numpy(name).tolist() == one.tolist()
            assert found.as_numpy(name).dtype == one.dtype


def test_a_parameter_pad_is_an_input(url: str) -> None:
    one = {"name": "a", "shape": [2], "datatype": "INT64", "data": [1, 0]}
    asked = {"inputs": [{**one, "parameters": {"pad": 0}}]}
    found = ask("POST", f"{url}/v2/models/many/infer", json=asked).json()
    assert sorted((out["name"], out["data"]) for out in found["outputs"]) == [
        ("a", [1, 0]),
        ("a.pad", [0]),
    ]


def test_a_raw_body_for_a_model_of_one_input(url: str) -> None:
    found = ask(
        "POST",
        f"{url}/v2/models/echo/infer",
        content=rows().tobytes(),
        headers={"Inference-Header-Content-Length": "0"},
    ).json()
    assert found["outputs"][0]["shape"] == [3, 4]


def bad(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**JSON["inputs"][0], **changes}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("echo", b"{", 400, "JSON"),
        ("echo", b"[]", 400, "object"),
        ("echo", b"{}", 400, "inputs"),
        ("echo", b'{"inputs": [1]}', 400, "object for each"),
        ("echo", bad(name="wrong"), 400, "unexpected inference input 'wrong'"),
        ("echo", bad(datatype="FP8"), 400, "datatype"),
        ("echo", bad(shape=[2, 4]), 400, "shape"),
        ("echo", bad(shape=[1 << 40, 0], data=[]), 400, "elements"),
        ("echo", bad(shape=[-1, 4]), 400, "dimensions"),
        ("echo", bad(data=["a"] * 4), 400, "values of FP32"),
        ("echo", bad(data=[None] * 4), 400, "values of FP32"),
        ("echo", bad(data=[1e300] * 4), 400, "larger"),
        ("echo", bad(datatype="INT8", data=[300] * 4), 400, "larger"),
        ("echo", bad(datatype="INT8", data=[1.5] * 4), 400, "values of INT8"),
        ("echo", {**JSON, "outputs": [{"name": "y"}]}, 400, "unexpected inference output 'y'"),
        ("echo", {**JSON, "parameters": {"timeout": "soon"}}, 400, "microseconds"),
        ("echo", {"inputs": JSON["inputs"] * 2}, 400, "twice"),
        ("other", JSON, 404, "other"),
        ("echo/versions/9", JSON, 404, "9"),
        ("a/b/c/d", JSON, 404, "not found"),
    ],
)
def test_bad_requests(url: str, path: str, body: Any, status: int, text: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = ask("POST", f"{url}/v2/models/{path}/infer", content=content)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize("path", ["echo/infer", "echo/versions/1/infer"])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_another_method_is_refused(url: str, path: str, method: str) -> None:
    answer = ask(method, f"{url}/v2/models/{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"] == "Method Not Allowed"


def test_bad_lengths(url: str) -> None:
    header = json.dumps(bad(parameters={"binary_data_size": 16})).replace('"data"', '"no"')
    for length, extra, text in (
        ("x", 16, "a number"),
        ("99999", 16, "at most the body"),
        (str(len(header)), 15, "remaining 15"),
        (str(len(header)), 17, "16 bytes of binary data, got 17"),
    ):
        answer = ask(
            "POST",
            f"{url}/v2/models/echo/infer",
            content=header.encode() + bytes(extra),
            headers={"Inference-Header-Content-Length": length},
        )
        assert answer.status_code == 400
        assert text in answer.json()["error"]


def test_a_small_body_does_not_become_a_large_one(repository: FakeRepository) -> None:
    with serving(
        repository, grpc_port=None, limits=RequestLimits(body_bytes=1 << 16)
    ) as running:
        url = f"http://{running.http}/v2/models/echo/infer"
        packed = gzip.compress(bytes(1 << 20))
        answer = ask("POST", url, content=packed, headers={"Content-Encoding": "gzip"})
        assert (answer.status_code, "at most 65536" in answer.text) == (400, True)
        assert ask("POST", url, content=bytes(1 << 17)).status_code == 413
        answer = ask("POST", url, content=iter([bytes(1 << 16), b"x"]))  # of unknown length
        assert answer.status_code == 413


def test_stalled_bodies_hold_up_no_other(repository: FakeRepository) -> None:
    settings = ServiceSettings(num_threads=1, max_waiting=1)
    with serving(repository, settings, grpc_port=None) as running, stalled(running.http):
        for _ in range(3):
            answer = ask("POST", f"http://{running.http}/v2/models/echo/infer", json=JSON)
            assert answer.status_code == 200


def test_stalled_bodies_are_given_up(repository: FakeRepository) -> None:
    with (
        serving(repository, grpc_port=None, body_timeout_s=0.5) as running,
        stalled(running.http) as held,
    ):
        for number, one in enumerate(held):
            assert one.recv(100)[:13] == (b"" if number == 7 else b"HTTP/1.1 504 ")


@contextlib.contextmanager
def stalled(address: str) -> Iterator[list[socket.socket]]:
    """Send parts of bodies by several connections, and of a head by the last."""
    host, _, port = address.partition(":")
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            for _ in range(8)
        ]
        for number, one in enumerate(held):
            one.sendall(head[:30] if number == 7 else head + b"{" * (number % 2))
        yield held


def test_a_full_queue_is_429_and_a_deadline_504(
    repository: FakeRepository, monkeypatch: Monkey
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(inputs: Any) -> None:
        started.set()
        assert go_on.wait(PATIENCE_S)

    repository.held["echo"].before = wait
    settings = ServiceSettings(num_threads=1, max_waiting=1)
    with serving(repository, settings, grpc_port=None) as running:
        url = f"http://{running.http}/v2/models/echo/infer"
        late = {"X-Request-Timeout-Ms": "50"}
        check = InferJob.check_deadline

        def check_for_the_caller(job: InferJob) -> None:
            if not threading.current_thread().name.startswith("persia-model"):
                check(job)

        with monkeypatch.context() as patch:
            # The first is begun, even if its thread comes to it late.
            patch.setattr(InferJob, "check_deadline", check_for_the_caller)
            first = ask("POST", url, json=JSON, headers=late)
            assert first.status_code == 504
            assert started.wait(PATIENCE_S)
        second = ask("POST", url, json=JSON, headers=late)  # stays in the queue
        assert second.status_code == 504
        third = ask("POST", url, json=JSON)
        assert third.status_code == 429
        go_on.set()
        running.service.drain(PATIENCE_S)
        assert repository.held["echo"].calls == [1]  # the second was not begun


def test_a_stop_finishes_what_is_in_flight(
    repository: FakeRepository, monkeypatch: Monkey
) -> None:
    started, go_on, looked = threading.Event(), threading.Event(), threading.Event()
    pause = asyncio.sleep

    async def pause_or_wait(seconds: float) -> None:
        """Let the delay end when the test has looked, be that soon or late."""
        if seconds == delay_s:
            assert await asyncio.to_thread(looked.wait, PATIENCE_S)
        else:
            await pause(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause_or_wait)

    def wait(inputs: Any) -> None:
        started.set()
        assert go_on.wait(PATIENCE_S)

    repository.held["echo"].before = wait
    answers: list[httpx.Response] = []
    delay_s = 12.5
    with serving(repository, grpc_port=None, drain_delay_s=delay_s) as running:
        url = f"http://{running.http}/v2"
        asking = threading.Thread(
            target=lambda: answers.append(ask("POST", f"{url}/models/echo/infer", json=JSON))
        )
        asking.start()
        assert started.wait(PATIENCE_S)
        running.server.stop()
        until(lambda: ask("GET", f"{url}/health/ready").status_code == 503)
        assert ask("GET", f"{url}/health/live").json() == {"live": True, "ready": False}
        looked.set()
        go_on.set()
        assert running.stop()
        asking.join(PATIENCE_S)
    assert answers[0].status_code == 200


def test_an_error_of_the_model_is_500(repository: FakeRepository, url: str) -> None:
    def fail(inputs: Any) -> None:
        raise RuntimeError("a matrix\nof another shape")

    repository.held["echo"].before = fail
    answer = ask("POST", f"{url}/v2/models/echo/infer", json=JSON)
    assert answer.status_code == 500
    assert answer.json() == {"error": "the model failed: RuntimeError: a matrix"}


def test_tokens(repository: FakeRepository, tmp_path: Path) -> None:
    paths = {}
    for name in ("token", "control"):
        paths[name] = tmp_path / name
        paths[name].write_text(f"{name}-0123456789abcdef\n")
    with serving(
        repository,
        grpc_port=None,
        token_file=paths["token"],
        control_token_file=paths["control"],
    ) as running:
        url = f"http://{running.http}/v2"
        shown = {name: {"Authorization": f"Bearer {name}-0123456789abcdef"} for name in paths}
        assert ask("GET", f"{url}/health/ready").status_code == 200
        assert ask("GET", f"{url}/models/echo").status_code == 401
        assert ask("POST", f"{url}/models/echo/infer", json=JSON).status_code == 401
        index = f"{url}/repository/index"
        for name, status in (("token", 403), ("control", 200)):
            headers = shown[name]
            answer = ask("POST", f"{url}/models/echo/infer", json=JSON, headers=headers)
            assert answer.status_code == 200
            assert ask("POST", index, headers=headers).status_code == status
        with triton.InferenceServerClient(running.http) as client:
            control = shown["control"]
            client.unload_model("echo", headers=control)
            (line, _) = client.get_model_repository_index(headers=control)
            assert line["state"] == "UNAVAILABLE"
            answer = ask("POST", f"{url}/models/echo/infer", json=JSON, headers=control)
            assert answer.status_code == 503
            client.load_model("echo", headers=control)
            assert client.is_model_ready("echo", headers=control)


def test_control_is_off_without_its_token(url: str) -> None:
    answer = ask("POST", f"{url}/v2/repository/index")
    assert (answer.status_code, "control" in answer.json()["error"]) == (403, True)
