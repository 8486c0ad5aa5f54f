"""The routes of the original, and those under /v1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kopf")
pytest.importorskip("httpx")

from click.testing import CliRunner
from starlette.testclient import TestClient

from persia import k8s_utils
from persia._k8s import server
from persia._k8s.server import find_token, make_app
from persia.errors import ConfigError
from tests.k8s.memory_api import MemoryApi
from tests.k8s.specs import original
from tests.support.fixtures import Monkey

OK = {"success": True, "err_msg": ""}
JOB = {"job_name": "adult", "namespace": "default"}
BEARER = {"Authorization": "Bearer secret"}
IS_JSON = {"Content-Type": "application/json"}


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def client_of(api: MemoryApi, *, is_local: bool = False) -> TestClient:
    @asynccontextmanager
    async def connect() -> Any:
        yield api

    return TestClient(make_app(connect, "secret", is_local=is_local))


@pytest.fixture
def client(api: MemoryApi) -> Iterator[TestClient]:
    with client_of(api) as found:
        found.headers.update(BEARER)
        yield found


def get(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    """As the original's clients ask: GET with a body."""
    return client.request("GET", path, json=body)


def test_a_job_s_life_by_the_original_s_routes(api: MemoryApi, client: TestClient) -> None:
    body = {"job_identifier": JOB, "spec": original()["spec"]}
    assert client.post("/apply", json=body).json() == OK
    assert api.of("PersiaJob")["adult"]["spec"] == original()["spec"]
    body["spec"] = original(logLevel="info")["spec"]
    assert client.post("/apply", json=body).json() == OK
    assert api.of("PersiaJob")["adult"]["metadata"]["generation"] == 2
    assert get(client, "/listjobs", {}).json() == {
        "execution_results": OK,
        "resources": ["adult"],
    }
    labels = {"persia_job": "adult"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": labels}}
    api.put({**pod, "status": {"phase": "Running"}})
    assert get(client, "/listpods", JOB).json() == {"execution_results": OK, "resources": ["p"]}
    found = get(client, "/podstatus", {"pod_name": "p", "namespace": "default"}).json()
    assert found["execution_results"] == OK
    assert json.loads(found["body"]) == {"phase": "Running"}
    assert client.post("/delete", json=JOB).json() == OK
    api.collect()
    assert not api.of("PersiaJob")


def test_the_original_s_routes_always_answer_200(api: MemoryApi, client: TestClient) -> None:
    body = {"job_identifier": JOB, "spec": {"persiaEnv": {}}}
    found = client.post("/apply", json=body)
    assert found.status_code == 200
    assert not found.json()["success"]
    assert "spec.persiaEnv.PERSIA_GLOBAL_CONFIG: the key is required" in found.json()["err_msg"]
    found = get(client, "/podstatus", {"pod_name": "none"})
    assert (found.status_code, found.json()["body"]) == (200, "None")
    assert "404" in found.json()["execution_results"]["err_msg"]
    assert get(client, "/listpods", {}).json()["resources"] == []
    api.refuses["PersiaJob"] = (403, "forbidden")
    body["spec"] = original()["spec"]
    assert client.post("/apply", json=body).json() == {"success": False, "err_msg": "forbidden"}


def test_v1_has_the_statuses_of_http(api: MemoryApi, client: TestClient) -> None:
    assert client.get("/v1/listjobs?namespace=other").json() == {"result": []}
    assert client.get("/v1/podstatus?pod_name=none").status_code == 404
    for content in (b"{", b"[]", b"3", b"\xff", b"[" * 100_000):
        found = client.post("/v1/delete", content=content, headers=IS_JSON)
        assert found.status_code == 400
        assert "of JSON" in found.json()["error"]
    for name in ("", "../secrets", "a b", 3, "x" * 300, "a=b,c"):
        found = client.post("/v1/delete", json={"job_name": name})
        assert found.status_code == 400
        assert found.json()["error"].startswith("job_name: expected a name")
    assert client.post("/v1/delete", content=b"x" * (2 << 20)).status_code == 400
    body = {"job_identifier": JOB, "spec": original()["spec"]}
    for status, want in ((403, 403), (401, 502), (500, 502), (0, 502)):
        api.refuses["PersiaJob"] = (status, "why")
        found = client.post("/v1/apply", json=body)
        assert (found.status_code, found.json()) == (want, {"error": "why"})
    assert client.get("/v1/apply").status_code == 405


def test_a_token_is_asked_for_at_every_route(api: MemoryApi) -> None:
    with client_of(api) as client:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            assert client.get("/listjobs", headers=headers).status_code == 401
            assert client.post("/v1/delete", json=JOB, headers=headers).status_code == 401
        assert client.get("/listjobs", headers=BEARER).json()["resources"] == []


def test_a_page_of_a_browser_here_starts_no_job(api: MemoryApi) -> None:
    """Without asking the server first, a page can send a form or plain text to loopback."""
    body = json.dumps({"job_identifier": JOB, "spec": original()["spec"]})
    with client_of(api, is_local=True) as client:

        def post(host: str, kind: str, **headers: str) -> Any:
            headers |= {"Host": host, "Content-Type": kind}
            return client.post("/v1/apply", content=body, headers=headers)

        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            assert post("localhost:8080", kind).status_code == 401
            found = post("localhost:8080", kind, **BEARER)
            assert (found.status_code, api.writes) == (400, [])
            assert "Content-Type: application/json" in found.json()["error"]
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", ""):
            assert post(host, "application/json", **BEARER).status_code == 421
        assert not api.writes
        for host in ("localhost", "127.0.0.1:8080", "[::1]:8080"):
            assert post(host, "application/json; charset=utf-8", **BEARER).status_code == 200
    with client_of(api) as client:  # behind names of a cluster
        headers = {**BEARER, "Host": "persia.example.com"}
        assert client.get("/v1/listjobs", headers=headers).json() == {"result": ["adult"]}


def test_a_token_is_of_a_file_or_new_where_only_this_host_can_ask(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "example.com"):
        with pytest.raises(ConfigError, match="expected --token-file where others than this"):
            find_token(host, None)
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="--token-file: cannot read"):
        find_token("127.0.0.1", path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="--token-file: expected a token of ASCII"):
        find_token("0.0.0.0", path)
    path.write_text("abc\n", encoding="utf-8")
    assert find_token("0.0.0.0", path) == "abc"
    tokens = {find_token(host, None) for host in ("127.0.0.1", "::1", "localhost")}
    assert len(tokens) == 3
    assert all(len(one) >= 32 for one in tokens)


def test_a_new_token_is_printed_and_that_of_a_file_is_not(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    asked: list[tuple[str, int, str]] = []
    monkeypatch.setattr(server, "run_server", lambda *given: asked.append(given))
    ran = CliRunner().invoke(k8s_utils.cli, ["server"])
    ((host, port, token),) = asked
    assert (host, port) == ("127.0.0.1", 8080)
    assert ran.stdout == f"Authorization: Bearer {token}\n"
    (tmp_path / "token").write_text("abc", encoding="utf-8")
    words = ["server", "--token-file", str(tmp_path / "token")]
    assert CliRunner().invoke(k8s_utils.cli, words).stdout == ""
    assert asked[1] == ("127.0.0.1", 8080, "abc")
