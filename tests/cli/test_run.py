"""The process of a script or a function: what it sees, and the status that it ends with."""

from __future__ import annotations

import functools
import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from persia._cli.run import Child, dump_call
from persia._process_exit import RUN, End, first_failure
from tests.support import processes
from tests.support.fixtures import Log, Monkey
from tests.support.waiting import until


def run(tmp_path: Path, *words: str) -> tuple[int, str, End | None]:
    notes = tmp_path / "notes"
    notes.mkdir()
    variables = {**os.environ, "PERSIA_RUN_DIRECTORY": str(notes)}
    ran = processes.run("-m", RUN, *words, env=variables)
    return ran.returncode, ran.stdout + ran.stderr, first_failure(notes)


@pytest.mark.parametrize(
    ("code", "status", "noted"),
    [
        ("raise SystemExit", 0, None),
        ("raise SystemExit(260)", 4, End(4)),
        ("raise SystemExit('no data')", 1, End(1)),
        ("raise KeyboardInterrupt", 130, End(130)),
        ("from persia.errors import JobFinished; raise JobFinished('')", 1, End(1)),
    ],
)
def test_the_status_of_a_script(
    tmp_path: Path, code: str, status: int, noted: End | None
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    assert run(tmp_path, "script", str(script))[::2] == (status, noted)


def test_a_traceback_begins_at_the_script_and_is_noted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nraise ValueError(sys.argv[1:])\n")
    status, printed, noted = run(tmp_path, "script", str(script), "--lr", "3")
    assert status == 1
    assert noted == End(1, printed)
    begin, first, *_, last = printed.splitlines()
    assert begin == "Traceback (most recent call last):"
    assert first == f'  File "{script}", line 2, in <module>'
    assert last == "ValueError: ['--lr', '3']"


def test_a_function_is_called(tmp_path: Path) -> None:
    path, out = tmp_path / "call", tmp_path / "out"
    path.write_bytes(dump_call(functools.partial(out.write_text, json.dumps([1]))))
    assert run(tmp_path, "call", str(path)) == (0, "", None)
    assert out.read_text() == "[1]"


NOTES = "from persia._process_exit import mark_participated, mark_slow_end, note_end; "


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
    monkeypatch: Monkey,
) -> None:
    monkeypatch.setenv("RANK", "7")
    code = f"import os; {NOTES} mark_participated(); raise SystemExit('RANK' in os.environ)"
    with closing(Child(["-c", code], RANK=None)) as child:
        assert child.end() == End(0)
        assert child.has_participated
        assert not child.ends_slowly


def test_a_child_whose_end_takes_time() -> None:
    with closing(Child(["-c", f"{NOTES} mark_slow_end()"])) as child:
        assert child.end() == End(0)
        assert child.ends_slowly


def test_a_child_that_does_not_end_in_time_is_killed(caplog: Log) -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignores}; {NOTES} mark_participated(); signal.pause()"
    with closing(Child(["-c", code])) as child:
        until(lambda: child.has_participated)
        child.stop(signal.SIGTERM, timeout_s=0.05)
        assert child.end().status == 128 + signal.SIGKILL
    assert "did not end within 0.05 s of SIGTERM and is killed" in caplog.text


@pytest.mark.slow
def test_ranks_that_fail_are_one_line_each(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("raise SystemExit(3)\n")
    status, printed, _ = run(tmp_path, "torchrun", "--standalone", str(script))
    assert status == 1
    assert printed.splitlines()[-1].endswith(") ended with exit code 3")
    assert "Traceback" not in printed
