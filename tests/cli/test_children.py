"""A child process and its end."""

from __future__ import annotations

import signal
from contextlib import closing

import pytest

from persia._cli.children import Child
from persia._process_exit import End
from tests.support.waiting import until

NOTES = "from persia._process_exit import mark_participated, note_end; "


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("pass", End(0)),
        ("raise SystemExit(3)", End(3)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", End(128 + 9)),
        (f"{NOTES} note_end(5, 'why'); raise SystemExit(1)", End(5, "why")),
    ],
)
def test_how_a_child_ends(code: str, end: End) -> None:
    with closing(Child(["-c", code])) as child:
        assert child.end() == end
        assert not child.has_participated


def test_a_child_that_configures_servers_and_variables_that_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "7")
    code = f"import os; {NOTES} mark_participated(); raise SystemExit('RANK' in os.environ)"
    with closing(Child(["-c", code], RANK=None)) as child:
        assert child.end() == End(0)
        assert child.has_participated


def test_a_child_that_does_not_end_in_time_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignores}; {NOTES} mark_participated(); signal.pause()"
    with closing(Child(["-c", code])) as child:
        until(lambda: child.has_participated)
        child.stop(signal.SIGTERM, timeout_s=0.05)
        assert child.end().status == 128 + signal.SIGKILL
    assert "did not end within 0.05 s of SIGTERM and is killed" in caplog.text
