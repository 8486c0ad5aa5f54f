"""Contexts that serve."""

from __future__ import annotations

import pytest

from persia.ctx import (
    InferCtx,
)
from persia.errors import ServiceUnavailable
from tests.training.conftest import MakeCtx


def test_addresses_given_to_an_infer_ctx_come_before_the_context_around_it(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_ctx():
        monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
        with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/0"):
            InferCtx(["ipc:///nowhere/0"]).__enter__()
