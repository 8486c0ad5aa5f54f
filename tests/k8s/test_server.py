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

from starlette.testclient import TestClient

from persia._k8s.server import make_app, run_server
from persia.errors import ConfigError
from tests.k8s.memory_api import MemoryApi
from tests.k8s.specs import original

OK = {"success": True, "err_msg": ""}
JOB = {"job_name": "adult", "namespace": "default"}


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def client_of(api: MemoryApi, token: str | None = None) -> TestClient:
    @asynccontextmanager
    async def connect() -> Any:
        yield api

    return TestClient(make_app(connect, token))


@pytest.fixture
def client(api: MemoryApi) -> Iterator[TestClient]:
    with client_of(api) as found:
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
        assert client.post("/v1/delete", content=content).status_code == 400
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
    with client_of(api, "secret") as client:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            assert client.get("/listjobs", headers=headers).status_code == 401
            assert client.post("/v1/delete", json=JOB, headers=headers).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert client.get("/listjobs", headers=headers).json()["resources"] == []


def test_others_can_ask_only_with_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "example.com"):
        with pytest.raises(ConfigError, match="expected --token-file where others than this"):
            run_server(host, 0, None)
    with pytest.raises(ConfigError, match="--token-file: cannot read"):
        run_server("0.0.0.0", 0, tmp_path / "token")
    (tmp_path / "token").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="--token-file: expected a token of ASCII"):
        run_server("0.0.0.0", 0, tmp_path / "token")
