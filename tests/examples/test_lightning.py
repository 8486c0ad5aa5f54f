"""The Lightning example learns, and goes on in another process as if it had not stopped."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.examples.loading import EXAMPLES
from tests.golden.commands import without_persia
from tests.support.processes import ROOT, run

pytestmark = pytest.mark.slow


def train(folder: Path, *words: str) -> float:
    """Run the example in a process of its own; return its last loss."""
    script = EXAMPLES / "lightning" / "train.py"
    given = ("--quiet", "--folder", str(folder), *words)
    environment = without_persia() | {"PYTHONPATH": str(ROOT)}
    ran = run(sys.executable, script, *given, cwd=folder, env=environment, timeout_s=240.0)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"^loss ([0-9.]+), 200 users, 200 items$", ran.stdout, re.MULTILINE)
    assert found is not None, ran.stdout
    return float(found[1])


def test_it_learns_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="`make zoo` installs it")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    loss = train(whole)
    first = train(parts, "--epochs", "2")
    assert loss < 0.5  # of 0.69 by chance
    assert first > loss
    assert train(parts, "--resume") == loss
