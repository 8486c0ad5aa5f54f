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


def test_a_number_below_the_window_is_refused_by_name() -> None:
    updates = AppliedUpdates(window=2)
    for number in range(5, 10):
        updates.run((3, number), lambda: 0)
    with pytest.raises(StoreError, match="update 1 of client 3 is not above 7"):
        updates.run((3, 1), lambda: 0)


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
    class Request:
        pass

    request = Request()
    known = weakref.ref(request)
    updates = AppliedUpdates()

    def call(request: Request) -> None:
        def fail() -> int:
            raise MemoryError(f"no room for {type(request).__name__}")

        with pytest.raises(MemoryError):
            updates.run((0, 0), fail)

    call(request)
    del request
    gc.collect()
    assert known() is None


def test_a_repetition_during_the_first_call_waits_for_its_outcome() -> None:
    updates = AppliedUpdates()
    started, may_end = threading.Event(), threading.Event()
    outcomes = []

    def apply() -> int:
        started.set()
        assert may_end.wait(10)
        return 7

    def call() -> None:
        outcomes.append(updates.run((0, 0), apply))

    first = threading.Thread(target=call)
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=call)
    second.start()
    may_end.set()
    first.join(10)
    second.join(10)
    assert sorted(outcomes) == [(7, False), (7, True)]
