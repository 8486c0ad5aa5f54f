"""Calls of storages that hang."""

from __future__ import annotations

import errno
import threading

import pytest

from persia._rows.storage_calls import StorageCalls
from persia.errors import ServiceTimeout
from tests.support.fixtures import Monkey
from tests.support.waiting import PATIENCE_S, until


def test_results_and_errors_are_the_callers() -> None:
    calls = StorageCalls(threading.Event())
    assert calls.run("a", PATIENCE_S, lambda deadline: deadline > 0)
    with pytest.raises(OSError, match="disk"):
        calls.run("a", PATIENCE_S, lambda deadline: _fail())
    assert calls.run("a", PATIENCE_S, lambda deadline: 2) == 2


def _fail() -> None:
    raise OSError(errno.EIO, "disk")


def test_a_call_that_hangs_holds_up_its_place_only() -> None:
    calls, may_go = StorageCalls(threading.Event()), threading.Event()
    with pytest.raises(ServiceTimeout, match="not done within"):
        calls.run("a", 0.01, lambda deadline: may_go.wait(PATIENCE_S))
    with pytest.raises(ServiceTimeout, match="still hangs"):
        calls.run("a", 0.01, lambda deadline: 1)
    assert calls.run("b", PATIENCE_S, lambda deadline: 1) == 1
    may_go.set()
    until(lambda: all(one.is_set() for one in calls._hung.values()))
    assert calls.run("a", PATIENCE_S, lambda deadline: 1) == 1


def test_a_closed_one_waits_for_nothing() -> None:
    stop, may_go = threading.Event(), threading.Event()
    stop.set()
    with pytest.raises(ServiceTimeout, match="closed"):
        StorageCalls(stop).run("a", PATIENCE_S, lambda deadline: may_go.wait(PATIENCE_S))
    may_go.set()


def test_without_a_thread_it_may_be_tried_again(monkeypatch: Monkey) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = StorageCalls(threading.Event())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            calls.run("a", PATIENCE_S, lambda deadline: 1)
    assert calls.run("a", PATIENCE_S, lambda deadline: 1) == 1
