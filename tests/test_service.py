"""Addresses that inference asks for."""

from __future__ import annotations

import pytest

from persia.service import get_embedding_worker_services


@pytest.mark.parametrize("unset", ["", None])
def test_address(monkeypatch: pytest.MonkeyPatch, unset: str | None) -> None:
    if unset is not None:
        monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", unset)
    assert get_embedding_worker_services() == ["embedding_worker:8887"]
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "host:1234")
    assert get_embedding_worker_services() == ["host:1234"]
