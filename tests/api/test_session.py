"""The stack of entered contexts."""

from __future__ import annotations

import threading

import pytest

from persia._rpc import session
from persia.errors import InternalError


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_entered", [])


def test_contexts_nest() -> None:
    outer, inner = object(), object()
    assert session.current() is None
    session.push(outer)
    session.push(inner)
    assert session.current() is inner
    session.pop(inner)
    assert session.current() is outer
    session.pop(outer)
    assert session.current() is None


def test_w52_contexts_may_leave_in_any_order() -> None:
    first, second = object(), object()
    session.push(first)
    session.push(second)
    session.pop(first)
    assert session.current() is second
    session.pop(second)
    assert session.current() is None


def test_the_same_context_twice() -> None:
    ctx, other = object(), object()
    for entered in (ctx, other, ctx):
        session.push(entered)
    session.pop(ctx)
    assert session.current() is other


def test_equal_is_not_the_same() -> None:
    first, second = [1], [1]
    session.push(first)
    with pytest.raises(InternalError, match="among the entered contexts"):
        session.pop(second)
    assert session.current() is first


def test_other_threads_see_the_context() -> None:
    ctx = object()
    session.push(ctx)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(session.current()))
    thread.start()
    thread.join()
    assert seen == [ctx]
