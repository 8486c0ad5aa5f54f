"""Updates are applied at most once, and never dropped in silence."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._server.applied_updates import AppliedUpdates
from persia.errors import StoreError
from tests.support.streams import Background


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=80))
def test_an_id_runs_once_or_is_refused_whatever_the_order(ids: list[tuple[int, int]]) -> None:
    updates = AppliedUpdates(window=4)
    applied: list[tuple[int, int]] = []
    highest: dict[int, int] = {}
    for update_id in ids:
        client, number = update_id

        def apply(update_id: tuple[int, int] = update_id) -> int:
            applied.append(update_id)
            return update_id[1] * 10

        was_applied = update_id in applied
        try:
            outcome, repeated = updates.run(update_id, apply)
        except StoreError:
            # Only what is further back than the window may be refused.
            assert number < highest[client] - 3
            continue
        assert outcome == number * 10
        assert repeated is was_applied
        highest[client] = max(highest.get(client, -1), number)
    assert len(applied) == len(set(applied))


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt("no room")])
def test_an_update_that_failed_half_way_is_not_run_again(error: BaseException) -> None:
    updates = AppliedUpdates()
    runs = []

    def fail() -> int:
        runs.append(1)
        raise error

    with pytest.raises(type(error), match="no room"):
        updates.run((0, 0), fail)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"0 of client 0 failed half way.*no room"):
            updates.run((0, 0), fail)
    assert runs == [1]


def test_a_failed_update_keeps_no_request_alive() -> None:
    updates = AppliedUpdates()

    def call() -> weakref.ref[set[int]]:
        request = {1}

        def fail() -> int:
            raise MemoryError(f"no room for {request}")

        with pytest.raises(MemoryError):
            updates.run((0, 0), fail)
        return weakref.ref(request)

    known = call()
    gc.collect()
    assert known() is None


def test_a_repetition_during_the_first_call_waits_for_its_outcome() -> None:
    updates = AppliedUpdates()
    started, may_end = threading.Event(), threading.Event()

    def apply() -> int:
        started.set()
        assert may_end.wait(60)
        return 7

    first = Background(lambda: updates.run((0, 0), apply))
    assert started.wait(60)
    second = Background(lambda: updates.run((0, 0), apply))
    may_end.set()
    assert (first.result(), second.result()) == ((7, False), (7, True))
