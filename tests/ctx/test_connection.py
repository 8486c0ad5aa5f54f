"""Connecting: servers that are not there, or not ready."""

from __future__ import annotations

import pytest

from persia import env
from persia.ctx import (
    InferCtx,
    cnt_ctx,
    eval_ctx,
)
from persia.errors import ConfigError, ServiceTimeout, ServiceUnavailable
from tests.training.conftest import MakeCtx, Net
from tests.training.fakes import FakeWorker


def test_wait_servers_ready_gives_up(
    worker: FakeWorker, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.ctx.connection.READY_S", 0.0)
    monkeypatch.setattr("persia.ctx.connection.ASK_AGAIN_S", 0.0)
    ctx = make_ctx()
    with pytest.raises(ServiceTimeout, match="not ready in 0 s"):
        ctx.wait_servers_ready()


def test_several_ranks_need_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    env.reload_env()
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}})


def test_servers_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/0"):
        InferCtx(["ipc:///nowhere/0"]).__enter__()
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc:///nowhere/1")
    ctx = eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}})
    with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/1"):
        ctx.__enter__()
    assert cnt_ctx() is None


def test_a_context_that_was_never_entered_waits_for_updates_of_a_later_one(
    worker: FakeWorker, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    reader = eval_ctx(model=Net(), embedding_worker=worker)
    with make_ctx() as ctx:
        engine = ctx.backward_engine
        assert engine is not None
        with monkeypatch.context() as patch:
            patch.setattr(engine, "flush", lambda: flushed.append("flush"))
            patch.setattr(engine, "wait", lambda: flushed.append("wait"))
            reader.get_embedding_size()
            reader._connected().wait()
        assert flushed == ["flush", "wait"]
    reader.get_embedding_size()
    assert reader._connected().backward is None
