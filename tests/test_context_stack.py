"""The stack of entered contexts."""

from __future__ import annotations

import threading

import pytest

from persia import _context_stack
from persia.errors import InternalError


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_context_stack, "_entered", [])


def test_w52_contexts_nest_and_may_leave_in_any_order() -> None:
    first, second = object(), object()
    assert _context_stack.current() is None
    for entered in (first, second, first):
        _context_stack.push(entered)
    assert _context_stack.current() is first
    _context_stack.pop(first)
    assert _context_stack.current() is second
    _context_stack.pop(first)
    assert _context_stack.current() is second
    _context_stack.pop(second)
    assert _context_stack.current() is None


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
