"""The end of a job, and the watchers that learn of it."""

from __future__ import annotations

import threading

from persia._rpc import job
from persia._rpc.job import FORGOTTEN_S, JobState
from tests.support.fixtures import Monkey


def test_the_number_of_watchers_is_bounded(monkeypatch: Monkey) -> None:
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


def test_a_script_that_configured_nothing_ends_only_servers_that_none_configured() -> None:
    fresh, state = JobState(), JobState()
    state.mark_configured()
    for each in (fresh, state):
        each.finish_job(143, False)
    assert (fresh.status, state.status) == (143, None)
    state.finish_job(0, True)
    assert state.status == 0


def test_a_waiter_is_let_go_when_the_server_ends() -> None:
    state = JobState()
    waiter = threading.Thread(target=state.wait)
    waiter.start()
    state.close()
    waiter.join(60.0)
    assert not waiter.is_alive()
    assert state.wait(60.0) is None
