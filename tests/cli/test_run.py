"""The process of a script or a function: what it sees, and the status that it ends with."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from persia._cli.run import dump_call
from persia._process_exit import RUN, End, first_failure


def run(tmp_path: Path, *words: str) -> tuple[int, str, End | None]:
    notes = tmp_path / "notes"
    notes.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", RUN, *words],
        env={**os.environ, "PERSIA_RUN_DIRECTORY": str(notes)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ran.returncode, ran.stdout + ran.stderr, first_failure(notes)


@pytest.mark.parametrize(
    ("code", "status", "noted"),
    [
        ("pass", 0, None),
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
