"""Addresses of a job that does not run, and no time spent on PyTorch."""

from __future__ import annotations

import pytest

from persia._cli import checks
from tests.support.processes import loopback_host


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_ANSWER_S", 0.3)
    for name in ("PERSIA_KEYS", "PERSIA_LISTEN_WITHOUT_KEYS", "PERSIA_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    host = loopback_host()
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "127.0.0.1")
    monkeypatch.setenv("PERSIA_METRICS_HOST", host)
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"{host}:22888")
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", f"{host}:22887")
    monkeypatch.setenv("PERSIA_NN_WORKERS", f"{host}:22457")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_check_torch", lambda: checks.ok("torch", "not asked"))
