"""Tokens, and addresses at which a server may listen without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from persia._serving import access
from persia._serving.access import AccessPolicy, Need, check_listening
from persia._serving.oip.grpc_service import GrpcFrontend, MessageReader, UnaryCalls
from persia._serving.oip.rest import RestFrontend
from persia._serving.oip.tensors import RequestLimits
from persia._serving.torchserve import TorchServeFrontend
from persia.errors import ConfigError, NotAllowed
from tests.serving.oip.serving_models import EchoModel, FakeRepository, serving
from tests.support.waiting import PATIENCE_S

FIRST, SECOND = "a" * 16, "b" * 16


def test_a_replaced_token_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_LOOK_S", -1.0)
    path = tmp_path / "token"
    path.write_text(FIRST)
    policy = AccessPolicy(path)
    policy.check(Need.TOKEN, f"Bearer {FIRST}")
    path.write_text(SECOND)
    policy.check(Need.TOKEN, f"bearer {SECOND}")
    with pytest.raises(NotAllowed):
        policy.check(Need.TOKEN, f"Bearer {FIRST}")
    path.write_text("")  # being written
    policy.check(Need.TOKEN, f"Bearer {SECOND}")


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer ", f"Basic {FIRST}", "Bearer \xff"])
def test_what_is_no_token(tmp_path: Path, shown: str) -> None:
    path = tmp_path / "token"
    path.write_text(FIRST)
    policy = AccessPolicy(path)
    policy.check(Need.NOTHING, shown)
    for need in (Need.TOKEN, Need.CONTROL):
        with pytest.raises(NotAllowed):
            policy.check(need, shown)


def test_files_that_hold_no_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        AccessPolicy(tmp_path / "none")
    path = tmp_path / "short"
    path.write_text("secret")
    with pytest.raises(ConfigError, match="16"):
        AccessPolicy(None, path)


def test_only_this_host_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_LISTEN_WITHOUT_KEYS", raising=False)
    for host in ("127.0.0.1", "localhost", "::1", "[::1]"):
        check_listening(host, has_tls=False, has_token=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        check_listening(host, has_tls=True, has_token=False)
        check_listening(host, has_tls=False, has_token=True)
        with pytest.raises(ConfigError, match="token"):
            check_listening(host, has_tls=False, has_token=False)
    monkeypatch.setenv("PERSIA_LISTEN_WITHOUT_KEYS", "1")
    check_listening("0.0.0.0", has_tls=False, has_token=False)


# What anyone may ask of a server with tokens; all else that it has is refused.
OPEN_PATHS = {"/v2/health/live", "/v2/health/ready"}
OPEN_METHODS = {"ServerLive", "ServerReady", "Check", "Ping"}


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Path]:
    for name, text in (("token_file", FIRST), ("control_token_file", SECOND)):
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in ("token_file", "control_token_file")}


def rest_routes() -> set[tuple[str, str]]:
    """Return verb and path of everything that the HTTP frontend has."""
    nothing: Any = None
    frontend = RestFrontend(nothing, AccessPolicy(), RequestLimits())
    found = {
        ("POST", f"/v2/models/{{model}}{end}/infer") for end in ("", "/versions/{version}")
    }
    for route in frontend._routes():
        found |= {(verb, route.path) for verb in route.methods or ()}
    return found


def grpc_methods() -> set[tuple[str, str, str]]:
    """Return port, service and method of everything that the gRPC frontends have."""
    nothing: Any = None
    calls = UnaryCalls(AccessPolicy(), MessageReader(1.0, 1))
    frontends: dict[str, Any] = {
        "grpc": GrpcFrontend(nothing, calls, RequestLimits()),
        "torchserve": TorchServeFrontend(nothing, calls),
    }
    return {
        (port, *name.strip("/").split("/"))
        for port, frontend in frontends.items()
        for handler in frontend.handlers()
        for name in handler._method_handlers
    }


@pytest.mark.parametrize("shown", ["", "Bearer wrong-wrong-wrong", f"Basic {SECOND}"])
def test_a_stranger_is_refused_everywhere(tokens: dict[str, Any], shown: str) -> None:
    headers = {"authorization": shown} if shown else {}
    routes, methods = rest_routes(), grpc_methods()
    assert len(routes) >= 14
    assert len(methods) >= 13
    with (
        serving(FakeRepository(echo=EchoModel()), **tokens) as running,
        httpx.Client(
            base_url=f"http://{running.http}", headers=headers, timeout=PATIENCE_S
        ) as client,
    ):
        for verb, path in sorted(routes):
            given = path.replace("{model}", "echo").replace("{version}", "1")
            found = client.request(verb, given, content=b"{}" if verb == "POST" else None)
            if path in OPEN_PATHS:
                assert found.status_code == 200
            else:
                assert found.status_code in (401, 403), (verb, path)
                assert b"echo" not in found.content
        for port, service, method in sorted(methods):
            with grpc.insecure_channel(getattr(running, port)) as channel:
                call = channel.unary_unary(f"/{service}/{method}")
                metadata = list(headers.items())
                if method in OPEN_METHODS:
                    call(b"", timeout=PATIENCE_S, metadata=metadata)
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"", timeout=PATIENCE_S, metadata=metadata)
                code = refused.value.code()
                assert code.name in ("UNAUTHENTICATED", "PERMISSION_DENIED"), (service, method)


def test_the_token_of_callers_controls_nothing(tokens: dict[str, Any]) -> None:
    with (
        serving(FakeRepository(echo=EchoModel()), **tokens) as running,
        httpx.Client(base_url=f"http://{running.http}", timeout=PATIENCE_S) as client,
    ):
        for path in sorted(path for _, path in rest_routes() if "/repository/" in path):
            given = path.replace("{model}", "echo")
            headers = {"authorization": f"Bearer {FIRST}"}
            assert client.post(given, headers=headers).status_code == 403, path
