"""What every server of the Open Inference Protocol answers, by every client.

Each case runs against each server of ``hosts`` and by each client of ``CLIENTS``, with the same
assertions. ``make triton`` fetches the real Triton.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serving.conformance.clients import CLIENTS, TIMEOUT_S, Client, Refused
from tests.serving.conformance.models import DTYPES, WEIGHTS
from tests.serving.conformance.own_host import own_server
from tests.serving.conformance.triton_host import (
    Host,
    triton_server,
    why_no_triton,
    write_models,
)
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    # aiohttp's, of what tritonclient gives it.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

BOTH = ("NOT_FOUND", "INVALID_ARGUMENT")


@pytest.fixture(scope="module", params=["persia", "triton"])
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "persia":
        with own_server(folder) as running:
            yield running
        return
    if why := why_no_triton():
        pytest.skip(why)
    write_models(folder / "models")
    with triton_server(folder / "models", folder / "log", "echo", "linear") as running:
        yield running


@pytest.fixture(params=[*CLIENTS])
def client(request: pytest.FixtureRequest, host: Host) -> Iterator[Client]:
    one = CLIENTS[request.param](host)
    yield one
    one.close()


@pytest.fixture
def plain(host: Host) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{host.http}", timeout=TIMEOUT_S) as one:
        yield one


@pytest.fixture
def stub(host: Host) -> Iterator[Any]:
    with grpc.insecure_channel(host.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def rows(count: int = 3) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def values(datatype: str) -> np.ndarray[Any, Any]:
    if datatype == "BYTES":
        return np.array([[b"a", b""], ["\u00e9".encode(), b"long" * 50]], object)
    if datatype == "BOOL":
        return np.array([[True, False], [False, True]])
    if datatype.startswith("FP"):
        return np.array([[0.5, -1.25], [0.0, 2048.0]], DTYPES[datatype])
    about = np.iinfo(DTYPES[datatype])
    return np.array([[about.min, about.max], [0, 1]], DTYPES[datatype])


# --- what the server says of itself ----------------------------------------------------------


def test_live_and_ready(client: Client) -> None:
    assert client.live()
    assert client.ready()


def test_server_metadata(client: Client) -> None:
    about = client.server_metadata()
    assert about["name"]
    assert about["version"]
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(about["extensions"])


@pytest.mark.parametrize(
    ("model", "version", "is_ready"),
    [("echo", "", True), ("echo", "1", True), ("linear", "2", True), ("echo", "9", False)],
)
def test_model_ready(client: Client, model: str, version: str, is_ready: bool) -> None:
    assert client.model_ready(model, version) == is_ready


def test_an_unknown_model_is_not_ready(client: Client) -> None:
    # By gRPC ours says NOT_FOUND; Triton says no.
    try:
        is_ready = client.model_ready("none")
    except Refused as refused:
        is_ready = refused.status != "NOT_FOUND"
    assert not is_ready


def test_model_metadata(client: Client) -> None:
    about = client.model_metadata("linear")
    assert about["name"] == "linear"
    assert sorted(about["versions"]) == ["1", "2"]
    assert about["platform"]
    (x,) = about["inputs"]
    assert (x["name"], x["datatype"], x["shape"]) == ("x", "FP32", [-1, 4])
    found = {one["name"]: (one["datatype"], one["shape"]) for one in about["outputs"]}
    assert found == {"score": ("FP32", [-1]), "total": ("FP64", [1])}


def test_metadata_of_every_datatype(client: Client) -> None:
    about = client.model_metadata("echo", "1")
    assert {one["datatype"] for one in about["inputs"]} == set(DTYPES)


@pytest.mark.parametrize(("model", "version"), [("none", ""), ("echo", "9")])
def test_metadata_of_an_unknown_model(client: Client, model: str, version: str) -> None:
    with pytest.raises(Refused) as refused:
        client.model_metadata(model, version)
    assert refused.value.status == "NOT_FOUND"
    assert model in refused.value.message


# --- inference -----------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False])
def test_scores(client: Client, binary: bool) -> None:
    x = rows()
    found = client.infer("linear", {"x": x}, version="1", binary=binary)
    assert (found.model, found.version) == ("linear", "1")
    assert found.outputs["score"].dtype == np.float32
    assert found.outputs["score"].tolist() == (x @ WEIGHTS + 1).tolist()
    assert found.outputs["total"].tolist() == [float((x @ WEIGHTS + 1).sum())]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", [*DTYPES])
def test_datatype(client: Client, datatype: str, binary: bool) -> None:
    if datatype == "FP16" and (not binary or "plain" in str(getattr(client, "name", ""))):
        pytest.skip("the protocol has no FP16 in JSON")
    sent = values(datatype)
    found = client.infer("echo", {f"in_{datatype}": sent}, binary=binary)
    got = found.outputs[f"out_{datatype}"]
    assert got.shape == sent.shape
    assert got.dtype == sent.dtype
    assert got.tolist() == sent.tolist()


@pytest.mark.parametrize("count", [1, 2, 100, 2000])
def test_any_number_of_rows(client: Client, count: int) -> None:
    x = rows(count)
    assert client.infer("linear", {"x": x}).outputs["score"].shape == (count,)


def test_no_rows(client: Client) -> None:
    if getattr(client, "name", "") == "kserve-http":
        pytest.skip("KServe's client sends an empty tensor as JSON and as binary data at once")
    x = rows(0)
    assert client.infer("linear", {"x": x}).outputs["score"].shape == (0,)


def test_both_sizes_may_vary(client: Client) -> None:
    for shape in ((1, 7), (7, 1), (3, 5)):
        sent = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        got = client.infer("echo", {"in_INT64": sent}).outputs["out_INT64"]
        assert np.array_equal(got, sent)


def test_several_inputs(client: Client) -> None:
    sent = {f"in_{name}": values(name) for name in ("INT64", "BYTES", "FP32")}
    got = client.infer("echo", sent).outputs
    assert got.keys() == {f"out_{name[3:]}" for name in sent}
    for name, one in sent.items():
        assert got[f"out_{name[3:]}"].tolist() == one.tolist()


@pytest.mark.parametrize("sent", ["", "7", "a/b c", "\u00e9" * 20])
def test_the_id_comes_back(client: Client, sent: str) -> None:
    assert client.infer("linear", {"x": rows()}, request_id=sent).id == sent


def test_chosen_outputs(client: Client) -> None:
    found = client.infer("linear", {"x": rows()}, outputs=["total"])
    assert found.outputs.keys() == {"total"}


def test_parameters_are_taken(client: Client) -> None:
    given = {"flag": True, "count": 3, "text": "a"}
    found = client.infer("linear", {"x": rows()}, parameters=given)
    assert found.outputs["score"].shape == (3,)


@pytest.mark.parametrize("version", ["1", "2"])
def test_version(client: Client, version: str) -> None:
    found = client.infer("linear", {"x": rows()}, version=version)
    assert found.version == version
    assert found.outputs["score"][0] == rows()[0] @ WEIGHTS + int(version)


def test_without_a_version_the_newest_answers(client: Client) -> None:
    assert client.infer("linear", {"x": rows()}).version == "2"


def test_a_large_tensor(client: Client) -> None:
    sent = np.random.default_rng(1).random((1000, 500), np.float32)
    got = client.infer("echo", {"in_FP32": sent}).outputs["out_FP32"]
    assert np.array_equal(got, sent)


def test_several_clients_at_once(host: Host, client: Client) -> None:
    make = CLIENTS[str(getattr(client, "name", ""))]

    def ask(number: int) -> bool:
        own = make(host)
        try:
            x = rows() + number
            found = [own.infer("linear", {"x": x}, version="1") for _ in range(10)]
            return all(np.array_equal(one.outputs["score"], x @ WEIGHTS + 1) for one in found)
        finally:
            own.close()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(16)))


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "version"), [("none", ""), ("linear", "9")])
def test_an_unknown_model(client: Client, model: str, version: str) -> None:
    with pytest.raises(Refused) as refused:
        client.infer(model, {"x": rows()}, version=version)
    assert refused.value.status == "NOT_FOUND"
    assert model in refused.value.message


def test_an_unknown_input(client: Client) -> None:
    with pytest.raises(Refused, match="wrong") as refused:
        client.infer("linear", {"x": rows(), "wrong": rows()})
    assert refused.value.status == "INVALID_ARGUMENT"


def test_an_input_is_missing(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.infer("linear", {})
    assert refused.value.status == "INVALID_ARGUMENT"


def test_another_datatype(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.infer("linear", {"x": rows().astype(np.int32)})
    assert refused.value.status == "INVALID_ARGUMENT"
    assert "INT32" in refused.value.message


def test_another_shape(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.infer("linear", {"x": rows()[:, :3].copy()})
    assert refused.value.status == "INVALID_ARGUMENT"


def test_another_rank(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.infer("linear", {"x": rows()[0]})
    assert refused.value.status == "INVALID_ARGUMENT"


def test_an_unknown_output(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.infer("linear", {"x": rows()}, outputs=["wrong"])
    assert refused.value.status == "INVALID_ARGUMENT"


def test_values_that_the_model_refuses(client: Client) -> None:
    if getattr(client, "name", "") == "plain":
        pytest.skip("JSON has no nan")
    with pytest.raises(Refused, match="nan") as refused:
        client.infer("linear", {"x": rows() * np.float32(np.nan)})
    assert refused.value.status == "INVALID_ARGUMENT"


def test_after_an_error_it_answers(client: Client) -> None:
    for _ in range(3):
        with pytest.raises(Refused):
            client.infer("linear", {"wrong": rows()})
        assert client.infer("linear", {"x": rows()}).outputs["score"].shape == (3,)


# --- the repository, and statistics -----------------------------------------------------------


def test_repository_index(client: Client) -> None:
    found = {(one["name"], one["version"], one["state"]) for one in client.index()}
    assert {("echo", "1", "READY"), ("linear", "1", "READY"), ("linear", "2", "READY")} <= found


def test_unload_and_load(client: Client) -> None:
    client.unload("echo")
    until(lambda: not client.model_ready("echo"))
    with pytest.raises(Refused) as refused:
        client.infer("echo", {"in_FP32": values("FP32")})
    assert refused.value.status in ("NOT_FOUND", "UNAVAILABLE")
    client.load("echo")
    until(lambda: client.model_ready("echo"))
    assert client.infer("echo", {"in_FP32": values("FP32")}).outputs


def test_load_of_an_unknown_model(client: Client) -> None:
    with pytest.raises(Refused):
        client.load("none")


def test_statistics(client: Client) -> None:
    def counts() -> tuple[int, int]:
        (found,) = client.statistics("linear", "1")
        about = found["inference_stats"]["success"]
        return int(found.get("inference_count", 0)), int(about.get("count", 0))

    before = counts()
    client.infer("linear", {"x": rows()}, version="1")
    until(lambda: counts()[1] == before[1] + 1)
    assert counts()[0] > before[0]
    assert {one["name"] for one in client.statistics()} >= {"echo", "linear"}


def test_statistics_of_an_unknown_model(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.statistics("none")
    assert refused.value.status in BOTH


# --- HTTP, by its bytes -----------------------------------------------------------------------

X: dict[str, Any] = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[1, 2, 3, 4]]}
INFER = "/v2/models/linear/versions/1/infer"


@pytest.mark.parametrize("data", [[[1, 2, 3, 4]], [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]])
def test_json_data_is_nested_or_flat(plain: httpx.Client, data: object) -> None:
    found = plain.post(INFER, json={"inputs": [{**X, "data": data}]})
    assert found.status_code == 200
    (score,) = [one for one in found.json()["outputs"] if one["name"] == "score"]
    expected = float(np.arange(1, 5, dtype=np.float32) @ WEIGHTS + 1)
    assert score == {"name": "score", "datatype": "FP32", "shape": [1], "data": [expected]}


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"null", b'{"inputs": 3}', b'{"inputs": [{}]}', b"\xff\xfe", b"{}"],
)
def test_a_body_that_is_no_request(plain: httpx.Client, body: bytes) -> None:
    found = plain.post(INFER, content=body)
    # Triton says 500 where its parser of JSON fails.
    assert found.status_code in (400, 500)
    assert found.json()["error"]


@pytest.mark.parametrize(
    "changed",
    [
        *({"shape": [2, 4]}, {"shape": [1, -4]}, {"shape": "1"}, {"data": [["a"] * 4]}),
        *({"data": [[1, 2, 3]]}, {"datatype": "FP31"}, {"data": {}}),
    ],
)
def test_an_input_that_is_none(plain: httpx.Client, changed: dict[str, Any]) -> None:
    found = plain.post(INFER, json={"inputs": [{**X, **changed}]})
    assert found.status_code in (400, 500)
    assert found.json()["error"]


def test_binary_tensors_by_hand(plain: httpx.Client) -> None:
    raw = np.arange(1, 5, dtype="<f4").tobytes()
    about = {key: X[key] for key in ("name", "shape", "datatype")}
    about["parameters"] = {"binary_data_size": len(raw)}
    wanted = [{"name": "score", "parameters": {"binary_data": True}}]
    head = httpx.Request("POST", "http://x", json={"inputs": [about], "outputs": wanted}).read()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    found = plain.post(INFER, content=head + raw, headers=headers)
    assert found.status_code == 200
    length = int(found.headers["Inference-Header-Content-Length"])
    (score,) = struct.unpack("<f", found.content[length:])
    assert score == float(np.arange(1, 5, dtype=np.float32) @ WEIGHTS + 1)


def test_all_outputs_binary_by_one_parameter(plain: httpx.Client) -> None:
    asked = {"inputs": [X], "parameters": {"binary_data_output": True}}
    found = plain.post(INFER, json=asked)
    length = int(found.headers["Inference-Header-Content-Length"])
    assert len(found.content) - length == 4 + 8


@pytest.mark.parametrize("size", [15, 17, -1, 1 << 40])
def test_a_wrong_binary_size(plain: httpx.Client, size: int) -> None:
    about = {key: X[key] for key in ("name", "shape", "datatype")}
    about["parameters"] = {"binary_data_size": size}
    head = httpx.Request("POST", "http://x", json={"inputs": [about]}).read()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    found = plain.post(INFER, content=head + bytes(16), headers=headers)
    assert found.status_code in (400, 500)
    assert found.json()["error"]


def test_a_wrong_header_length(plain: httpx.Client) -> None:
    headers = {"Inference-Header-Content-Length": "99999"}
    found = plain.post(INFER, json={"inputs": [X]}, headers=headers)
    assert found.status_code == 400


def test_a_raw_body_for_a_model_of_one_input(plain: httpx.Client) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    raw = np.arange(8, dtype="<f4").tobytes()
    found = plain.post(INFER, content=raw, headers=headers)
    # Triton takes only 1-d inputs this way.
    assert found.status_code in (200, 400)


def test_paths_that_are_none(plain: httpx.Client) -> None:
    assert plain.get("/v2/none").status_code == 404
    assert plain.get(INFER).status_code in (404, 405)


# --- gRPC, by its messages --------------------------------------------------------------------


def request(**fields: Any) -> Any:
    asked = service_pb2.ModelInferRequest(model_name="linear", model_version="1", **fields)
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return asked


def test_raw_contents(stub: Any) -> None:
    asked = request(raw_input_contents=[np.arange(4, dtype="<f4").tobytes()], id="r")
    found = stub.ModelInfer(asked, timeout=TIMEOUT_S)
    assert found.id == "r"
    assert [one.name for one in found.outputs] == ["score", "total"]
    score = np.frombuffer(found.raw_output_contents[0], "<f4")
    assert score.tolist() == [float(np.arange(4, dtype=np.float32) @ WEIGHTS + 1)]


def test_typed_contents(stub: Any) -> None:
    asked = request()
    asked.inputs[0].contents.fp32_contents.extend([0, 1, 2, 3])
    found = stub.ModelInfer(asked, timeout=TIMEOUT_S)
    score = np.frombuffer(found.raw_output_contents[0], "<f4")
    assert score.tolist() == [float(np.arange(4, dtype=np.float32) @ WEIGHTS + 1)]


@pytest.mark.parametrize("raw", [[], [b"123"], [bytes(20)]])
def test_raw_contents_of_another_size(stub: Any, raw: list[bytes]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request(raw_input_contents=raw), timeout=TIMEOUT_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_deadline_that_has_passed(stub: Any) -> None:
    asked = request(raw_input_contents=[bytes(16)])
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(asked, timeout=-1.0)
    assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert stub.ModelInfer(asked, timeout=TIMEOUT_S).model_name == "linear"
