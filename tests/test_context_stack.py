"""The stack of entered contexts."""

from __future__ import annotations

import threading

import pytest

from persia import _context_stack
from persia.errors import InternalError


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_context_stack, "_entered", [])


def test_contexts_nest() -> None:
    outer, inner = object(), object()
    assert _context_stack.current() is None
    _context_stack.push(outer)
    _context_stack.push(inner)
    assert _context_stack.current() is inner
    _context_stack.pop(inner)
    assert _context_stack.current() is outer
    _context_stack.pop(outer)
    assert _context_stack.current() is None


def test_w52_contexts_may_leave_in_any_order() -> None:
    first, second = object(), object()
    _context_stack.push(first)
    _context_stack.push(second)
    _context_stack.pop(first)
    assert _context_stack.current() is second
    _context_stack.pop(second)
    assert _context_stack.current() is None


def test_the_same_context_twice() -> None:
    ctx, other = object(), object()
    for entered in (ctx, other, ctx):
        _context_stack.push(entered)
    _context_stack.pop(ctx)
    assert _context_stack.current() is other


def test_equal_is_not_the_same() -> None:
    first, second = [1], [1]
    _context_stack.push(first)
    with pytest.raises(InternalError, match="among the entered contexts"):
        _context_stack.pop(second)
    assert _context_stack.current() is first


def test_other_threads_see_the_context() -> None:
    ctx = object()
    _context_stack.push(ctx)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(_context_stack.current()))
    thread.start()
    thread.join()
    assert seen == [ctx]
