"""torchrun without a traceback of its own; with scripts: tests/e2e/test_command_lines.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ranks_that_fail_are_one_line_each(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("raise SystemExit(3)\n")
    command = [sys.executable, "-m", "persia._cli.torchrun", "--standalone", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith(") ended with exit code 3")
    assert "Traceback" not in ran.stderr
