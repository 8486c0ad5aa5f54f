"""The end of a job, and the watchers that learn of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from persia._rpc import job
from persia._rpc.job import FORGOTTEN_S, JobState

if TYPE_CHECKING:
    import pytest


def test_the_number_of_watchers_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "_MAX_WATCHERS", 100)  # each further name looks at all of them
    now = 0.0
    state = JobState(clock=lambda: now)
    state.job_status("loader")
    for number in range(3 * job._MAX_WATCHERS):
        state.job_status(f"stranger {number}")
        state.job_status("loader")
    assert len(state._polled_at) == job._MAX_WATCHERS
    now = FORGOTTEN_S + 1.0
    state.job_status("late")
    assert state._waiting() == ["late"]
    state.finish_job(0, True)
    assert not state.wait_until_notified(0.0)
    assert state.job_status("late") == 0
    assert state.wait_until_notified(0.0)


def test_a_script_that_never_configured_a_configured_server_does_not_end_it() -> None:
    state = JobState()
    state.mark_configured()
    state.finish_job(143, False)
    assert state.status is None
    state.finish_job(0, True)
    assert state.status == 0


def test_a_script_that_failed_before_it_began_ends_servers_that_none_configured() -> None:
    state = JobState()
    state.finish_job(1, False)
    assert state.status == 1


def test_a_waiter_is_let_go_when_the_server_ends() -> None:
    state = JobState()
    waiter = threading.Thread(target=state.wait)
    waiter.start()
    state.close()
    waiter.join(10.0)
    assert not waiter.is_alive()
    assert state.wait(60.0) is None
