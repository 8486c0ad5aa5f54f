"""Threads that share a call."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.base.threads import ThreadPool
from persia._worker.batch import shares


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_each_place_is_dealt_once_and_no_share_is_much_heavier(
    weights: list[int], count: int
) -> None:
    dealt = shares(weights, count)
    assert sorted(place for share in dealt for place in share) == list(range(len(weights)))
    assert len(dealt) == min(count, len(weights))
    totals = [sum(weights[place] + 1 for place in share) for share in dealt]
    if totals:
        assert max(totals) <= sum(totals) / count + max(weights) + 1


def test_the_parts_of_a_call_run_at_the_same_time() -> None:
    met = threading.Barrier(3)

    def call(part: int) -> None:
        met.wait(10)  # raises if the other two never come

    with contextlib.closing(ThreadPool(3, "crew")) as crew:
        crew.run(call, [0, 1, 2])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_when_all_parts_have_ended(failing: int) -> None:
    ended = []

    def call(part: int) -> None:
        if part == failing:
            raise ValueError(part)
        ended.append(part)

    with (
        contextlib.closing(ThreadPool(2, "crew")) as crew,
        pytest.raises(ValueError, match=str(failing)),
    ):
        crew.run(call, [0, 1])
    assert ended == [1 - failing]
