"""The end of a job, and who is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia._rpc import job
from persia._rpc.job import FORGOTTEN_S, JobState

if TYPE_CHECKING:
    import pytest


def test_watchers_are_bounded_however_many_names_somebody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "_MANY", 100)  # each further name looks at all of them
    now = 0.0
    state = JobState(clock=lambda: now)
    state.job_status("loader")
    for number in range(3 * job._MANY):
        state.job_status(f"stranger {number}")
        state.job_status("loader")
    assert len(state._asked_at) == job._MANY
    now = FORGOTTEN_S + 1.0
    state.job_status("late")
    assert state._waiting() == ["late"]
    state.finish_job(0, True)
    assert not state.wait_until_told(0.0)
    assert state.job_status("late") == 0
    assert state.wait_until_told(0.0)


def test_who_never_configured_a_server_does_not_end_it_once_somebody_has() -> None:
    state = JobState()
    state.take()
    state.finish_job(143, False)
    assert state.status is None
    state.finish_job(0, True)
    assert state.status == 0


def test_a_script_that_failed_before_it_began_ends_servers_that_nobody_has() -> None:
    state = JobState()
    state.finish_job(1, False)
    assert state.status == 1
